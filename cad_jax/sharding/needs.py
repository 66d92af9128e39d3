"""What tasks need of every capacity, counted in one compiled pass: the figures of `routing.Routing.required`
without its tables, in a tenth of the time, for planning's many candidates.

Shape letters: T tokens per server, S servers, P pieces, A atoms (`traffic`), G groups, W words of 64 servers.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from cad_jax.sharding.tasks import DOCUMENT, K_START, K_STOP, Q_START, Q_STOP, SERVER

DIRECT, RELAY, RAGGED = range(3)  # transports


class Held(NamedTuple):
    """Runs of tokens that servers hold, each of one home rank, in the order of (server, start)."""

    server: np.ndarray  # int64 [P]
    start: np.ndarray  # int64 [P]
    stop: np.ndarray  # int64 [P]
    rows: np.ndarray  # int64 [S], of each server's buffer
    local: np.ndarray  # int64 [S], runs of a server's own tokens


class Atoms(NamedTuple):
    """Maximal runs of tokens with one set of servers, in token order."""

    start: np.ndarray  # int64 [A]
    stop: np.ndarray  # int64 [A]
    first: np.ndarray  # int64 [A + 1], each one's first entry in `server`
    server: np.ndarray  # int64, the servers of each, ascending


class Counts(NamedTuple):
    """Of one exchange, integers; of a second hop 0 where there is none."""

    units: tuple[Any, Any]
    runs: tuple[Any, Any]
    arrivals: np.ndarray  # int64 [S], runs that a server receives
    atom_runs: np.ndarray  # int64 [A], runs of an atom on its way to one peer


@njit(error_model="numpy")
def _held(server, start, stop, servers, tokens):
    """The union of tasks' runs of tokens by server, in ascending order, cut at rank boundaries."""
    room = 0
    for i in range(server.size):
        room += (stop[i] - 1) // tokens - start[i] // tokens + 1
    owner, first, last = (
        np.empty(room, np.int64),
        np.empty(room, np.int64),
        np.empty(room, np.int64),
    )
    rows, local = np.zeros(servers, np.int64), np.zeros(servers, np.int64)
    count = nth = 0
    while nth < server.size:
        at, begin, end = server[nth], start[nth], stop[nth]
        nth += 1
        while nth < server.size and server[nth] == at and start[nth] <= end:
            end = max(end, stop[nth])
            nth += 1
        rows[at] += end - begin
        while begin < end:
            home = begin // tokens
            owner[count], first[count] = at, begin
            begin = min(end, (home + 1) * tokens)
            last[count] = begin
            local[at] += home == at
            count += 1
    return Held(owner[:count], first[:count], last[:count], rows, local)


@njit(error_model="numpy")
def _sort_keys(tasks, start, stop):
    """Puts runs of keys of one server and document in ascending order: few are out of it."""
    for i in range(1, start.size):
        j = i
        while (
            j > 0
            and tasks[j - 1, SERVER] == tasks[i, SERVER]
            and tasks[j - 1, DOCUMENT] == tasks[i, DOCUMENT]
            and start[j - 1] > start[j]
        ):
            start[j - 1], start[j] = start[j], start[j - 1]
            stop[j - 1], stop[j] = stop[j], stop[j - 1]
            j -= 1


@njit(error_model="numpy")
def _find(cuts, token):
    """Where a cut is among ascending cuts."""
    low, high = 0, cuts.size - 1
    while low < high:
        middle = (low + high) // 2
        if cuts[middle] < token:
            low = middle + 1
        else:
            high = middle
    return low


@njit(error_model="numpy")
def _atoms(held, tokens, remote):
    """The atoms of what servers hold; of what is not their own alone if `remote`."""
    cuts, kept = np.empty(2 * held.start.size, np.int64), 0
    chosen = np.empty(held.start.size, np.int64)
    for i in range(held.start.size):
        if not remote or held.start[i] // tokens != held.server[i]:
            cuts[2 * kept], cuts[2 * kept + 1] = held.start[i], held.stop[i]
            chosen[kept] = i
            kept += 1
    cuts = np.sort(cuts[: 2 * kept])
    count = 0
    for i in range(cuts.size):
        if i == 0 or cuts[i] != cuts[i - 1]:
            cuts[count] = cuts[i]
            count += 1
    cuts = cuts[:count]
    low, high = np.empty(kept, np.int64), np.empty(kept, np.int64)
    members = np.zeros(count + 1, np.int64)
    for i in range(kept):
        low[i] = _find(cuts, held.start[chosen[i]])
        high[i] = _find(cuts, held.stop[chosen[i]])
        members[low[i]] += 1
        members[high[i]] -= 1
    # Of the intervals between cuts those that anyone holds are atoms.
    start, stop, first = (
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.zeros(count + 1, np.int64),
    )
    entry = np.zeros(count + 1, np.int64)
    atoms = entries = users = 0
    for interval in range(count):
        users += members[interval]
        entry[interval] = entries
        if users > 0:
            start[atoms], stop[atoms] = cuts[interval], cuts[interval + 1]
            first[atoms] = entries
            atoms += 1
            entries += users
    first[atoms] = entries
    servers = np.empty(entries, np.int64)
    for i in range(kept):  # in ascending order of servers
        for interval in range(low[i], high[i]):
            servers[entry[interval]] = held.server[chosen[i]]
            entry[interval] += 1
    return Atoms(start[:atoms], stop[:atoms], first[: atoms + 1], servers)


