"""Tokamax's Hopper kernels under this package's contract: tasks as per-row key ranges.

Shape letters: CQ query rows, CK key rows, H query heads, K key/value heads, D head dim.

An optional extra: importing this module needs tokamax and the CUDA plugin of jax. The forward kernel
visits, for every 128 query rows, the key tiles between the least k_lo and the greatest k_hi. The backward
kernels of tokamax 0.0.17 mask by range but visit every pair of tiles of the two buffers: right for
one long document, wasteful for many short ones.

Forward and backward ops are called explicitly (tokamax refuses residuals under autodiff) with fixed
tile sizes: every host compiles the same program, whatever its autotuning cache holds.
"""

import jax
import jax.numpy as jnp
from tokamax._src.ops.attention import (  # pyright: ignore[reportMissingImports]
    base,
    pallas_mosaic_gpu,
    pallas_mosaic_gpu_vjp,
    pallas_mosaic_gpu_vjp_common,
)
from tokamax._src.precision import (  # pyright: ignore[reportMissingImports]
    canonicalize_precision,
)

from cad_jax.attention.base import KeyRanges, attended_keys, without_slack

_ROWS = 128  # rows that one block of either kernel reads and writes, without bounds checks


def _check(q) -> None:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"dtype {q.dtype} would be rounded to 16 bits")
    if q.shape[-1] > 256:
        raise NotImplementedError(f"head dim {q.shape[-1]} is above 256")


def _padded(x, fill=0):
    """Rows up to a multiple of a block: its tail neither reads nor writes beyond the buffer."""
    pad = ((0, -x.shape[0] % _ROWS),) + ((0, 0),) * (x.ndim - 1)
    return jnp.pad(x, pad, constant_values=fill)


def _operands(q, k, v, ranges: KeyRanges):
    live = ranges.k_lo < ranges.k_hi
    attended = attended_keys(ranges, k.shape[0])
    queries = _padded(without_slack(q, live))
    keys, values = (_padded(without_slack(x, attended)) for x in (k, v))
    k_start, k_end = (_padded(x)[None] for x in ranges)
    return live, queries, keys, values, base.Mask(k_start=k_start, k_end=k_end)


def forward(q, k, v, ranges: KeyRanges, scale: float) -> tuple[jax.Array, jax.Array]:
    """See `varlen_attention`."""
    _check(q)
    live, queries, keys, values, mask = _operands(q, k, v, ranges)
    wide = q.shape[-1] <= 128
    config = pallas_mosaic_gpu.ConfigSM90(
        block_q=64, block_kv=128 if wide else 64, num_stages=2, persistent=wide
    )
    attend = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention(config=config, use_stable_softmax=True)
    out, (peak, total) = attend(
        queries, keys, values, mask=mask, logits_scale=scale, return_residuals=True
    )
    rows = q.shape[0]
    lse = (peak + jnp.log(total)).T[:rows]
    return without_slack(out[:rows], live), jnp.where(live[:, None], lse, -jnp.inf)


def _with_delta(d_out, delta):
    """Some `out` [CQ, H, D] float32 with rowsum(d_out * out) = delta to the last bit or two.

    The op computes delta from out, which stays at home; all of delta goes on the lane where d_out is
    largest, so the quotient neither overflows nor loses digits.
    """
    lane = jnp.argmax(jnp.abs(d_out), axis=-1, keepdims=True)
    largest = jnp.take_along_axis(d_out, lane, axis=-1).astype(jnp.float32)
    quotient = jnp.where(largest != 0, delta[..., None] / jnp.where(largest != 0, largest, 1), 0)
    lanes = jax.lax.broadcasted_iota(lane.dtype, d_out.shape, d_out.ndim - 1)
    return jnp.where(lanes == lane, quotient, 0.0)


def backward(q, k, v, d_out, lse, delta, ranges: KeyRanges, scale: float):
    """See `varlen_attention_bwd`."""
    _check(q)
    live, queries, keys, values, mask = _operands(q, k, v, ranges)
    d_outs, lses, deltas = (_padded(without_slack(x, live)) for x in (d_out, lse, delta))
    config = pallas_mosaic_gpu_vjp_common.Config(
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
        num_stages=2 if q.shape[-1] <= 128 else 1,
    )
    precision = canonicalize_precision(jax.lax.Precision.DEFAULT)
    grads = pallas_mosaic_gpu_vjp.PallasMosaicGpuFlashAttentionVjp(config=config)(
        (lses.T, jnp.ones_like(lses.T)),
        _with_delta(d_outs, deltas),
        d_outs,
        queries,
        keys,
        values,
        precision=(precision, precision),
        logits_dtype=jnp.dtype(jnp.float32),
        logits_scale=scale,
        bias=None,
        logits_soft_cap=None,
        mask=mask,
        dropout_mask=None,
        dropout_rate=0.0,
        paging_info=None,
        q_indices=None,
        k_indices=None,
        normalize_output=True,
    )
    return grads["q"][: q.shape[0]], grads["k"][: k.shape[0]], grads["v"][: v.shape[0]]
