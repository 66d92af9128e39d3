"""Seconds of one layer on one device: attention, linear layers, transfers. Host only.

The source of seconds for predicting, simulating and advising, and for plans that are given one. Figures are measured
on the device (`cad-jax profile` writes them, `from_csv` reads them), derived from published ones (shipped profiles),
or a fraction of the device's published peak (`analytic`). What a run settles without a profile, its transport, goes by
`cost.exchange_s`: published links alone, so that all hosts choose alike.

Shape letters: S servers, n tasks, R rows of a kernel's tile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cad_jax.sharding import profile_table
from cad_jax.sharding.attention_grid import AttentionGrid, grid_of_rows, tiled_shape
from cad_jax.sharding.cost import Device, ModelShape, attention_flops
from cad_jax.sharding.profile_table import AttentionRow, LinearRow, Profile, SlackRow, TransferRow
from cad_jax.sharding.tasks import (
    DOCUMENT,
    K_START,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    TILE_ROWS,
    Capacities,
    HeadShape,
)

BACKWARD_FLOPS = 2.5  # of attention, over the forward's: five products for two
BACKWARD_PRODUCTS = 2.0  # of a linear layer: one product for each input

ATTENTION_EFFICIENCY, LINEAR_EFFICIENCY = 0.6, 0.6  # of a device's peak, where nothing was measured
# The upper end, for predictions of what hides behind compute: fast kernels leave less to hide behind.
# Large bfloat16 products reach 0.7 to 0.8 of the data sheet; attention, forward and backward, from published
# measurements of these kernels' kind on H100 at 16K tokens; xla: of its matmuls.
FAST_LINEAR_EFFICIENCY = 0.8
FAST_ATTENTION_EFFICIENCY: Mapping[str, tuple[float, float]] = {
    "triton": (0.42, 0.35),
    "tokamax": (0.69, 0.50),
    "xla": (0.30, 0.30),
    "reference": (0.30, 0.30),
}
PROFILES_DIR = Path(__file__).parent / "profiles"  # shipped: NAME.csv


@dataclass(frozen=True, eq=False)
class LinearSpeed:
    """Seconds of matrix products over the tokens that share a weight.

    tokens: float64 [n], rising. forward_flop_s, backward_flop_s: float64 [n], seconds of one
    FLOP; backward counts its own FLOPs, twice the forward's.
    """

    tokens: np.ndarray
    forward_flop_s: np.ndarray
    backward_flop_s: np.ndarray

    def seconds(self, flops: float, tokens: float, *, backward: bool) -> float:
        """Of so many FLOPs with so many tokens: linear in tokens between points, in proportion
        beyond them.
        """
        flop_s = self.backward_flop_s if backward else self.forward_flop_s
        if tokens <= 0:
            return 0.0
        at = min(max(tokens, self.tokens[0]), self.tokens[-1])
        return float(flops * np.interp(at, self.tokens, self.tokens * flop_s) / at)


class Link(NamedTuple):
    """A way between two devices."""

    bytes_s: float  # per direction
    latency_s: float  # of one collective


@dataclass(frozen=True, eq=False)
class CostModel:
    """Seconds of ONE layer on ONE device.

    label: "measured" | "derived", of attention's seconds. grids: one or several shapes of
    heads; the nearest to those asked for counts.
    """

    label: str
    device: Device
    grids: tuple[AttentionGrid, ...]
    linear: LinearSpeed
    within_node: Link
    between_nodes: Link

    def grid(self, heads: HeadShape) -> AttentionGrid:
        """The grid of the same head dim, group and query heads, or the nearest, in that order."""

        def distance(grid: AttentionGrid) -> tuple[float, ...]:
            mine, asked = (
                np.log([h.head_dim, h.num_q_heads / h.num_kv_heads, h.num_q_heads])
                for h in (grid.heads, heads)
            )
            return tuple(np.abs(mine - asked))

        return min(self.grids, key=distance)

    def task_s(self, q_rows, k_rows, heads: HeadShape, *, backward: bool = False) -> np.ndarray:
        """Causal tasks whose last query sees `k_rows` keys, from the first row of a tile on.

        q_rows, k_rows: int [n] or anything that broadcasts. Returns float64. Queries that see no key
        (more of them than keys) cost nothing.
        """
        q_rows, k_rows = np.broadcast_arrays(
            np.asarray(q_rows, np.int64), np.asarray(k_rows, np.int64)
        )
        grid = self.grid(heads)
        shape = tiled_shape(
            np.maximum(k_rows - q_rows, 0), k_rows, np.zeros_like(k_rows), k_rows, grid.tile_rows
        )
        return grid.seconds(shape, heads, backward=backward)

    def server_s(
        self,
        tasks: np.ndarray,
        servers: int,
        heads: HeadShape,
        *,
        backward: bool = False,
        capacities: Capacities | None = None,
    ) -> np.ndarray:
        """Attention of each server: the sum over its tasks, float64 [S].

        tasks: int64 [n, 7], rows of `TASK_FIELDS` in a plan's order, which is that of a server's
        query rows; key sub-ranges count as what they are. Rows that go on where the task before
        them ends cost as one task. capacities: whose buffers the kernel gets; without them, nothing
        for rows of a buffer that hold no work.
        """
        grid = self.grid(heads)
        tasks = _joined(tasks)
        offset = _tile_offsets(tasks, grid.tile_rows) if grid.tiles_of == "buffer" else 0
        shape = tiled_shape(
            tasks[:, Q_START], tasks[:, Q_STOP], tasks[:, K_START], tasks[:, K_STOP],
            grid.tile_rows, offset,
        )  # fmt: skip
        seconds = grid.seconds(shape, heads, backward=backward)
        total = np.bincount(tasks[:, SERVER], seconds, servers)
        if capacities is None or not grid.slack_s.any():
            return total
        query_rows, key_rows = _buffer_rows(tasks, servers)
        empty = (capacities.query_rows - query_rows, capacities.key_rows - key_rows)
        return total + grid.empty_s(*empty, heads, backward=backward)

    def pair_s(self, heads: HeadShape, *, backward: bool = False) -> float:
        """One (query, key) pair of a task that saturates the device."""
        return self.grid(heads).pair_s(heads, backward=backward)

    def attention_flops_s(self, forward_flops: float, *, backward: bool = False) -> float:
        """Attention that saturates the device, of so many FLOPs counted forward."""
        unit = HeadShape(1, 1, 1)
        pair_s = self.pair_s(unit, backward=backward)
        return forward_flops * pair_s / attention_flops(unit, 1)

    def linear_s(
        self, model: ModelShape, tokens: float, tp: int, *, backward: bool = False
    ) -> float:
        """The linear layers of one transformer layer, over `tokens` tokens shared by `tp` devices."""
        flops = 2 * layer_weights(model) * tokens / tp
        return self.product_s(flops, tokens, backward=backward)

    def product_s(self, forward_flops: float, tokens: float, *, backward: bool = False) -> float:
        """Matrix products of weights with `tokens` tokens. forward_flops: counted forward, whichever
        direction is asked for.
        """
        flops = forward_flops * (BACKWARD_PRODUCTS if backward else 1.0)
        return self.linear.seconds(flops, tokens, backward=backward)

    def transfer_s(self, wire_bytes: float, *, within_node: bool, hops: int) -> float:
        """An exchange that puts `wire_bytes` on one rank's link, in `hops` collectives."""
        link = self.within_node if within_node else self.between_nodes
        return wire_bytes / link.bytes_s + hops * link.latency_s