@njit(error_model="numpy")
def _before(words, one, other):
    """How two atoms' sets of servers compare: below 0, 0, above 0."""
    for word in range(words.shape[1]):
        if words[one, word] != words[other, word]:
            return -1 if words[one, word] < words[other, word] else 1
    return 0


@njit(error_model="numpy")
def _grouped(home, words, servers):
    """Atoms by home and set of servers, those alike as they were: (order, first of each group and A)."""
    begin = np.zeros(servers + 1, np.int64)
    for rank in home:
        begin[rank + 1] += 1
    for rank in range(servers):
        begin[rank + 1] += begin[rank]
    entry, order = begin.copy(), np.empty(home.size, np.int64)
    for atom in range(home.size):
        order[entry[home[atom]]] = atom
        entry[home[atom]] += 1
    spare = np.empty(home.size, np.int64)
    for rank in range(servers):  # merge sort
        size, stop = 1, begin[rank + 1]
        while size < stop - begin[rank]:
            for low in range(begin[rank], stop, 2 * size):
                middle, high = min(low + size, stop), min(low + 2 * size, stop)
                left, right = low, middle
                for at in range(low, high):
                    if left < middle and (
                        right == high or _before(words, order[left], order[right]) <= 0
                    ):
                        spare[at] = order[left]
                        left += 1
                    else:
                        spare[at] = order[right]
                        right += 1
            for at in range(begin[rank], stop):
                order[at] = spare[at]
            size *= 2
    heads = np.empty(home.size + 1, np.int64)
    count = 0
    for at in range(home.size):
        one, other = order[at - 1], order[at]
        if at == 0 or home[one] != home[other] or _before(words, one, other) != 0:
            heads[count] = at
            count += 1
    heads[count] = home.size
    return order, heads[: count + 1]


@njit(error_model="numpy")
def _relay_of(unit, base, odd, turn, servers):
    """The relay that has a unit of a group: see `spreads.Spread`, `base` at least 1."""
    wrapped, end = max(turn + odd - servers, 0), min(turn + odd, servers)
    first = wrapped * (base + 1)
    second = turn * base + min(turn, wrapped)
    third = second + (end - turn) * (base + 1)
    if unit < first:
        return unit // (base + 1)
    if unit < second:
        return wrapped + (unit - first) // base
    if unit < third:
        return turn + (unit - second) // (base + 1)
    return end + (unit - third) // base


@njit(error_model="numpy")
def _add(change, turn, odd, weight):
    """A weight to each of `odd` relays from `turn` on, as differences, [S + 1]."""
    servers = change.size - 1
    wrapped = max(turn + odd - servers, 0)
    change[turn] += weight
    change[turn + odd - wrapped] -= weight
    change[0] += weight * (wrapped > 0)
    change[wrapped] -= weight * (wrapped > 0)


@njit(error_model="numpy")
def _most(change):
    """The largest sum of differences, [S + 1], up to a relay."""
    total = most = 0
    for relay in range(change.size - 1):
        total += change[relay]
        most = max(most, total)
    return most


@njit(error_model="numpy")
def _relayed(home, units, first, server, order, heads, servers):
    """Counts of a relayed exchange: see `routes.RelayRoute`."""
    ways, base_units = (
        np.zeros((2, servers, servers + 1), np.int64),
        np.zeros((2, servers), np.int64),
    )
    thin, sent = np.zeros(servers + 1, np.int64), np.zeros(servers, np.int64)
    arrivals, atom_runs = np.zeros(servers, np.int64), np.zeros(home.size, np.int64)
    full = given = 0
    for group in range(heads.size - 1):
        leader = order[heads[group]]
        total = 0
        for at in range(heads[group], heads[group + 1]):
            total += units[order[at]]
        base, odd, turn = total // servers, total % servers, given % servers
        given += odd
        position = runs = 0
        for at in range(heads[group], heads[group + 1]):
            atom = order[at]
            last = position + units[atom] - 1
            atom_runs[atom] = units[atom]  # without a base, blocks are units
            if base > 0:
                atom_runs[atom] = 1 + _relay_of(last, base, odd, turn, servers)
                atom_runs[atom] -= _relay_of(position, base, odd, turn, servers)
            position = last + 1
            runs += atom_runs[atom]
        rank, members = home[leader], first[leader + 1] - first[leader]
        base_units[0, rank] += base
        _add(ways[0, rank], turn, odd, 1)
        for nth in range(first[leader], first[leader + 1]):
            at = server[nth]
            base_units[1, at] += base
            _add(ways[1, at], turn, odd, 1)
            arrivals[at] += runs
        sent[rank] += runs
        if base > 0:
            full += members
        else:
            _add(thin, turn, odd, members)
    most = np.zeros(2, np.int64)
    for way in range(2):
        for rank in range(servers):
            most[way] = max(most[way], base_units[way, rank] + _most(ways[way, rank]))
    return Counts((most[0], most[1]), (sent.max(), full + _most(thin)), arrivals, atom_runs)


