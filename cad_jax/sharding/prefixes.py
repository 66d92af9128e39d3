"""Balance by pieces that keep their whole causal prefix: the greedy of `balance`, on task arrays.

Shape letters: T tokens per server, S servers, N documents, n tasks.
"""

from typing import NamedTuple

import numpy as np

from cad_jax.sharding.compiled import balance, best_balance
from cad_jax.sharding.fares import equal_weights
from cad_jax.sharding.pieces import Pool
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
    HeadShape,
    home_tasks,
    sort_tasks,
)

UNLIMITED = 2**62
# Receivers fill this part of the tolerance, in tenths, in a round of the greedy each.
FILL_TENTHS = (10, 6)
REFINE_SWEEPS = 3
# Tries to mend the best round and sweeps of each, by servers of the pool at most: bytes against time.
EFFORT = ((16, 48, 1), (48, 20, 3), (128, 12, 1), (UNLIMITED, 8, 3))
# Pieces a server that these are for: a try with as many more takes the square of that more time.
USUAL_PIECES = 32
_PIECE_COLUMNS = [DOCUMENT, Q_START, Q_STOP, HOME, SERVER]  # `pieces.DOC` and on


class PoolDocuments(NamedTuple):
    """What is planned, and for whom."""

    lengths: np.ndarray  # int64 [N], tokens
    starts: np.ndarray  # int64 [N], first token of each in the pool
    tokens_per_server: int
    heads: HeadShape
    speeds: np.ndarray  # int64 [S], of each server: any unit
    node: int  # servers of a node

    @property
    def servers(self) -> int:
        return len(self.speeds)

    @property
    def pairs(self) -> int:
        """(query, key) pairs of all documents."""
        return int(self.lengths @ (self.lengths + 1)) // 2


def load_bounds(pairs: int, speeds: np.ndarray, tolerance: float) -> np.ndarray:
    """Pairs each server may have, int64 [S]: (1 + tolerance) times its share, in whole pairs.

    pairs: of the whole pool. speeds: int64 [S]; a share is in proportion to them.
    """
    kinds, total = speeds.tolist(), int(speeds.sum())  # Python's integers: products pass 64 bits
    shares = {
        kind: max(int(pairs * (1 + tolerance) * kind / total), -(-pairs * kind // total))
        for kind in dict.fromkeys(kinds)
    }
    return np.array([shares[kind] for kind in kinds], np.int64)


def reachable_loads(documents: PoolDocuments, tolerance: float) -> np.ndarray:
    """`load_bounds`, or what list scheduling ends within of each server's share, int64 [S].

    With cuts of at most c pairs that is (1 - 1/S) c more than the mean, c where speeds differ.
    """
    longest = int(documents.lengths.max(initial=0))
    rest = max(longest - TILE_ROWS, 0)
    cut = (longest * (longest + 1) - rest * (rest + 1)) // 2
    servers, speeds, pairs = documents.servers, documents.speeds, documents.pairs
    listed = load_bounds(pairs, speeds, 0.0) + cut
    if np.all(speeds == speeds[0]):
        listed[:] = -(-(pairs + (servers - 1) * cut) // servers)
    return np.maximum(load_bounds(pairs, speeds, tolerance), listed)


def prefix_tasks(
    documents: PoolDocuments, tolerance: float, *, query_rows: np.ndarray, key_rows: int = UNLIMITED
) -> np.ndarray:
    """The tasks of the best of some rounds of the greedy, mended, int64 [n, 7], sorted.

    query_rows: int64 [S], most query rows of each server; key_rows: most key rows of any.
    """
    tries, sweeps = next(effort for most, *effort in EFFORT if documents.servers <= most)
    fills = np.stack(
        [
            load_bounds(documents.pairs, documents.speeds, tolerance * tenths / 10)
            for tenths in FILL_TENTHS
        ]
    )
    pool, pieces = _pool(documents, tolerance, query_rows, key_rows)
    crowding = max(len(pieces) // (documents.servers * USUAL_PIECES), 1)
    tries = max(tries // crowding**2, 1)
    room = len(pieces) + 64 * documents.servers
    # Not what list scheduling may end within: where the tolerance can be kept, bytes do not excuse more.
    promised = load_bounds(documents.pairs, documents.speeds, tolerance)
    while True:
        moved = best_balance(pool, pieces, room, fills, promised, sweeps, tries)
        if len(moved):
            return _tasks(moved)
        room *= 2


def few_moves(
    documents: PoolDocuments,
    tolerance: float,
    *,
    query_rows: np.ndarray,
    key_rows: int,
    max_moves: int = UNLIMITED,
) -> tuple[np.ndarray, int]:
    """One round of the greedy, stopped after some moves: (tasks, int64 [n, 7], moves made)."""
    pool, home = _pool(documents, tolerance, query_rows, key_rows)
    room = len(home) + 64 * documents.servers
    weights = equal_weights(documents.servers)
    while True:
        pieces, moves = balance(pool, home, room, pool.bound, weights, max_moves, REFINE_SWEEPS)
        if len(pieces):
            return _tasks(pieces), moves
        room *= 2


def _pool(documents, tolerance, query_rows, key_rows) -> tuple[Pool, np.ndarray]:
    heads, tokens = documents.heads, documents.tokens_per_server
    bound = load_bounds(documents.pairs, documents.speeds, tolerance)
    pool = Pool(
        documents.starts, documents.starts + documents.lengths, tokens, heads.q_units, heads.kv_units, query_rows, key_rows,
        documents.node, bound,
    )  # fmt: skip
    tasks = home_tasks(documents.lengths, tokens, documents.starts)
    return pool, np.ascontiguousarray(tasks[:, _PIECE_COLUMNS])


def _tasks(pieces: np.ndarray) -> np.ndarray:
    tasks = np.zeros((len(pieces), len(TASK_FIELDS)), np.int64)
    tasks[:, _PIECE_COLUMNS] = pieces
    tasks[:, K_STOP] = tasks[:, Q_STOP]
    return join_tasks(sort_tasks(tasks))


def join_tasks(tasks: np.ndarray) -> np.ndarray:
    """Sorted tasks, those that together are one task made one.

    Rows follow one another on one server and home, from one key on, and either up to one key too, or
    the first rows up to their own.
    """
    before, after = tasks[:-1], tasks[1:]
    kind = [DOCUMENT, HOME, SERVER, K_START]
    same = (before[:, kind] == after[:, kind]).all(1)
    causal = (before[:, K_STOP] == before[:, Q_STOP]) & (after[:, K_STOP] >= before[:, Q_STOP])
    same &= before[:, Q_STOP] == after[:, Q_START]
    same &= causal | (before[:, K_STOP] == after[:, K_STOP])
    first = np.flatnonzero(np.append(True, ~same)[: len(tasks)])
    joined = tasks[first]
    last = np.append(first[1:], len(tasks))[: len(first)] - 1
    joined[:, [Q_STOP, K_STOP]] = tasks[last][:, [Q_STOP, K_STOP]]
    return joined