def layer_weights(model: ModelShape) -> int:
    """Weights of the matrix products of one transformer layer, attention's projections included."""
    projections = 2 * (model.num_q_heads + model.num_kv_heads) * model.head_dim
    return model.embedding_dim * (projections + 3 * model.ffn_dim)


def _joined(tasks: np.ndarray) -> np.ndarray:
    """Tasks with those that continue each other joined: same server, document and first key, rows
    end to end, each over all keys up to its last row.
    """
    if len(tasks) < 2:
        return tasks
    before, after = tasks[:-1], tasks[1:]
    goes_on = (
        (before[:, (SERVER, DOCUMENT, K_START)] == after[:, (SERVER, DOCUMENT, K_START)]).all(1)
        & (before[:, Q_STOP] == after[:, Q_START])
        & (before[:, K_STOP] == before[:, Q_STOP])
        & (after[:, K_STOP] == after[:, Q_STOP])
    )
    first = np.flatnonzero(np.r_[True, ~goes_on])
    joined = tasks[first].copy()
    last = np.r_[first[1:], len(tasks)] - 1
    joined[:, Q_STOP], joined[:, K_STOP] = tasks[last, Q_STOP], tasks[last, K_STOP]
    return joined


def _buffer_rows(tasks: np.ndarray, servers: int) -> tuple[np.ndarray, np.ndarray]:
    """Query and key rows that each server's tasks fill, int64 [S]; of a document's keys those that any
    task needs, once.
    """
    queries = np.bincount(tasks[:, SERVER], tasks[:, Q_STOP] - tasks[:, Q_START], servers)
    ordered = tasks[np.lexsort((tasks[:, K_START], tasks[:, DOCUMENT], tasks[:, SERVER]))]
    changes = (np.diff(ordered[:, (SERVER, DOCUMENT)], axis=0) != 0).any(axis=1)
    # Documents of servers end to end, so that one running maximum serves all of them.
    shift = np.cumsum(np.r_[0, changes])[: len(ordered)] * (tasks[:, K_STOP].max(initial=0) + 1)
    start, stop = ordered[:, K_START] + shift, ordered[:, K_STOP] + shift
    reached = np.r_[0, np.maximum.accumulate(stop)[:-1]][: len(ordered)]
    fresh = np.maximum(stop - np.maximum(start, reached), 0)
    keys = np.bincount(ordered[:, SERVER], fresh, servers)
    return queries.astype(np.int64), keys.astype(np.int64)


