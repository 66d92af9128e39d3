"""Tokens to heads and back: attention's heads are split over a mesh axis whose devices hold different tokens.

Device t of the axis holds the t-th slice of a rank's tokens with all heads; the servers of attention
want all of a rank's tokens with one slice of the heads. One all-to-all over that axis turns one
into the other, everything side by side in one buffer. It lies within a node, and is one more hop of
an exchange: with a part of the compute of its own it is as asynchronous as the others (two
dependent collectives beside one part would not be: XLA makes the first of them synchronous).

Letters: R rows of a device, A devices of the axis, T = A R rows of a rank, H query heads, K
key/value heads, D head dim.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from cad_jax.attention.differentiable import Settings, Way
from cad_jax.sharding.exchange import Hops, complete

_CARRIERS = {2: jnp.uint16, 4: jnp.uint32}


def tokens_to_heads(
    arrays: Sequence[jax.Array], axis: str | None, name: str
) -> Hops[list[jax.Array]]:
    """[R, heads, ...] each -> [T, heads / A, ...], this device's slice of the heads.

    One collective for all of them. Key heads fewer than A are sent to several devices. Dtypes are
    kept bit for bit: the widest of them may be a multiple of the narrowest.
    """
    devices = lax.axis_size(axis)
    sliced = [_repeated(x, devices) for x in arrays]
    carrier = _CARRIERS[min(x.dtype.itemsize for x in arrays)]
    blocks = [_to_lanes(x, carrier, x.shape[0], devices) for x in sliced]
    sent = yield jnp.concatenate(blocks, axis=2).swapaxes(0, 1)
    with jax.named_scope(f"exchange/{name}/heads"):
        received = lax.all_to_all(sent, axis, 0, 0, tiled=True)
    received = yield received
    rows = received.reshape(-1, received.shape[2])
    bounds = [0]
    for block in blocks:
        bounds.append(bounds[-1] + block.shape[2])
    return [
        _from_lanes(rows[:, low:high], x.dtype, (-1, x.shape[1] // devices, *x.shape[2:]))
        for x, low, high in zip(sliced, bounds[:-1], bounds[1:], strict=True)
    ]


def heads_to_tokens(
    arrays: Sequence[jax.Array], heads: Sequence[int], axis: str | None, name: str
) -> Hops[list[jax.Array]]:
    """The way back, [T, heads / A, ...] each -> [R, heads, ...]; copies of a key head are summed in
    float32, in a fixed order. heads: how many there are of each in all."""
    devices = lax.axis_size(axis)
    carrier = _CARRIERS[min(x.dtype.itemsize for x in arrays)]
    blocks = [_to_lanes(x, carrier, devices, x.shape[0] // devices) for x in arrays]
    sent = yield jnp.concatenate(blocks, axis=2)
    with jax.named_scope(f"exchange/{name}/heads"):
        received = lax.all_to_all(sent, axis, 0, 0, tiled=True)
    received = yield received
    rows = received.swapaxes(0, 1)
    result, low = [], 0
    for x, block, number in zip(arrays, blocks, heads, strict=True):
        high = low + block.shape[2]
        whole = rows[:, :, low:high].reshape(rows.shape[0], -1)
        shape = (-1, devices * x.shape[1], *x.shape[2:])
        result.append(_summed(_from_lanes(whole, x.dtype, shape), number))
        low = high
    return result


def _repeated(x: jax.Array, devices: int) -> jax.Array:
    return jnp.repeat(x, max(1, devices // x.shape[1]), axis=1)


def _summed(x: jax.Array, heads: int) -> jax.Array:
    copies = x.shape[1] // heads
    if copies == 1:
        return x
    grouped = x.reshape(x.shape[0], heads, copies, *x.shape[2:])
    return grouped.astype(jnp.float32).sum(axis=2).astype(x.dtype)


def _to_lanes(x: jax.Array, carrier: DTypeLike, first: int, second: int) -> jax.Array:
    """[rows, heads, ...] -> unsigned integers [first, second, lanes]."""
    return lax.bitcast_convert_type(x, carrier).reshape(first, second, -1)


def _from_lanes(lanes: jax.Array, dtype: jnp.dtype, shape: tuple[int, ...]) -> jax.Array:
    if lanes.dtype.itemsize < dtype.itemsize:
        lanes = lanes.reshape(lanes.shape[0], -1, dtype.itemsize // lanes.dtype.itemsize)
    return lax.bitcast_convert_type(lanes, dtype).reshape(shape)


@functools.cache
def over_heads(way: Way) -> Way:
    """`way` for tokens that are split over `settings.head_axis`: its arrays are [R, H, D] with all
    heads, its lse [T, H / A] of this device's slice. One object a way: it is a static argument."""

    def forward(settings: Settings, q, k, v, tables):
        axis = settings.head_axis
        sliced = complete(tokens_to_heads((q, k, v), axis, "forward"))
        out, lse = way.forward(settings, *sliced, tables)
        (out,) = complete(heads_to_tokens((out,), q.shape[1:2], axis, "forward"))
        return out, lse

    def backward(settings: Settings, q, k, v, out, lse, d_out, tables):
        axis = settings.head_axis
        q_, k_, v_, out, d_out = complete(tokens_to_heads((q, k, v, out, d_out), axis, "backward"))
        gradients = way.backward(settings, q_, k_, v_, out, lse, d_out, tables)
        heads = q.shape[1], k.shape[1], v.shape[1]
        dq, dk, dv = complete(heads_to_tokens(gradients, heads, axis, "backward"))
        return dq, dk, dv

    return Way(forward, backward)
