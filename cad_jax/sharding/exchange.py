"""The exchange on the device: rows from their homes to the servers' buffers and back. Called inside
shard_map on one rank's arrays, without a pool dim.

Four phases: `dispatch_fwd` (q, k, v out), `combine_fwd` (out, lse home), `dispatch_bwd` (q, k, v,
lse, d_out, delta out), `combine_bwd` (dq, dk, dv home). Each is a generator that stops before every
collective with what it will send and after it with what was received, and goes on with what it is
given back: the caller may tie both to compute that runs meanwhile, or run straight through
(`complete`). Rows travel as UNITS of g heads in an unsigned integer carrier of the element's width;
float32 scalars (lse, delta: one per head) ride behind their unit as bit patterns, because a float
carrier may quiet the bit patterns of signalling NaNs. Every move is a gather by index, outward and,
through inverse indices, back; copies of one unit are summed in float32 in a fixed order. A relay's
sum takes its last hop in the gradients' own dtype, and in float32 where keys are divided (M > 1): partial
dq, rounded at the server, at a relay and at home, would err 1.6 times as much as one that is whole. Slack rows of every buffer are exactly zero,
whatever their sources hold.

A transport is the number and kind of hops in the arrays (`routes.TRANSPORTS` makes them), and
`collectives` knows the kinds. Phases take `skip_empty`: leave the collectives out at run time where
nothing travels (cheap on CPU; on GPU a conditional costs a host round trip); such a phase runs
straight through.

Shape letters: T tokens (rows) of a rank, H query heads, K key/value heads, D head dim, g heads of a
unit, S servers, C units per pair, CQ and CK rows of the query and key buffer, M partial outputs, n
units, W carrier lanes of a unit with its scalars.
"""

import math
from collections.abc import Callable, Generator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from cad_jax.sharding.collectives import cross, cross_back, join, split
from cad_jax.sharding.tables import AnyHopTable, Copies, Tables

_CARRIERS = {2: jnp.uint16, 4: jnp.uint32}

# Units at hand, lane by lane: columns side by side (data, bit patterns of scalars), each of sources
# end to end.
type Columns = Sequence[tuple[jax.Array, ...]]
# A phase under way: yields what each collective sends and what it brought, takes both back, returns
# its result.
type Hops[R] = Generator[jax.Array, jax.Array, R]


def complete[R](hops: Hops[R]) -> R:
    """A phase run straight through: its result."""
    try:
        buffer = next(hops)
        while True:
            buffer = hops.send(buffer)
    except StopIteration as end:
        return end.value


def dispatch_fwd(
    q: jax.Array, k: jax.Array, v: jax.Array, tables: Tables, axis_names: tuple[str, ...],
    *, skip_empty: bool = False,
) -> Hops[tuple[jax.Array, jax.Array, jax.Array]]:  # fmt: skip
    """q [T, H, D], k and v [T, K, D] at home -> the server's q [CQ, H, D], k and v [CK, K, D], same
    dtype.
    """
    lanes = _lanes(q, k, v)
    q_units, kv_units = _to_units(q, lanes), _to_units(jnp.concatenate([k, v], axis=1), lanes)
    streams = [([(q_units, kv_units)], tables.dispatch)]
    (received,) = yield from _where_anything_travels(
        lambda: _send(streams, axis_names, "dispatch_fwd"), tables, skip_empty
    )
    query = _take((q_units, received), tables.query)
    return (
        _from_units(query, q.dtype, q.shape[1:]),
        *_split_kv(_take((kv_units, received), tables.key), k),
    )


def combine_fwd(
    out: jax.Array, lse: jax.Array, tables: Tables, axis_names: tuple[str, ...],
    *, skip_empty: bool = False,
) -> Hops[tuple[tuple[jax.Array, ...], jax.Array]]:  # fmt: skip
    """The server's out [CQ, H, D] and lse float32 [CQ, H] -> the home's M partial outputs [T, H, D] each,
    and lse float32 [M, T, H]; a partial that no server computed has out 0 and lse -inf.
    """
    num_heads, head_dim = out.shape[1:]
    _, tokens, q_units = tables.merge.shape
    unit_heads = num_heads // q_units
    lanes = unit_heads * head_dim
    units = _to_units(out, lanes)
    bits = _to_bits(lse, units)
    columns = [(units,), (bits,)]
    returned = yield from _where_anything_travels(
        lambda: _send_back(
            columns, tables.output_back, tables.output, axis_names, out.dtype, "combine_fwd"
        ),
        tables, skip_empty,
    )  # fmt: skip
    merge = tables.merge.reshape(-1)
    lse_home = _from_bits(_take((bits, returned[:, lanes:]), merge), unit_heads)
    lse_home = jnp.where(merge[:, None] < 0, -jnp.inf, lse_home)
    source = jnp.concatenate([units, returned[:, :lanes]])
    out_home = tuple(
        _from_units(_take((source,), level.reshape(-1)), out.dtype, (num_heads, head_dim))
        for level in tables.merge
    )
    return out_home, lse_home.reshape(-1, tokens, num_heads)


