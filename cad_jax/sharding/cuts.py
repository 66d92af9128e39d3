"""Cuts of queries with their whole causal prefix: by pairs, on multiples of a kernel tile's rows.

Exact in int64, so that every host cuts alike.
"""

import numpy as np
from numba import njit

from cad_jax.sharding.tasks import TILE_ROWS

CUTS = 4  # ways to cut a piece: its end, its start, at the receiver's keys, cheapest inside


@njit(error_model="numpy")
def prefix_pairs(start, stop):
    """Pairs of queries [start, stop) with their whole causal prefix."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


@njit(error_model="numpy")
def down(position):
    """The cut at or before a position."""
    return position // TILE_ROWS * TILE_ROWS


@njit(error_model="numpy")
def up(position):
    """The cut at or after a position."""
    return (position + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


@njit(error_model="numpy")
def floor_sqrt(x):
    """Largest r with r * r <= x, exact in int64."""
    root = np.int64(np.sqrt(np.float64(x)))
    while root * root > x:
        root -= 1
    while (root + 1) * (root + 1) <= x:
        root += 1
    return root


@njit(error_model="numpy")
def start_for(stop, pairs):
    """Smallest q_start whose queries [q_start, stop) hold at most `pairs` pairs."""
    start = floor_sqrt(max(np.int64(0), stop * (stop + 1) - 2 * pairs))
    while prefix_pairs(start, stop) > pairs:
        start += 1
    return start


@njit(error_model="numpy")
def stop_for(start, pairs):
    """Largest q_stop whose queries [start, q_stop) hold at most `pairs` pairs."""
    stop = floor_sqrt(2 * pairs + start * (start + 1))
    while prefix_pairs(start, stop) > pairs:
        stop -= 1
    return stop


@njit(error_model="numpy")
def cut(way, start, stop, want, room, rows, resident, q_units, kv_units):
    """A part of queries [start, stop) of about `want`, at most `room` pairs and `rows` rows.

    Returns (0, 0) where this way of CUTS has none. Cuts fall on multiples of TILE_ROWS; the part
    covers `want` where room and rows allow, else stops short of it. The cheapest contiguous shard
    of A pairs has sqrt(b 2A / (2 + b)) queries, with b = kv_units / (2 q_units), and ends at
    queries * (1 + 1 / b): the least units it can take.
    """
    if way == 1:
        reach = max(stop_for(start, want), start + 1)  # one row at least
        high = up(reach)
        if high >= stop or prefix_pairs(start, high) > room or high - start > rows:
            high = down(min(reach, start + rows))
        return (start, high) if start < high < stop else (0, 0)
    high = stop
    if way == 2 and resident < stop:
        high = down(resident)
    elif way == 3:
        queries = floor_sqrt(2 * want * kv_units // (4 * q_units + kv_units))
        high = down(queries + 2 * queries * q_units // kv_units)
        if high >= stop:
            return 0, 0
    if high <= start:
        return 0, 0
    reach = min(start_for(high, want), high - 1)  # one row at least
    low = max(start, down(reach))
    if prefix_pairs(low, high) > room or high - low > rows:
        low = max(start, up(max(reach, high - rows)))
    return (low, high) if low < high else (0, 0)
