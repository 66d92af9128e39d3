"""From document lengths to a plan: balance under the tolerance, within the capacities, at few bytes.

Shape letters: T tokens per server, S servers.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np

from cad_jax.sharding.balance import Pool, balance
from cad_jax.sharding.capacities import default_capacities
from cad_jax.sharding.cost import server_loads, travelling_rows
from cad_jax.sharding.coverage import check_lengths
from cad_jax.sharding.plan import Plan, describe_exceeded, home_plan
from cad_jax.sharding.routing import required_capacities
from cad_jax.sharding.tasks import (
    DOCUMENT,
    HOME,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    TASK_FIELDS,
    TILE_ROWS,
    Capacities,
    HeadShape,
    causal_pairs,
    document_starts,
    home_tasks,
    sort_tasks,
)

# The greedy runs once for each of these and the plan of fewest bytes wins: how dear a row into a
# busy server is (`balance.PRESSURE_UNIT`), and the part of the tolerance receivers fill, in tenths.
VARIANTS = ((2, 10), (8, 9), (1, 6), (8, 10))
REFINE_SWEEPS = 3
RELAXED_TOLERANCES = (2, 4, 8)  # times the tolerance, tried where capacities refuse every variant
REPAIR_MOVES = 8192  # moves the repair plans in all: some 48 rounds of usual plans
_UNLIMITED = 2**62
_PIECE_COLUMNS = [DOCUMENT, Q_START, Q_STOP, HOME, SERVER]  # `balance.DOC` and on


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

    Raises ValueError for documents that do not fit or overlap, and where even the home plan exceeds a capacity.
    """
    heads = HeadShape(num_q_heads, num_kv_heads, head_dim)
    lengths, starts = _checked_documents(
        lengths, starts, servers, tokens_per_server, max_document_tokens
    )
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}: 0.05 is usual")
    if capacities is None:
        capacities = default_capacities(
            servers, tokens_per_server, heads, max_document_tokens, transport
        )
    elif transport not in (None, capacities.transport):
        raise ValueError(
            f"capacities are for transport {capacities.transport!r}, got transport {transport!r}: "
            "leave transport out, or make capacities for it"
        )
    home = home_plan(
        lengths, servers=servers, tokens_per_server=tokens_per_server, heads=heads,
        capacities=capacities, tolerance=tolerance, starts=starts,
    )  # fmt: skip
    _check_home_fits(home)
    return home if home.loads().max() <= load_bound(home.loads(), tolerance) else _balanced(home)


def _balanced(home: Plan) -> Plan:
    """The best plan for the documents, bound and capacities of a home plan."""
    lengths, servers, tolerance = home.lengths, home.servers, home.tolerance
    capacities = home.capacities
    reachable = reachable_load(lengths, home.loads(), tolerance)
    rows = np.full(servers, capacities.query_rows)

    def fits(tasks: np.ndarray) -> bool:
        candidate = dataclasses.replace(home, tasks=tasks)
        return capacities.holds(required_capacities(candidate, capacities.transport))

    def balanced(tolerance, variant=VARIANTS[0], query_rows=rows, max_moves=_UNLIMITED):
        return balanced_tasks(
            lengths, servers, home.tokens_per_server, home.heads, tolerance, variant=variant,
            query_rows=query_rows, key_rows=capacities.key_rows, max_moves=max_moves,
            starts=home.starts,
        )  # fmt: skip

    def rank(tasks: np.ndarray) -> tuple[int, int]:
        """Pairs over the promised bound, then units: their mean and the worst server's."""
        over = int(server_loads(tasks, servers).max()) - reachable
        rows = travelling_rows(lengths, tasks, servers, home.tokens_per_server, home.starts)
        units = rows.units_in(home.heads)
        return max(over, 0), int(units.sum() + servers * units.max())

    candidates = [balanced(tolerance, variant)[0] for variant in VARIANTS]
    ranks = [rank(tasks) for tasks in candidates]
    for at in sorted(range(len(VARIANTS)), key=lambda at: ranks[at]):
        if ranks[at][0] == 0 and fits(candidates[at]):
            return dataclasses.replace(home, tasks=candidates[at])

    # Limits of rows steer the greedy, sometimes into a corner: a plan that knows none may fit.
    for variant in VARIANTS:
        tasks, _ = balanced_tasks(
            lengths, servers, home.tokens_per_server, home.heads, tolerance, variant=variant,
            query_rows=np.full(servers, _UNLIMITED), starts=home.starts,
        )  # fmt: skip
        if rank(tasks)[0] == 0 and fits(tasks):
            return dataclasses.replace(home, tasks=tasks)

    # A capacity is in the way: the best of what it holds, and what it keeps at home is counted.
    relaxed = [balanced(scale * max(tolerance, 0.05))[0] for scale in RELAXED_TOLERANCES]
    choices = [tasks for tasks in candidates + relaxed if fits(tasks)]
    choices.append(_fitted(partial(balanced, tolerance, VARIANTS[0]), fits, rows))
    tasks = min(choices, key=rank)
    fallback_tasks = 0
    if rank(tasks)[0] > 0:
        free, _ = balanced_tasks(
            lengths, servers, home.tokens_per_server, home.heads, tolerance,
            query_rows=np.full(servers, _UNLIMITED), starts=home.starts,
        )  # fmt: skip
        fallback_tasks = max(1, _moved(free) - _moved(tasks))
    return dataclasses.replace(home, tasks=tasks, fallback_tasks=fallback_tasks)