def dispatch_bwd(
    q: jax.Array, k: jax.Array, v: jax.Array, lse: jax.Array, d_out: jax.Array, delta: jax.Array,
    tables: Tables, axis_names: tuple[str, ...], *, skip_empty: bool = False,
) -> Hops[tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]]:  # fmt: skip
    """q, d_out [T, H, D], k, v [T, K, D], lse and delta float32 [T, H] at home -> the server's q
    [CQ, H, D], k, v [CK, K, D], lse [CQ, H], d_out [CQ, H, D], delta [CQ, H]. One collective per
    hop carries both families.
    """
    lanes = _lanes(q, k, v)
    q_units, d_units = _to_units(q, lanes), _to_units(d_out, lanes)
    kv_units = _to_units(jnp.concatenate([k, v], axis=1), lanes)
    lse_bits, delta_bits = _to_bits(lse, q_units), _to_bits(delta, d_units)
    no_bits = jnp.zeros((kv_units.shape[0], lse_bits.shape[1]), lse_bits.dtype)
    streams = [
        ([(q_units, kv_units), (lse_bits, no_bits)], tables.dispatch),
        ([(d_units,), (delta_bits,)], tables.output),
    ]
    received, received_out = yield from _where_anything_travels(
        lambda: _send(streams, axis_names, "dispatch_bwd"), tables, skip_empty
    )

    def unpack(own, own_bits, received, index):
        units = _take((own, received[:, :lanes]), index)
        bits = _take((own_bits, received[:, lanes:]), index)
        scalars = _from_bits(bits, lanes // q.shape[2]).reshape(-1, q.shape[1])
        return _from_units(units, q.dtype, q.shape[1:]), scalars

    q_buf, lse_buf = unpack(q_units, lse_bits, received, tables.query)
    d_out_buf, delta_buf = unpack(d_units, delta_bits, received_out, tables.query_out)
    k_buf, v_buf = _split_kv(_take((kv_units, received[:, :lanes]), tables.key), k)
    return q_buf, k_buf, v_buf, lse_buf, d_out_buf, delta_buf


def combine_bwd(
    dq: jax.Array, dk: jax.Array, dv: jax.Array, tables: Tables, axis_names: tuple[str, ...],
    *, skip_empty: bool = False,
) -> Hops[tuple[jax.Array, jax.Array, jax.Array]]:  # fmt: skip
    """The server's dq [CQ, H, D], dk and dv [CK, K, D] -> the home's dq [T, H, D], dk and dv [T, K,
    D]: own and received parts summed in float32, cast once.
    """
    lanes = _lanes(dq, dk, dv)
    dq_units, dkv_units = _to_units(dq, lanes), _to_units(jnp.concatenate([dk, dv], axis=1), lanes)
    columns, (first, *relayed) = [(dq_units, dkv_units)], tables.dispatch
    sums = jnp.float32 if relayed and tables.merge.shape[0] > 1 else dq.dtype
    arrived = yield from _where_anything_travels(
        lambda: _send_back(
            columns, tables.received_back, tables.dispatch, axis_names, dq.dtype, "combine_bwd", sums
        ),
        tables, skip_empty,
    )  # fmt: skip
    arrived = (
        _from_bits(arrived, lanes)
        if sums == jnp.float32
        else lax.bitcast_convert_type(arrived, sums)
    )
    split = len(tables.own_query_back)
    if isinstance(first.back, Copies):
        total = sum_back(arrived, first.back)
        parts = total[:split], total[split:]
    else:
        parts = (sum_back(arrived, back) for back in (first.back[:split], first.back[split:]))
    owns = (dq_units, tables.own_query_back), (dkv_units, tables.own_key_back)
    dq_home, dkv_home = (
        (lax.bitcast_convert_type(_take((units,), own), dq.dtype) + part).astype(dq.dtype)
        for (units, own), part in zip(owns, parts, strict=True)
    )
    return dq_home.reshape(-1, *dq.shape[1:]), *_split_kv(dkv_home, dk)


def sum_back(received: jax.Array, back: jax.Array | Copies) -> jax.Array:
    """Sum of the copies of each unit, in the order of the slots: [slots, W] -> float32 [n, W]."""
    if not isinstance(back, Copies):
        return _take((received,), back).astype(jnp.float32)

    def add(total, slot):
        return total + _take((received,), slot), None

    first, *rest = back.levels
    total = _take((received,), first[0]).astype(jnp.float32)
    for level in rest:
        head, _ = lax.scan(add, total[: level.shape[1]], level)
        total = lax.dynamic_update_slice_in_dim(total, head, 0, axis=0)
    ranked = total.shape[0]
    return _take((total,), jnp.where(back.place < ranked, back.place, -1))


def _where_anything_travels[R](
    hops: Callable[[], Hops[R]], tables: Tables, skip_empty: bool
) -> Hops[R]:
    """hops(); with `skip_empty` run straight through, or zeros of its shapes where the plan moves
    nothing (the same answer on all ranks).
    """
    if not skip_empty:
        return (yield from hops())

    def travel():
        return complete(hops())

    def stay():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(travel))

    return lax.cond(tables.travels > 0, travel, stay)


