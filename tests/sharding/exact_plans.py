"""The best plan with whole causal prefixes there is, and bounds on it, by mixed-integer programming.

An independent model of the same problem: which server computes each tile of 128 queries, and which key
tiles every server holds. Documents end to end, lengths whole tiles.
"""

from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from cad_jax.sharding.tasks import HeadShape

TILE = 128


class Bound(NamedTuple):
    """Units in, of all servers together and S times the worst one's: of the best plan found (infinity
    without one), and what no plan is below."""

    best: float
    least: float


def best_units(lengths, servers, tokens, heads: HeadShape, bound: int, limit_s: float) -> Bound:
    """lengths: int [N]; tokens: T; bound: pairs no server may exceed; limit_s: seconds to search."""
    tiles = [(d, q) for d, n in enumerate(lengths) for q in range(n // TILE)]
    starts = np.cumsum(lengths) - lengths
    home = [int(starts[d] + q * TILE) // tokens for d, q in tiles]
    n, most = len(tiles), 2 * len(tiles) * servers
    query, key = heads.q_units * TILE, heads.kv_units * TILE

    def computes(tile, server):
        return tile * servers + server

    def holds(tile, server):
        return n * servers + tile * servers + server

    rows, columns, values, upper = [], [], [], []

    def at_most(limit, *terms):
        for column, value in terms:
            rows.append(len(upper))
            columns.append(column)
            values.append(value)
        upper.append(limit)

    for tile in range(n):  # each tile on one server exactly
        at_most(1, *((computes(tile, s), 1) for s in range(servers)))
        at_most(-1, *((computes(tile, s), -1) for s in range(servers)))
    for server in range(servers):
        pairs = [q * TILE * TILE + TILE * (TILE + 1) // 2 for _, q in tiles]
        at_most(bound, *((computes(t, server), pairs[t]) for t in range(n)))
        units, returned = [(most, -1.0)], 0
        for tile, (_, q) in enumerate(tiles):
            at_most(0, (computes(tile, server), 1), (holds(tile, server), -1))
            if q:  # a prefix of keys
                at_most(0, (holds(tile, server), 1), (holds(tile - 1, server), -1))
            if home[tile] == server:  # what others compute comes home as outputs
                units.append((computes(tile, server), -query))
                returned += query
            else:
                units += [(computes(tile, server), query), (holds(tile, server), key)]
        at_most(-returned, *units)
    cost = np.zeros(most + 1)
    cost[most] = servers
    fixed = n * query  # outputs of tiles that are not at home: those that are count as less
    for tile in range(n):
        for server in range(servers):
            away = home[tile] != server
            cost[computes(tile, server)] = query if away else -query
            cost[holds(tile, server)] = key if away else 0
    matrix = coo_array((values, (rows, columns)), shape=(len(upper), most + 1))
    integral = np.zeros(most + 1)
    integral[: n * servers] = 1
    limits = Bounds(np.zeros(most + 1), np.append(np.ones(most), np.inf))
    found = milp(
        cost, integrality=integral, bounds=limits,
        constraints=LinearConstraint(matrix.tocsr(), -np.inf, np.array(upper, float)),
        options={"time_limit": limit_s},
    )  # fmt: skip
    best = np.inf if found.x is None else found.fun + fixed
    return Bound(best, found.mip_dual_bound + fixed)


def least_worst(
    lengths, servers, tokens, heads: HeadShape, bound: int, cell: int, limit_s: float
) -> float:
    """Units in that the worst server has at least, in any plan with whole prefixes: a mixed-integer
    relaxation.

    Documents shorter than `cell` travel free. Others are cut in cells of so many tokens and at rank
    boundaries, whose pairs servers share in any parts, by as few queries as at the cell's end; of the
    cells before one that a server computes in it has all keys, of that one none. lengths: int [N], end
    to end; bound: pairs no server may exceed; limit_s: seconds to search.
    """
    starts = np.cumsum(lengths) - lengths
    long = np.flatnonzero(np.asarray(lengths) >= cell)
    pairs = np.asarray(lengths, float) * (np.asarray(lengths) + 1) / 2
    free = pairs.sum() - pairs[long].sum()
    cells = []  # (document, first, end, home)
    for d in long:
        ranks = range(starts[d] // tokens + 1, (starts[d] + lengths[d] - 1) // tokens + 1)
        cuts = {*range(0, lengths[d], cell), *(rank * tokens - starts[d] for rank in ranks)}
        cuts = [*sorted(cuts), lengths[d]]
        cells += [
            (d, a, b, (starts[d] + a) // tokens) for a, b in zip(cuts, cuts[1:], strict=False)
        ]
    n = len(cells)
    part, used = np.arange(2 * n * servers).reshape(2, n, servers)
    spare, worst = 2 * n * servers + np.arange(servers), (2 * n + 1) * servers
    rows, columns, values, lower, upper = [], [], [], [], []

    def between(low, high, *terms):
        for column, value in terms:
            rows.append(len(upper))
            columns.append(column)
            values.append(value)
        lower.append(low)
        upper.append(high)

    work = [(b * (b + 1) - a * (a + 1)) / 2 / bound for _, a, b, _ in cells]
    for c in range(n):
        between(1, 1, *((part[c, s], 1) for s in range(servers)))
    between(free / bound, free / bound, *((x, 1) for x in spare))
    for s in range(servers):
        between(-np.inf, 1, (spare[s], 1), *((part[c, s], work[c]) for c in range(n)))
        units, returned = [(worst, -1.0)], 0.0
        for c, (d, a, b, home) in enumerate(cells):
            between(-np.inf, 0, (part[c, s], 1), (used[c, s], -1))
            later = c + 1 < n and cells[c + 1][0] == d
            if later:
                between(-np.inf, 0, (used[c + 1, s], 1), (used[c, s], -1))
            query = work[c] * bound / b * heads.q_units
            if home == s:
                units.append((part[c, s], -query))
                returned += query
                continue
            units.append((part[c, s], query))
            if later:
                units.append((used[c + 1, s], (b - a) * heads.kv_units))
        between(-np.inf, -returned, *units)
    size = worst + 1
    cost, integral, most = np.zeros(size), np.zeros(size), np.full(size, np.inf)
    cost[worst], integral[used.ravel()], most[: 2 * n * servers] = 1, 1, 1
    matrix = coo_array((values, (rows, columns)), shape=(len(upper), size))
    found = milp(
        cost, integrality=integral, bounds=Bounds(np.zeros(size), most),
        constraints=LinearConstraint(matrix.tocsr(), lower, upper),
        options={"time_limit": limit_s},
    )  # fmt: skip
    # Without long documents nothing is integral, and the solution is the bound.
    return max(found.fun if found.mip_dual_bound is None else found.mip_dual_bound, 0.0)
