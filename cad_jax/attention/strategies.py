"""Ways to distribute core attention: prepare on the host, expand and attend on the devices.

`make_strategy(name, ...)` gives one of: cad (planned servers), home (the same machinery, nothing
moves), all_gather and ring (context parallelism in head-tail order), native and native_dense (left
to XLA's partitioner). The model receives `attend` and never learns which it is.

Letters: T tokens per server, S servers, H query heads, K key/value heads, D head dim.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from cad_jax.attention import all_gather, cad, differentiable, native, ring
from cad_jax.attention.all_gather import HeadTailArrays
from cad_jax.attention.base import KeyRanges
from cad_jax.attention.differentiable import Settings, Way
from cad_jax.attention.head_tail import causal_ranges, head_tail, rank_pairs
from cad_jax.attention.varlen import KERNEL_NAMES, load_kernel
from cad_jax.sharding.capacities import (
    capacities_from_plans,
    default_capacities,
    home_capacities,
)
from cad_jax.sharding.cost import DEVICES, Device, choose_transport, exchange_s, max_over_mean
from cad_jax.sharding.mesh import MESH_AXES, POOL_AXES
from cad_jax.sharding.plan import Plan, home_plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.routing import wire_bytes
from cad_jax.sharding.tables import Tables, expand
from cad_jax.sharding.tasks import TRANSPORT_HOPS, Capacities, HeadShape


class StepFigures(NamedTuple):
    """What a prepared microbatch costs. Bytes are of one layer's forward, per rank."""

    plan_s: float  # host seconds spent preparing
    max_over_mean_home: float  # (query, key) pairs of the worst rank over the mean, tokens at home
    max_over_mean: float  # the same as this strategy really spreads them
    exchange_bytes_mean: float  # bytes into a rank, mean over ranks
    exchange_bytes_max: float  # the worst rank's bytes in or out
    wire_bytes: float  # bytes a rank hands to collectives, padding included
    capacity_used: dict[str, float]  # fraction of each capacity
    fallback_tasks: int  # tasks kept at home for want of capacity


class Prepared(NamedTuple):
    """A microbatch made ready on the host.

    order: int64 [S * T], new position -> global token, to be applied to ids, positions and targets;
    None where tokens stay. arrays: a pytree of numpy arrays with leading dim S (or the ranks asked
    for). home_pairs, pairs: int64 [S], (query, key) pairs of each rank at home and under this
    strategy. digest: equal on all hosts that prepared the same.
    """

    order: np.ndarray | None
    arrays: Any
    figures: StepFigures
    digest: str
    home_pairs: np.ndarray
    pairs: np.ndarray


class Strategy(Protocol):
    """One way to distribute core attention. `expand` and `attend` run where `manual_axes` are
    manual: with the pool's axes among them, on one rank's arrays (no leading dim) and rows; else on
    global ones."""

    @property
    def name(self) -> str: ...

    @property
    def manual_axes(self) -> tuple[str, ...]: ...

    @property
    def way(self) -> Way | None:
        """Forward and backward as plain functions of the devices; None where XLA derives them."""
        ...

    def describe(self) -> str:
        """For people: how rows travel, and what that costs."""
        ...

    def prepare(self, lengths: np.ndarray, ranks: Sequence[int] | None = None) -> Prepared:
        """Host: lengths int64 [N] of documents laid end to end, padding last."""
        ...

    def expand(self, arrays: Any) -> Any:
        """Device, once per microbatch: what `attend` needs besides q, k and v."""
        ...

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        """Device, in every layer: q [T, H, D], k, v [T, K, D] -> out [T, H, D], differentiable."""
        ...


@dataclass(frozen=True)
class Pool:
    """What every strategy knows of its surroundings; heads are those of one device."""

    servers: int
    tokens_per_server: int
    heads: HeadShape
    axis_names: tuple[str, ...]
    kernel: str
    element_bytes: int
    device: Device
    tp: int

    @property
    def tokens(self) -> int:
        return self.servers * self.tokens_per_server

    @property
    def settings(self) -> Settings:
        return Settings(self.axis_names, self.kernel)

    def digest(self, name: str, lengths: np.ndarray) -> str:
        """Of what the strategies without a plan derive everything from."""
        header = f"{name} {self.servers} {self.tokens_per_server} {self.heads}".encode()
        return hashlib.sha256(header + np.asarray(lengths, "<i8").tobytes()).hexdigest()

    def describe_gather(self) -> str:
        return f"every key to every rank: {self.gather_bytes() / 2**20:,.1f} MiB per rank and layer"

    def gather_bytes(self) -> int:
        """Bytes of the others' keys and values that reach every rank."""
        return (
            (self.servers - 1)
            * self.tokens_per_server
            * self.heads.kv_row_bytes(self.element_bytes)
        )


