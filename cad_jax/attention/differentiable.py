"""Any distributed attention as a differentiable function, from its forward and its backward.

A `Way` is a module's pair of plain functions; both hold collectives, so neither is ever left to
automatic differentiation. `attend` computes and saves; `attend_saved` takes out and lse that an
earlier forward saved, and has the same gradients: a backward pass that recomputes the layers around
it repeats no attention and no exchange.

Letters: T tokens per rank, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


class Settings(NamedTuple):
    """What is static about a call: the mesh axes that share the work, the kernel's name, and the
    axis over which heads are split inside attention while tokens are outside (None: heads are split
    everywhere, or nowhere)."""

    axis_names: tuple[str, ...]
    kernel: str = "auto"
    head_axis: str | None = None


class Way(NamedTuple):
    """One way to distribute attention, inside shard_map over `settings.axis_names`.

    forward(settings, q, k, v, tables) -> (out [T, H, D], lse [T, H] float32)
    backward(settings, q, k, v, out, lse, d_out, tables) -> (dq, dk, dv)
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def output_delta(out: jax.Array, d_out: jax.Array) -> jax.Array:
    """rowsum(d_out * out) per head, float32 [T, H]: what the softmax's backward subtracts."""
    return jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)


def _named_forward(way: Way, settings: Settings, q, k, v, tables):
    out, lse = way.forward(settings, q, k, v, tables)
    # Named here, inside the forward rule: a caller's remat policy can then save both, and neither
    # the kernel nor the exchanges run twice.
    return checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(way: Way, settings: Settings, q, k, v, out, lse, d_out, tables: Any):
    return way.backward(settings, q, k, v, out, lse, d_out, tables)


@_gradients.defjvp
def _refuse_second_derivatives(way, settings, primals, tangents):
    # Rows travel as integers of the same bits, and derivatives end there: they would come out as zeros.
    raise NotImplementedError(
        "core attention has first derivatives alone, and a derivative of its gradient was asked for: put "
        "jax.lax.stop_gradient around the inner gradient, or use a dense attention where second ones are needed"
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(way: Way, settings: Settings, q, k, v, tables: Any) -> jax.Array:
    """q [T, H, D], k, v [T, K, D] -> out [T, H, D], differentiable in q, k and v."""
    return _named_forward(way, settings, q, k, v, tables)[0]


def _attend_fwd(way, settings, q, k, v, tables):
    out, lse = _named_forward(way, settings, q, k, v, tables)
    return out, (q, k, v, out, lse, tables)


def _attend_bwd(way, settings, residuals, d_out):
    q, k, v, out, lse, tables = residuals
    return *_gradients(way, settings, q, k, v, out, lse, d_out, tables), None


attend.defvjp(_attend_fwd, _attend_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_saved(way: Way, settings: Settings, q, k, v, out, lse, tables: Any) -> jax.Array:
    """`out` as it was saved, with the gradients `attend` has in q, k and v; none reach out and lse."""
    return out


def _attend_saved_fwd(way, settings, q, k, v, out, lse, tables):
    return out, (q, k, v, out, lse, tables)


def _attend_saved_bwd(way, settings, residuals, d_out):
    q, k, v, out, lse, tables = residuals
    gradients = _gradients(way, settings, q, k, v, out, lse, d_out, tables)
    return *gradients, jnp.zeros_like(out), jnp.zeros_like(lse), None


attend_saved.defvjp(_attend_saved_fwd, _attend_saved_bwd)
