"""From document lengths to a plan: balance under the tolerance, within the capacities, at few bytes.

Shape letters: T tokens per server, S servers.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import numpy as np

from cad_jax.sharding.capacities import default_capacities
from cad_jax.sharding.cost import exchange_latencies, server_loads
from cad_jax.sharding.coverage import check_lengths
from cad_jax.sharding.key_ranges import key_range_tasks
from cad_jax.sharding.plan import Plan, describe_exceeded, home_plan
from cad_jax.sharding.prefixes import (
    UNLIMITED,
    PoolDocuments,
    few_moves,
    load_bounds,
    prefix_tasks,
    reachable_loads,
)
from cad_jax.sharding.required import required_by_tasks, required_capacities
from cad_jax.sharding.routing import WireBytes, wire_bytes
from cad_jax.sharding.tasks import (
    HOME,
    Q_START,
    Q_STOP,
    SERVER,
    TRANSPORT_HOPS,
    Capacities,
    HeadShape,
    document_starts,
)

RELAXED_TOLERANCES = (2, 4, 8)  # times the tolerance, tried where capacities refuse every plan
REPAIR_MOVES = 8192  # moves the repair plans in all: some 48 rounds of usual plans
# Of the busiest rank's bytes: plans so near each other are told apart by what all ranks take in. Blocks of
# dense transports are as large for every rank.
ALIKE = {"ragged": 1 / 64}
SPEED_UNIT = 1024  # speeds are rounded to this part of the mean, so that every host decides alike

_default_capacities = lru_cache(default_capacities)


class AttentionCost(Protocol):
    """What planning asks of a cost model: see `cost_model.CostModel`."""

    def server_s(
        self, tasks: np.ndarray, servers: int, heads: HeadShape, *, backward: bool = False
    ) -> np.ndarray:
        """Seconds of each server's tasks, float64 [S]."""
        ...

    def transfer_s(self, wire_bytes: float, *, within_node: bool, hops: int) -> float:
        """Seconds of one exchange of so many bytes a rank."""
        ...


def plan_documents(
    lengths,
    *,
    servers: int,
    tokens_per_server: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tolerance: float = 0.05,
    max_document_tokens: int | None = None,
    capacities: Capacities | None = None,
    transport: str | None = None,
    starts=None,
    key_ranges: int | None = None,
    speeds=None,
    node: int = 1,
    cost_model: AttentionCost | None = None,
) -> Plan:
    """Plans core attention of documents over the pool.

    lengths: token counts of the documents, zero allowed, together at most servers *
    tokens_per_server. starts: the first token of each in the pool, in ascending order; by default
    they lie end to end, padding last. Heads are those of one device. The most loaded server gets at most
    (1 + tolerance) times the mean pairs, or 1 + (1 - 1/S) c / mean where one cut of 128 rows is
    large (c pairs at most); where the home plan is within that, nothing moves.

    `max_document_tokens` and `capacities` fix the shapes of `Plan.arrays`, so that new lengths never
    recompile; capacities default to `default_capacities`. A plan beyond them gives way to one with
    fewer moves, at last to the home plan, and `Plan.fallback_tasks` counts the tasks kept at home
    for it. The same arguments give the same plan on every host.

    `key_ranges`: servers that the keys of one query row may be divided among, where that is cheaper
    than whole causal prefixes; 1 gives every task its whole prefix. By default what the capacities
    allow (`Capacities.partials`), else 1; of given ones no more than they allow.
    `speeds`: [S], of each server in any unit; the bound is then on pairs over speed, and a slow server
    gets less. `node`: servers of a node, within which bytes are cheap. Whole plans are compared by what
    they put on the wire of the capacities' transport, forward and backward, in bfloat16; with a
    `cost_model` by predicted seconds of a layer.

    Raises ValueError for documents that do not fit or overlap, and where even the home plan exceeds a
    capacity.
    """
    heads = HeadShape(num_q_heads, num_kv_heads, head_dim)
    lengths, starts = _checked_documents(
        lengths, starts, servers, tokens_per_server, max_document_tokens
    )
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}: 0.05 is usual")
    if node < 1 or (key_ranges is not None and key_ranges < 1):
        raise ValueError(
            f"node and key_ranges must be at least 1, got {node} and {key_ranges}: leave them out "
            "where nodes and key sub-ranges play no part"
        )
    if transport not in (None, *TRANSPORT_HOPS):
        raise ValueError(
            f"transport must be one of {', '.join(TRANSPORT_HOPS)}, got {transport!r}: leave it out for "
            "the one of fewest predicted seconds"
        )
    # Default capacities hold the home plan of any documents end to end.
    roomy = capacities is None and np.array_equal(starts, document_starts(lengths))
    if capacities is None:
        capacities = _default_capacities(
            servers, tokens_per_server, heads, max_document_tokens, transport,
            partials=min(key_ranges or 1, servers),
        )  # fmt: skip
    elif transport not in (None, capacities.transport):
        raise ValueError(
            f"capacities are for transport {capacities.transport!r}, got transport {transport!r}: "
            "leave transport out, or make capacities for it"
        )
    elif min(key_ranges or 1, servers) > capacities.partials:
        raise ValueError(
            f"key_ranges must be at most the partials that the capacities hold, {capacities.partials}, "
            f"got {key_ranges}: make capacities with partials={min(key_ranges or 1, servers)}, or leave "
            "key_ranges out"
        )
    home = home_plan(
        lengths, servers=servers, tokens_per_server=tokens_per_server, heads=heads,
        capacities=capacities, tolerance=tolerance, starts=starts,
    )  # fmt: skip
    if not roomy:
        _check_home_fits(home)
    # Copies where given: the compiled greedy would be compiled again for read-only arrays.
    documents = PoolDocuments(
        lengths.copy(), starts.copy(), tokens_per_server, heads,
        _quantised_speeds(speeds, servers), node,
    )  # fmt: skip
    bound = load_bounds(documents.pairs, documents.speeds, tolerance)
    if np.all(home.loads() <= bound):
        return home
    partials = min(key_ranges or capacities.partials, capacities.partials)
    return _balanced(home, documents, partials, cost_model)


