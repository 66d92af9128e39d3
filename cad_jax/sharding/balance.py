"""The greedy that balances core attention: integer functions, compiled once and cached on disk.

While the most loaded server is over the bound, the piece with the most (query, key) pairs per
marginal unit moves to a server that has room. Traffic counts in exchange units (`tasks.HeadShape`):
q_units for a query row and again for its returned output, kv_units for a key row with its value. A
server holds one key prefix of each document it serves; keys that are local, or already fetched for
another task, cost nothing. All arithmetic is int64, so that every host decides alike.

Shape letters: S servers, N documents, P pieces (room for new ones included).
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from cad_jax.sharding.tasks import TILE_ROWS

DOC, START, STOP, HOME, AT = range(5)  # columns of a piece: queries [START, STOP) of DOC
CUTS = 4  # ways to cut a piece: its end, its start, at the receiver's keys, cheapest inside
LEVEL, REFINE = range(2)  # what a move is for: to lower the maximum, or to save units
PRESSURE_UNIT = 8  # a pressure of 8 doubles the price of rows into a server that holds T keys


class Pool(NamedTuple):
    """What stays fixed while pieces move."""

    starts: np.ndarray  # int64 [N], global token index of each document
    tokens: int  # T
    q_units: int
    kv_units: int
    query_rows: np.ndarray  # int64 [S], capacity of each server's query buffer
    key_rows: int  # capacity of a server's key buffer
    pressure: int  # weight of the units a receiver takes in already


class State(NamedTuple):
    """Pieces and what follows from them, kept up to date by `move`."""

    pieces: np.ndarray  # int64 [P, 5]
    count: np.ndarray  # int64 [1], pieces in use
    load: np.ndarray  # int64 [S], pairs
    units_in: np.ndarray  # int64 [S]
    rows: np.ndarray  # int64 [S], query rows
    keys: np.ndarray  # int64 [S], key rows
    held: np.ndarray  # int64 [S, N], key prefix
    holders: np.ndarray  # int64 [N], servers that hold keys of the document


@njit(cache=True, error_model="numpy")
def prefix_pairs(start, stop):
    """Pairs of queries [start, stop) with their whole causal prefix."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


@njit(cache=True, error_model="numpy")
def down(position):
    """The cut at or before a position."""
    return position // TILE_ROWS * TILE_ROWS


