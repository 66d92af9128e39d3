"""Core attention left to XLA's partitioner: sharding constraints, no collective of our own.

Queries stay sharded over the pool in document order; keys and values are constrained to be
replicated, so the partitioner gathers them (and reduces their gradients). Two forms:
`blockwise_attention`, the same tiles as everywhere in this package, and `dense_attention`, the
masked [queries, keys] form people write first. Both take global arrays over the pool's axes, which
must be left to the partitioner (jit, or a shard_map manual over tp only).

Letters: N = S T tokens of the pool, H query heads, K key/value heads, D head dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from cad_jax.attention.base import KeyRanges, without_slack
from cad_jax.attention.differentiable import output_delta
from cad_jax.attention.kernels import xla


def _sharded(x: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, P(axis_names))


def _replicated(x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, P())


def dense_attention(axis_names: tuple[str, ...], q, k, v, ranges: KeyRanges) -> jax.Array:
    """q [N, H, D]; k, v [N, K, D]; ranges [S, T] of global keys -> out [N, H, D].

    A rank holds N^2 H / S scores.
    """
    lo, hi = (x.reshape(-1) for x in ranges)
    q, k, v = (without_slack(x, lo < hi) for x in (q, k, v))
    grouped = _sharded(q, axis_names).reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    k, v = _replicated(k), _replicated(v)
    scores = jnp.einsum("nkgd,skd->kgns", grouped, k, preferred_element_type=jnp.float32)
    keys = jnp.arange(k.shape[0])[None]
    mask = (keys >= lo[:, None]) & (keys < hi[:, None])
    scores = jnp.where(mask[None, None], scores * q.shape[-1] ** -0.5, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("kgns,skd->nkgd", weights, v).reshape(q.shape)
    return checkpoint_name(_sharded(without_slack(out, lo < hi), axis_names), "attention_out")


def _forward(axis_names, q, k, v, ranges: KeyRanges):
    chunks = _sharded(q.reshape(*ranges.k_lo.shape, *q.shape[1:]), axis_names)
    scale = q.shape[-1] ** -0.5
    with jax.named_scope("attention/forward"):
        out, lse = xla.forward_chunks(chunks, _replicated(k), _replicated(v), ranges, scale)
    out, lse = (_sharded(x, axis_names).reshape(q.shape[0], *x.shape[2:]) for x in (out, lse))
    return checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise_attention(axis_names: tuple[str, ...], q, k, v, ranges: KeyRanges) -> jax.Array:
    """q [N, H, D]; k, v [N, K, D]; ranges [S, T] of global keys -> out [N, H, D].

    Every rank walks its own list of tile pairs; all take as many steps as the longest list, a
    number known before the loop, so that no step needs the partitioner to agree on an end.
    """
    return _forward(axis_names, q, k, v, ranges)[0]


def _blockwise_fwd(axis_names, q, k, v, ranges):
    out, lse = _forward(axis_names, q, k, v, ranges)
    return out, (q, k, v, out, lse, ranges)


def _blockwise_bwd(axis_names, residuals, d_out):
    q, k, v, out, lse, ranges = residuals
    delta = output_delta(out, d_out)

    def chunk(x):
        return _sharded(x.reshape(*ranges.k_lo.shape, *x.shape[1:]), axis_names)

    with jax.named_scope("attention/backward"):
        dq, dk, dv = xla.backward_chunks(
            chunk(q),
            _replicated(k),
            _replicated(v),
            chunk(d_out),
            chunk(lse),
            chunk(delta),
            ranges,
            q.shape[-1] ** -0.5,
        )
    dk, dv = (_sharded(x.astype(jnp.float32).sum(axis=0), axis_names) for x in (dk, dv))
    return _sharded(dq, axis_names).reshape(q.shape), dk.astype(k.dtype), dv.astype(v.dtype), None


blockwise_attention.defvjp(_blockwise_fwd, _blockwise_bwd)