@dataclass(frozen=True)
class PlannedStrategy:
    """cad and home: servers compute the tasks of a plan."""

    name: str
    pool: Pool
    capacities: Capacities
    tolerance: float
    max_document_tokens: int | None

    @property
    def manual_axes(self) -> tuple[str, ...]:
        return MESH_AXES

    @property
    def way(self) -> Way:
        return cad.PLANNED

    def describe(self) -> str:
        pool, heads = self.pool, self.pool.heads
        wire = wire_bytes(self.capacities, pool.servers, heads, pool.element_bytes).forward
        seconds = exchange_s(self.capacities, heads, pool.servers, pool.device, pool.tp)
        return (
            f"{self.capacities.transport} transport: {wire / 2**20:,.1f} MiB on the wire per rank and "
            f"layer forward, {1e3 * seconds:,.2f} ms predicted on {pool.device.name} in bfloat16"
        )

    def plan(self, lengths: np.ndarray) -> Plan:
        """The plan of a microbatch. Raises ValueError where documents or capacities do not fit."""
        pool = self.pool
        if self.name == "home":
            return home_plan(
                lengths,
                servers=pool.servers,
                tokens_per_server=pool.tokens_per_server,
                heads=pool.heads,
                capacities=self.capacities,
                tolerance=self.tolerance,
            )
        return plan_documents(
            lengths,
            servers=pool.servers,
            tokens_per_server=pool.tokens_per_server,
            num_q_heads=pool.heads.num_q_heads,
            num_kv_heads=pool.heads.num_kv_heads,
            head_dim=pool.heads.head_dim,
            tolerance=self.tolerance,
            max_document_tokens=self.max_document_tokens,
            capacities=self.capacities,
        )

    def prepare(self, lengths: np.ndarray, ranks: Sequence[int] | None = None) -> Prepared:
        start = time.perf_counter()
        plan = self.plan(lengths)
        arrays = plan.arrays(ranks)
        plan_s = time.perf_counter() - start
        item = self.pool.element_bytes
        bytes_in, bytes_out = plan.bytes_in(item), plan.bytes_out(item)
        wire = wire_bytes(self.capacities, plan.servers, plan.heads, item)
        figures = StepFigures(
            plan_s=plan_s,
            max_over_mean_home=plan.max_over_mean_home,
            max_over_mean=plan.max_over_mean,
            exchange_bytes_mean=float(bytes_in.mean()),
            exchange_bytes_max=float(max(bytes_in.max(), bytes_out.max())),
            wire_bytes=float(wire.forward),
            capacity_used=plan.capacity_used(),
            fallback_tasks=plan.fallback_tasks,
        )
        return Prepared(None, arrays, figures, plan.digest(), plan.home_loads(), plan.loads())

    def expand(self, arrays: Any) -> Tables:
        return expand(arrays, self.pool.heads, self.pool.tokens_per_server)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        return differentiable.attend(self.way, self.pool.settings, q, k, v, tables)


def _unplanned(pool: Pool, name: str, lengths, order, arrays, start: float) -> Prepared:
    """Prepared for strategies that send every key everywhere: no plan, no capacities."""
    plan_s = time.perf_counter() - start
    home = rank_pairs(lengths, np.arange(pool.tokens), pool.servers)
    pairs = home if order is None else rank_pairs(lengths, order, pool.servers)
    gathered = float(pool.gather_bytes())
    figures = StepFigures(
        plan_s, max_over_mean(home), max_over_mean(pairs), gathered, gathered, gathered, {}, 0
    )
    return Prepared(order, arrays, figures, pool.digest(name, lengths), home, pairs)


def _rank_rows(pool: Pool, values: np.ndarray, ranks: Sequence[int] | None) -> np.ndarray:
    """int64 [S * T] -> int32 [S, T], or the rows of `ranks`."""
    rows = values.astype(np.int32).reshape(pool.servers, pool.tokens_per_server)
    return rows if ranks is None else rows[list(ranks)]


@dataclass(frozen=True)
class HeadTailStrategy:
    """all_gather and ring: head-tail order, every rank sees every key."""

    name: str
    pool: Pool

    @property
    def manual_axes(self) -> tuple[str, ...]:
        return MESH_AXES

    @property
    def way(self) -> Way:
        return all_gather.ALL_GATHER if self.name == "all_gather" else ring.RING

    def describe(self) -> str:
        return self.pool.describe_gather()

    def prepare(self, lengths: np.ndarray, ranks: Sequence[int] | None = None) -> Prepared:
        start = time.perf_counter()
        placed = head_tail(lengths, self.pool.servers, self.pool.tokens_per_server)
        arrays = HeadTailArrays(*(_rank_rows(self.pool, x, ranks) for x in placed))
        return _unplanned(self.pool, self.name, lengths, placed.order, arrays, start)

    def expand(self, arrays: Any) -> Any:
        module = all_gather if self.name == "all_gather" else ring
        return module.expand(arrays, self.pool.axis_names)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        return differentiable.attend(self.way, self.pool.settings, q, k, v, tables)