def _send(
    streams: Sequence[tuple[Columns, tuple[AnyHopTable, ...]]],
    axis_names: tuple[str, ...], name: str,
) -> Hops[list[jax.Array]]:  # fmt: skip
    """Units of each stream (columns, hops), all of one width W, through their hops: the receive
    buffers, [slots, W] each. One collective per hop.
    """
    at_hand = [columns for columns, _ in streams]
    received = []
    for number in range(len(streams[0][1])):
        same = [hops[number] for _, hops in streams]
        units = [
            _gather(columns, hop.send.reshape(-1))
            for columns, hop in zip(at_hand, same, strict=True)
        ]
        buffer = yield join(units, same)
        with jax.named_scope(f"exchange/{name}/hop{number + 1}"):
            buffer = cross(buffer, same, axis_names)
        buffer = yield buffer
        received = split(buffer, same)
        at_hand = [[(units,)] for units in received]
    return received


def _send_back(
    columns: Columns, index: jax.Array, hops: tuple[AnyHopTable, ...],
    axis_names: tuple[str, ...], dtype: DTypeLike, name: str, sums: DTypeLike | None = None,
) -> Hops[jax.Array]:  # fmt: skip
    """The way back: units `index` of the columns in the slots they arrived in -> what the first
    hop's send slots get back, [slots, W]. Ranks on the way sum copies, and pass on the sums in dtype
    `sums`, of as many more lanes as it is wider than `dtype`.
    """
    units = _gather(columns, index)
    carrier = units.dtype
    for number, hop in reversed(list(enumerate(hops))):
        units = yield units
        with jax.named_scope(f"exchange/{name}/hop{len(hops) - number}"):
            units = cross_back(units, hop, axis_names)
        units = yield units
        if number == 0:
            break
        if isinstance(hop.back, Copies):
            total = sum_back(lax.bitcast_convert_type(units, dtype), hop.back).astype(sums)
            units = lax.bitcast_convert_type(total, carrier).reshape(total.shape[0], -1)
        else:
            units = _take((units,), hop.back)
    return units


def _gather(columns: Columns, index: jax.Array) -> jax.Array:
    """Units `index` with all their columns, int32 [n] -> [n, W]."""
    return jnp.concatenate([_take(sources, index) for sources in columns], axis=1)


def _take(sources: Sequence[jax.Array], index: jax.Array) -> jax.Array:
    """Rows `index` of the sources laid end to end: [n_i, W] -> [len(index), W]; zero where index is
    negative. One gather of laid out sources: on CPU a gather a source took up to three times as long.
    """
    source = jnp.concatenate(sources)
    if not source.shape[0]:
        return jnp.zeros((index.shape[0], source.shape[1]), source.dtype)
    held = ((index >= 0) & (index < source.shape[0]))[:, None]
    return jnp.where(held, jnp.take(source, index, axis=0, mode="clip"), 0)


def _lanes(q: jax.Array, k: jax.Array, v: jax.Array) -> int:
    """Elements of a unit, from q [rows, H, D], k and v [rows, K, D] of one dtype."""
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}: cast them"
        )
    return math.gcd(q.shape[1], 2 * k.shape[1]) * q.shape[2]


def _to_units(x: jax.Array, lanes: int) -> jax.Array:
    """[rows, heads, D] -> carrier units [rows * units per row, lanes]."""
    width = x.dtype.itemsize
    if width not in _CARRIERS:
        raise ValueError(
            f"q, k and v must have a dtype of {' or '.join(map(str, _CARRIERS))} bytes, got "
            f"{x.dtype}: cast them to bfloat16 or float32"
        )
    return lax.bitcast_convert_type(x, _CARRIERS[width]).reshape(-1, lanes)


def _from_units(units: jax.Array, dtype: jnp.dtype, shape: tuple[int, ...]) -> jax.Array:
    return lax.bitcast_convert_type(units, dtype).reshape(-1, *shape)


def _split_kv(units: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Units of k/v rows -> k, v [rows, K, D] in the dtype of `k`."""
    num_heads, head_dim = k.shape[1:]
    kv = _from_units(units, k.dtype, (2, num_heads, head_dim))
    return kv[:, 0], kv[:, 1]


def _to_bits(scalars: jax.Array, units: jax.Array) -> jax.Array:
    """Float32 scalars of all heads [rows, H] -> the bit patterns of each unit's, in its carrier."""
    bits = lax.bitcast_convert_type(scalars.astype(jnp.float32), units.dtype)
    return bits.reshape(units.shape[0], -1)


def _from_bits(bits: jax.Array, unit_heads: int) -> jax.Array:
    """Bit patterns of each unit's scalars -> float32 [n, g]."""
    if bits.dtype.itemsize < 4:
        bits = bits.reshape(bits.shape[0], unit_heads, 4 // bits.dtype.itemsize)
    return lax.bitcast_convert_type(bits, jnp.float32)