@njit(error_model="numpy")
def _straight(home, units, first, server, servers, ragged):
    """Counts of an exchange of one hop: see `routes.DirectRoute` and `routes.RaggedRoute`."""
    table, totals = np.zeros((servers, servers), np.int64), np.zeros((2, servers), np.int64)
    sent, arrivals = np.zeros(servers, np.int64), np.zeros(servers, np.int64)
    for atom in range(home.size):
        rank = home[atom]
        for nth in range(first[atom], first[atom + 1]):
            at = server[nth]
            table[rank, at] += units[atom]
            totals[0, rank] += units[atom]
            totals[1, at] += units[atom]
            sent[rank] += 1
            arrivals[at] += 1
    most = (totals[0].max(), totals[1].max()) if ragged else (table.max(), np.int64(0))
    return Counts(most, (sent.max(), np.int64(0)), arrivals, np.full(home.size, 1))


@njit(error_model="numpy")
def _exchange(kind, home, units, first, server, words, servers):
    if kind == RELAY:
        order, heads = _grouped(home, words, servers)
        return _relayed(home, units, first, server, order, heads, servers)
    return _straight(home, units, first, server, servers, kind == RAGGED)


@njit(error_model="numpy")
def count(tasks, starts, servers, tokens, q_units, kv_units, kind):
    """Of sorted tasks, int64 [n, 7], of documents from `starts`: values of `tasks.CAPACITY_FIELDS` (
    units and runs as two values each)."""
    size = tasks.shape[0]
    at, start, stop = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    for i in range(size):
        base, at[i] = starts[tasks[i, DOCUMENT]], tasks[i, SERVER]
        start[i], stop[i] = base + tasks[i, Q_START], base + tasks[i, Q_STOP]
    query = _held(at, start, stop, servers, tokens)
    for i in range(size):
        base = starts[tasks[i, DOCUMENT]]
        start[i], stop[i] = base + tasks[i, K_START], base + tasks[i, K_STOP]
    _sort_keys(tasks, start, stop)
    key = _held(at, start, stop, servers, tokens)

    asked, fetched = _atoms(query, tokens, True), _atoms(key, tokens, True)
    size = asked.start.size + fetched.start.size
    home, units, first = (
        np.empty(size, np.int64),
        np.empty(size, np.int64),
        np.empty(size + 1, np.int64),
    )
    server = np.empty(asked.server.size + fetched.server.size, np.int64)
    words = np.zeros((size, (servers + 63) // 64), np.uint64)
    atom = entry = 0
    for atoms, unit in ((asked, q_units), (fetched, kv_units)):
        for nth in range(atoms.start.size):
            home[atom] = atoms.start[nth] // tokens
            units[atom] = (atoms.stop[nth] - atoms.start[nth]) * unit
            first[atom] = entry
            for holder in range(atoms.first[nth], atoms.first[nth + 1]):
                other = atoms.server[holder]
                server[entry] = other
                words[atom, other // 64] |= np.uint64(1) << np.uint64(other % 64)
                entry += 1
            atom += 1
    first[atom] = entry
    out = _exchange(kind, home, units, first, server, words, servers)

    # Outputs: every server's of a row by itself, ordered by who computes it.
    rows = _atoms(query, tokens, False)
    levels = np.int64(1)
    for atom in range(rows.start.size):
        levels = max(levels, rows.first[atom + 1] - rows.first[atom])
    size = rows.server.size
    merge = np.zeros((servers, levels), np.int64)
    home, units = np.empty(size, np.int64), np.empty(size, np.int64)
    server, level = np.empty(size, np.int64), np.empty(size, np.int64)
    entries = 0
    for atom in range(rows.start.size):
        rank = rows.start[atom] // tokens
        for nth in range(rows.first[atom + 1] - rows.first[atom]):
            other = rows.server[rows.first[atom] + nth]
            if other == rank:
                merge[rank, nth] += 1
                continue
            home[entries], server[entries], level[entries] = rank, other, nth
            units[entries] = (rows.stop[atom] - rows.start[atom]) * q_units
            entries += 1
    home, units, server = home[:entries], units[:entries], server[:entries]
    words = np.zeros((entries, 1), np.uint64)
    for entry in range(entries):
        words[entry, 0] = np.uint64(server[entry])
    back = _exchange(kind, home, units, np.arange(entries + 1), server, words, servers)
    for entry in range(entries):
        merge[home[entry], level[entry]] += back.atom_runs[entry]

    assembled = output_assembled = np.int64(0)
    for rank in range(servers):
        own = query.local[rank]
        assembled = max(assembled, own + key.local[rank] + out.arrivals[rank])
        output_assembled = max(output_assembled, own + back.arrivals[rank])
    exchanged = (*out.units, *back.units, *out.runs, *back.runs)
    return (
        query.rows.max(), key.rows.max(), *exchanged, assembled, output_assembled, merge.max(), levels,
    )  # fmt: skip
