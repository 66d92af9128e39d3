"""Blockwise attention in plain XLA: any device, linear memory, work proportional to the tiles that exist.

Shape letters: CQ query rows, CK key rows, H query heads, K key/value heads, G = H / K, D head dim,
NQ and NK query and key tiles, BQ and BK their rows, M = G BQ columns of a tile pair's scores, S chunks.

The kernel walks a flat list of the tile pairs that exist, one key/value head after the other, in two
loops: pairs that need no mask, then pairs that do. The softmax state of every query tile lives in the
loop carry and is updated in place, so the order of pairs is free and the trip count is one scalar known
before the loop. The G query heads of a key head fold into the columns of one matmul, and scores are kept
transposed, [BK, M]: then no product of the forward or the backward pass contracts the leading dim of
a large left operand, which costs more than twice the time on CPUs.

A flat list also serves callers whose queries are sharded by XLA's partitioner (`forward_chunks`): with
per-chunk trip counts a vmapped loop would agree on every iteration; here all chunks run the longest
chunk's count, known in advance, and finished ones work on a spare tile.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from cad_jax.attention.base import (
    KeyRanges,
    attended_keys,
    dot_precision,
    tile_tables,
    without_slack,
)

_LOWEST = -1e30  # start of a running maximum: finite, so that no difference of maxima is NaN

# Contractions of two matrices, by the dim of each that is summed.
_LAST_LAST = (((1,), (1,)), ((), ()))
_LAST_FIRST = (((1,), (0,)), ((), ()))
_FIRST_FIRST = (((0,), (0,)), ((), ()))


class Blocks(NamedTuple):
    """Static choices: rows of a query tile and of a key tile, and the dtype that matmuls read."""

    q: int
    k: int
    dtype: jnp.dtype


def choose_blocks(
    platform: str, query_rows: int, key_rows: int, group: int, dtype, *, backward: bool
) -> Blocks:
    """Tile sizes for a platform ("cpu" or any other) and the dtype of matmul operands.

    On CPU the scores of a tile pair should stay in the L2 cache, and matmuls want some 512 rows of
    folded heads; the backward pass keeps twice as much per pair. Converting bfloat16 tiles to float32
    costs less there than bfloat16 matmuls. Elsewhere launches dominate: large tiles, operands as they are.
    """
    if platform == "cpu":
        folded, keys, dtype = 512, 128 if backward else 256, jnp.float32
    else:
        folded, keys = 2048, 512
    fit = [-(-rows // 8) * 8 for rows in (query_rows, key_rows)]
    return Blocks(min(max(16, folded // group), fit[0]), min(keys, fit[1]), jnp.dtype(dtype))


def _scales(scale: float, dtype) -> tuple[float, float]:
    """Factors of the queries and of the scores: float32 queries carry the scale, which saves a pass."""
    return (scale, 1.0) if dtype == jnp.float32 else (1.0, scale)


class _Walk(NamedTuple):
    """A flat list of tile pairs: query tiles in order, each with `count` key tiles in two runs."""

    live: jax.Array  # [NQ + 1] query tiles with pairs, then NQ (the spare tile)
    count: jax.Array  # [NQ + 1]
    first: jax.Array  # [NQ + 1] first key tile
    before_gap: jax.Array  # [NQ + 1] key tiles before the gap
    gap: jax.Array  # [NQ + 1] key tiles left out
    total: jax.Array  # pairs


def _walks(ranges: KeyRanges, key_rows: int, blocks: Blocks) -> tuple[_Walk, _Walk]:
    """The pairs that need no mask, and those that do."""
    t = tile_tables(ranges, key_rows, blocks.q, blocks.k)
    inner, left = t.inner_stop - t.inner_first, t.inner_first - t.key_first
    first = jnp.stack([t.inner_first, t.key_first])
    before_gap = jnp.stack([inner, left])
    gap = jnp.stack([jnp.zeros_like(inner), inner])
    count = jnp.stack([inner, t.key_stop - t.key_first - inner])
    tiles = count.shape[1]
    index = lax.broadcasted_iota(jnp.int32, count.shape, 1)
    live = jnp.sort(jnp.where(count > 0, index, tiles), axis=1)
    spare = [jnp.pad(x, ((0, 0), (0, 1))) for x in (count, first, before_gap, gap)]
    live = jnp.pad(live, ((0, 0), (0, 1)), constant_values=tiles)
    plain, masked = ([x[i] for x in (live, *spare, count.sum(axis=1))] for i in (0, 1))
    return _Walk(*plain), _Walk(*masked)


def _for_pairs(walk: _Walk, trips, step, state):
    """state = step(i, j, state) over the pairs of a walk, `trips` >= walk.total times."""

    def body(_, carry):
        slot, within, state = carry
        i = walk.live[slot]
        j = walk.first[i] + within + jnp.where(within >= walk.before_gap[i], walk.gap[i], 0)
        state = step(i, j, state)
        last = within + 1 >= walk.count[i]
        slot = jnp.minimum(slot + last, walk.live.shape[0] - 1)
        return slot, jnp.where(last, 0, within + 1), state

    start = (jnp.int32(0), jnp.int32(0), state)
    return lax.fori_loop(0, trips, body, start)[2]


def _read(tiles, i):
    return lax.dynamic_index_in_dim(tiles, i, 0, keepdims=False)


def _write(tiles, i, tile):
    return lax.dynamic_update_index_in_dim(tiles, tile, i, 0)


def _add(tiles, i, tile):
    return _write(tiles, i, _read(tiles, i) + tile)


def _query_tiles(x, kv_heads: int, block: int):
    """[CQ, H, ...] -> [K, NQ + 1, M, ...]; padding and the spare tile are zero."""
    tiles = -(-x.shape[0] // block) + 1
    pad = ((0, tiles * block - x.shape[0]),) + ((0, 0),) * (x.ndim - 1)
    x = jnp.pad(x, pad)
    x = x.reshape(tiles, block, kv_heads, -1, *x.shape[2:])
    x = jnp.moveaxis(x, (2, 3), (0, 2))
    return x.reshape(kv_heads, tiles, -1, *x.shape[4:])


def _query_rows(tiles, rows: int, group: int):
    """Inverse of `_query_tiles`: [K, NQ + 1, M, ...] -> [CQ, H, ...]."""
    kv_heads, count, columns = tiles.shape[:3]
    x = tiles.reshape(kv_heads, count, group, columns // group, *tiles.shape[3:])
    x = jnp.moveaxis(x, (0, 2), (2, 3))
    return x.reshape(count * x.shape[1], kv_heads * group, *x.shape[4:])[:rows]


def _key_tiles(x, block: int):
    """[CK, K, D] -> [K, NK, BK, D]."""
    tiles = -(-x.shape[0] // block)
    x = jnp.pad(x, ((0, tiles * block - x.shape[0]), (0, 0), (0, 0)))
    return x.reshape(tiles, block, *x.shape[1:]).transpose(2, 0, 1, 3)


def _key_rows(tiles, rows: int):
    """[K, NK, BK, D] -> [CK, K, D]."""
    x = tiles.transpose(1, 2, 0, 3)
    return x.reshape(-1, *x.shape[2:])[:rows]


def _bounds(ranges: KeyRanges, block: int, group: int):
    """k_lo, k_hi of each column of a query tile: int32 [NQ + 1, M] each."""
    return [_query_tiles(jnp.tile(x[:, None], (1, group)), 1, block)[0] for x in ranges]


def _mask(scores, bounds, i, j, block: int, key_dim: int, fill: float):
    keys = j * block + lax.broadcasted_iota(jnp.int32, scores.shape, key_dim)
    lo, hi = (jnp.expand_dims(_read(x, i), key_dim) for x in bounds)
    return jnp.where((keys >= lo) & (keys < hi), scores, fill)


def _forward(q, k, v, ranges: KeyRanges, walks, trips, scale: float, blocks: Blocks):
    group = q.shape[1] // k.shape[1]
    pre, post = _scales(scale, blocks.dtype)
    live = ranges.k_lo < ranges.k_hi
    bounds = _bounds(ranges, blocks.q, group)
    dot = partial(
        lax.dot_general,
        preferred_element_type=jnp.float32,
        precision=dot_precision(blocks.dtype),
    )

    def one_head(operands):
        queries, keys, values = (x.astype(blocks.dtype) for x in operands)
        queries = queries * pre

        def step(i, j, state, masked):
            peaks, totals, outs = state
            scores = dot(_read(queries, i), _read(keys, j), _LAST_LAST) * post
            if masked:
                scores = _mask(scores, bounds, i, j, blocks.k, key_dim=1, fill=-jnp.inf)
            before = _read(peaks, i)
            peak = jnp.maximum(before, scores.max(axis=1))
            weights = jnp.exp(scores - peak[:, None])
            fade = jnp.exp(before - peak)
            total = _read(totals, i) * fade + weights.sum(axis=1)
            part = dot(weights.astype(blocks.dtype), _read(values, j), _LAST_FIRST)
            out = _read(outs, i) * fade[:, None] + part
            return _write(peaks, i, peak), _write(totals, i, total), _write(outs, i, out)

        state = (
            jnp.full(queries.shape[:2], _LOWEST, jnp.float32),
            jnp.zeros(queries.shape[:2], jnp.float32),
            jnp.zeros(queries.shape, jnp.float32),
        )
        for walk, count, masked in zip(walks, trips, (False, True), strict=True):
            state = _for_pairs(walk, count, partial(step, masked=masked), state)
        peaks, totals, outs = state
        out = outs / jnp.where(totals > 0, totals, 1.0)[..., None]
        return out.astype(q.dtype), jnp.log(totals) + peaks

    out, lse = lax.map(
        one_head,
        (
            _query_tiles(without_slack(q, live), k.shape[1], blocks.q),
            _key_tiles(k, blocks.k),
            _key_tiles(v, blocks.k),
        ),
    )
    out = without_slack(_query_rows(out, q.shape[0], group), live)
    return out, jnp.where(live[:, None], _query_rows(lse, q.shape[0], group), -jnp.inf)


def _backward(
    q, k, v, d_out, lse, delta, ranges: KeyRanges, walks, trips, scale: float, blocks: Blocks
):
    group = q.shape[1] // k.shape[1]
    pre, post = _scales(scale, blocks.dtype)
    live = ranges.k_lo < ranges.k_hi
    bounds = _bounds(ranges, blocks.q, group)
    dot = partial(
        lax.dot_general,
        preferred_element_type=jnp.float32,
        precision=dot_precision(blocks.dtype),
    )

    def one_head(operands):
        queries, d_outs, keys, values = (x.astype(blocks.dtype) for x in operands[:4])
        queries = queries * pre
        lses, deltas = operands[4:]

        def step(i, j, state, masked):
            dqs, dks, dvs = state
            query, d_out_tile, key = _read(queries, i), _read(d_outs, i), _read(keys, j)
            weights = jnp.exp(dot(key, query, _LAST_LAST) * post - _read(lses, i)[None])
            if masked:
                weights = _mask(weights, bounds, i, j, blocks.k, key_dim=0, fill=0.0)
            d_weights = dot(_read(values, j), d_out_tile, _LAST_LAST)
            d_scores = (weights * (d_weights - _read(deltas, i)[None])).astype(blocks.dtype)
            dvs = _add(dvs, j, dot(weights.astype(blocks.dtype), d_out_tile, _LAST_FIRST))
            dks = _add(dks, j, dot(d_scores, query, _LAST_FIRST))
            dqs = _add(dqs, i, dot(key, d_scores, _FIRST_FIRST))
            return dqs, dks, dvs

        state = (
            jnp.zeros((queries.shape[0], queries.shape[2], queries.shape[1]), jnp.float32),
            jnp.zeros(keys.shape, jnp.float32),
            jnp.zeros(values.shape, jnp.float32),
        )
        for walk, count, masked in zip(walks, trips, (False, True), strict=True):
            state = _for_pairs(walk, count, partial(step, masked=masked), state)
        dqs, dks, dvs = state
        dqs, dks = dqs.swapaxes(1, 2) * scale, dks * post
        return dqs.astype(q.dtype), dks, dvs

    kv_heads = k.shape[1]
    dq, dk, dv = lax.map(
        one_head,
        (
            _query_tiles(without_slack(q, live), kv_heads, blocks.q),
            _query_tiles(without_slack(d_out, live), kv_heads, blocks.q),
            _key_tiles(k, blocks.k),
            _key_tiles(v, blocks.k),
            _query_tiles(without_slack(lse, live), kv_heads, blocks.q),
            _query_tiles(without_slack(delta, live), kv_heads, blocks.q),
        ),
    )
    return (
        _query_rows(dq, q.shape[0], group),
        _key_rows(dk, k.shape[0]),
        _key_rows(dv, v.shape[0]),
    )


def _one(platform: str, run, backward: bool, scale: float, q, k, v, *operands):
    """One buffer: the walks' own totals are the trip counts."""
    ranges = operands[-1]
    attended = attended_keys(ranges, k.shape[0])
    k, v = (without_slack(x, attended) for x in (k, v))
    group = q.shape[1] // k.shape[1]
    blocks = choose_blocks(platform, q.shape[0], k.shape[0], group, q.dtype, backward=backward)
    walks = _walks(ranges, k.shape[0], blocks)
    return run(q, k, v, *operands, walks, [w.total for w in walks], scale, blocks)


