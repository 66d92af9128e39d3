"""Balance by blocks of cells: part of the queries of a document against part of its keys.

While a server is over its bound, the block with the most pairs per unit that travels moves to a
server with room. A rectangle of n queries and m keys has n m pairs and takes 2 q_units n +
kv_units m units, fewest at m = 2 q_units / kv_units n: far fewer than a whole prefix takes deep in a
long document. Rounds follow one another, each from the home plan, with units dearer on the servers
that took in the most the round before, and the best of them stands.

Shape letters: S servers, N documents, R tiles, C tiles of a document, n tasks.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from cad_jax.sharding.fares import equal_weights, judged, next_weights, price
from cad_jax.sharding.tiles import (
    at_home,
    cell_pairs,
    give,
    is_guest,
    part_of,
)


class Limits(NamedTuple):
    """What no server may exceed."""

    load: np.ndarray  # int64 [S], pairs
    query_rows: np.ndarray  # int64 [S]
    key_rows: int


class Need(NamedTuple):
    """A server over its bound, and who may help it."""

    server: np.int64
    excess: np.int64  # pairs over the bound
    spill: np.int64  # pairs that a receiver may go over its own
    sparing: bool  # whether blocks may take no more than their share of a receiver's query rows
    shift: int  # of pairs, before they are divided by units: as large as 64 bits allow


class Scratch(NamedTuple):
    """Room for sums over a document's keys and the rows of one home, allocated once."""

    pairs: (
        np.ndarray
    )  # int64 [2, rows, C + 1], of the first rows from either end, keys up to a tile
    freed: (
        np.ndarray
    )  # int64 [2, rows, C + 1], what those keys cost the giver, where it needs no more
    fetched: np.ndarray  # int64 [C + 1], what keys up to a tile would cost the receiver
    new: np.ndarray  # int64 [C + 1], their rows
    users: np.ndarray  # int64 [C + 1], query tiles of the giver that need a key tile
    receivers: np.ndarray  # int64 [S]
    found: np.ndarray  # int64 [6], the best block: score, first, last, left, edge, receiver


@njit(error_model="numpy")
def _tabulate(tiles, rates, parts, giver, rows, scratch):
    """Pairs and freed keys of the giver's query tiles `rows` of one document, from either end."""
    base, end = tiles.base[rows[0]], tiles.end[rows[0]]
    size = end - base
    users = scratch.users
    users[: size + 1] = 0
    for query in range(base, end):
        part = part_of(parts, query, giver)
        if part >= 0:
            users[parts.low[query, part] - base] += 1
            users[parts.high[query, part] - base] -= 1
    for key in range(1, size):
        users[key] += users[key - 1]
    count, pairs = np.zeros((2, size), np.int64)
    for upward in range(2):
        count[:], pairs[:] = 0, 0
        for nth in range(rows[1] - rows[0]):
            query = rows[1] - 1 - nth if upward else rows[0] + nth
            part = part_of(parts, query, giver)
            if part >= 0:
                for key in range(parts.low[query, part], parts.high[query, part]):
                    pairs[key - base] += cell_pairs(tiles, query, key)
                    count[key - base] += 1
            total, saved = np.int64(0), np.int64(0)
            for key in range(size):
                scratch.pairs[upward, nth, key] = total
                scratch.freed[upward, nth, key] = saved
                total += pairs[key]
                if count[key] and count[key] == users[key]:
                    saved += (
                        rates.kv_units
                        * tiles.rows[base + key]
                        * price(rates.node, tiles.home[base + key], giver)
                    )
            scratch.pairs[upward, nth, size] = total
            scratch.freed[upward, nth, size] = saved


