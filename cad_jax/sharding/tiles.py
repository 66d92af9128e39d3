"""Documents as tiles: causal triangles cut in rows and keys, and which server holds which part.

A TILE is a run of tokens of one document on one home rank. A CELL is the queries of one tile against
the keys of another at or before it, of the same document. Each server's cells of one query tile
follow one another, so that every query row has one key range a server. Short documents that one
rank holds share a tile, and its one cell: they move together.

All arithmetic is int64, so that every host decides alike. Shape letters: S servers, N documents, R
tiles, M parts a query tile may have.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from cad_jax.sharding.fares import price
from cad_jax.sharding.tasks import (
    DOCUMENT,
    HOME,
    K_START,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    TASK_FIELDS,
    TILE_ROWS,
)


class Tiles(NamedTuple):
    """Tiles in token order, int64 [R] each but `first`."""

    base: np.ndarray  # first tile of the document
    end: np.ndarray  # after its last tile
    document: np.ndarray
    documents: np.ndarray  # documents in the tile: more than one where short ones share it
    start: np.ndarray  # position of the tile's first token in its document
    rows: np.ndarray
    pairs: np.ndarray  # of the tile's queries with its own keys
    home: np.ndarray
    first: np.ndarray  # [S + 1] first tile of each home rank


class Parts(NamedTuple):
    """Which server computes which cells, and what follows from it; `give` keeps it up to date.

    Query tile r is divided into count[r] parts: keys of the tiles [low, high) on a server.
    """

    count: np.ndarray  # int64 [R]
    server: np.ndarray  # int64 [R, M]
    low: np.ndarray  # int64 [R, M]
    high: np.ndarray  # int64 [R, M]
    held: np.ndarray  # bool [S, R], key tiles
    guests: np.ndarray  # int64 [R], at a document's first tile: the last of its `guest` entries
    guest: np.ndarray  # int64 [entries, 2], a server that holds parts of other homes' queries, next
    guest_count: np.ndarray  # int64 [1]
    load: np.ndarray  # int64 [S], pairs
    fare: np.ndarray  # int64 [S], units in, each at what it costs
    query_rows: np.ndarray  # int64 [S]
    key_rows: np.ndarray  # int64 [S]


class Rates(NamedTuple):
    """Units of a row, and servers of a node."""

    q_units: int
    kv_units: int
    node: int


@njit(error_model="numpy")
def cut_tiles(lengths, starts, servers, tokens, tile_rows):
    """Tiles of about `tile_rows` tokens, cut at rank boundaries and at multiples of TILE_ROWS."""
    room = 2 * lengths.size + servers + lengths.sum() // tile_rows * 2
    base, end, document, documents, start, rows, pairs, home = np.zeros((8, room), np.int64)
    count, shared = 0, -1  # `shared`: the tile that short documents may still join
    for d in range(lengths.size):
        length, position = lengths[d], np.int64(0)
        if length == 0:
            continue
        rank, own = starts[d] // tokens, length * (length + 1) // 2
        short = 2 * length <= tile_rows and starts[d] + length <= (rank + 1) * tokens
        joins = short and shared >= 0 and home[shared] == rank
        if joins and pairs[shared] + own <= tile_rows * tile_rows // 2:
            documents[shared] = d - document[shared] + 1
            rows[shared] += length
            pairs[shared] += own
            continue
        before = count
        shared = count if short else -1
        while position < length:
            rank = (starts[d] + position) // tokens
            stop = min(length, (rank + 1) * tokens - starts[d])
            pieces = max(np.int64(1), (stop - position + tile_rows // 2) // tile_rows)
            low = position
            for nth in range(1, pieces + 1):
                high = stop
                if nth < pieces:
                    high = (position + (stop - position) * nth // pieces) // TILE_ROWS * TILE_ROWS
                if high <= low:
                    continue
                base[count], document[count], documents[count] = before, d, 1
                start[count], rows[count], home[count] = low, high - low, rank
                pairs[count] = (high - low) * (high - low + 1) // 2
                count += 1
                low = high
            position = stop
    last = count
    for i in range(count - 1, -1, -1):
        end[i] = last
        if base[i] == i:
            last = i
    first = np.searchsorted(home[:count], np.arange(servers + 1))
    return Tiles(
        base[:count], end[:count], document[:count], documents[:count], start[:count],
        rows[:count], pairs[:count], home[:count], first,
    )  # fmt: skip


@njit(error_model="numpy")
def cell_pairs(tiles, query, key):
    """Pairs of one cell."""
    return tiles.pairs[query] if query == key else tiles.rows[query] * tiles.rows[key]


@njit(error_model="numpy")
def at_home(tiles, rates, servers, parts_limit):
    """Every cell at the home of its queries."""
    size = tiles.rows.size
    count = np.ones(size, np.int64)
    server, low, high = np.zeros((3, size, parts_limit), np.int64)
    held = np.zeros((servers, size), np.bool_)
    load, fare, query_rows, key_rows = np.zeros((4, servers), np.int64)
    for r in range(size):
        rank = tiles.home[r]
        server[r, 0], low[r, 0], high[r, 0] = rank, tiles.base[r], r + 1
        query_rows[rank] += tiles.rows[r]
        for key in range(tiles.base[r], r + 1):
            load[rank] += cell_pairs(tiles, r, key)
            if not held[rank, key]:
                held[rank, key] = True
                key_rows[rank] += tiles.rows[key]
                fare[rank] += (
                    rates.kv_units * tiles.rows[key] * price(rates.node, tiles.home[key], rank)
                )
    return Parts(
        count, server, low, high, held, np.full(size, -1), np.zeros((size * parts_limit, 2), np.int64),
        np.zeros(1, np.int64), load, fare, query_rows, key_rows,
    )  # fmt: skip


@njit(error_model="numpy")
def part_of(parts, query, server):
    """The part of a query tile on a server, or -1."""
    for part in range(parts.count[query]):
        if parts.server[query, part] == server:
            return part
    return -1


@njit(error_model="numpy")
def is_guest(parts, base, server):
    """Whether a server holds parts of other homes' queries of a document."""
    entry = parts.guests[base]
    while entry >= 0:
        if parts.guest[entry, 0] == server:
            return True
        entry = parts.guest[entry, 1]
    return False


