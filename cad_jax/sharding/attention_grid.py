"""Seconds of attention tasks from a grid, between whose points they are bilinear. Host only.

Kernels cut the rows of queries into tiles of R rows, and each tile visits the keys that its last row sees:
what a task costs follows from its tiles (x rows, a multiple of R) and from the keys that a tile visits, on
average over its tiles (y). A rectangle of queries by keys and the triangle of a whole document are two
points of the same plane. Seconds are those of a task among others that fill the device. Bilinear is exact for
costs per task, per tile and per pair; beyond the grid seconds grow in proportion: the throughput of its last
point is the device's peak.

Shape letters: n tasks, R tile rows, A and B points of a grid's two axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cad_jax.sharding.profile_table import CURE, AttentionRow, ProfileHeader, SlackRow
from cad_jax.sharding.tasks import HeadShape


class TiledShape(NamedTuple):
    """What a kernel's tiles make of tasks, [n] each."""

    rows: np.ndarray  # int64: query rows of the tiles that hold any of the task's rows
    keys: np.ndarray  # float64: keys that such a tile visits, mean; 0 where no row sees a key


def tiled_shape(
    q_start, q_stop, k_start, k_stop, tile_rows: int, offset: np.ndarray | int = 0
) -> TiledShape:
    """Tiles of tasks with queries [q_start, q_stop) and keys [k_start, k_stop), causal, int64 [n]
    each. offset: rows of its first tile before the task's first query, in [0, R).
    """
    first, stop, low, high = (np.asarray(x, np.int64) for x in (q_start, q_stop, k_start, k_stop))
    stop, offset = np.maximum(stop, first), np.asarray(offset, np.int64)
    # Rows before the sub-range's first key see nothing; their tiles do not exist.
    skipped = np.clip(low - first, 0, stop - first)
    first, offset = first + skipped, (offset + skipped) % tile_rows
    tiles = np.where(stop > first, -(-(offset + stop - first) // tile_rows), 0)
    before = first - offset  # tile j, counted from 1, ends at row before + j R
    whole = np.clip((high - before) // tile_rows, 0, tiles)  # tiles that end before the keys do
    ends = whole * before + tile_rows * whole * (whole + 1) // 2 + (tiles - whole) * high
    visits = np.maximum(ends - tiles * low, 0)
    return TiledShape(tiles * tile_rows, visits / np.maximum(tiles, 1))


@dataclass(frozen=True, eq=False)
class AttentionGrid:
    """Seconds of attention tasks over tiled rows and keys, for one shape of heads.

    heads: of the tasks measured; others cost in proportion to query heads times head dim. tile_rows: R.
    tiles_of: "task", every task begins a tile of its own; "buffer", tiles cut a server's whole buffer
    and may hold rows of several tasks. rows: int64 [A], query rows, multiples of R from R on. keys: float64 [B],
    keys a tile visits, mean. forward_s, backward_s: float64 [A, B], never falling along an axis.
    slack_s: float64 [2, 2], of a buffer's row without work: query and key row, forward and backward.
    """

    heads: HeadShape
    tile_rows: int
    tiles_of: str
    rows: np.ndarray
    keys: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    slack_s: np.ndarray

    def __post_init__(self):
        shape = (len(self.rows), len(self.keys))
        assert self.forward_s.shape == self.backward_s.shape == shape, shape
        assert self.rows[0] == self.tile_rows, (self.rows, self.tile_rows)

    def seconds(self, shape: TiledShape, heads: HeadShape, *, backward: bool) -> np.ndarray:
        """float64 [n], of `heads`. Keys below the grid cost as its first point where every task has
        tiles of its own, and in proportion where they share tiles.
        """
        table = self.backward_s if backward else self.forward_s
        rows = np.clip(shape.rows, self.rows[0], self.rows[-1])
        keys = np.clip(shape.keys, self.keys[0], self.keys[-1])
        i, of_row = _cell(self.rows, rows)
        j, of_key = _cell(self.keys, keys)
        i1, j1 = np.minimum(i + 1, len(self.rows) - 1), np.minimum(j + 1, len(self.keys) - 1)
        near = table[i, j] * (1 - of_key) + table[i, j1] * of_key
        far = table[i1, j] * (1 - of_key) + table[i1, j1] * of_key
        beyond = (
            shape.rows
            / rows
            * np.where((shape.keys > keys) | (self.tiles_of == "buffer"), shape.keys / keys, 1.0)
        )
        work = _lanes(heads) / _lanes(self.heads)
        live = (shape.rows > 0) & (shape.keys > 0)
        return np.where(live, (near + (far - near) * of_row) * beyond * work, 0.0)

    def empty_s(self, query_rows, key_rows, heads: HeadShape, *, backward: bool) -> np.ndarray:
        """Buffer rows without work, which kernels of this project pass over all the same, float64 [n]."""
        query_s, key_s = self.slack_s[int(backward)]
        work = _lanes(heads) / _lanes(self.heads)
        return (np.asarray(query_rows) * query_s + np.asarray(key_rows) * key_s) * work

    def pair_s(self, heads: HeadShape, *, backward: bool) -> float:
        """Seconds of one (query, key) pair at the peak: the grid's last point."""
        table = self.backward_s if backward else self.forward_s
        work = _lanes(heads) / _lanes(self.heads)
        return float(table[-1, -1] / (self.rows[-1] * self.keys[-1]) * work)


def _lanes(heads: HeadShape) -> int:
    return heads.num_q_heads * heads.head_dim


def _cell(axis: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the grid point at or before, and how far between it and the next, in [0, 1]."""
    index = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, max(len(axis) - 2, 0))
    if len(axis) == 1:
        return index, np.zeros(np.shape(at))
    return index, (at - axis[index]) / (axis[index + 1] - axis[index])


def grid_of_rows(
    path: str | Path,
    header: ProfileHeader,
    heads: HeadShape,
    measured: Sequence[AttentionRow],
    slack: Sequence[SlackRow] = (),
) -> AttentionGrid:
    """Rows of a profile, all of these heads, as a grid over tiled rows and keys. More queries than
    causal tasks of so few keys can have: such points follow from their neighbours with more keys, less what
    the keys between them cost fewer queries, in proportion to queries.

    Raises:
        ValueError: rows missing, repeated, or of no whole number of tiles; path: named in it.
    """
    tile = header.tile_rows
    rows = np.unique([r.query_rows for r in measured])
    # A task of q rows visits on average k - (q - R) / 2 keys in its tiles.
    keys = np.unique([r.key_rows - (r.query_rows - tile) / 2 for r in measured])
    if rows[0] != tile or np.any(rows % tile):
        raise ValueError(
            f"{path}: query_rows must be multiples of tile_rows (= {tile}) from {tile} on, got "
            f"{rows.tolist()}: {CURE}"
        )
    seconds = {(r.query_rows, r.key_rows - (r.query_rows - tile) / 2): r for r in measured}
    if len(seconds) < len(measured):
        raise ValueError(
            f"{path}: every pair of query_rows and key_rows must be there once, got "
            f"{len(measured) - len(seconds)} of {heads} again: {CURE}"
        )
    table = np.empty((2, len(rows), len(keys)))
    for i, q in enumerate(rows):
        for j in reversed(range(len(keys))):
            row = seconds.get((q, keys[j]))
            if row is not None:
                table[:, i, j] = row.forward_s, row.backward_s
            elif i and j + 1 < len(keys) and keys[j] < (q + tile) / 2:
                fewer = table[:, i - 1]
                visits_s = (fewer[:, j + 1] - fewer[:, j]) * (q / rows[i - 1])
                table[:, i, j] = np.maximum(table[:, i, j + 1] - visits_s, fewer[:, j])
            else:
                raise ValueError(
                    f"{path}: the grid of {heads} must be complete, got no task of {q} query_rows "
                    f"and {int(keys[j] + (q - tile) / 2)} key_rows: {CURE}"
                )
    # A larger task takes no less: what noise says otherwise gives way.
    for axis in (1, 2):
        table = np.maximum.accumulate(table, axis=axis)
    return AttentionGrid(
        heads, tile, header.tiles_of, rows, keys, table[0], table[1], _slack(slack)
    )


def _slack(measured: Sequence[SlackRow]) -> np.ndarray:
    """Seconds of a row without work, [direction, query or key]: least squares, none negative."""
    if not measured:
        return np.zeros((2, 2))
    rows = np.array([(r.query_rows, r.key_rows) for r in measured], np.float64)
    seconds = np.array([(r.forward_s, r.backward_s) for r in measured])
    return np.maximum(np.linalg.lstsq(rows, seconds, rcond=None)[0].T, 0.0)