@dataclass(frozen=True)
class NativeStrategy:
    """native and native_dense: global arrays, document order, collectives by XLA's partitioner."""

    name: str
    pool: Pool

    @property
    def manual_axes(self) -> tuple[str, ...]:
        return MESH_AXES[-1:]

    @property
    def way(self) -> None:
        return None

    def describe(self) -> str:
        return self.pool.describe_gather()

    def prepare(self, lengths: np.ndarray, ranks: Sequence[int] | None = None) -> Prepared:
        start = time.perf_counter()
        ranges = causal_ranges(lengths, self.pool.tokens)
        arrays = tuple(_rank_rows(self.pool, x, ranks) for x in ranges)
        return _unplanned(self.pool, self.name, lengths, None, arrays, start)

    def expand(self, arrays: tuple[jax.Array, jax.Array]) -> KeyRanges:
        return KeyRanges(*arrays)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: KeyRanges) -> jax.Array:
        if self.name == "native":
            return native.blockwise_attention(self.pool.axis_names, q, k, v, tables)
        return native.dense_attention(self.pool.axis_names, q, k, v, tables)


STRATEGIES = ("cad", "home", "all_gather", "ring", "native", "native_dense")


def make_strategy(
    name: str,
    *,
    servers: int,
    tokens_per_server: int,
    heads: HeadShape,
    tolerance: float = 0.05,
    capacities: Capacities | None = None,
    transport: str = "auto",
    sample_lengths: Sequence[np.ndarray] = (),
    kernel: str = "auto",
    axis_names: tuple[str, ...] = POOL_AXES,
    max_document_tokens: int | None = None,
    element_bytes: int = 2,
    device: Device = DEVICES["h200"],
    tp: int = 1,
) -> Strategy:
    """The strategy of that name.

    Args:
      name: one of STRATEGIES.
      servers: S, the product of the pool's axes.
      tokens_per_server: T.
      heads: of one device, key heads replicated where there are fewer of them than tp devices.
      tolerance: cad's bound on the most loaded server's work over the mean, less one.
      capacities: of cad and home. Without them they hold all but one in a thousand of the plans
        for `sample_lengths`, and any home plan; without these too, they follow from the other
        arguments.
      transport: "auto" (fewest predicted seconds) | "direct" | "relay", where capacities are not
        given.
      sample_lengths: document lengths of some microbatches to come.
      kernel: see `varlen_attention`; native runs "xla" only, native_dense has none.
      axis_names: mesh axes of the pool, in rank order.
      max_document_tokens: the longest document to come; by default the whole microbatch.
      element_bytes: of q, k and v, for the figures.
      device, tp: what the ranks are, and how many of them share a server's tokens: transport
        "auto" predicts seconds from both.

    Raises:
      ValueError: an unknown name, a kernel the strategy cannot run or whose package is missing,
        sample lengths that do not fit.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {name!r}")
    if kernel not in KERNEL_NAMES:
        raise ValueError(f"kernel must be one of {', '.join(KERNEL_NAMES)}, got {kernel!r}")
    if kernel != "auto":
        try:
            load_kernel(kernel)
        except ImportError as error:
            raise ValueError(str(error)) from error
    pool = Pool(servers, tokens_per_server, heads, axis_names, kernel, element_bytes, device, tp)
    if name in ("cad", "home"):
        if capacities is None:
            capacities = _first_capacities(name, pool, transport, max_document_tokens)
            first = PlannedStrategy(name, pool, capacities, tolerance, max_document_tokens)
            plans = [first.plan(np.asarray(lengths)) for lengths in sample_lengths]
            if plans:
                capacities = capacities_from_plans(
                    plans,
                    max_document_tokens=max_document_tokens,
                    transport=None if transport == "auto" else transport,
                    device=device,
                    tp=tp,
                )
        return PlannedStrategy(name, pool, capacities, tolerance, max_document_tokens)
    if name in ("all_gather", "ring"):
        return HeadTailStrategy(name, pool)
    own_kernel = "xla" if name == "native" else "auto"
    if kernel not in ("auto", own_kernel):
        raise ValueError(
            f"strategy {name} must leave splitting to XLA's partitioner, which kernel {kernel!r} "
            f"does not allow; use kernel {own_kernel!r}"
        )
    return NativeStrategy(name, pool)


def _first_capacities(
    name: str, pool: Pool, transport: str, max_document_tokens: int | None
) -> Capacities:
    """From static arguments alone: roomy for cad, just enough for home."""
    shape = pool.servers, pool.tokens_per_server, pool.heads, max_document_tokens
    if name == "cad":
        chosen = None if transport == "auto" else transport
        return default_capacities(*shape, chosen, pool.device, pool.tp)
    transports = TRANSPORT_HOPS if transport == "auto" else (transport,)
    candidates = {t: home_capacities(*shape, t) for t in transports}
    return candidates[choose_transport(candidates, pool.heads, pool.servers, pool.device, pool.tp)]
