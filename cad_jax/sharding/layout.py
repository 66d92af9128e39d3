"""The only place that pads: a plan becomes int32 arrays of static shape, one part per rank, that
the device expands and obeys.

Every table is runs of exchange units (destination, source, units), int32 [R, 3], sorted by
destination; rows past the last run are (size of the destination, 0, 0). Each host may build only
its own ranks' part: it equals that slice of the whole.

Shape letters: S servers (or the ranks asked for), T tokens per server, CQ and CK rows of the query
and key buffer, R runs, C units per pair, M partials.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cad_jax.sharding.routes import RaggedRoute, Route, Slots
from cad_jax.sharding.routing import Routing, route
from cad_jax.sharding.tasks import (
    DOCUMENT,
    K_START,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    PlanLike,
)
from cad_jax.sharding.traffic import Pieces, RowMap

Table = Any  # a numpy array on the host, a jax array inside the step


class Hop(NamedTuple):
    """One collective of blocks of one size. runs: int32 [S, R, 3], units of the send buffer [peers * C]
    <- units at hand (the rank's own on the first hop, what the last hop received on the second).
    extent: int8 [S, peers, C, 0], no elements: its shape carries C through jit.
    """

    runs: Table
    extent: Table

    @property
    def peers(self) -> int:
        return self.extent.shape[-3]

    @property
    def send_slots(self) -> int:
        return self.peers * self.extent.shape[-2]


class Blocks(NamedTuple):
    """The blocks of a ragged collective, in slots, int32 [S, peers] each: where the block a rank sends
    each peer begins in its send buffer, its size, where it begins in the peer's receive buffer; and
    where the block it receives from each peer begins in its receive buffer, its size, where it began
    in the peer's send buffer. The last three are the first three of the way back.
    """

    send_first: Table
    send_sizes: Table
    lands_at: Table
    receive_first: Table
    receive_sizes: Table
    came_from: Table


class RaggedHop(NamedTuple):
    """One ragged collective. runs: int32 [S, R, 3], units of the send buffer <- the rank's own units.
    send_extent: int8 [S, slots, 0], receive_extent alike: their shapes carry the buffers' slots.
    """

    runs: Table
    send_extent: Table
    receive_extent: Table
    blocks: Blocks

    @property
    def peers(self) -> int:
        return self.blocks.send_sizes.shape[-1]

    @property
    def send_slots(self) -> int:
        return self.send_extent.shape[-2]


type AnyHop = Hop | RaggedHop


class PlanArrays(NamedTuple):
    """A plan for the device. Leading dim S on the host; `tables.expand` takes one rank's part
    without it.

    k_lo, k_hi: int32 [S, CQ], key-buffer rows [k_lo, k_hi) each query-buffer row attends (0, 0:
    nothing). dispatch, output: hops of q and k/v rows, and of query-only rows (d_out outward; out
    and lse come back the same way reversed). assemble: int32 [S, R, 3], units of [query buffer |
    key buffer] <- [own q | own k/v | received]. assemble_output: units of the query buffer <- [own
    | received]. merge: int32 [S, M, R, 3], units of a home's own query rows, partial m <- [own
    query buffer | returned to the output's first hop send slots]. key_extent: int8 [S, CK, 0],
    carries CK. home_extent: int8 [S, T, q_units, kv_units, 0], carries what the plan was made for.
    travels: int32 [S], 1 on every rank if any row of the plan leaves its home.
    """

    k_lo: Table
    k_hi: Table
    dispatch: tuple[AnyHop, ...]
    output: tuple[AnyHop, ...]
    assemble: Table
    assemble_output: Table
    merge: Table
    key_extent: Table
    home_extent: Table
    travels: Table


def lay_out(plan: PlanLike, ranks: Sequence[int] | None = None) -> PlanArrays:
    """The arrays of `plan` for `ranks` (all by default, in order). Raises ValueError where a
    capacity does not hold the plan.
    """
    size, tokens, heads, limits = plan.servers, plan.tokens_per_server, plan.heads, plan.capacities
    chosen = np.arange(size) if ranks is None else np.asarray(ranks, np.int64)
    if len(np.unique(chosen)) != len(chosen) or np.any((chosen < 0) | (chosen >= size)):
        raise ValueError(
            f"ranks must be distinct and in [0, {size}), got {chosen.tolist()}: name each once, or "
            "leave ranks out for all"
        )
    routing = route(plan, limits.transport)
    _check(routing, limits)
    local_units = tokens * (heads.q_units + heads.kv_units)
    key_base = limits.query_rows * heads.q_units
    pack = _Packer(chosen, size)
    dispatch_slots = routing.dispatch.slots(limits.dispatch_units)
    output_slots = routing.output.slots(limits.output_units)

    k_lo, k_hi = _key_ranges(plan, routing, chosen)
    arrivals = routing.dispatch.arrivals(chosen)
    traffic = routing.dispatch.traffic
    token, is_query = traffic.token[arrivals.atom], traffic.is_query[arrivals.atom]
    query_own, query_runs = _own_runs(routing.query, routing.query_map, tokens, heads.q_units)
    key_own, key_runs = _own_runs(routing.key, routing.key_map, tokens, heads.kv_units)
    key_runs = key_runs + np.array([key_base, tokens * heads.q_units, 0])
    target = np.where(
        is_query,
        routing.query_map.lookup(arrivals.server, token) * heads.q_units,
        key_base + routing.key_map.lookup(arrivals.server, token) * heads.kv_units,
    )
    received = dispatch_slots[-1].received[arrivals.server, arrivals.peer] + arrivals.slot
    assemble = pack(
        np.concatenate([query_own, key_own, arrivals.server]),
        np.concatenate(
            [query_runs, key_runs,
             _stack(target + arrivals.offset, local_units + received, arrivals.units)]
        ),
        limits.assemble_runs, key_base + limits.key_rows * heads.kv_units,
    )  # fmt: skip

    arrivals = routing.output.arrivals(chosen)
    token = routing.output.traffic.token[arrivals.atom]
    target = routing.query_map.lookup(arrivals.server, token) * heads.q_units
    received = output_slots[-1].received[arrivals.server, arrivals.peer] + arrivals.slot
    assemble_output = pack(
        np.concatenate([query_own, arrivals.server]),
        np.concatenate(
            [query_runs,
             _stack(target + arrivals.offset, tokens * heads.q_units + received, arrivals.units)]
        ),
        limits.output_assemble_runs, key_base,
    )  # fmt: skip

    travels = bool(np.any(routing.partials.home != routing.partials.server)) or bool(
        np.any(routing.key.home != routing.key.server)
    )
    return PlanArrays(
        k_lo, k_hi,
        _hops(routing.dispatch, chosen, dispatch_slots, limits.dispatch_runs, pack),
        _hops(routing.output, chosen, output_slots, limits.output_runs, pack),
        assemble, assemble_output, _merge(plan, routing, chosen, output_slots[0], pack),
        np.zeros((len(chosen), limits.key_rows, 0), np.int8),
        np.zeros((len(chosen), tokens, heads.q_units, heads.kv_units, 0), np.int8),
        np.full(len(chosen), travels, np.int32),
    )  # fmt: skip


def _check(routing: Routing, limits) -> None:
    exceeded = limits.exceeded(routing.required(limits.transport))
    if exceeded:
        (name, (limit, needed)), *more = exceeded.items()
        raise ValueError(
            f"a plan must fit its capacities: it needs {name} {needed}, but the capacity is {limit}"
            + (f" (and {', '.join(n for n, _ in more)} are exceeded too)" if more else "")
            + f"; raise {name} to at least {needed}, or raise the tolerance so that less moves"
        )


class _Packer:
    """Runs of many ranks into one padded table of the chosen ones."""

    def __init__(self, chosen: np.ndarray, servers: int):
        self.ranks = len(chosen)
        self.index = np.full(servers, -1)
        self.index[chosen] = np.arange(self.ranks)

    def __call__(self, rank: np.ndarray, runs: np.ndarray, capacity: int, size: int) -> np.ndarray:
        """int32 [ranks, capacity, 3]; runs of ranks not chosen are dropped. size: units of the
        destination.
        """
        assert size < 2**31 and runs.max(initial=0) < 2**31
        index = self.index[rank]
        keep = np.flatnonzero(index >= 0)
        index, runs = index[keep], runs[keep]
        order = np.argsort(index * size + runs[:, 0])
        index, runs = index[order], runs[order]
        first = np.searchsorted(index, np.arange(self.ranks))
        table = np.zeros((self.ranks, capacity, 3), np.int32)
        table[:, :, 0] = size
        table[index, np.arange(len(index)) - first[index]] = runs
        return table


def _stack(target: np.ndarray, source: np.ndarray, units: np.ndarray) -> np.ndarray:
    return np.stack([target, source, units], axis=1)


def _own_runs(
    pieces: Pieces, rows: RowMap, tokens: int, per_row: int
) -> tuple[np.ndarray, np.ndarray]:
    """Buffer units that are the server's own rows: (server, runs with destination and source
    counted from their family's first unit).
    """
    server, _, start, stop = pieces.where(pieces.home == pieces.server)
    runs = _stack(rows.lookup(server, start), start % tokens, stop - start) * per_row
    return server, runs


def _hops(
    route_: Route, chosen: np.ndarray, slots: tuple[Slots, ...], runs: tuple[int, ...],
    pack: _Packer,
) -> tuple[AnyHop, ...]:  # fmt: skip
    servers, hops = route_.traffic.servers, []
    for hop, (at, capacity) in enumerate(zip(slots, runs, strict=True)):
        sends = route_.sends(hop, chosen)
        source = sends.source
        if sends.source_peer is not None:
            source = source + slots[hop - 1].received[sends.rank, sends.source_peer]
        table = _stack(at.sent[sends.rank, sends.peer] + sends.slot, source, sends.units)
        table = pack(sends.rank, table, capacity, at.send_slots)
        if isinstance(route_, RaggedRoute):
            sent, received = (
                np.zeros((len(chosen), n, 0), np.int8) for n in (at.send_slots, at.receive_slots)
            )
            hops.append(RaggedHop(table, sent, received, _blocks(route_, at, chosen)))
        else:
            extent = np.zeros((len(chosen), servers, at.send_slots // servers, 0), np.int8)
            hops.append(Hop(table, extent))
    return tuple(hops)


def _blocks(route_: RaggedRoute, at: Slots, chosen: np.ndarray) -> Blocks:
    (pairs,) = route_.pair_units
    tables = at.sent, pairs, at.received.T, at.received, pairs.T, at.sent.T
    return Blocks(*(table[chosen].astype(np.int32) for table in tables))


def _merge(
    plan: PlanLike, routing: Routing, chosen: np.ndarray, at: Slots, pack: _Packer
) -> np.ndarray:
    limits, tokens, per_row = plan.capacities, plan.tokens_per_server, plan.heads.q_units
    partials = routing.partials
    own = partials.home == partials.server
    home, start, stop = partials.home[own], partials.start[own], partials.stop[own]
    rows = routing.query_map.lookup(home, start)
    kept = _stack(start % tokens, rows, stop - start) * per_row
    # What a home sent on the first hop of the output route comes back to the slots it left from.
    sends, traffic = routing.output.sends(0, chosen), routing.output.traffic
    slot = at.sent[sends.rank, sends.peer] + sends.slot
    returned = _stack(sends.source, limits.query_rows * per_row + slot, sends.units)
    rank = np.concatenate([home, sends.rank])
    runs = np.concatenate([kept, returned])
    level = np.concatenate([partials.level[own], traffic.level[sends.atom]])
    tables = [
        pack(rank[level == m], runs[level == m], limits.merge_runs, tokens * per_row)
        for m in range(limits.partials)
    ]
    return np.stack(tables, axis=1)


def _key_ranges(
    plan: PlanLike, routing: Routing, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """k_lo, k_hi: int32 [ranks, CQ]. Query buffer rows are the tasks' rows in the plan's order."""
    k_lo = np.zeros((len(chosen), plan.capacities.query_rows), np.int32)
    k_hi = np.zeros(k_lo.shape, np.int32)
    first = np.searchsorted(plan.tasks[:, SERVER], chosen)
    last = np.searchsorted(plan.tasks[:, SERVER], chosen, side="right")
    for i, server in enumerate(chosen):
        tasks = plan.tasks[first[i] : last[i]]
        rows = tasks[:, Q_STOP] - tasks[:, Q_START]
        begin = routing.key_map.lookup(
            np.full(len(tasks), server), plan.starts[tasks[:, DOCUMENT]] + tasks[:, K_START]
        )
        # The query at position p sees keys [k_start, min(k_stop, p + 1)): a ramp, seldom cut off.
        ramp = begin - tasks[:, K_START] + tasks[:, Q_START] + 1 - (np.cumsum(rows) - rows)
        low, high = k_lo[i, : rows.sum()], k_hi[i, : rows.sum()]
        low[:] = np.repeat(begin.astype(np.int32), rows)
        high[:] = np.arange(len(high), dtype=np.int32) + np.repeat(ramp.astype(np.int32), rows)
        if np.any(tasks[:, K_STOP] < tasks[:, Q_STOP]):
            end = begin + tasks[:, K_STOP] - tasks[:, K_START]
            np.minimum(high, np.repeat(end.astype(np.int32), rows), out=high)
        if np.any(tasks[:, K_START] > tasks[:, Q_START]):
            empty = high <= low
            low[empty] = high[empty] = 0
    return k_lo, k_hi
