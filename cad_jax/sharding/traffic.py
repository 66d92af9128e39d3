"""What a plan moves: the rows of every server's buffers, and the rows that leave their home, as
units grouped by destination.

1. `row_map`: per server the tokens its query (or key) buffer holds, as disjoint intervals in token
   order, packed without gaps. Intervals that touch are merged.
2. `dispatch_traffic`, `output_traffic`: what leaves its home, as ATOMS (maximal intervals of rows
   with one set of destination servers), gathered in GROUPS of equal home and destination set.
   Dispatch carries q and k/v rows, each distinct row once per home; output carries one item per
   (query row, remote server), because partial outputs are merged at home by log-sum-exp and never
   summed on the way.

A UNIT is `HeadShape.unit_heads` heads of one row: a run of n query rows is n * q_units contiguous
units. Shape letters: S servers, T tokens per server, A atoms, G groups, P (group, server) pairs.
"""

from typing import NamedTuple

import numpy as np

from cad_jax.sharding.tasks import (
    DOCUMENT,
    K_START,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    HeadShape,
    PlanLike,
)


class RowMap(NamedTuple):
    """Tokens [start, stop) of a server's buffer begin at `row`; intervals ordered by (server,
    start). All int64.
    """

    server: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    row: np.ndarray
    rows: np.ndarray  # [S] rows of each server's buffer
    key: np.ndarray  # server * span + start, increasing
    span: int  # S * T + 1

    def lookup(self, server: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Buffer row of `token` on `server`, which must hold it."""
        at = np.searchsorted(self.key, server * self.span + token, side="right") - 1
        return self.row[at] + token - self.start[at]


class Pieces(NamedTuple):
    """Intervals of tokens that a server holds, each within one home rank."""

    server: np.ndarray
    home: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def where(self, mask: np.ndarray) -> "Pieces":
        return Pieces(*(x[mask] for x in self))


class Traffic(NamedTuple):
    """Units that leave their homes. Atoms are sorted by group, groups by home; every atom has at
    least one unit. All int64.

    home, token, source, units, level [A]: home rank, first global token, first unit among the
    home's local units, units, partial index (output traffic). is_query bool [A]. group_atoms [G +
    1]: first atom of each group. group_home, group_units [G]. member_group, member_server [P]: the
    servers of each group, sorted by (group, server).
    """

    servers: int
    home: np.ndarray
    token: np.ndarray
    source: np.ndarray
    units: np.ndarray
    level: np.ndarray
    is_query: np.ndarray
    group_atoms: np.ndarray
    group_home: np.ndarray
    group_units: np.ndarray
    member_group: np.ndarray
    member_server: np.ndarray

    @property
    def atom_first(self) -> np.ndarray:
        """Position of each atom's first unit when all groups are laid end to end."""
        return np.cumsum(self.units) - self.units


def spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """counts[i] copies of each i, and the number of each copy: (owner, nth)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def begins(owner: np.ndarray) -> np.ndarray:
    """Where a run of equal owners begins, bool."""
    new = np.ones(len(owner), bool)
    new[1:] = owner[1:] != owner[:-1]
    return new


def row_map(
    server: np.ndarray, start: np.ndarray, stop: np.ndarray, servers: int, tokens: int
) -> RowMap:
    """The union of token intervals per server, laid out in token order without gaps. `tokens`: of
    the whole pool.
    """
    span = tokens + 1
    low, high = server * span + start, server * span + stop
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    apart = np.ones(len(low), bool)
    apart[1:] = low[1:] > high[:-1]
    first = np.flatnonzero(apart)
    key, high = low[first], high[np.append(first[1:], len(low))[: len(first)] - 1]
    server, length = key // span, high - key
    begin = np.searchsorted(server, np.arange(servers + 1))
    total = np.append(0, np.cumsum(length))
    rows = np.diff(total[begin])
    return RowMap(
        server, key - server * span, high - server * span,
        total[:-1] - total[begin[server]], rows, key, span,
    )  # fmt: skip


def buffer_maps(plan: PlanLike) -> tuple[RowMap, RowMap]:
    """The query and the key buffer of every server."""
    tasks, pool = plan.tasks, plan.servers * plan.tokens_per_server
    at, server = plan.starts[tasks[:, DOCUMENT]], tasks[:, SERVER]
    query = row_map(server, at + tasks[:, Q_START], at + tasks[:, Q_STOP], plan.servers, pool)
    key = row_map(server, at + tasks[:, K_START], at + tasks[:, K_STOP], plan.servers, pool)
    return query, key


def cut_at_homes(rows: RowMap, tokens_per_server: int) -> Pieces:
    """The map's intervals, cut at rank boundaries, in the map's order."""
    first = rows.start // tokens_per_server
    owner, nth = spread((rows.stop - 1) // tokens_per_server - first + 1)
    home = first[owner] + nth
    return Pieces(
        rows.server[owner], home,
        np.maximum(rows.start[owner], home * tokens_per_server),
        np.minimum(rows.stop[owner], (home + 1) * tokens_per_server),
    )  # fmt: skip


def _overlay(pieces: Pieces) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Maximal intervals over which the set of servers is constant: (start, stop, pair_atom,
    pair_server), pairs sorted by (atom, server).
    """
    cuts = np.unique(np.concatenate([pieces.start, pieces.stop]))
    first = np.searchsorted(cuts, pieces.start)
    owner, nth = spread(np.searchsorted(cuts, pieces.stop) - first)
    interval = first[owner] + nth
    # Pieces are ordered by server, so a stable sort leaves each interval's servers ascending.
    order = np.argsort(interval, kind="stable")
    interval, server = interval[order], pieces.server[owner[order]]
    new = begins(interval)
    used = interval[new]
    return cuts[used], cuts[np.minimum(used + 1, len(cuts) - 1)], np.cumsum(new) - 1, server