def _tile_offsets(tasks: np.ndarray, tile_rows: int) -> np.ndarray:
    """Rows of each task's first tile before its first query, where tiles cut each server's rows."""
    order = np.argsort(tasks[:, SERVER], kind="stable")
    rows = (tasks[:, Q_STOP] - tasks[:, Q_START])[order]
    begin = np.cumsum(rows) - rows
    server = tasks[order, SERVER]
    begin -= begin[np.searchsorted(server, server)]
    offset = np.empty(len(tasks), np.int64)
    offset[order] = begin % tile_rows
    return offset


def analytic(
    device: Device,
    *,
    attention_efficiency: float | tuple[float, float] = ATTENTION_EFFICIENCY,
    linear_efficiency: float = LINEAR_EFFICIENCY,
    between_nodes_bytes_s: float | None = None,
) -> CostModel:
    """A device whose kernels reach a fraction of its published peak, whatever the size of the work.

    Args:
        device: peak and links.
        attention_efficiency: of attention kernels, over the (query, key) pairs of their tiles of
            TILE_ROWS rows; one figure, or forward and backward.
        linear_efficiency: of matrix products.
        between_nodes_bytes_s: instead of the device's, per direction.

    Raises:
        ValueError: a device without a published peak, or an efficiency outside (0, 1].
    """
    forward, backward = np.broadcast_to(attention_efficiency, 2).tolist()
    for name, value in (
        ("attention_efficiency", forward),
        ("attention_efficiency", backward),
        ("linear_efficiency", linear_efficiency),
    ):
        if not 0 < value <= 1:
            raise ValueError(
                f"{name} must be above 0 and at most 1, got {value}: the fraction of the device's "
                "peak that its kernels reach, 0.6 is usual"
            )
    if device.peak_flops is None:
        raise ValueError(
            f"device {device.name} has no published peak: name another to predict for, or measure "
            "this one with cad-jax profile"
        )
    unit = HeadShape(1, 1, 1)
    tile_s = attention_flops(unit, TILE_ROWS**2) / device.peak_flops
    grid = AttentionGrid(
        unit,
        TILE_ROWS,
        "task",
        rows=np.array([TILE_ROWS]),
        keys=np.array([float(TILE_ROWS)]),
        forward_s=np.array([[tile_s / forward]]),
        backward_s=np.array([[BACKWARD_FLOPS * tile_s / backward]]),
        slack_s=np.zeros((2, 2)),
    )
    flop_s = np.array([1 / (linear_efficiency * device.peak_flops)])
    between = (
        device.between_nodes_bytes_s if between_nodes_bytes_s is None else between_nodes_bytes_s
    )
    return CostModel(
        "derived",
        device,
        (grid,),
        LinearSpeed(np.array([1.0]), flop_s, flop_s),
        Link(device.within_node_bytes_s, device.hop_latency_s),
        Link(between, device.hop_latency_s),
    )


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILES_DIR.glob("*.csv"))


