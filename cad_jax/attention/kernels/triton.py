"""Minimal attention kernels in Pallas through Triton, for GPUs from Ampere on; interpreted on CPU.

Shape letters: CQ query rows, CK key rows, H query heads, K key/value heads, G = H / K, D head dim,
BQ and BK rows of a query and a key tile.

One program computes one query tile of one head over the key tiles that exist for it (forward, dq), or one
key tile of one key/value head over the query tiles that see it (dk, dv: no atomics, so gradients are
deterministic). Tail tiles load and store under a row mask, so buffers of any length work in place.
JAX deprecated this backend in 0.11 and warns whenever it lowers such a kernel; everything that
depends on it is in this file.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from cad_jax.attention.base import (
    KeyRanges,
    attended_keys,
    dot_precision,
    tile_tables,
    without_slack,
)

_LOG2_E = math.log2(math.e)
_LOWEST = -1e30  # start of a running maximum: finite, so that no difference of maxima is NaN


def _check(q) -> None:
    dim = q.shape[-1]
    if dim not in (16, 32, 64, 128, 256):
        raise NotImplementedError(f"head dim {dim} is not a power of two from 16 to 256")
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"dtype {q.dtype} is not float32, bfloat16 or float16")


def _load(ref, tile, block: int, rows: int, *index):
    """Rows of a tile, [block] or [block, D]; rows beyond the buffer read as zero."""
    start = tile * block
    mask = start + jnp.arange(block) < rows
    at = ref.at[(pl.ds(start, block), *index)]
    return plgpu.load(at, mask=mask if at.shape == (block,) else mask[:, None], other=0)


def _store(ref, tile, values, rows: int, *index):
    start = tile * values.shape[0]
    mask = start + jnp.arange(values.shape[0]) < rows
    at = ref.at[(pl.ds(start, values.shape[0]), *index)]
    plgpu.store(at, values.astype(ref.dtype), mask=mask if values.ndim == 1 else mask[:, None])


def _dot(a, b):
    return plgpu.dot(a, b, precision=dot_precision(a.dtype)).astype(jnp.float32)


def _in_range(tile, block: int, lo, hi):
    """bool [BQ, BK]: whether the keys of a tile lie in each row's range."""
    keys = (tile * block + jnp.arange(block))[None]
    return (keys >= lo[:, None]) & (keys < hi[:, None])


def _sweep(tables, i, step, carry):
    """Runs step(j, carry, masked) over a query tile's key tiles: left edge, inner, right edge."""
    first, stop, inner_first, inner_stop = (table[i] for table in tables)
    carry = lax.fori_loop(first, inner_first, partial(step, masked=True), carry)
    carry = lax.fori_loop(inner_first, inner_stop, partial(step, masked=False), carry)
    return lax.fori_loop(inner_stop, stop, partial(step, masked=True), carry)