def dispatch_traffic(
    query: Pieces, key: Pieces, servers: int, tokens_per_server: int, heads: HeadShape
) -> Traffic:
    """Rows of q and of k/v that other servers need. Local units of a rank: T * q_units of q, then T
    * kv_units of k/v.
    """
    home, token, source, units, is_query = [], [], [], [], []
    pair_atom, pair_server, atoms = [], [], 0
    for pieces, per_row, base in (
        (query, heads.q_units, 0),
        (key, heads.kv_units, tokens_per_server * heads.q_units),
    ):
        start, stop, atom, server = _overlay(pieces.where(pieces.home != pieces.server))
        home.append(start // tokens_per_server)
        token.append(start)
        source.append(base + start % tokens_per_server * per_row)
        units.append((stop - start) * per_row)
        is_query.append(np.full(len(start), pieces is query))
        pair_atom.append(atom + atoms)
        pair_server.append(server)
        atoms += len(start)
    home, pair_atom, pair_server = map(np.concatenate, (home, pair_atom, pair_server))
    members = np.bincount(pair_atom, minlength=atoms)
    pair_first = np.cumsum(members) - members
    keys = [home]  # then the set of servers, 64 of them a word
    for word in range(-(-servers // 64)):
        bit = np.where(pair_server // 64 == word, 1, 0).astype(np.uint64)
        bits = bit << (pair_server % 64).astype(np.uint64)
        keys.append(np.bitwise_or.reduceat(bits, pair_first) if atoms else bits)
    order = np.lexsort(keys[::-1])
    head = np.flatnonzero(np.any([begins(part[order]) for part in keys], axis=0))
    leader = order[head]
    member_group, nth = spread(members[leader])
    units = np.concatenate(units)[order]
    return Traffic(
        servers, home[order], np.concatenate(token)[order], np.concatenate(source)[order], units,
        np.zeros(atoms, np.int64), np.concatenate(is_query)[order],
        np.append(head, atoms), home[leader], sum_by(units, head),
        member_group, pair_server[pair_first[leader][member_group] + nth],
    )  # fmt: skip


class Partials(NamedTuple):
    """The partial outputs of a home's query rows: rows [start, stop) are computed by `server` as
    partial `level` of theirs.
    """

    home: np.ndarray
    server: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    level: np.ndarray


def query_partials(query: Pieces, tokens_per_server: int) -> Partials:
    """Every (query interval, server) of the plan; the servers of one row are numbered in ascending
    order.
    """
    start, stop, atom, server = _overlay(query)
    first = np.flatnonzero(begins(atom))
    level = np.arange(len(atom)) - first[atom]
    return Partials(start[atom] // tokens_per_server, server, start[atom], stop[atom], level)


def output_traffic(
    partials: Partials, servers: int, tokens_per_server: int, heads: HeadShape
) -> Traffic:
    """One item per (query row, remote server). Local units of a rank: T * q_units."""
    remote = np.flatnonzero(partials.home != partials.server)
    pair = partials.home[remote] * servers + partials.server[remote]
    order = remote[np.argsort(pair, kind="stable")]
    home, server, start, stop, level = (x[order] for x in partials)
    head = np.flatnonzero(begins(home * servers + server))
    units = (stop - start) * heads.q_units
    return Traffic(
        servers, home, start, start % tokens_per_server * heads.q_units, units, level,
        np.ones(len(order), bool), np.append(head, len(order)), home[head], sum_by(units, head),
        np.arange(len(head)), server[head],
    )  # fmt: skip


def sum_by(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Sum over each run of entries that begins at one of `first`."""
    return np.add.reduceat(values, first) if len(first) else values[:0]


def sum_before(values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Sum over the earlier entries (dim 0) of the same owner; owners are contiguous."""
    total = np.cumsum(values, axis=0) - values
    first = begins(owner)
    return total - total[np.flatnonzero(first)][np.cumsum(first) - 1]