@njit(error_model="numpy")
def _move_queries(tiles, rates, parts, query, server, sign):
    rows, home = tiles.rows[query], tiles.home[query]
    cost = rates.q_units * rows * price(rates.node, home, server)
    parts.query_rows[server] += sign * rows
    parts.fare[server] += sign * cost  # q comes in at the server, the output at home
    parts.fare[home] += sign * cost


@njit(error_model="numpy")
def _hold(tiles, rates, parts, key, server, sign):
    parts.held[server, key] = sign > 0
    parts.key_rows[server] += sign * tiles.rows[key]
    cost = rates.kv_units * tiles.rows[key] * price(rates.node, tiles.home[key], server)
    parts.fare[server] += sign * cost


@njit(error_model="numpy")
def give(tiles, rates, parts, giver, server, queries, left, edge):
    """Gives keys before (left) or from tile `edge` of the query tiles [queries[0], queries[1]) of one
    document, as far as the giver has them, to a server that has none of these rows or the keys
    next to them.
    """
    first, last = queries
    base, end = tiles.base[first], tiles.end[first]
    for query in range(first, last):
        part = part_of(parts, query, giver)
        if part < 0:
            continue
        low, high = parts.low[query, part], parts.high[query, part]
        start, stop = (low, min(high, edge)) if left else (max(low, edge), high)
        if start >= stop:
            continue
        for key in range(start, stop):
            pairs = cell_pairs(tiles, query, key)
            parts.load[giver] -= pairs
            parts.load[server] += pairs
            if not parts.held[server, key]:
                _hold(tiles, rates, parts, key, server, 1)
        mine = part_of(parts, query, server)
        if mine < 0:
            _move_queries(tiles, rates, parts, query, server, 1)
        if (start, stop) == (low, high):
            _move_queries(tiles, rates, parts, query, giver, -1)
            if mine < 0:
                parts.server[query, part] = server
                continue
            rest = parts.count[query] - 1
            parts.low[query, mine] = min(parts.low[query, mine], start)
            parts.high[query, mine] = max(parts.high[query, mine], stop)
            parts.server[query, part] = parts.server[query, rest]
            parts.low[query, part] = parts.low[query, rest]
            parts.high[query, part] = parts.high[query, rest]
            parts.count[query] = rest
            continue
        if left:
            parts.low[query, part] = stop
        else:
            parts.high[query, part] = start
        if mine < 0:
            mine = parts.count[query]
            parts.count[query] += 1
            parts.server[query, mine] = server
            parts.low[query, mine], parts.high[query, mine] = start, stop
        else:
            parts.low[query, mine] = min(parts.low[query, mine], start)
            parts.high[query, mine] = max(parts.high[query, mine], stop)
    if not is_guest(parts, base, server):
        entry = parts.guest_count[0]
        parts.guest_count[0] += 1
        parts.guest[entry, 0], parts.guest[entry, 1] = server, parts.guests[base]
        parts.guests[base] = entry
    # Keys no query of the giver needs any more.
    change = np.zeros(end - base + 1, np.int64)
    for query in range(base, end):
        part = part_of(parts, query, giver)
        if part >= 0:
            change[parts.low[query, part] - base] += 1
            change[parts.high[query, part] - base] -= 1
    users = 0
    for key in range(base, end):
        users += change[key - base]
        if users == 0 and parts.held[giver, key]:
            _hold(tiles, rates, parts, key, giver, -1)


def part_tasks(tiles: Tiles, parts: Parts, lengths: np.ndarray) -> np.ndarray:
    """One task a part, or a document where several share a tile, int64 [n, 7], in token order."""
    part = np.arange(parts.server.shape[1]) < parts.count[:, None]
    query = np.nonzero(part)[0]
    low, high, server = parts.low[part], parts.high[part] - 1, parts.server[part]
    copies = tiles.documents[query]
    nth = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
    query, low, high, server = (np.repeat(x, copies) for x in (query, low, high, server))
    tasks = np.zeros((len(query), len(TASK_FIELDS)), np.int64)
    tasks[:, DOCUMENT] = tiles.document[query] + nth
    shared = tiles.documents[query] > 1
    tasks[:, Q_START] = tiles.start[query]
    tasks[:, Q_STOP] = tiles.start[query] + tiles.rows[query]
    tasks[:, K_START] = tiles.start[low]
    tasks[:, K_STOP] = tiles.start[high] + tiles.rows[high]
    whole = lengths[tasks[shared, DOCUMENT]]
    tasks[shared, Q_STOP] = tasks[shared, K_STOP] = whole
    tasks[:, HOME] = tiles.home[query]
    tasks[:, SERVER] = server
    return tasks[tasks[:, Q_START] < tasks[:, Q_STOP]]
