"""Balance mended: part of a plan goes home again and is balanced once more, another way.

What a greedy gave away early it never takes back. Here the pieces around a crowded server do go home,
a few at a time, or one piece goes elsewhere, and the greedy of `balance` finds new places for what is
over then; the plan that costs less stays. All arithmetic is int64, choices come from a fixed sequence, and every host mends
alike.

Shape letter: S servers.
"""

import numpy as np
from numba import njit

from cad_jax.sharding.balance import balance
from cad_jax.sharding.fares import WEIGHT, judged
from cad_jax.sharding.pieces import AT, DOC, HOME, START, STOP, has_room, restart

# To choose what goes home: of the crowded server, of another one too, of one document; or one piece of
# the crowded server's goes to any other.
WAYS = 4


@njit(error_model="numpy")
def _next(seed):
    """The next number of a fixed sequence, 31 bits of which are well mixed."""
    return seed * np.int64(6364136223846793005) + np.int64(1442695040888963407)


@njit(error_model="numpy")
def _below(seed, limit):
    return ((seed >> np.int64(33)) & np.int64(0x7FFFFFFF)) % limit


@njit(error_model="numpy")
def ordered(pieces):
    """Pieces in token order, those that together are one piece made one."""
    order = np.argsort((pieces[:, DOC] << 32) + pieces[:, START])
    joined = np.empty_like(pieces)
    count = 0
    for i in order:
        if (
            count > 0
            and joined[count - 1, DOC] == pieces[i, DOC]
            and joined[count - 1, STOP] == pieces[i, START]
            and joined[count - 1, HOME] == pieces[i, HOME]
            and joined[count - 1, AT] == pieces[i, AT]
        ):
            joined[count - 1, STOP] = pieces[i, STOP]
        else:
            joined[count] = pieces[i]
            count += 1
    return joined[:count]


@njit(error_model="numpy")
def _some_document(pieces, crowded, seed):
    """A document of which pieces are away from home, and from or on the crowded server; -1: none."""
    first = _below(seed, max(pieces.shape[0], 1))
    for step in range(pieces.shape[0]):
        i = (first + step) % pieces.shape[0]
        at, home = pieces[i, AT], pieces[i, HOME]
        if at != home and crowded in (at, home):
            return pieces[i, DOC]
    return -1


@njit(error_model="numpy")
def _sent_away(pieces, crowded, servers, seed):
    """A copy of the pieces, one that is on the crowded server, or its own and away, on any other."""
    result = pieces.copy()
    seed = _next(seed)
    first, to = _below(seed, max(pieces.shape[0], 1)), _below(_next(seed), servers)
    for step in range(pieces.shape[0]):
        i = (first + step) % pieces.shape[0]
        at, home = pieces[i, AT], pieces[i, HOME]
        if at == crowded or (at != home and home == crowded):
            result[i, AT] = to
            break
    return ordered(result)


@njit(error_model="numpy")
def _disturbed(pieces, fare, way, seed):
    """A copy of the pieces, three in four of those that are chosen at home again; or one elsewhere."""
    crowded = np.argmax(fare)
    if way == 3:
        return _sent_away(pieces, crowded, fare.size, seed)
    other = _below(seed, fare.size) if way == 1 else crowded
    document = _some_document(pieces, crowded, seed) if way == 2 else -1
    result = pieces.copy()
    for i in range(pieces.shape[0]):
        at, home = pieces[i, AT], pieces[i, HOME]
        if at == home:
            continue
        chosen = crowded in (at, home) or other in (at, home)
        if way == 2:
            chosen = pieces[i, DOC] == document
        seed = _next(seed)
        if chosen and _below(seed, 4) > 0:
            result[i, AT] = home
    return ordered(result)


@njit(error_model="numpy")
def _weights(fare, seed):
    """What a unit weighs on each server: as in what a plan is judged by, some more and some less."""
    near = (64 * fare // max(fare.max(), 1)) ** 8 // 2**20
    weights = WEIGHT + fare.size * WEIGHT * near // max(near.sum(), 1)
    for server in range(fare.size):
        seed = _next(seed)
        weights[server] = max(weights[server] * (32 + _below(seed, 65)) // 64, 1)
    return weights


@njit(error_model="numpy")
def mend(pool, state, pieces, fills, promised, tries, sweeps):
    """Better pieces than these, int64 [n, 5], after so many tries; the same where none helps.

    state: of this pool, to work in. fills: int64 [rounds, S], ways to fill receivers.
    """
    restart(pool, state, pieces)
    over, cost = max((state.load - promised).max(), 0), judged(state.fare)
    fare = state.fare.copy()
    seed = np.int64(1)
    for nth in range(tries):
        seed = _next(seed)
        trial = _disturbed(pieces, fare, nth % WAYS, seed)
        if trial.shape[0] + 2 > state.pieces.shape[0]:
            break
        restart(pool, state, trial)
        stale = np.zeros(pool.bound.size, np.bool_)
        balance(
            pool,
            state,
            fills[nth // WAYS % fills.shape[0]],
            _weights(fare, seed),
            np.int64(2**62),
            sweeps,
            stale,
        )
        # A home that has taken others' rows may have no room for its own.
        crowded = (state.rows > pool.query_rows).any() or state.keys.max() > pool.key_rows
        if crowded or not has_room(state):
            continue
        trial_over, trial_cost = max((state.load - promised).max(), 0), judged(state.fare)
        if (trial_over, trial_cost) < (over, cost):
            over, cost = trial_over, trial_cost
            fare[:] = state.fare
            pieces = ordered(state.pieces[: state.count[0]])
    return pieces