def shipped(name: str, option: str = "profile") -> Path:
    """The file of a profile that comes with the package. option: that names it. ValueError lists the names there are."""
    names = shipped_profiles()
    if name not in names:
        raise ValueError(
            f"{option} must be one of {', '.join(names)}, got {name!r}: name one, or a file"
        )
    return PROFILES_DIR / f"{name}.csv"


def from_csv(path: str | Path, device: Device) -> CostModel:
    """The cost model of a profile (`profile_table`), with the device's published figures for what
    the profile does not hold: links, and products at LINEAR_EFFICIENCY of the peak.

    Raises:
        ValueError: a damaged file, one for another device, or one whose grid has gaps.
    """
    profile = profile_table.load(path)
    header = profile.header
    if device.name not in header.devices.split():
        raise ValueError(
            f"{path} is a profile of {header.devices}, but the device is {device.name}: name a "
            "profile of that device, or measure one with cad-jax profile"
        )
    grids = _grids(path, profile)
    linear = _linear_speed(path, profile.of(LinearRow), device)
    transfers = profile.of(TransferRow)
    within, between = (
        _link([t for t in transfers if t.link == name], bytes_s, device.hop_latency_s)
        for name, bytes_s in (
            ("within_node", device.within_node_bytes_s),
            ("between_nodes", device.between_nodes_bytes_s),
        )
    )
    return CostModel(header.label, device, grids, linear, within, between)


def _grids(path: str | Path, profile: Profile) -> tuple[AttentionGrid, ...]:
    by_heads: dict[tuple[int, int, int], list[AttentionRow]] = {}
    for row in profile.of(AttentionRow):
        by_heads.setdefault(row[:3], []).append(row)
    if not by_heads:
        raise ValueError(f"{path} must have rows of attention, got none: {profile_table.CURE}")
    slack = profile.of(SlackRow)
    return tuple(
        grid_of_rows(
            path, profile.header, HeadShape(*heads), rows, [s for s in slack if s[:3] == heads]
        )
        for heads, rows in by_heads.items()
    )


def _linear_speed(path: str | Path, rows: Sequence[LinearRow], device: Device) -> LinearSpeed:
    if not rows:
        if device.peak_flops is None:
            raise ValueError(
                f"{path} must have rows of linear layers, since device {device.name} has no "
                f"published peak, got none: {profile_table.CURE}"
            )
        flop_s = np.array([1 / (LINEAR_EFFICIENCY * device.peak_flops)])
        return LinearSpeed(np.array([1.0]), flop_s, flop_s)
    rows = sorted(rows, key=lambda row: row.tokens)
    tokens = np.array([row.tokens for row in rows], np.float64)
    if np.any(np.diff(tokens) == 0):
        raise ValueError(
            f"{path}: linear layers must be there once for each number of tokens, got "
            f"{[row.tokens for row in rows]}: {profile_table.CURE}"
        )
    flops = 2.0 * np.array([row.weights for row in rows]) * tokens
    forward, backward = (
        np.array(s) for s in zip(*((r.forward_s, r.backward_s) for r in rows), strict=True)
    )
    return LinearSpeed(tokens, forward / flops, backward / (BACKWARD_PRODUCTS * flops))


def _link(transfers: Sequence[TransferRow], bytes_s: float, latency_s: float) -> Link:
    """Least squares of seconds = hops * latency + bytes / bandwidth, relative to what was measured;
    the published figures where nothing was.
    """
    if not transfers:
        return Link(bytes_s, latency_s)
    seconds = np.array([t.transfer_s for t in transfers])
    terms = np.array([(t.hops, t.wire_bytes) for t in transfers]) / seconds[:, None]
    fits = [
        np.linalg.lstsq(terms, np.ones(len(seconds)), rcond=None)[0],
        np.r_[0.0, terms[:, 1].sum() / (terms[:, 1] ** 2).sum()],  # where latency came out negative
    ]
    latency_s, byte_s = next(fit for fit in fits if fit.min() >= 0 and fit[1] > 0)
    return Link(1 / float(byte_s), float(latency_s))
