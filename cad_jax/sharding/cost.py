"""What work costs: devices, model shapes by name, FLOPs, predicted seconds, loads and traffic.

Shape letters: S servers, N documents, n tasks, H query heads, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cad_jax.sharding.routing import wire_bytes
from cad_jax.sharding.tasks import (
    DOCUMENT,
    HOME,
    K_START,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    TRANSPORT_HOPS,
    Capacities,
    HeadShape,
    causal_pairs,
    document_starts,
)


@dataclass(frozen=True)
class Device:
    """Published figures of one accelerator, dense bf16, and of its links, per direction.

    `between_nodes_bytes_s` takes one network card per accelerator, the usual build of its nodes.
    """

    name: str
    peak_flops: float | None  # FLOP/s; None where no figure is published
    memory_bytes_s: float
    within_node_bytes_s: float
    between_nodes_bytes_s: float
    devices_per_node: int
    hop_latency_s: float  # fixed cost of one collective


# Vendor data sheets: NVIDIA A100 80GB SXM (312 TFLOP/s, NVLink 600 GB/s both ways, 200 Gb/s cards),
# H100 SXM and H200 SXM (989 TFLOP/s, 3.35 and 4.8 TB/s, NVLink 900 GB/s both ways, 400 Gb/s cards),
# HGX B200 (18 PFLOP/s dense for eight, 8 TB/s, NVLink 1.8 TB/s both ways, 400 Gb/s cards). The hop
# latencies and the cpu row, several processes of one machine, are orders of magnitude.
DEVICES: Mapping[str, Device] = {
    d.name: d
    for d in (
        Device("a100", 312e12, 2.04e12, 300e9, 25e9, 8, 20e-6),
        Device("h100", 989.4e12, 3.35e12, 450e9, 50e9, 8, 20e-6),
        Device("h200", 989.4e12, 4.8e12, 450e9, 50e9, 8, 20e-6),
        Device("b200", 2.25e15, 8e12, 900e9, 50e9, 8, 20e-6),
        Device("cpu", None, 20e9, 4e9, 1e9, 8, 100e-6),
    )
}


def find_device(kind: str) -> Device | None:
    """The device whose name occurs in a runtime's device kind ("NVIDIA H200", "cpu"), or None."""
    words = kind.lower().replace("-", " ").split()
    return next((d for name, d in DEVICES.items() if name in words), None)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that planning needs."""

    name: str
    num_layers: int
    embedding_dim: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int


# Layers, embedding, query heads, key heads, head dim, ffn, vocabulary, from the published
# configurations; llama-34b is the shape used in the literature on packed long documents, with 16 key
# heads, codellama-34b the released model.
MODELS: Mapping[str, ModelShape] = {
    m.name: m
    for m in (
        ModelShape("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        ModelShape("llama2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
        ModelShape("llama3-1b", 16, 2048, 32, 8, 64, 8192, 128256),
        ModelShape("llama3-3b", 28, 3072, 24, 8, 128, 8192, 128256),
        ModelShape("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("llama3-405b", 126, 16384, 128, 8, 128, 53248, 128256),
        ModelShape("llama-34b", 48, 8192, 64, 16, 128, 22016, 32000),
        ModelShape("codellama-34b", 48, 8192, 64, 8, 128, 22016, 32000),
    )
}


def model_shape(name: str) -> ModelShape:
    """The shape by name; ValueError lists the names there are."""
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]


def attention_flops(heads: HeadShape, pairs: int) -> int:
    """Forward FLOPs of `pairs` (query, key) pairs: two matmuls, 4 H D each pair."""
    return 4 * heads.num_q_heads * heads.head_dim * pairs


def link_bytes_s(device: Device, servers: int, tp: int = 1) -> float:
    """Bytes/s per direction of one rank's exchange: the network once the pool leaves a node."""
    within = servers * tp <= device.devices_per_node
    return device.within_node_bytes_s if within else device.between_nodes_bytes_s


def exchange_latencies(transport: str) -> int:
    """Latencies of a collective that one layer's exchange pays, out and back.

    A ragged collective pays it twice: it passes on its offsets first, and between nodes waits for the
    host to read them.
    """
    return 2 * (2 if transport == "ragged" else TRANSPORT_HOPS[transport])


def exchange_s(
    capacities: Capacities,
    heads: HeadShape,
    servers: int,
    device: Device,
    tp: int = 1,
    element_bytes: int = 2,
) -> float:
    """Predicted seconds of one layer's forward exchange: wire bytes, plus latency a hop. element_bytes: of
    q, k, v (2 for bfloat16).
    """
    wire = wire_bytes(capacities, servers, heads, element_bytes)
    wire_s = wire.forward / link_bytes_s(device, servers, tp)
    return wire_s + exchange_latencies(capacities.transport) * device.hop_latency_s