class _Weighed(NamedTuple):
    """A finished plan's tasks and how it is judged: less is better."""

    over: int  # pairs over what list scheduling ends within, of the server that is worst off
    beyond: int  # pairs over the tolerance, of that server
    cost: float  # bytes on the wire, or predicted seconds
    fits: bool
    tasks: np.ndarray

    @property
    def rank(self) -> tuple[int, int, float]:
        return self.over, self.beyond, self.cost

    @property
    def good(self) -> bool:
        return self.over == 0 and self.fits


def _balanced(
    home: Plan, documents: PoolDocuments, partials: int, cost_model: AttentionCost | None
) -> Plan:
    """The best plan for the documents, bound and capacities of a home plan."""
    servers, tolerance, capacities = home.servers, home.tolerance, home.capacities
    rows, unlimited = np.full(servers, capacities.query_rows), np.full(servers, UNLIMITED)
    bound = reachable_loads(documents, tolerance)
    promised = load_bounds(documents.pairs, documents.speeds, tolerance)

    def weighed(tasks: np.ndarray) -> _Weighed:
        needed = required_by_tasks(home, tasks, capacities.transport)
        fits = capacities.holds(needed)
        wire = wire_bytes(needed, servers, home.heads)
        cost = float(wire.forward + wire.backward)
        if cost_model is not None:
            cost = _seconds(home, tasks, wire, documents, cost_model)
        loads = server_loads(tasks, servers)
        over, beyond = (max(int((loads - most).max()), 0) for most in (bound, promised))
        return _Weighed(over, beyond, cost, fits, tasks)

    candidates = [prefix_tasks(documents, tolerance, query_rows=rows, key_rows=capacities.key_rows)]
    if partials > 1:
        tasks = key_range_tasks(
            documents, tolerance, query_rows=rows, key_rows=capacities.key_rows, partials=partials
        )
        candidates += [] if tasks is None else [tasks]
    finished = [weighed(tasks) for tasks in candidates]
    good = [plan for plan in finished if plan.good and plan.beyond == 0]
    if good:
        alike_part = 0.0 if cost_model is not None else ALIKE.get(capacities.transport, 0.0)
        most = min(plan.cost for plan in good) * (1 + alike_part)
        alike = [dataclasses.replace(home, tasks=plan.tasks) for plan in good if plan.cost <= most]
        return alike[0] if len(alike) == 1 else min(alike, key=_travels)

    # Limits of rows steer the greedy, sometimes into a corner: another way, or one that knows none.
    few = partial(few_moves, documents, key_rows=capacities.key_rows)
    free = prefix_tasks(documents, tolerance, query_rows=unlimited)
    blind, _ = few_moves(documents, tolerance, query_rows=unlimited, key_rows=UNLIMITED)
    others = [weighed(tasks) for tasks in (few(tolerance, query_rows=rows)[0], free, blind)]
    good = [plan for plan in (*finished, *others) if plan.good]
    if good:
        return dataclasses.replace(home, tasks=min(good, key=lambda plan: plan.rank).tasks)

    # A capacity is in the way: the best of what it holds, and what it keeps at home is counted.
    scales = [scale * max(tolerance, 0.05) for scale in RELAXED_TOLERANCES]
    finished += [weighed(few(scale, query_rows=rows)[0]) for scale in (tolerance, *scales)]
    choices = [plan for plan in finished if plan.fits]
    fitted = _fitted(partial(few, tolerance), lambda tasks: weighed(tasks).fits, rows)
    best = min([*choices, weighed(fitted)], key=lambda plan: plan.rank)
    fallback_tasks = max(1, _moved(free) - _moved(best.tasks)) if best.over > 0 else 0
    return dataclasses.replace(home, tasks=best.tasks, fallback_tasks=fallback_tasks)


