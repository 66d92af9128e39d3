"""Merges partial attention outputs over disjoint key ranges of the same query rows."""

import jax
import jax.numpy as jnp


def merge_partials(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Combines M partial outputs by log-sum-exp, in float32.

    out [M, T, H, D], any float dtype; lse [M, T, H] float32. A partial with lse -inf attended nothing and
    weighs zero, whatever its out holds; where all do, out is 0 and lse -inf. Returns (out [T, H, D] in the
    dtype of `out`, lse [T, H] float32). M = 1 is the identity, bit for bit.
    """
    if out.shape[0] == 1:
        return out[0], lse[0]
    peak = lse.max(axis=0, keepdims=True)
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weight = jnp.exp(lse - peak)
    total = weight.sum(axis=0, keepdims=True)
    share = (weight / jnp.where(total > 0, total, 1.0))[..., None]
    merged = jnp.where(share > 0, out.astype(jnp.float32) * share, 0.0).sum(axis=0)
    return merged.astype(out.dtype), (jnp.log(total) + peak)[0]
