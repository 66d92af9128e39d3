"""The greedy that balances core attention: integer functions, compiled once and cached on disk.

While a server is over its bound, the piece with the most (query, key) pairs per weighted fare moves to
a server that has room. Rounds follow one another with fares dearer where most came in the round before.
All arithmetic is int64, so that every host decides alike.

Shape letters: S servers.
"""

import numpy as np
from numba import njit

from cad_jax.sharding.cuts import CUTS, cut, down, prefix_pairs
from cad_jax.sharding.fares import equal_weights, judged, next_weights, price
from cad_jax.sharding.pieces import (
    AT,
    DOC,
    HOME,
    START,
    STOP,
    has_room,
    held_without,
    is_whole,
    key_fare,
    move,
    receivers,
    restart,
    start_state,
)
from cad_jax.sharding.tasks import TILE_ROWS

LEVEL, REFINE = range(2)  # what a move is for: to lower the maximum, or to save fare


@njit(error_model="numpy")
def marginal(pool, state, weights, i, low, high, to, kept):
    """Weighted fare that moving queries [low, high) of piece i adds in all."""
    doc, home, at = state.pieces[i, DOC], state.pieces[i, HOME], state.pieces[i, AT]
    fetched = key_fare(pool, to, doc, max(state.held[to, doc], high)) - key_fare(
        pool, to, doc, state.held[to, doc]
    )
    if high < state.pieces[i, STOP]:
        kept = max(kept, state.pieces[i, STOP])
    elif low > state.pieces[i, START]:
        kept = max(kept, low)
    freed = key_fare(pool, at, doc, state.held[at, doc]) - key_fare(pool, at, doc, kept)
    # q comes in at the server, the output comes in at home
    queries = pool.q_units * (high - low)
    taken = queries * price(pool.node, home, to) * (weights[to] + weights[home])
    returned = queries * price(pool.node, home, at) * (weights[at] + weights[home])
    return fetched * weights[to] - freed * weights[at] + taken - returned


@njit(error_model="numpy")
def best_move(pool, state, weights, server, excess, ceiling, aim):
    """The best move off `server`: (score, piece, low, high, receiver), score 0 if none is.

    A receiver is filled to `ceiling` pairs at most, int64 [S]. LEVEL wants the server rid of `excess`
    pairs and takes the most useful pairs per weighted fare; REFINE takes the most fare saved.
    """
    best = 0
    best_i, best_low, best_high, best_to = 0, 0, 0, 0
    roomiest = 1 if server == 0 else 0
    for to in range(state.load.size):
        if to != server and ceiling[to] - state.load[to] > ceiling[roomiest] - state.load[roomiest]:
            roomiest = to
    shift = 0
    while shift < 40 and (max(excess, 1) << shift) < 2**60:
        shift += 1
    following = state.piece[server]
    while following >= 0:
        i, following = following, state.chain[following, 1]
        doc, start, stop = state.pieces[i, DOC], state.pieces[i, START], state.pieces[i, STOP]
        if aim == REFINE:
            home = state.pieces[i, HOME]
            spared = key_fare(pool, server, doc, state.held[server, doc]) * weights[server]
            queries = pool.q_units * (stop - start) * price(pool.node, home, server)
            if spared + queries * (weights[server] + weights[home]) <= best:
                continue  # all that it has of the document would save no more
        if is_whole(pool, state, i, server):
            kept, count = 0, 1
            state.receivers[0] = roomiest
        else:
            kept = state.held[server, doc]
            if kept == stop:
                kept = held_without(state, server, doc, i)
            count = receivers(pool, state, doc, roomiest)
        for nth in range(count):
            to = state.receivers[nth]
            room = ceiling[to] - state.load[to]
            rows = pool.query_rows[to] - state.rows[to]
            end = state.held[to, doc] + pool.key_rows - state.keys[to]  # keys there is room for
            end = stop if end >= stop else down(end)
            if to == server or room <= 0 or rows <= 0 or end <= start:
                continue
            if aim == REFINE and room < TILE_ROWS // 2 * start:
                continue  # not for the least part worth a search
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
                cost = marginal(pool, state, weights, i, low, high, to, kept)
                useful = min(pairs, excess) << shift
                score = -cost if aim == REFINE else max(useful // max(cost, 1), 1)
                if score > best:
                    best, best_i, best_low, best_high, best_to = score, i, low, high, to
    return best, best_i, best_low, best_high, best_to


@njit(error_model="numpy")
def move_neighbours(pool, state, i, server, to, ceiling):
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
            or prefix_pairs(0, length)
            > min(state.load[server] - pool.bound[server], ceiling[to] - state.load[to])
            or state.rows[to] + length > pool.query_rows[to]
            or state.keys[to] + length > pool.key_rows
            or not has_room(state)
        ):
            break
        move(pool, state, j, 0, length, to)


