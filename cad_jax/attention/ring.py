"""Core attention by passing keys and values around a ring (head-tail order, inside shard_map).

At step i a rank attends the block of the rank i places before it while that block is already on its
way to the next. Partial outputs merge by log-sum-exp in float32; in the backward a block's dk and
dv travel with it, also in float32.
Letters: T tokens per rank, S ranks, H query heads, K key/value heads, D head dim.
"""

import math

import jax
import jax.numpy as jnp

from cad_jax.attention.all_gather import HeadTailArrays
from cad_jax.attention.base import KeyRanges
from cad_jax.attention.differentiable import Settings, Way, output_delta
from cad_jax.attention.merge import merge_partials
from cad_jax.attention.varlen import varlen_attention, varlen_attention_bwd


def expand(arrays: HeadTailArrays, axis_names: tuple[str, ...]) -> KeyRanges:
    """Once per step: the key range of each of my queries within the block of every ring step, int32
    [S, T] each.

    A rank's tokens ascend, so a range of global tokens is a range of its rows: two binary searches.
    """
    orders = jax.lax.all_gather(arrays.order, axis_names)
    rank = jax.lax.axis_index(axis_names)
    block_of_step = (rank - jnp.arange(orders.shape[0])) % orders.shape[0]

    def ranges(order):
        lo = jnp.searchsorted(order, arrays.k_lo).astype(jnp.int32)
        hi = jnp.searchsorted(order, arrays.k_hi).astype(jnp.int32)
        return KeyRanges(lo, jnp.maximum(lo, hi))

    return jax.lax.map(ranges, orders[block_of_step])


def _pass_on(block, axis_names):
    """Every rank's block to the next rank of the ring."""
    ranks = math.prod(jax.lax.axis_size(name) for name in axis_names)
    pairs = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    with jax.named_scope("exchange/ring"):
        return jax.lax.ppermute(block, axis_names, pairs)


def _around(ranges: KeyRanges, first, middle, last):
    """Chains `first` on step 0, `middle` on steps 1 .. S-2 (one scan) and `last` on step S-1, each
    with its step's ranges.

    Only the middle both receives a block and sends it on. S is at least 2.
    """
    steps = ranges.k_lo.shape[0]
    carry = first(_at_step(ranges, 0))
    if steps > 2:
        inner = jax.tree.map(lambda x: x[1:-1], ranges)
        carry, _ = jax.lax.scan(lambda c, r: (middle(c, r), None), carry, inner)
    return last(carry, _at_step(ranges, steps - 1))


def _at_step(ranges: KeyRanges, step: int) -> KeyRanges:
    return KeyRanges(ranges.k_lo[step], ranges.k_hi[step])


def forward(settings: Settings, q, k, v, ranges: KeyRanges):
    """q [T, H, D]; k, v [T, K, D], rows in head-tail order; ranges of `expand` -> out, lse."""

    def attend(block, at):
        block_k, block_v = jnp.split(block, 2, axis=1)
        out, lse = varlen_attention(q, block_k, block_v, at, kernel=settings.kernel)
        return out.astype(jnp.float32), lse

    def merged(out, lse, block, at):
        new_out, new_lse = attend(block, at)
        return merge_partials((out, new_out), jnp.stack([lse, new_lse]))

    def first(at):
        return (*attend(own, at), _pass_on(own, settings.axis_names))

    def middle(carry, at):
        out, lse, block = carry
        following = _pass_on(block, settings.axis_names)
        return (*merged(out, lse, block, at), following)

    def last(carry, at):
        out, lse, block = carry
        return merged(out, lse, block, at)

    own = jnp.concatenate([k, v], axis=1)
    if ranges.k_lo.shape[0] == 1:
        out, lse = attend(own, _at_step(ranges, 0))
    else:
        out, lse = _around(ranges, first, middle, last)
    return out.astype(q.dtype), lse


def backward(settings: Settings, q, k, v, out, lse, d_out, ranges: KeyRanges):
    """dq, dk, dv, summed over the steps in float32."""
    delta = output_delta(out, d_out)

    def gradients(block, at):
        block_k, block_v = jnp.split(block, 2, axis=1)
        dq, dk, dv = varlen_attention_bwd(
            q, block_k, block_v, d_out, lse, delta, at, kernel=settings.kernel
        )
        return dq.astype(jnp.float32), jnp.concatenate([dk, dv], axis=1).astype(jnp.float32)

    # The gradients of a block lag one place behind it, so that their hop too runs beside a kernel.
    def first(at):
        return (*gradients(own, at), _pass_on(own, settings.axis_names))

    def middle(carry, at):
        dq, d_block, block = carry
        following = _pass_on(block, settings.axis_names)
        arrived = _pass_on(d_block, settings.axis_names)
        more_dq, more_block = gradients(block, at)
        return dq + more_dq, arrived + more_block, following

    def last(carry, at):
        dq, d_block, block = carry
        arrived = _pass_on(d_block, settings.axis_names)
        more_dq, more_block = gradients(block, at)
        return dq + more_dq, _pass_on(arrived + more_block, settings.axis_names)

    own = jnp.concatenate([k, v], axis=1)
    if ranges.k_lo.shape[0] == 1:
        dq, d_own = gradients(own, _at_step(ranges, 0))
    else:
        dq, d_own = _around(ranges, first, middle, last)
    dk, dv = jnp.split(d_own, 2, axis=1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


RING = Way(forward, backward)