def _chunks(platform: str, run, backward: bool, scale: float, q, k, v, *operands):
    """Many query buffers on the same keys: all take the trips of the longest walk."""
    ranges = operands[-1]
    attended = jax.vmap(attended_keys, (0, None))(ranges, k.shape[0]).any(axis=0)
    k, v = (without_slack(x, attended) for x in (k, v))
    group = q.shape[2] // k.shape[1]
    blocks = choose_blocks(platform, q.shape[1], k.shape[0], group, q.dtype, backward=backward)
    walks = jax.vmap(lambda x: _walks(x, k.shape[0], blocks))(ranges)
    trips = [w.total.max() for w in walks]

    def one(q, *rest):
        *operands, walks = rest
        return run(q, k, v, *operands, walks, trips, scale, blocks)

    return jax.vmap(one)(q, *operands, walks)


def _by_platform(form, run, backward: bool, scale: float, *operands):
    """Decides when the program is lowered, so that a CPU process can compile for other devices."""
    cpu, other = (partial(form, platform, run, backward, scale) for platform in ("cpu", "other"))
    return lax.platform_dependent(*operands, cpu=cpu, default=other)


def forward(q, k, v, ranges: KeyRanges, scale: float) -> tuple[jax.Array, jax.Array]:
    """See `varlen_attention`."""
    return _by_platform(_one, _forward, False, scale, q, k, v, ranges)


def backward(q, k, v, d_out, lse, delta, ranges: KeyRanges, scale: float):
    """See `varlen_attention_bwd`."""
    operands = (q, k, v, d_out, lse, delta, ranges)
    dq, dk, dv = _by_platform(_one, _backward, True, scale, *operands)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def forward_chunks(q, k, v, ranges: KeyRanges, scale: float) -> tuple[jax.Array, jax.Array]:
    """`forward` for S query buffers that share their keys, in step with each other.

    q [S, CQ, H, D]; k, v [CK, K, D]; ranges of [S, CQ] -> out [S, CQ, H, D], lse [S, CQ, H]. With the leading
    dim sharded and the keys replicated, XLA's partitioner adds no collective inside the loops.
    """
    return _by_platform(_chunks, _forward, False, scale, q, k, v, ranges)


def backward_chunks(q, k, v, d_out, lse, delta, ranges: KeyRanges, scale: float):
    """`backward` for S query buffers: dq [S, CQ, H, D] in q's dtype; each buffer's share of dk and dv,
    [S, CK, K, D] float32, for the caller to sum over S."""
    return _by_platform(_chunks, _backward, True, scale, q, k, v, d_out, lse, delta, ranges)