def _fitted(
    balanced: Callable[[np.ndarray, int], tuple[np.ndarray, int]],
    fits: Callable[[np.ndarray], bool],
    query_rows: np.ndarray,
) -> np.ndarray:
    """Tasks that fit: half the rows of the first move that does not are refused, again and again.

    balanced(query rows of each server, max moves) -> tasks, moves. The home plan must fit.
    """
    limits = query_rows.copy()
    spent = 0
    while True:
        tasks, refused = balanced(limits, _UNLIMITED)
        if fits(tasks):
            return tasks
        spent += refused
        kept = 0
        while refused - kept > 1:
            middle = (kept + refused) // 2
            if fits(balanced(limits, middle)[0]):
                kept = middle
            else:
                refused = middle
        if spent > REPAIR_MOVES:
            return balanced(limits, kept)[0]
        before, after = (_query_rows(balanced(limits, m)[0], len(limits)) for m in (kept, refused))
        server = int((after - before).argmax())
        limits[server] = before[server] + (after - before)[server] // 2


def balanced_tasks(
    lengths: np.ndarray,
    servers: int,
    tokens_per_server: int,
    heads: HeadShape,
    tolerance: float,
    *,
    query_rows: np.ndarray,
    key_rows: int = _UNLIMITED,
    variant: tuple[int, int] = VARIANTS[0],
    max_moves: int = _UNLIMITED,
    starts: np.ndarray | None = None,
) -> tuple[np.ndarray, int]:
    """One run of the greedy from the home plan: (tasks, int64 [n, 7], moves made).

    query_rows: int64 [S], most query rows of each server; key_rows: most key rows of any. starts:
    int64 [N], the documents' first tokens, end to end by default.
    """
    # A copy where given: the compiled greedy would be compiled again for a read-only array.
    starts = document_starts(lengths) if starts is None else np.array(starts, np.int64)
    tasks = home_tasks(lengths, tokens_per_server, starts)
    loads = server_loads(tasks, servers)
    bound = load_bound(loads, tolerance)
    pressure, tenths = variant
    fill = load_bound(loads, tolerance * tenths / 10)
    pool = Pool(
        starts, tokens_per_server, heads.q_units, heads.kv_units, query_rows, key_rows, pressure,
    )  # fmt: skip
    room = len(tasks) + 64 * servers
    while True:
        pieces = np.zeros((room, len(_PIECE_COLUMNS)), np.int64)
        pieces[: len(tasks)] = tasks[:, _PIECE_COLUMNS]
        count, moves = balance(
            pool, pieces, len(tasks), servers, bound, fill, max_moves, REFINE_SWEEPS
        )
        if count + 2 <= room:
            break
        room *= 2
    result = np.zeros((count, len(TASK_FIELDS)), np.int64)
    result[:, _PIECE_COLUMNS] = pieces[:count]
    result[:, K_STOP] = result[:, Q_STOP]
    return _joined(sort_tasks(result)), moves


def load_bound(loads: np.ndarray, tolerance: float) -> int:
    """Pairs the most loaded server may have: (1 + tolerance) times the mean, in whole pairs."""
    total, servers = int(loads.sum()), len(loads)
    return max(int(total * (1 + tolerance) / servers), -(-total // servers))


def reachable_load(lengths: np.ndarray, loads: np.ndarray, tolerance: float) -> int:
    """`load_bound`, or what list scheduling with cuts of at most c pairs ends within of the mean."""
    longest = int(lengths.max(initial=0))
    costliest = int(causal_pairs(max(longest - TILE_ROWS, 0), longest, 0, longest))
    servers = len(loads)
    listed = -(-(int(loads.sum()) + (servers - 1) * costliest) // servers)
    return max(load_bound(loads, tolerance), listed)


def _joined(tasks: np.ndarray) -> np.ndarray:
    """Sorted tasks, those that follow one another on one server and home made one."""
    new = np.ones(len(tasks), bool)
    new[1:] = (tasks[1:, Q_START] != tasks[:-1, Q_STOP]) | (
        tasks[1:, [DOCUMENT, HOME, SERVER]] != tasks[:-1, [DOCUMENT, HOME, SERVER]]
    ).any(1)
    first = np.flatnonzero(new)
    joined = tasks[first]
    last = np.append(first[1:], len(tasks))[: len(first)] - 1
    joined[:, [Q_STOP, K_STOP]] = tasks[last][:, [Q_STOP, K_STOP]]
    return joined


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