def _forward_kernel(
    order, first, stop, inner_first, inner_stop, lo_ref, hi_ref, q_ref, k_ref, v_ref,
    out_ref, lse_ref, *, scale, block_q, block_k, group,
):  # fmt: skip
    i, head = order[pl.program_id(0)], pl.program_id(1)
    kv_head = head // group
    rows, key_rows = q_ref.shape[0], k_ref.shape[0]
    lo, hi = (_load(x, i, block_q, rows) for x in (lo_ref, hi_ref))
    live = lo < hi
    query = jnp.where(live[:, None], _load(q_ref, i, block_q, rows, head, slice(None)), 0)

    def step(j, carry, masked):
        peak, total, out = carry
        key = _load(k_ref, j, block_k, key_rows, kv_head, slice(None))
        scores = _dot(query, key.T) * (scale * _LOG2_E)
        if masked:
            scores = jnp.where(_in_range(j, block_k, lo, hi), scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        weights = jnp.exp2(scores - new_peak[:, None])
        fade = jnp.exp2(peak - new_peak)
        value = _load(v_ref, j, block_k, key_rows, kv_head, slice(None))
        out = out * fade[:, None] + _dot(weights.astype(value.dtype), value)
        return new_peak, total * fade + weights.sum(axis=1), out

    carry = (
        jnp.full(block_q, _LOWEST, jnp.float32),
        jnp.zeros(block_q, jnp.float32),
        jnp.zeros((block_q, q_ref.shape[2]), jnp.float32),
    )
    peak, total, out = _sweep((first, stop, inner_first, inner_stop), i, step, carry)
    safe = jnp.where(live, total, 1.0)
    out = jnp.where(live[:, None], out / safe[:, None], 0.0)
    lse = jnp.where(live, (peak + jnp.log2(safe)) / _LOG2_E, -jnp.inf)
    _store(out_ref, i, out, rows, head, slice(None))
    _store(lse_ref, i, lse, rows, head)


def _rows_of_queries(i, head, block_q, lo_ref, hi_ref, q_ref, d_out_ref, lse_ref, delta_ref):
    """A query tile's operands, zero in rows without keys: those then add exact zeros to every gradient."""
    rows = q_ref.shape[0]
    lo, hi = (_load(x, i, block_q, rows) for x in (lo_ref, hi_ref))
    live = lo < hi
    query, d_out = (
        jnp.where(live[:, None], _load(x, i, block_q, rows, head, slice(None)), 0)
        for x in (q_ref, d_out_ref)
    )
    lse = jnp.where(live, _load(lse_ref, i, block_q, rows, head), 0.0)
    delta = jnp.where(live, _load(delta_ref, i, block_q, rows, head), 0.0)
    return lo, hi, query, d_out, lse * _LOG2_E, delta


def _dq_kernel(
    order, first, stop, inner_first, inner_stop, lo_ref, hi_ref, q_ref, k_ref, v_ref,
    d_out_ref, lse_ref, delta_ref, dq_ref, *, scale, block_q, block_k, group,
):  # fmt: skip
    i, head = order[pl.program_id(0)], pl.program_id(1)
    kv_head = head // group
    key_rows = k_ref.shape[0]
    lo, hi, query, d_out, lse, delta = _rows_of_queries(
        i, head, block_q, lo_ref, hi_ref, q_ref, d_out_ref, lse_ref, delta_ref
    )

    def step(j, dq, masked):
        key = _load(k_ref, j, block_k, key_rows, kv_head, slice(None))
        value = _load(v_ref, j, block_k, key_rows, kv_head, slice(None))
        weights = jnp.exp2(_dot(query, key.T) * (scale * _LOG2_E) - lse[:, None])
        if masked:
            weights = jnp.where(_in_range(j, block_k, lo, hi), weights, 0.0)
        d_scores = weights * (_dot(d_out, value.T) - delta[:, None])
        return dq + _dot(d_scores.astype(key.dtype), key)

    dq = jnp.zeros((block_q, q_ref.shape[2]), jnp.float32)
    dq = _sweep((first, stop, inner_first, inner_stop), i, step, dq)
    _store(dq_ref, i, dq * scale, q_ref.shape[0], head, slice(None))


def _dkv_kernel(
    query_first, query_stop, first, stop, lo_ref, hi_ref, q_ref, k_ref, v_ref,
    d_out_ref, lse_ref, delta_ref, dk_ref, dv_ref, *, scale, block_q, block_k, group,
):  # fmt: skip
    j, kv_head = pl.program_id(0), pl.program_id(1)
    key_rows = k_ref.shape[0]
    key, value = (_load(x, j, block_k, key_rows, kv_head, slice(None)) for x in (k_ref, v_ref))

    def pair(i, head, carry):
        dk, dv = carry
        lo, hi, query, d_out, lse, delta = _rows_of_queries(
            i, head, block_q, lo_ref, hi_ref, q_ref, d_out_ref, lse_ref, delta_ref
        )
        weights = jnp.exp2(_dot(query, key.T) * (scale * _LOG2_E) - lse[:, None])
        weights = jnp.where(_in_range(j, block_k, lo, hi), weights, 0.0)
        dv += _dot(weights.astype(d_out.dtype).T, d_out)
        d_scores = weights * (_dot(d_out, value.T) - delta[:, None])
        return dk + _dot(d_scores.astype(query.dtype).T, query), dv

    def step(i, carry):
        needed = (first[i] <= j) & (j < stop[i])
        heads = needed.astype(jnp.int32) * group
        return lax.fori_loop(0, heads, lambda g, c: pair(i, kv_head * group + g, c), carry)

    zeros = jnp.zeros(key.shape, jnp.float32)
    dk, dv = lax.fori_loop(query_first[j], query_stop[j], step, (zeros, zeros))
    _store(dk_ref, j, dk * scale, key_rows, kv_head, slice(None))
    _store(dv_ref, j, dv, key_rows, kv_head, slice(None))


def _call(kernel, grid, out_shape, operands, *, interpret: bool, num_warps: int, **static):
    return pl.pallas_call(
        partial(kernel, **static),
        grid=grid,
        out_shape=out_shape,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
        out_specs=jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), out_shape),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
        name=kernel.__name__.strip("_"),
    )(*operands)


