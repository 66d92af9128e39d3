"""Core attention by gathering every rank's keys and values (head-tail order, inside shard_map).

One all-gather moves k and v together; an index map restores document order, so a query's keys are
one contiguous range.
Letters: T tokens per rank, S ranks, H query heads, K key/value heads, D head dim.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cad_jax.attention.base import KeyRanges
from cad_jax.attention.differentiable import Settings, Way, output_delta
from cad_jax.attention.varlen import varlen_attention, varlen_attention_bwd


class HeadTailArrays(NamedTuple):
    """Host arrays of the head-tail strategies, int32 [S, T] (on a device [T]).

    order: the global token at each position. k_lo, k_hi: the global key range of the query there.
    """

    order: Any
    k_lo: Any
    k_hi: Any


class GatherTables(NamedTuple):
    """order: int32 [S * T], gathered row -> global token; restore: int32 [S * T], its inverse;
    ranges: of my T queries."""

    order: jax.Array
    restore: jax.Array
    ranges: KeyRanges


def expand(arrays: HeadTailArrays, axis_names: tuple[str, ...]) -> GatherTables:
    """Once per step, outside the layers: every rank learns the order of all."""
    order = jax.lax.all_gather(arrays.order, axis_names, tiled=True)
    rows = jnp.arange(order.shape[0], dtype=jnp.int32)
    restore = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True)
    return GatherTables(order, restore, KeyRanges(arrays.k_lo, arrays.k_hi))


def gather_keys(k: jax.Array, v: jax.Array, tables: GatherTables, axis_names):
    """k, v [T, K, D] of every rank, in document order: [S * T, K, D] each."""
    with jax.named_scope("exchange/gather_keys"):
        gathered = jax.lax.all_gather(jnp.concatenate([k, v], axis=1), axis_names, tiled=True)
    return jnp.split(gathered[tables.restore], 2, axis=1)


def scatter_gradients(dk: jax.Array, dv: jax.Array, tables: GatherTables, axis_names):
    """The transpose of `gather_keys`: sums over ranks in float32, each rank keeps its own rows."""
    grads = jnp.concatenate([dk, dv], axis=1).astype(jnp.float32)[tables.order]
    with jax.named_scope("exchange/scatter_gradients"):
        own = jax.lax.psum_scatter(grads, axis_names, tiled=True)
    own_k, own_v = jnp.split(own, 2, axis=1)
    return own_k.astype(dk.dtype), own_v.astype(dv.dtype)


def forward(settings: Settings, q, k, v, tables: GatherTables):
    """q [T, H, D]; k, v [T, K, D], rows in head-tail order -> out [T, H, D], lse [T, H] float32."""
    all_k, all_v = gather_keys(k, v, tables, settings.axis_names)
    return varlen_attention(q, all_k, all_v, tables.ranges, kernel=settings.kernel)


def backward(settings: Settings, q, k, v, out, lse, d_out, tables: GatherTables):
    """dq, dk, dv; gathers k and v again."""
    all_k, all_v = gather_keys(k, v, tables, settings.axis_names)
    dq, dk, dv = varlen_attention_bwd(
        q,
        all_k,
        all_v,
        d_out,
        lse,
        output_delta(out, d_out),
        tables.ranges,
        kernel=settings.kernel,
    )
    return dq, *scatter_gradients(dk, dv, tables, settings.axis_names)


ALL_GATHER = Way(forward, backward)