def choose_transport(
    candidates: Mapping[str, Capacities],
    heads: HeadShape,
    servers: int,
    device: Device = DEVICES["h200"],
    tp: int = 1,
    element_bytes: int = 2,
) -> str:
    """The transport, among capacities by transport name, of fewest predicted seconds.

    element_bytes: of q, k, v (2 for bfloat16). Candidates come in order of preference: the first of equals wins.
    """
    seconds = {
        t: exchange_s(c, heads, servers, device, tp, element_bytes) for t, c in candidates.items()
    }
    return min(seconds, key=lambda transport: seconds[transport])


def server_loads(tasks: np.ndarray, servers: int) -> np.ndarray:
    """(query, key) pairs of each server, int64 [S]."""
    loads = np.zeros(servers, np.int64)
    np.add.at(loads, tasks[:, SERVER], causal_pairs(*tasks[:, Q_START : K_STOP + 1].T))
    return loads


def max_over_mean(loads: np.ndarray, speeds: Sequence[float] | np.ndarray | None = None) -> float:
    """Pairs of the most loaded server over the mean; 1.0 where there is no work.

    loads: [S]. speeds: [S], relative, where servers are not alike: seconds of the server that ends last, over those
    in which all would end together. That is the most that a server has of its share by speed.
    """
    if not loads.sum():
        return 1.0
    shares = np.ones(len(loads)) if speeds is None else np.asarray(speeds, np.float64)
    return float((loads / shares).max() * shares.sum() / loads.sum())


class TravellingRows(NamedTuple):
    """Rows in and out of each server in one forward of one layer, int64 [S] each.

    Query rows count twice, as q on the way to the server and as the output on the way home. Keys a
    server has of its own never travel; others come in once a server and document.
    """

    query_rows_in: np.ndarray
    query_rows_out: np.ndarray
    key_rows_in: np.ndarray
    key_rows_out: np.ndarray

    def units_in(self, heads: HeadShape) -> np.ndarray:
        return self.query_rows_in * heads.q_units + self.key_rows_in * heads.kv_units

    def units_out(self, heads: HeadShape) -> np.ndarray:
        return self.query_rows_out * heads.q_units + self.key_rows_out * heads.kv_units


class Flows(NamedTuple):
    """Rows that go from homes to servers, int64 [n] each; a pair of ranks may come more than once."""

    home: np.ndarray
    server: np.ndarray
    rows: np.ndarray

    def into(self, servers: int) -> np.ndarray:
        """Rows into each server, int64 [S]."""
        return np.bincount(self.server, self.rows, servers).astype(np.int64)

    def out_of(self, servers: int) -> np.ndarray:
        """Rows out of each home, int64 [S]."""
        return np.bincount(self.home, self.rows, servers).astype(np.int64)


def travelling_rows(
    lengths: np.ndarray,
    tasks: np.ndarray,
    servers: int,
    tokens_per_server: int,
    starts: np.ndarray | None = None,
) -> TravellingRows:
    """Rows in and out of each server for tasks in any order; documents end to end by default."""
    queries = travelling_queries(tasks)
    keys = travelling_keys(lengths, tasks, tokens_per_server, starts)
    # What goes out of the one comes in at the other, both ways: in and out are alike.
    query_rows = queries.into(servers) + queries.out_of(servers)
    return TravellingRows(query_rows, query_rows.copy(), keys.into(servers), keys.out_of(servers))


def travelling_queries(tasks: np.ndarray) -> Flows:
    """Query rows of tasks, int64 [n, 7], that are not computed at home."""
    home, server = tasks[:, HOME], tasks[:, SERVER]
    return Flows(home, server, np.where(home != server, tasks[:, Q_STOP] - tasks[:, Q_START], 0))


def travelling_keys(
    lengths: np.ndarray,
    tasks: np.ndarray,
    tokens_per_server: int,
    starts: np.ndarray | None = None,
) -> Flows:
    """Key rows that go to servers for tasks in any order: the union of each server's key ranges of a
    document, split by the rank that owns them. Documents end to end by default."""
    starts = document_starts(lengths) if starts is None else starts
    document, server = tasks[:, DOCUMENT], tasks[:, SERVER]
    order = np.lexsort((tasks[:, K_START], document, server))
    document, server = document[order], server[order]
    start, stop = tasks[order, K_START], tasks[order, K_STOP]
    group = np.cumsum(np.r_[0, (np.diff(document) != 0) | (np.diff(server) != 0)])[: len(order)]
    span = int(lengths.max(initial=0)) + 1
    reach = np.maximum.accumulate(stop + group * span) - group * span
    fresh = start.copy()
    same = np.flatnonzero(np.diff(group) == 0) + 1
    fresh[same] = np.maximum(start[same], reach[same - 1])
    kept = fresh < stop
    server = server[kept]
    base = starts[document[kept]]
    first, last = base + fresh[kept], base + stop[kept]
    pieces = (last - 1) // tokens_per_server - first // tokens_per_server + 1
    nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    server, first, last = (np.repeat(x, pieces) for x in (server, first, last))
    owner = first // tokens_per_server + nth
    rows = np.minimum(last, (owner + 1) * tokens_per_server)
    rows -= np.maximum(first, owner * tokens_per_server)
    rows[owner == server] = 0
    return Flows(owner, server, rows)
