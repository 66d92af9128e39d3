"""A plan's arrays as index tables on the device: runs expanded to one index per unit, and the inverse
of every index, so that the way back is a gather too.

Shape letters: T tokens (rows) of a rank, S servers, R runs, C units per pair, CQ and CK rows of the
query and key buffer, M partial outputs, n units.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cad_jax.sharding.layout import AnyHop, Blocks, PlanArrays, RaggedHop
from cad_jax.sharding.tasks import HeadShape


class Copies(NamedTuple):
    """Slots that carry copies of the same unit. Units are ranked by falling number of copies, so
    that the c-th copies of all units lie in a prefix of the ranking, of at most slots / (c + 1)
    units: adding up all copies costs slots log S rows, not S n.

    levels: int32 [copies, prefix] each, slot or -1. place: int32 [n], rank of each unit.
    """

    levels: tuple[jax.Array, ...]
    place: jax.Array


class HopTable(NamedTuple):
    """send: int32 [S, C], the unit each slot carries, -1 for none. back: the slots that carry each
    unit, int32 [n] where there is one at most.
    """

    send: jax.Array
    back: jax.Array | Copies

    @property
    def receive_slots(self) -> int:
        return self.send.size


class RaggedHopTable(NamedTuple):
    """send: int32 [n], the unit each slot of the send buffer carries, -1 for none. back: see
    `HopTable`. receive_extent: int8 [m, 0], carries the slots of the receive buffer. blocks: int32
    [peers] each.
    """

    send: jax.Array
    back: jax.Array | Copies
    receive_extent: jax.Array
    blocks: Blocks

    @property
    def receive_slots(self) -> int:
        return self.receive_extent.shape[0]


type AnyHopTable = HopTable | RaggedHopTable


class Tables(NamedTuple):
    """One rank's arrays expanded to int32 indices of units, negative where nothing is."""

    k_lo: jax.Array  # [CQ] rows of the key buffer [k_lo, k_hi) each query row attends
    k_hi: jax.Array
    dispatch: tuple[AnyHopTable, ...]
    output: tuple[AnyHopTable, ...]
    query: jax.Array  # query buffer <- [own q | received]
    key: jax.Array  # key buffer <- [own k/v | received]
    query_out: jax.Array  # query buffer <- [own q | received output units]
    own_query_back: jax.Array  # own q <- query buffer
    own_key_back: jax.Array  # own k/v <- key buffer
    received_back: jax.Array  # received <- [query buffer | key buffer]
    output_back: jax.Array  # received output units <- query buffer
    merge: jax.Array  # [M, T, q_units] own q <- [query buffer | returned output units]
    travels: jax.Array  # int32, 0 where nothing leaves its home on any rank


def expand_runs(tables: Sequence[jax.Array], lengths: Sequence[int]) -> list[jax.Array]:
    """Per table of runs int32 [R, 3], sorted by destination and padded with (length, 0, 0): the
    source unit of each of its `length` destination units, int32 [length], -1 where no run reaches.
    """
    # One search for all, their destinations laid end to end: padding ends where the next begins.
    bounds = [0, *itertools.accumulate(lengths)]
    runs = jnp.concatenate(
        [
            table + jnp.array([[low, 0, 0]], jnp.int32)
            for table, low in zip(tables, bounds[:-1], strict=True)
        ]
    )
    if not (bounds[-1] and runs.shape[0]):
        return [jnp.full((length,), -1, jnp.int32) for length in lengths]
    target, source, units = runs[:, 0], runs[:, 1], runs[:, 2]
    position = jnp.arange(bounds[-1], dtype=jnp.int32)
    run = jnp.searchsorted(target, position, side="right").astype(jnp.int32) - 1
    held = jnp.maximum(run, 0)
    offset = position - target[held]
    index = jnp.where((run >= 0) & (offset < units[held]), source[held] + offset, -1)
    return [index[low:high] for low, high in itertools.pairwise(bounds)]


def invert(index: jax.Array, length: int) -> jax.Array:
    """Where in `index` each value of [0, length) stands, int32 [length], -1 if nowhere. None may
    stand twice; other values are ignored.
    """
    target = jnp.where((index >= 0) & (index < length), index, length)
    positions = jnp.arange(index.shape[0], dtype=jnp.int32)
    return jnp.full((length,), -1, jnp.int32).at[target].set(positions, mode="drop")