def _seconds(
    home: Plan,
    tasks: np.ndarray,
    wire: WireBytes,
    documents: PoolDocuments,
    cost_model: AttentionCost,
) -> float:
    """Predicted seconds of a layer's attention and exchanges, forward and backward, none hidden."""
    servers, heads, transport = home.servers, home.heads, home.capacities.transport
    relative = documents.speeds / documents.speeds.mean()
    seconds = 0.0
    for backward, sent_bytes in ((False, wire.forward), (True, wire.backward)):
        attention_s = cost_model.server_s(tasks, servers, heads, backward=backward)
        seconds += float((attention_s / relative).max())
        seconds += cost_model.transfer_s(
            sent_bytes,
            within_node=servers <= documents.node,
            hops=exchange_latencies(transport),
        )
    return seconds


def _fitted(
    few: Callable[..., tuple[np.ndarray, int]],
    fits: Callable[[np.ndarray], bool],
    query_rows: np.ndarray,
) -> np.ndarray:
    """Tasks that fit: half the rows of the first move that does not are refused, again and again.

    few(query_rows=of each server, max_moves=) -> tasks, moves. The home plan must fit.
    """
    limits = query_rows.copy()
    spent = 0
    while True:
        tasks, refused = few(query_rows=limits)
        if fits(tasks):
            return tasks
        spent += refused
        kept = 0
        while refused - kept > 1:
            middle = (kept + refused) // 2
            if fits(few(query_rows=limits, max_moves=middle)[0]):
                kept = middle
            else:
                refused = middle
        if spent > REPAIR_MOVES:
            return few(query_rows=limits, max_moves=kept)[0]
        before, after = (
            _query_rows(few(query_rows=limits, max_moves=m)[0], len(limits))
            for m in (kept, refused)
        )
        server = int((after - before).argmax())
        limits[server] = before[server] + (after - before)[server] // 2


def _quantised_speeds(speeds, servers: int) -> np.ndarray:
    """Integers in proportion to speeds, int64 [S]; equal ones by default."""
    if speeds is None:
        return np.full(servers, SPEED_UNIT)
    given = np.asarray(speeds, np.float64)
    if given.shape != (servers,) or not np.all(np.isfinite(given)) or np.any(given <= 0):
        raise ValueError(
            f"speeds must be one positive finite number for each of {servers} servers, got "
            f"{given.tolist()} of shape {given.shape}: leave speeds out where servers are alike"
        )
    return np.maximum(np.rint(given / given.mean() * SPEED_UNIT).astype(np.int64), 1)


def _travels(plan: Plan) -> int:
    """Units that all ranks take in together."""
    return int(plan.travelling_rows().units_in(plan.heads).sum())


def _query_rows(tasks: np.ndarray, servers: int) -> np.ndarray:
    rows = np.zeros(servers, np.int64)
    np.add.at(rows, tasks[:, SERVER], tasks[:, Q_STOP] - tasks[:, Q_START])
    return rows


def _moved(tasks: np.ndarray) -> int:
    return int(np.count_nonzero(tasks[:, HOME] != tasks[:, SERVER]))


def _check_home_fits(home: Plan) -> None:
    exceeded = home.capacities.exceeded(required_capacities(home, home.capacities.transport))
    if exceeded:
        raise ValueError(
            "capacities must hold at least the home plan (every task at its home), which needs "
            f"{describe_exceeded(exceeded)}: raise them (default_capacities with "
            f"max_document_tokens {int(home.lengths.max(initial=0))} or more never falls below "
            "it), or split the longest document"
        )


def _checked_documents(
    lengths, starts, servers, tokens_per_server, max_document_tokens
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and starts, int64 [N] each."""
    for name, value in (("servers", servers), ("tokens_per_server", tokens_per_server)):
        if value < 1:
            raise ValueError(
                f"{name} must be at least 1, got {value}: a pool has ranks with tokens"
            )
    lengths = _whole_numbers("lengths", lengths, "token count")
    given = document_starts(lengths) if starts is None else starts
    starts = _whole_numbers("starts", given, "first token in the pool")
    check_lengths(lengths, servers, tokens_per_server, starts)
    if max_document_tokens is not None and lengths.max(initial=0) > max_document_tokens:
        at = int(lengths.argmax())
        raise ValueError(
            f"documents must hold at most max_document_tokens = {max_document_tokens} tokens, got "
            f"{lengths[at]} for document {at}: split it, or raise max_document_tokens"
        )
    return lengths, starts


def _whole_numbers(name: str, values, what: str) -> np.ndarray:
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be one row of whole numbers, got "
            f"{given.dtype} of shape {given.shape}: pass the {what} of each document"
        )
    return given.astype(np.int64)