@njit(error_model="numpy")
def balance(pool, state, fill, weights, max_moves, sweeps, stale):
    """Moves pieces until no server is over its bound, or nothing helps any more.

    Receivers fill to `fill` pairs, int64 [S]; where cuts of TILE_ROWS rows are too coarse for that,
    moves that still lower the most a server is over follow, which ends within (1 - 1/S) of one such
    cut above the mean. `sweeps` rounds then move pieces that save fare without lifting a server over
    its bound, off servers that are `stale`, bool [S]: those among them, and those that have changed
    since they were searched. Returns how many moves.
    """
    moves = 0
    while moves < max_moves and has_room(state):
        over = state.load - pool.bound
        server = np.argmax(over)
        if over[server] <= 0:
            break
        score, i, low, high, to = best_move(pool, state, weights, server, over[server], fill, LEVEL)
        if score == 0:
            score, i, low, high, to = best_move(
                pool, state, weights, server, over[server], pool.bound + over[server] - 1, LEVEL
            )
        if score == 0:
            break
        whole = is_whole(pool, state, i, server) and high == state.pieces[i, STOP] and low == 0
        move(pool, state, i, low, high, to)
        stale[server], stale[to] = True, True
        if whole:
            move_neighbours(pool, state, i, server, to, fill)
        moves += 1
    for _ in range(sweeps if moves else 0):
        before = moves
        for server in range(pool.bound.size):
            while stale[server] and moves < max_moves and has_room(state):
                score, i, low, high, to = best_move(
                    pool, state, weights, server, np.int64(0), pool.bound, REFINE
                )
                if score == 0:
                    stale[server] = False
                    break
                move(pool, state, i, low, high, to)
                stale[to] = True
                moves += 1
        if moves == before:
            break
    return moves


@njit(error_model="numpy")
def balance_once(pool, home_pieces, room, fill, weights, max_moves, sweeps):
    """One round of `balance` from the home plan: (pieces, int64 [n, 5], moves made); no pieces where
    `room` for them did not suffice."""
    pieces = np.zeros((room, home_pieces.shape[1]), np.int64)
    pieces[: home_pieces.shape[0]] = home_pieces
    state = start_state(pool, pieces, home_pieces.shape[0])
    stale = np.ones(pool.bound.size, np.bool_)
    moves = balance(pool, state, fill, weights, max_moves, sweeps, stale)
    return pieces[: state.count[0] if has_room(state) else 0], moves


@njit(error_model="numpy")
def best_balance(pool, home_pieces, room, fills, promised, sweeps):
    """The best of as many rounds as there are `fills`, int64 [rounds, S], each from the home plan with
    the weights that the last one's fares make; and of the best two ways once more with `sweeps`.

    Plans within `promised` pairs, int64 [S], are judged by fare alone. Returns (the pieces, int64 [n,
    5], or none where `room` for pieces did not suffice; a state of this pool).
    """
    servers, rounds = pool.bound.size, fills.shape[0]
    weights = np.zeros((rounds + 1, servers), np.int64)
    weights[0] = equal_weights(servers)
    over, fare = np.zeros(rounds + 2, np.int64), np.zeros(rounds + 2, np.int64)
    swept = np.zeros(rounds, np.bool_)
    best, best_pieces = 0, home_pieces
    pieces = np.zeros((room, home_pieces.shape[1]), np.int64)
    pieces[: home_pieces.shape[0]] = home_pieces
    state = start_state(pool, pieces, home_pieces.shape[0])
    for nth in range(rounds + 2):
        way = nth
        if nth >= rounds:
            way = -1
            for i in range(rounds):
                if not swept[i] and (way < 0 or (over[i], fare[i]) < (over[way], fare[way])):
                    way = i
            if way < 0:
                break
            swept[way] = True
        if nth > 0:
            restart(pool, state, home_pieces)
        balance(
            pool, state, fills[way], weights[way], np.int64(2**62),
            sweeps if nth >= rounds else 0, np.ones(servers, np.bool_),
        )  # fmt: skip
        if not has_room(state):
            return pieces[:0], state
        over[nth], fare[nth] = max((state.load - promised).max(), 0), judged(state.fare)
        if nth == 0 or (over[nth], fare[nth]) < (over[best], fare[best]):
            best, best_pieces = nth, pieces[: state.count[0]].copy()
        if nth < rounds:
            weights[nth + 1] = next_weights(weights[nth], state.fare)
    return best_pieces, state