def _forward(interpret: bool, scale: float, q, k, v, ranges: KeyRanges):
    attended = attended_keys(ranges, k.shape[0])
    k, v = (without_slack(x, attended) for x in (k, v))
    wide = q.dtype != jnp.float32 and q.shape[-1] <= 128
    block_q, block_k = (128, 64) if wide else (64, 32)
    tables = tile_tables(ranges, k.shape[0], block_q, block_k)
    edges = (tables.key_first, tables.key_stop, tables.inner_first, tables.inner_stop)
    return _call(
        _forward_kernel,
        (tables.costliest.shape[0], q.shape[1]),
        (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        ),
        (tables.costliest, *edges, *ranges, q, k, v),
        interpret=interpret,
        num_warps=8 if q.shape[-1] > 64 else 4,
        scale=scale,
        block_q=block_q,
        block_k=block_k,
        group=q.shape[1] // k.shape[1],
    )


def _backward(interpret: bool, scale: float, q, k, v, d_out, lse, delta, ranges: KeyRanges):
    attended = attended_keys(ranges, k.shape[0])
    k, v = (without_slack(x, attended) for x in (k, v))
    block = 64 if q.dtype != jnp.float32 and q.shape[-1] <= 128 else 32
    tables = tile_tables(ranges, k.shape[0], block, block)
    edges = (tables.key_first, tables.key_stop, tables.inner_first, tables.inner_stop)
    operands = (*ranges, q, k, v, d_out, lse, delta)
    call = partial(
        _call,
        interpret=interpret,
        num_warps=4,
        scale=scale,
        block_q=block,
        block_k=block,
        group=q.shape[1] // k.shape[1],
    )
    dq = call(
        _dq_kernel,
        (tables.costliest.shape[0], q.shape[1]),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        (tables.costliest, *edges, *operands),
    )
    dk, dv = call(
        _dkv_kernel,
        (tables.query_first.shape[0], k.shape[1]),
        (jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        (tables.query_first, tables.query_stop, *edges[:2], *operands),
    )
    return dq, dk, dv


def _by_platform(run, scale: float, *operands):
    """Interprets where the program is lowered for CPU, compiles elsewhere."""
    interpreted, compiled = (partial(run, interpret, scale) for interpret in (True, False))
    return lax.platform_dependent(*operands, cpu=interpreted, default=compiled)


def forward(q, k, v, ranges: KeyRanges, scale: float) -> tuple[jax.Array, jax.Array]:
    """See `varlen_attention`."""
    _check(q)
    return _by_platform(_forward, scale, q, k, v, ranges)


def backward(q, k, v, d_out, lse, delta, ranges: KeyRanges, scale: float):
    """See `varlen_attention_bwd`."""
    _check(q)
    return _by_platform(_backward, scale, q, k, v, d_out, lse, delta, ranges)
