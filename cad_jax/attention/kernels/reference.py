"""Dense float32 attention over key ranges: the meaning of the op, with [CQ, CK] memory.

Shape letters: CQ query rows, CK key rows, H query heads, K key/value heads, G = H / K, D head dim.
"""

import jax
import jax.numpy as jnp

from cad_jax.attention.base import KeyRanges, attended_keys, without_slack


def _scores(q, k, ranges: KeyRanges, scale):
    """Masked scores [K, G, CQ, CK] in float32: -inf outside each row's range."""
    keys = jnp.arange(k.shape[0], dtype=jnp.int32)[None]
    mask = (keys >= ranges.k_lo[:, None]) & (keys < ranges.k_hi[:, None])
    scores = jnp.einsum("qkgd,skd->kgqs", q, k, precision="highest") * scale
    return jnp.where(mask[None, None], scores, -jnp.inf)


def _cleaned(q, k, v, ranges: KeyRanges, *rows):
    """float32 operands with slack rows zeroed; rows of query shape split into [CQ, K, G, D]."""
    live = ranges.k_lo < ranges.k_hi
    attended = attended_keys(ranges, k.shape[0])
    kv_heads = k.shape[1]

    def grouped(x):
        x = without_slack(x.astype(jnp.float32), live)
        return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])

    keys, values = (without_slack(x.astype(jnp.float32), attended) for x in (k, v))
    return grouped(q), keys, values, *(grouped(x) for x in rows)


def forward(q, k, v, ranges: KeyRanges, scale: float) -> tuple[jax.Array, jax.Array]:
    """See `varlen_attention`."""
    queries, keys, values = _cleaned(q, k, v, ranges)
    live = (ranges.k_lo < ranges.k_hi)[None, None]
    scores = _scores(queries, keys, ranges, scale)
    peak = jnp.where(live, scores.max(axis=-1), 0.0)
    weights = jnp.exp(scores - peak[..., None])
    total = weights.sum(axis=-1)
    weights = weights / jnp.where(live, total, 1.0)[..., None]
    out = jnp.einsum("kgqs,skd->qkgd", weights, values, precision="highest")
    lse = jnp.where(live, jnp.log(total) + peak, -jnp.inf).transpose(2, 0, 1)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:2])


def backward(q, k, v, d_out, lse, delta, ranges: KeyRanges, scale: float):
    """See `varlen_attention_bwd`."""
    queries, keys, values, d_outs, lses, deltas = _cleaned(q, k, v, ranges, d_out, lse, delta)
    scores = _scores(queries, keys, ranges, scale)
    weights = jnp.exp(scores - lses.transpose(1, 2, 0)[..., None])
    d_weights = jnp.einsum("qkgd,skd->kgqs", d_outs, values, precision="highest")
    d_scores = weights * (d_weights - deltas.transpose(1, 2, 0)[..., None]) * scale
    dq = jnp.einsum("kgqs,skd->qkgd", d_scores, keys, precision="highest")
    dk = jnp.einsum("kgqs,qkgd->skd", d_scores, queries, precision="highest")
    dv = jnp.einsum("kgqs,qkgd->skd", weights, d_outs, precision="highest")
    return dq.reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)
