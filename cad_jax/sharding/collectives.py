"""One hop's collective, outward and on the way back: the one place where data crosses between ranks.

Dense hops pad every block to one size: `lax.all_to_all`. Ragged ones send blocks at their own sizes:
`lax.ragged_all_to_all`, which GPUs alone have. Outward one collective carries a unit buffer each of
several streams (q, k, v; d_out): side by side within a dense block, as several slices a peer of a
ragged one. What no block fills of a ragged receive buffer is zero. Nothing here is differentiated: the way
back is written out.

Shape letters: S ranks of the pool, C units per pair, n slots of a stream's send buffer, m of its receive
buffer (S * C both where dense), W carrier lanes of a unit.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from cad_jax.sharding.tables import AnyHopTable, RaggedHopTable


def join(units: Sequence[jax.Array], hops: Sequence[AnyHopTable]) -> jax.Array:
    """Send buffers [n, W] of the streams -> what one collective takes: [S, C of all, W], ragged [n of
    all, W]. hops: the same hop of each stream.
    """
    if isinstance(hops[0], RaggedHopTable):
        return jnp.concatenate(units)
    blocks = [x.reshape(*hop.send.shape, x.shape[1]) for x, hop in zip(units, hops, strict=True)]
    return jnp.concatenate(blocks, axis=1)


def cross(buffer: jax.Array, hops: Sequence[AnyHopTable], axis_names: tuple[str, ...]) -> jax.Array:
    """The collective over the product of `axis_names`, of what `join` made, outward."""
    ragged = [hop for hop in hops if isinstance(hop, RaggedHopTable)]
    if not ragged:
        return _all_to_all(buffer, axis_names)
    # A peer's slices, one a stream, follow one another; streams lie end to end in both buffers.
    columns, send_base, receive_base = [], 0, 0
    for hop in ragged:
        first, sizes, lands_at, _, arriving, _ = hop.blocks
        columns.append((first + send_base, sizes, lands_at + receive_base, arriving))
        send_base += hop.send.shape[0]
        receive_base += hop.receive_slots
    first, sizes, lands_at, arriving = (
        jnp.stack(parts, axis=1).reshape(-1) for parts in zip(*columns, strict=True)
    )
    return _ragged_all_to_all(buffer, receive_base, first, sizes, lands_at, arriving, axis_names)


def split(received: jax.Array, hops: Sequence[AnyHopTable]) -> list[jax.Array]:
    """What `cross` brought -> receive buffers [m, W] of the streams."""
    parts, low = [], 0
    for hop in hops:
        if isinstance(hop, RaggedHopTable):
            parts.append(received[low : low + hop.receive_slots])
            low += hop.receive_slots
        else:
            block = received[:, low : low + hop.send.shape[1]]
            parts.append(block.reshape(hop.receive_slots, block.shape[2]))
            low += hop.send.shape[1]
    return parts


def cross_back(units: jax.Array, hop: AnyHopTable, axis_names: tuple[str, ...]) -> jax.Array:
    """The way back of one stream: a receive buffer [m, W] -> a send buffer [n, W], every block in the
    slots it was sent from.
    """
    if isinstance(hop, RaggedHopTable):
        _, returning, _, first, sizes, came_from = hop.blocks
        slots = hop.send.shape[0]
        return _ragged_all_to_all(units, slots, first, sizes, came_from, returning, axis_names)
    blocks = units.reshape(*hop.send.shape, units.shape[1])
    return _all_to_all(blocks, axis_names).reshape(units.shape)


def _all_to_all(blocks: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """[S, C, W] -> same shape: block s goes to rank s, and the one received there is from it."""
    assert blocks.shape[0] == lax.axis_size(axis_names), (blocks.shape, axis_names)
    return lax.all_to_all(blocks, axis_names, 0, 0, tiled=True) if blocks.size else blocks


def _ragged_all_to_all(
    operand: jax.Array, slots: int, first: jax.Array, sizes: jax.Array, lands_at: jax.Array,
    arriving: jax.Array, axis_names: tuple[str, ...],
) -> jax.Array:  # fmt: skip
    """[n, W] -> [slots, W]. first, sizes: of the slices sent; lands_at: their first slots on their
    receivers; arriving: sizes of the slices received. int32 [S * slices a peer] each.
    """
    received = jnp.zeros((slots, operand.shape[1]), operand.dtype)
    if not (operand.size and received.size):
        return received
    return lax.ragged_all_to_all(
        operand, received, first, sizes, lands_at, arriving, axis_name=axis_names
    )