def find_copies(send: jax.Array, peers: int, units: int) -> Copies:
    """The copies of each of `units` units in a send table int32 [slots], whose blocks for `peers` follow
    one another; each holds a unit once at most.
    """
    slots = send.shape[0]
    if not slots:
        return Copies((jnp.zeros((1, 0), jnp.int32),), jnp.zeros((units,), jnp.int32))
    held = jnp.where(send < 0, units, send)
    order = jnp.argsort(held, stable=True).astype(jnp.int32)
    first = jnp.searchsorted(held[order], jnp.arange(units + 1, dtype=jnp.int32)).astype(jnp.int32)
    count = first[1:] - first[:-1]
    ranking = jnp.argsort(-count, stable=True).astype(jnp.int32)
    levels, low = [], 0
    while low < max(peers - 1, 1):  # a rank never sends to itself what it serves itself
        high = min(max(2 * low, 1), max(peers - 1, 1))
        prefix = ranking[: min(units, slots // (low + 1))]
        copy = jnp.arange(low, high, dtype=jnp.int32)[:, None]
        at = jnp.minimum(first[prefix][None] + copy, slots - 1)
        levels.append(jnp.where(copy < count[prefix][None], order[at], -1))
        low = high
    return Copies(tuple(levels), invert(ranking, units))


def expand(arrays: PlanArrays, heads: HeadShape, tokens: int) -> Tables:
    """Index tables from one rank's arrays (no pool dim); once per step, outside the loop over
    layers. tokens: T.
    """
    expected = arrays.home_extent.shape[:3]
    if expected != (tokens, heads.q_units, heads.kv_units):
        raise ValueError(
            "q, k and v must have the rows and heads their plan was made for: the plan has "
            f"{expected[0]} tokens per server and heads of {expected[1]} and {expected[2]} units, "
            f"the arrays have {tokens} tokens and heads of {heads.q_units} and {heads.kv_units} "
            "units; plan with this tokens_per_server and with the heads of one device"
        )
    own_q, own_kv = tokens * heads.q_units, tokens * heads.kv_units
    query_units = arrays.k_lo.shape[0] * heads.q_units
    key_units = arrays.key_extent.shape[0] * heads.kv_units
    own = own_q + own_kv
    hops = (*arrays.dispatch, *arrays.output)
    assemble, query_out, *rest = expand_runs(
        [arrays.assemble, arrays.assemble_output, *(hop.runs for hop in hops), *arrays.merge],
        [
            query_units + key_units,
            query_units,
            *(hop.send_slots for hop in hops),
            *(own_q,) * len(arrays.merge),
        ],
    )
    sends, merge = rest[: len(hops)], rest[len(hops) :]
    query, key = assemble[:query_units], assemble[query_units:]
    first_out = len(arrays.dispatch)
    dispatch = _hop_tables(arrays.dispatch, sends[:first_out], own, multicast=True)
    output = _hop_tables(arrays.output, sends[first_out:], own_q, multicast=False)
    back = invert(assemble, own + dispatch[-1].receive_slots)
    return Tables(
        k_lo=arrays.k_lo,
        k_hi=arrays.k_hi,
        dispatch=dispatch,
        output=output,
        query=jnp.where(query >= own, query - own_kv, query),
        key=key - own_q,
        query_out=query_out,
        own_query_back=back[:own_q],
        own_key_back=back[own_q:own] - query_units,
        received_back=back[own:],
        output_back=invert(query_out, own_q + output[-1].receive_slots)[own_q:],
        merge=jnp.stack(merge).reshape(len(merge), tokens, heads.q_units),
        travels=arrays.travels,
    )


def _hop_tables(
    hops: Sequence[AnyHop], sends: Sequence[jax.Array], units: int, *, multicast: bool
) -> tuple[AnyHopTable, ...]:
    """Tables of each hop; the last one of a multicast carries a unit to several peers. units: at
    hand on the first hop.
    """
    tables = []
    for number, (hop, send) in enumerate(zip(hops, sends, strict=True), start=1):
        last = number == len(hops)
        back = find_copies(send, hop.peers, units) if multicast and last else invert(send, units)
        if isinstance(hop, RaggedHop):
            tables.append(RaggedHopTable(send, back, hop.receive_extent, hop.blocks))
        else:
            tables.append(HopTable(send.reshape(hop.extent.shape[:2]), back))
        units = tables[-1].receive_slots
    return tuple(tables)