@njit(cache=True, error_model="numpy")
def up(position):
    """The cut at or after a position."""
    return (position + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


@njit(cache=True, error_model="numpy")
def floor_sqrt(x):
    """Largest r with r * r <= x, exact in int64."""
    root = np.int64(np.sqrt(np.float64(x)))
    while root * root > x:
        root -= 1
    while (root + 1) * (root + 1) <= x:
        root += 1
    return root


@njit(cache=True, error_model="numpy")
def start_for(stop, pairs):
    """Smallest q_start whose queries [q_start, stop) hold at most `pairs` pairs."""
    start = floor_sqrt(max(np.int64(0), stop * (stop + 1) - 2 * pairs))
    while prefix_pairs(start, stop) > pairs:
        start += 1
    return start


@njit(cache=True, error_model="numpy")
def stop_for(start, pairs):
    """Largest q_stop whose queries [start, q_stop) hold at most `pairs` pairs."""
    stop = floor_sqrt(2 * pairs + start * (start + 1))
    while prefix_pairs(start, stop) > pairs:
        stop -= 1
    return stop


@njit(cache=True, error_model="numpy")
def remote_keys(pool, server, doc, stop):
    """Keys of the prefix [0, stop) of a document that are not the server's own."""
    low = server * pool.tokens - pool.starts[doc]
    return stop - max(0, min(stop, low + pool.tokens) - max(0, low))


@njit(cache=True, error_model="numpy")
def cut(way, start, stop, want, room, rows, resident, q_units, kv_units):
    """A part of queries [start, stop) of about `want`, at most `room` pairs and `rows` rows.

    Returns (0, 0) where this way of CUTS has none. Cuts fall on multiples of TILE_ROWS; the part
    covers `want` where room and rows allow, else stops short of it. The cheapest contiguous shard
    of A pairs has sqrt(b 2A / (2 + b)) queries, with b = kv_units / (2 q_units), and ends at
    queries * (1 + 1 / b): the least units it can take.
    """
    if way == 1:
        reach = max(stop_for(start, want), start + 1)  # one row at least
        high = up(reach)
        if high >= stop or prefix_pairs(start, high) > room or high - start > rows:
            high = down(min(reach, start + rows))
        return (start, high) if start < high < stop else (0, 0)
    high = stop
    if way == 2 and resident < stop:
        high = down(resident)
    elif way == 3:
        queries = floor_sqrt(2 * want * kv_units // (4 * q_units + kv_units))
        high = down(queries + 2 * queries * q_units // kv_units)
        if high >= stop:
            return 0, 0
    if high <= start:
        return 0, 0
    reach = min(start_for(high, want), high - 1)  # one row at least
    low = max(start, down(reach))
    if prefix_pairs(low, high) > room or high - low > rows:
        low = max(start, up(max(reach, high - rows)))
    return (low, high) if low < high else (0, 0)


@njit(cache=True, error_model="numpy")
def held_without(state, server, doc, skip):
    """Key prefix a server needs of a document without piece `skip`."""
    stop = 0
    for j in range(state.count[0]):
        if j != skip and state.pieces[j, AT] == server and state.pieces[j, DOC] == doc:
            stop = max(stop, state.pieces[j, STOP])
    return stop


@njit(cache=True, error_model="numpy")
def marginal(pool, state, i, low, high, to, kept):
    """(units moving queries [low, high) of piece i adds in all, units it adds at the receiver)."""
    doc, home, at = state.pieces[i, DOC], state.pieces[i, HOME], state.pieces[i, AT]
    fetched = remote_keys(pool, to, doc, max(state.held[to, doc], high)) - remote_keys(
        pool, to, doc, state.held[to, doc]
    )
    if high < state.pieces[i, STOP]:
        kept = max(kept, state.pieces[i, STOP])
    elif low > state.pieces[i, START]:
        kept = max(kept, low)
    freed = remote_keys(pool, at, doc, state.held[at, doc]) - remote_keys(pool, at, doc, kept)
    added = pool.kv_units * fetched
    total = pool.kv_units * (fetched - freed)
    if to != home:  # q comes in at the server, the output comes in at home
        added += pool.q_units * (high - low)
        total += 2 * pool.q_units * (high - low)
    if at != home:
        total -= 2 * pool.q_units * (high - low)
    return total, added


@njit(cache=True, error_model="numpy")
def is_whole(pool, state, i, server):
    """Whether piece i is all of a document of this server's own tokens: nobody else has its keys.

    The usual short document. Moving it frees no keys, and all receivers differ by load alone.
    """
    doc = state.pieces[i, DOC]
    local = server * pool.tokens - pool.starts[doc]
    return (
        state.holders[doc] == 1
        and state.pieces[i, START] == 0
        and state.pieces[i, STOP] == state.held[server, doc]
        and local <= 0
        and state.pieces[i, STOP] <= local + pool.tokens
    )


@njit(cache=True, error_model="numpy")
def move_neighbours(pool, state, i, server, to, goal, ceiling):
    """After whole document i, those that follow it in token order, while they are about as good.

    Many short documents then move with few searches, and touch in the receiver's buffers.
    """
    worth = 3 * state.pieces[i, STOP] // 4  # pairs per unit grow with the length
    for j in range(i + 1, state.count[0]):
        length = state.pieces[j, STOP]
        if (
            state.pieces[j, AT] != server
            or state.pieces[j, DOC] != state.pieces[j - 1, DOC] + 1
            or length < worth
            or not is_whole(pool, state, j, server)
            or prefix_pairs(0, length) > min(state.load[server] - goal, ceiling - state.load[to])
            or state.rows[to] + length > pool.query_rows[to]
            or state.keys[to] + length > pool.key_rows
        ):
            break
        move(pool, state, j, 0, length, to)


@njit(cache=True, error_model="numpy")
def best_move(pool, state, server, goal, ceiling, aim):
    """The best move off `server`: (score, piece, low, high, receiver), score 0 if none is.

    A receiver is filled to `ceiling` pairs at most. LEVEL wants the server down at `goal` and takes
    the most useful pairs per marginal unit; REFINE takes the most units saved.
    """
    best = 0
    best_i, best_low, best_high, best_to = 0, 0, 0, 0
    excess = state.load[server] - goal
    emptiest_of_all = 1 if server == 0 else 0
    for to in range(state.load.size):
        if to != server and state.load[to] < state.load[emptiest_of_all]:
            emptiest_of_all = to
    shift = 0
    while shift < 40 and (max(excess, 1) << shift) < 2**60:
        shift += 1
    for i in range(state.count[0]):
        if state.pieces[i, AT] != server:
            continue
        doc, start, stop = state.pieces[i, DOC], state.pieces[i, START], state.pieces[i, STOP]
        # Servers without keys of the document differ by load alone: the emptiest stands for all.
        if is_whole(pool, state, i, server):
            first, last, kept, emptiest = emptiest_of_all, emptiest_of_all + 1, 0, emptiest_of_all
        else:
            first, last, kept, emptiest = 0, state.load.size, state.held[server, doc], -1
            if kept == stop:
                kept = held_without(state, server, doc, i)
        for to in range(last - first if emptiest < 0 else 0):
            local = to * pool.tokens - pool.starts[doc]
            if to == server or state.held[to, doc] > 0 or -pool.tokens < local < stop:
                continue
            if emptiest < 0 or state.load[to] < state.load[emptiest]:
                emptiest = to
        for to in range(first, last):
            local = to * pool.tokens - pool.starts[doc]
            if state.held[to, doc] == 0 and not -pool.tokens < local < stop and to != emptiest:
                continue
            room = ceiling - state.load[to]
            rows = pool.query_rows[to] - state.rows[to]
            end = state.held[to, doc] + pool.key_rows - state.keys[to]  # keys there is room for
            end = stop if end >= stop else down(end)
            if to == server or room <= 0 or rows <= 0 or end <= start:
                continue
            want = room if aim == REFINE else min(excess, room)
            suits = prefix_pairs(start, end) <= want and end - start <= rows
            for way in range(1 if suits else 1 + CUTS):
                low, high = start, end
                if way > 0:
                    low, high = cut(
                        way - 1, start, end, want, room, rows, state.held[to, doc],
                        pool.q_units, pool.kv_units,
                    )  # fmt: skip
                pairs = prefix_pairs(low, high)
                if low >= high or pairs > room or high - low > rows:
                    continue
                total, added = marginal(pool, state, i, low, high, to, kept)
                crowd = added * state.units_in[to] * pool.pressure
                cost = total + crowd // (PRESSURE_UNIT * pool.tokens * pool.kv_units)
                useful = min(pairs, excess) << shift
                score = -cost if aim == REFINE else max(useful // max(cost, 1), 1)
                if score > best:
                    best, best_i, best_low, best_high, best_to = score, i, low, high, to
    return best, best_i, best_low, best_high, best_to


@njit(cache=True, error_model="numpy")
def set_held(pool, state, server, doc, stop):
    """Sets the key prefix a server holds, with its keys and units."""
    old = state.held[server, doc]
    fetched = remote_keys(pool, server, doc, stop) - remote_keys(pool, server, doc, old)
    state.holders[doc] += (stop > 0) - (old > 0)
    state.held[server, doc] = stop
    state.keys[server] += stop - old
    state.units_in[server] += pool.kv_units * fetched


@njit(cache=True, error_model="numpy")
def move(pool, state, i, low, high, to):
    """Moves queries [low, high) of piece i to server `to`; what is left becomes new pieces."""
    doc, home, at = state.pieces[i, DOC], state.pieces[i, HOME], state.pieces[i, AT]
    for left, right in ((state.pieces[i, START], low), (high, state.pieces[i, STOP])):
        if left < right:
            rest = state.count[0]
            for column in range(AT + 1):
                state.pieces[rest, column] = state.pieces[i, column]
            state.pieces[rest, START], state.pieces[rest, STOP] = left, right
            state.count[0] += 1
    state.pieces[i, START], state.pieces[i, STOP], state.pieces[i, AT] = low, high, to
    rows, pairs = high - low, prefix_pairs(low, high)
    state.load[at] -= pairs
    state.load[to] += pairs
    state.rows[at] -= rows
    state.rows[to] += rows
    for server, sign in ((at, -1), (to, 1)):
        if server != home:
            state.units_in[server] += sign * pool.q_units * rows
            state.units_in[home] += sign * pool.q_units * rows
    set_held(pool, state, to, doc, max(state.held[to, doc], high))
    set_held(pool, state, at, doc, held_without(state, at, doc, np.int64(-1)))


@njit(cache=True, error_model="numpy")
def start_state(pool, pieces, count, servers):
    """State of the first `count` pieces."""
    state = State(
        pieces, np.full(1, count), np.zeros(servers, np.int64), np.zeros(servers, np.int64),
        np.zeros(servers, np.int64), np.zeros(servers, np.int64),
        np.zeros((servers, pool.starts.size), np.int64), np.zeros(pool.starts.size, np.int64),
    )  # fmt: skip
    for i in range(count):
        doc, home, at = pieces[i, DOC], pieces[i, HOME], pieces[i, AT]
        start, stop = pieces[i, START], pieces[i, STOP]
        state.load[at] += prefix_pairs(start, stop)
        state.rows[at] += stop - start
        if at != home:
            state.units_in[at] += pool.q_units * (stop - start)
            state.units_in[home] += pool.q_units * (stop - start)
        set_held(pool, state, at, doc, max(state.held[at, doc], stop))
    return state


@njit(cache=True, error_model="numpy")
def balance(pool, pieces, count, servers, bound, fill, max_moves, sweeps):
    """Moves pieces (in place) until no server is over `bound` pairs, or nothing helps any more.

    Receivers fill to `fill` pairs; where cuts of TILE_ROWS rows are too coarse for that, moves that
    still lower the maximum follow, which ends within (1 - 1/S) of one such cut above the mean.
    `sweeps` rounds then move pieces that save units without lifting a server over the bound.
    Returns (pieces in use, moves).
    """
    state = start_state(pool, pieces, count, servers)
    moves = 0
    while moves < max_moves and state.count[0] + 2 <= pieces.shape[0]:
        server = np.argmax(state.load)
        if state.load[server] <= bound:
            break
        score, i, low, high, to = best_move(pool, state, server, bound, fill, LEVEL)
        if score == 0:
            top = state.load[server] - 1
            score, i, low, high, to = best_move(pool, state, server, bound, top, LEVEL)
        if score == 0:
            break
        whole = is_whole(pool, state, i, server) and high == state.pieces[i, STOP] and low == 0
        move(pool, state, i, low, high, to)
        if whole:
            move_neighbours(pool, state, i, server, to, bound, fill)
        moves += 1
    for _ in range(sweeps if moves else 0):
        before = moves
        for server in range(servers):
            while moves < max_moves and state.count[0] + 2 <= pieces.shape[0]:
                score, i, low, high, to = best_move(
                    pool, state, server, state.load[server], bound, REFINE
                )
                if score == 0:
                    break
                move(pool, state, i, low, high, to)
                moves += 1
        if moves == before:
            break
    return state.count[0], moves
