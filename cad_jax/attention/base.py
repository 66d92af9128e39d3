"""The kernel contract: which key rows each query row sees, and the tiles that follow from it.

Shape letters: CQ query-buffer rows, CK key-buffer rows, NQ query tiles, NK key tiles, H query heads,
K key/value heads, D head dim.

A server's buffers hold the rows of many tasks end to end. Query row r attends the contiguous key rows
[k_lo[r], k_hi[r]); a row with k_lo == k_hi attends nothing: its out is 0 and its lse -inf. That covers
causal masks (k_hi follows the row), sliding windows (k_lo follows too) and key sub-ranges. Rows of a
buffer that no range touches are slack: they may hold anything, NaN included, without effect.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeyRanges(NamedTuple):
    """Per query row, the key-buffer rows [k_lo, k_hi) it attends; both int32 [CQ]."""

    k_lo: jax.Array
    k_hi: jax.Array


class Kernel(NamedTuple):
    """One implementation of the contract.

    forward(q, k, v, ranges, scale) -> (out, lse)
    backward(q, k, v, d_out, lse, delta, ranges, scale) -> (dq, dk, dv)

    Either raises NotImplementedError(reason) for operands it does not take.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


class TileTables(NamedTuple):
    """The pairs of tiles that exist, as ranges; all int32.

    Query tile i needs key tiles [key_first[i], key_stop[i]), of which [inner_first[i], inner_stop[i])
    need no mask: every row of the tile that attends anything attends all of their keys. Key tile j is
    needed by query tiles within [query_first[j], query_stop[j]); a query tile in that range may still not
    need j, so test its own range. `costliest` orders the query tiles by the key tiles they need, most
    first.
    """

    key_first: jax.Array  # [NQ]
    key_stop: jax.Array  # [NQ]
    inner_first: jax.Array  # [NQ]
    inner_stop: jax.Array  # [NQ]
    query_first: jax.Array  # [NK]
    query_stop: jax.Array  # [NK]
    costliest: jax.Array  # [NQ]


def tile_tables(ranges: KeyRanges, key_rows: int, block_q: int, block_k: int) -> TileTables:
    """Reduces per-row key ranges to tile tables, on the device: a few passes over CQ, NQ and NK integers.

    Neither CQ nor key_rows (CK) need be a multiple of the tile. Query tiles without a live row have
    empty ranges.
    """
    query_tiles = -(-ranges.k_lo.shape[0] // block_q)
    key_tiles = -(-key_rows // block_k)
    pad = query_tiles * block_q - ranges.k_lo.shape[0]
    lo = jnp.pad(ranges.k_lo, (0, pad)).reshape(query_tiles, block_q)
    hi = jnp.pad(ranges.k_hi, (0, pad)).reshape(query_tiles, block_q)
    live = lo < hi
    any_live = live.any(axis=1)

    def over_live(values, reduce, neutral):
        return jnp.where(any_live, reduce(jnp.where(live, values, neutral), axis=1), 0)

    key_first = over_live(lo, jnp.min, key_rows) // block_k
    key_stop = -(-over_live(hi, jnp.max, 0) // block_k)
    inner_first = jnp.clip(-(-over_live(lo, jnp.max, 0) // block_k), key_first, key_stop)
    inner_stop = jnp.clip(over_live(hi, jnp.min, key_rows) // block_k, inner_first, key_stop)

    # A key tile's query range must hold every query tile whose range holds it. The first one ends at this
    # key tile or later, the last one starts here or earlier: running extrema over key tiles find both.
    # The range is exact where starts and ends grow with the query tile, and too wide otherwise.
    tiles = jnp.arange(query_tiles, dtype=jnp.int32)
    needs = key_first < key_stop
    first_key = jnp.where(needs, key_first, key_tiles)
    last_key = jnp.where(needs, key_stop - 1, key_tiles)
    starts = jnp.full(key_tiles, query_tiles, jnp.int32).at[last_key].min(tiles, mode="drop")
    stops = jnp.zeros(key_tiles, jnp.int32).at[first_key].max(tiles + 1, mode="drop")
    query_first = jax.lax.cummin(starts, reverse=True)
    query_stop = jnp.maximum(jax.lax.cummax(stops), query_first)
    costliest = jnp.argsort(key_first - key_stop, stable=True).astype(jnp.int32)
    return TileTables(
        key_first, key_stop, inner_first, inner_stop, query_first, query_stop, costliest
    )


def attended_keys(ranges: KeyRanges, key_rows: int) -> jax.Array:
    """bool [CK]: the key rows that at least one query row attends (the others are slack)."""
    live = (ranges.k_lo < ranges.k_hi).astype(jnp.int32)
    edges = jnp.zeros(key_rows + 1, jnp.int32).at[ranges.k_lo].add(live).at[ranges.k_hi].add(-live)
    return jnp.cumsum(edges[:-1]) > 0


def without_slack(values: jax.Array, live: jax.Array) -> jax.Array:
    """Zeroes the rows of `values` [C, ...] where `live` [C] is False, whatever they hold."""
    return jnp.where(live.reshape(live.shape + (1,) * (values.ndim - 1)), values, 0)


def dot_precision(dtype) -> jax.lax.Precision:
    """float32 operands ask for full float32 products; GPUs would round them to TF32 otherwise."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
