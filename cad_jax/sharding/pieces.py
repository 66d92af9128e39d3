"""Pieces of documents with their whole causal prefix, on servers: what a move changes.

Traffic counts in exchange units (`tasks.HeadShape`), each at its price (`fares`): q_units for a query
row and again for its returned output, kv_units for a key row with its value. A server holds one key
prefix of each document it serves; keys that are local, or already fetched for another task, cost
nothing. All arithmetic is int64, so that every host decides alike.

Shape letters: S servers, N documents, P pieces (room for new ones included).
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from cad_jax.sharding.cuts import prefix_pairs
from cad_jax.sharding.fares import FAR, NEAR, price

DOC, START, STOP, HOME, AT = range(5)  # columns of a piece: queries [START, STOP) of DOC


class Pool(NamedTuple):
    """What stays fixed while pieces move."""

    starts: np.ndarray  # int64 [N], global token index of each document
    ends: np.ndarray  # int64 [N], after its last token
    tokens: int  # T
    q_units: int
    kv_units: int
    query_rows: np.ndarray  # int64 [S], capacity of each server's query buffer
    key_rows: int  # capacity of a server's key buffer
    node: int  # servers of a node
    bound: np.ndarray  # int64 [S], pairs a server may have


class State(NamedTuple):
    """Pieces and what follows from them, kept up to date by `move`."""

    pieces: np.ndarray  # int64 [P, 5]
    count: np.ndarray  # int64 [1], pieces in use
    load: np.ndarray  # int64 [S], pairs
    fare: np.ndarray  # int64 [S], units in, each at its price
    rows: np.ndarray  # int64 [S], query rows
    keys: np.ndarray  # int64 [S], key rows
    held: np.ndarray  # int64 [S, N], key prefix
    holders: np.ndarray  # int64 [N], servers that hold keys of the document
    piece: np.ndarray  # int64 [S], the first piece on a server, -1: none
    chain: np.ndarray  # int64 [P, 2], the pieces on the same server before and after a piece
    guest: np.ndarray  # int64 [N], the first of a document's `guests`, -1: none
    guests: (
        np.ndarray
    )  # int64 [P, 2], a server that once took a piece of the document, the next one
    guest_count: np.ndarray  # int64 [1]
    receivers: np.ndarray  # int64 [S], room for a list of servers


@njit(error_model="numpy")
def key_fare(pool, server, doc, stop):
    """What the keys of the prefix [0, stop) of a document cost a server, its own aside."""
    low = server * pool.tokens - pool.starts[doc]
    own = max(0, min(stop, low + pool.tokens) - max(0, low))
    if pool.node == 1:
        return FAR * pool.kv_units * (stop - own)
    low = server // pool.node * pool.node * pool.tokens - pool.starts[doc]
    near = max(0, min(stop, low + pool.node * pool.tokens) - max(0, low))
    return pool.kv_units * (FAR * (stop - near) + NEAR * (near - own))


@njit(error_model="numpy")
def put(state, i, server):
    """Puts piece i first on a server."""
    after = state.piece[server]
    state.chain[i, 0], state.chain[i, 1] = -1, after
    if after >= 0:
        state.chain[after, 0] = i
    state.piece[server] = i


@njit(error_model="numpy")
def take(state, i, server):
    """Takes piece i off a server."""
    before, after = state.chain[i]
    if before < 0:
        state.piece[server] = after
    else:
        state.chain[before, 1] = after
    if after >= 0:
        state.chain[after, 0] = before


@njit(error_model="numpy")
def invite(pool, state, doc, server):
    """Notes a server, none of its homes, that takes a piece of a document."""
    first, last = pool.starts[doc] // pool.tokens, (pool.ends[doc] - 1) // pool.tokens
    entry = state.guest[doc]
    while entry >= 0:
        if state.guests[entry, 0] == server:
            return
        entry = state.guests[entry, 1]
    if not first <= server <= last:
        entry = state.guest_count[0]
        state.guest_count[0] += 1
        state.guests[entry, 0], state.guests[entry, 1] = server, state.guest[doc]
        state.guest[doc] = entry


@njit(error_model="numpy")
def held_without(state, server, doc, skip):
    """Key prefix a server needs of a document without piece `skip`."""
    stop = 0
    j = state.piece[server]
    while j >= 0:
        if j != skip and state.pieces[j, DOC] == doc:
            stop = max(stop, state.pieces[j, STOP])
        j = state.chain[j, 1]
    return stop


@njit(error_model="numpy")
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


@njit(error_model="numpy")
def receivers(pool, state, doc, roomiest):
    """Who may take queries of a document, into `state.receivers`: its homes, servers that took some
    before, and of all others, who differ by load alone, the one with the most room. Returns how many.
    """
    first, last = pool.starts[doc] // pool.tokens, (pool.ends[doc] - 1) // pool.tokens
    count, found = 0, first <= roomiest <= last
    for server in range(first, last + 1):
        state.receivers[count] = server
        count += 1
    entry = state.guest[doc]
    while entry >= 0:
        server = state.guests[entry, 0]
        if state.held[server, doc] > 0:
            state.receivers[count] = server
            count += 1
            found = found or server == roomiest
        entry = state.guests[entry, 1]
    if not found:
        state.receivers[count] = roomiest
        count += 1
    return count


@njit(error_model="numpy")
def set_held(pool, state, server, doc, stop):
    """Sets the key prefix a server holds, with its keys and fare."""
    old = state.held[server, doc]
    state.holders[doc] += (stop > 0) - (old > 0)
    state.held[server, doc] = stop
    state.keys[server] += stop - old
    state.fare[server] += key_fare(pool, server, doc, stop) - key_fare(pool, server, doc, old)


@njit(error_model="numpy")
def move(pool, state, i, low, high, to):
    """Moves queries [low, high) of piece i to server `to`; what is left becomes new pieces."""
    doc, home, at = state.pieces[i, DOC], state.pieces[i, HOME], state.pieces[i, AT]
    for left, right in ((state.pieces[i, START], low), (high, state.pieces[i, STOP])):
        if left < right:
            rest = state.count[0]
            for column in range(AT + 1):
                state.pieces[rest, column] = state.pieces[i, column]
            state.pieces[rest, START], state.pieces[rest, STOP] = left, right
            put(state, rest, at)
            state.count[0] += 1
    state.pieces[i, START], state.pieces[i, STOP], state.pieces[i, AT] = low, high, to
    take(state, i, at)
    put(state, i, to)
    invite(pool, state, doc, to)
    rows, pairs = high - low, prefix_pairs(low, high)
    state.load[at] -= pairs
    state.load[to] += pairs
    state.rows[at] -= rows
    state.rows[to] += rows
    for server, sign in ((at, -1), (to, 1)):
        cost = sign * pool.q_units * rows * price(pool.node, home, server)
        state.fare[server] += cost
        state.fare[home] += cost
    set_held(pool, state, to, doc, max(state.held[to, doc], high))
    set_held(pool, state, at, doc, held_without(state, at, doc, np.int64(-1)))


@njit(error_model="numpy")
def start_state(pool, pieces, count):
    """State of the first `count` pieces, all at home."""
    servers = pool.bound.size
    state = State(
        pieces, np.full(1, count), np.zeros(servers, np.int64), np.zeros(servers, np.int64),
        np.zeros(servers, np.int64), np.zeros(servers, np.int64),
        np.zeros((servers, pool.starts.size), np.int64), np.zeros(pool.starts.size, np.int64),
        np.full(servers, -1), np.full((pieces.shape[0], 2), -1), np.full(pool.starts.size, -1),
        np.zeros((pieces.shape[0], 2), np.int64), np.zeros(1, np.int64),
        np.zeros(servers, np.int64),
    )  # fmt: skip
    _settle(pool, state)
    return state


@njit(error_model="numpy")
def restart(pool, state, pieces):
    """The state of these pieces, in the arrays of a state of the same pool."""
    for i in range(state.count[0]):
        state.held[state.pieces[i, AT], state.pieces[i, DOC]] = 0
    for values in (state.load, state.fare, state.rows, state.keys, state.holders):
        values[:] = 0
    state.piece[:], state.guest[:], state.guest_count[0] = -1, -1, 0
    state.count[0] = pieces.shape[0]
    state.pieces[: pieces.shape[0]] = pieces
    _settle(pool, state)


@njit(error_model="numpy")
def _settle(pool, state):
    """Counts every piece where it is: all sums begin at zero."""
    for i in range(state.count[0] - 1, -1, -1):
        doc, at = state.pieces[i, DOC], state.pieces[i, AT]
        put(state, i, at)
        start, stop = state.pieces[i, START], state.pieces[i, STOP]
        state.load[at] += prefix_pairs(start, stop)
        state.rows[at] += stop - start
        set_held(pool, state, at, doc, max(state.held[at, doc], stop))
        home = state.pieces[i, HOME]
        if at != home:
            cost = pool.q_units * (stop - start) * price(pool.node, home, at)
            state.fare[at] += cost
            state.fare[home] += cost
            invite(pool, state, doc, at)


@njit(error_model="numpy")
def has_room(state):
    """Whether any one move still fits the arrays."""
    room = state.pieces.shape[0]
    return state.count[0] + 2 <= room and state.guest_count[0] + 1 <= room
