"""Merges partial attention outputs over disjoint key ranges of the same query rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def merge_partials(out: Sequence[jax.Array], lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Combines M partial outputs by log-sum-exp, in float32.

    out: M of [T, H, D], any float dtype; lse [M, T, H] float32. A partial with lse -inf attended nothing
    and weighs zero, whatever its out holds; where all do, out is 0 and lse -inf. Returns (out [T, H, D] in
    the dtype of `out`, lse [T, H] float32). M = 1 is the identity, bit for bit.

    Weights come first, from lse alone: then one sum over the partials is left, into which XLA fuses how
    each was made, so that no two of them are ever held at once.
    """
    if len(out) == 1:
        return out[0], lse[0]
    peak = lse.max(axis=0, keepdims=True)
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    weight = jnp.exp(lse - peak)
    total = weight.sum(axis=0, keepdims=True)
    shares = (weight / jnp.where(total > 0, total, 1.0))[..., None]
    merged = jnp.zeros(out[0].shape, jnp.float32)
    for part, share in zip(out, shares, strict=True):
        merged += jnp.where(share > 0, part.astype(jnp.float32) * share, 0.0)
    return merged.astype(out[0].dtype), (jnp.log(total) + peak)[0]