@njit(error_model="numpy")
def _consider(tiles, rates, parts, limits, weights, need, to, rows, room, scratch):
    """Keeps the best block for one receiver in `scratch.found` if it beats what is there."""
    base, end = tiles.base[rows[0]], tiles.end[rows[0]]
    giver = need.server
    size, want = end - base, min(room, need.excess)
    fetched, new = scratch.fetched, scratch.new
    for key in range(size):
        rows_new = 0 if parts.held[to, base + key] else tiles.rows[base + key]
        new[key + 1] = new[key] + rows_new
        fetched[key + 1] = fetched[key] + rates.kv_units * rows_new * price(
            rates.node, tiles.home[base + key], to
        )
    q_price = rates.q_units * price(rates.node, giver, to)
    query_room = limits.query_rows[to] - parts.query_rows[to]
    key_room = limits.key_rows - parts.key_rows[to]
    for upward in range(2):
        low, high, queries = size, np.int64(0), np.int64(0)
        left_allowed, right_allowed = True, True
        whole = False  # a query tile has all the parts it may have: the giver's must go entirely
        for nth in range(rows[1] - rows[0]):
            query = rows[1] - 1 - nth if upward else rows[0] + nth
            part, mine = part_of(parts, query, giver), part_of(parts, query, to)
            if part < 0:
                break
            start, stop = parts.low[query, part], parts.high[query, part]
            if mine >= 0:
                left_allowed = left_allowed and parts.high[query, mine] == start
                right_allowed = right_allowed and parts.low[query, mine] == stop
            else:
                queries += tiles.rows[query]
                whole = whole or parts.count[query] == parts.server.shape[1]
            if queries > query_room or not (left_allowed or right_allowed):
                break
            low, high = min(low, start - base), max(high, stop - base)
            pairs, freed = scratch.pairs[upward, nth], scratch.freed[upward, nth]
            for left in range(2):
                if not (left_allowed if left else right_allowed):
                    continue
                # The edge where the block is nearest to what is wanted, below it and above.
                goal = want if left else pairs[high] - want
                edge = low + np.searchsorted(pairs[low : high + 1], goal, side="right") - 1
                for at in (edge, edge + 1):
                    if at < low or at > high or (whole and at != (high if left else low)):
                        continue
                    first, last = (low, at) if left else (at, high)
                    taken = pairs[last] - pairs[first]
                    if taken <= 0 or taken > room or new[last] - new[first] > key_room:
                        continue
                    # Rows too must last until the receiver is full.
                    if need.sparing and queries > 0 and 2 * (taken // queries) < room // query_room:
                        continue
                    cost = (fetched[last] - fetched[first] + q_price * queries) * weights[to]
                    cost += (q_price * queries - freed[last] + freed[first]) * weights[giver]
                    score = max((min(taken, need.excess) << need.shift) // max(cost, 1), 1)
                    if score > scratch.found[0]:
                        scratch.found[0], scratch.found[3] = score, left
                        scratch.found[1] = query if upward else rows[0]
                        scratch.found[2] = rows[1] if upward else query + 1
                        scratch.found[4], scratch.found[5] = base + at, to


@njit(error_model="numpy")
def _receivers(tiles, parts, base, roomiest, receivers):
    """Who may take a part of a document: its homes, its guests, and of all others, who differ by load
    alone, the one with the most room. Returns how many."""
    nearest, farthest = tiles.home[base], tiles.home[tiles.end[base] - 1]
    count = 0
    for server in range(nearest, farthest + 1):
        receivers[count] = server
        count += 1
    entry = parts.guests[base]
    while entry >= 0:
        server, entry = parts.guest[entry]
        if not nearest <= server <= farthest:
            receivers[count] = server
            count += 1
    if not nearest <= roomiest <= farthest and not is_guest(parts, base, roomiest):
        receivers[count] = roomiest
        count += 1
    return count


@njit(error_model="numpy")
def _find_block(tiles, rates, parts, limits, weights, need, scratch):
    """The block of most pairs per unit off a server, into `scratch.found`; score 0 if there is none."""
    scratch.found[0] = 0
    giver = need.server
    roomiest = 1 if giver == 0 else 0
    for server in range(parts.load.size):
        room = limits.load[server] - parts.load[server]
        if server != giver and room > limits.load[roomiest] - parts.load[roomiest]:
            roomiest = server
    query, stop = tiles.first[giver], tiles.first[giver + 1]
    while query < stop:
        base, end = tiles.base[query], tiles.end[query]
        low, high = query, min(end, stop)
        query = high
        while low < high and part_of(parts, low, giver) < 0:
            low += 1
        while low < high and part_of(parts, high - 1, giver) < 0:
            high -= 1
        if low == high:
            continue
        rows = low, high
        _tabulate(tiles, rates, parts, giver, rows, scratch)
        for i in range(_receivers(tiles, parts, base, roomiest, scratch.receivers)):
            to = scratch.receivers[i]
            room = limits.load[to] - parts.load[to] + need.spill
            if to != giver and room > 0:
                _consider(tiles, rates, parts, limits, weights, need, to, rows, room, scratch)


@njit(error_model="numpy")
def level(tiles, rates, parts, limits, weights, scratch):
    """Gives blocks away until no server is over its bound; returns whether that is so.

    Where tiles are too coarse for a receiver's room, blocks that still lower the maximum follow.
    """
    while parts.guest_count[0] < parts.guest.shape[0]:
        over = parts.load - limits.load
        giver = np.argmax(over)
        excess = over[giver]
        if excess <= 0:
            return True
        shift = 0
        while shift < 40 and (excess << (shift + 1)) < 2**61:
            shift += 1
        for sparing, spill in ((True, np.int64(0)), (False, np.int64(0)), (False, excess - 1)):
            need = Need(np.int64(giver), excess, spill, sparing, shift)
            _find_block(tiles, rates, parts, limits, weights, need, scratch)
            if scratch.found[0] > 0:
                break
        if scratch.found[0] == 0:
            return False
        _, first, last, left, edge, to = scratch.found
        give(tiles, rates, parts, giver, to, (first, last), left == 1, edge)
    return False


@njit(error_model="numpy")
def best_parts(tiles, rates, limits, parts_limit, rounds):
    """The parts of the best of `rounds` rounds, by units in: their mean and the worst server's.

    Returns (whether any is within the bounds, parts).
    """
    servers = limits.load.size
    rows, columns = np.int64(1), np.int64(1)
    for i in range(tiles.rows.size):
        columns = max(columns, tiles.end[i] - tiles.base[i])
    for server in range(servers):
        rows = max(rows, tiles.first[server + 1] - tiles.first[server])
    rows = min(rows, columns)
    scratch = Scratch(
        np.zeros((2, rows, columns + 1), np.int64), np.zeros((2, rows, columns + 1), np.int64),
        np.zeros(columns + 1, np.int64), np.zeros(columns + 1, np.int64),
        np.zeros(columns + 1, np.int64), np.zeros(servers, np.int64), np.zeros(6, np.int64),
    )  # fmt: skip
    best, least = at_home(tiles, rates, servers, parts_limit), np.int64(-1)
    weights = equal_weights(servers)
    for _ in range(rounds):
        parts = at_home(tiles, rates, servers, parts_limit)
        if level(tiles, rates, parts, limits, weights, scratch):
            fare = judged(parts.fare)
            if least < 0 or fare < least:
                least, best = fare, parts
        weights = next_weights(weights, parts.fare)
    return least >= 0, best
