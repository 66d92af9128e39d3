"""The published planner (arXiv 2510.18121 and its released code), re-implemented from its description.

Documents lie end to end with a head-tail placement: where one does not fit the rest of a server, the
part that fits is taken from its outside, as many tokens of its head as of its tail, and the remainder
goes on. An item is such a pair, the tokens [start, start + n) and [L - start - n, L - start) of a
document of L tokens; it costs n (L + 1) (query, key) pairs wherever it lies. Servers below the mean,
the largest deficit first, take items from those above it until they lack at most tolerance times the
mean: a bound on deficits, not on the maximum. Host only.

Shape letters: S servers, T tokens per server, n tasks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cad_jax.sharding.cost import Flows, travelling_queries
from cad_jax.sharding.tasks import (
    DOCUMENT,
    HOME,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    TASK_FIELDS,
    HeadShape,
    causal_pairs,
    sort_tasks,
)
from cad_jax.simulation.work import MovedRows


class PublishedPlan(NamedTuple):
    """tasks: int64 [n, 7], rows of `TASK_FIELDS`; homes are those of the head-tail placement."""

    lengths: np.ndarray
    tasks: np.ndarray
    servers: int

    def loads(self) -> np.ndarray:
        """(query, key) pairs of each server, int64 [S]."""
        pairs = causal_pairs(*self.tasks[:, Q_START : K_STOP + 1].T)
        return np.bincount(self.tasks[:, SERVER], pairs, self.servers).astype(np.int64)

    def moved_rows(self) -> MovedRows:
        """Rows that travel; keys once a server and document, as one prefix up to the last row that
        the server needs, without the server's own rows.
        """
        tasks, servers = self.tasks, self.servers
        span = int(self.lengths.max(initial=0)) + 1
        key = tasks[:, DOCUMENT] * servers + tasks[:, SERVER]
        holders, of = np.unique(key, return_inverse=True)
        prefix = np.zeros(len(holders), np.int64)
        np.maximum.at(prefix, of, tasks[:, Q_STOP])
        # A task's rows are at its home: each holder of the document needs those below its prefix.
        order = np.argsort(tasks[:, DOCUMENT], kind="stable")
        document = holders // servers
        first = np.searchsorted(tasks[order, DOCUMENT], document, side="left")
        last = np.searchsorted(tasks[order, DOCUMENT], document, side="right")
        counts = last - first
        holder = np.repeat(np.arange(len(holders)), counts)
        nth = np.arange(len(holder)) - np.repeat(np.cumsum(counts) - counts, counts)
        task = order[first[holder] + nth]
        rows = np.clip(
            np.minimum(tasks[task, Q_STOP], prefix[holder]) - tasks[task, Q_START], 0, span
        )
        server, home = holders[holder] % servers, tasks[task, HOME]
        rows = np.where(server == home, 0, rows)
        return MovedRows(travelling_queries(tasks), Flows(home, server, rows))


def even_lengths(lengths: np.ndarray, room_tokens: int) -> np.ndarray:
    """Lengths rounded up to even, int64 [N], the last ones cut where that exceeds the room."""
    even = lengths + lengths % 2
    ends = np.minimum(np.cumsum(even), room_tokens)
    return np.diff(ends, prepend=0)


def plan_published(
    stages: Sequence[np.ndarray],
    *,
    servers: int,
    tokens_per_server: int,
    heads: HeadShape,
    tolerance: float = 0.1,
) -> PublishedPlan:
    """Plans documents by the published rule.

    stages: document lengths of each pipeline stage, which hold as many servers each; one without a
    pipeline. Taken in order, odd ones rounded up to even. tokens_per_server: T, even. heads: of one
    device, for the bytes of a move: query rows once, keys as the whole document's.

    Raises ValueError for an odd T, documents that do not fit, or a negative tolerance.
    """
    if tokens_per_server % 2:
        raise ValueError(
            f"tokens_per_server must be even for the published planner, got {tokens_per_server}: "
            "its items are pairs of equal halves; use an even number"
        )
    if tolerance < 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}: 0.1 is the published one")
    per_stage = servers // len(stages)
    room = per_stage * tokens_per_server
    rows, homes, even = [], [], []
    for stage, lengths in enumerate(stages):
        lengths = np.asarray(lengths, np.int64)
        if lengths.sum() > room:
            raise ValueError(
                f"documents of a stage must fit its {per_stage} x {tokens_per_server} tokens, got "
                f"{lengths.sum()}: plan fewer documents"
            )
        lengths = even_lengths(lengths, room)
        placed, on = _placed(lengths, sum(map(len, even)), stage * per_stage, tokens_per_server)
        rows, homes, even = rows + placed, homes + on, [*even, lengths]
    items = _Items(rows, homes)
    _balance(items, servers, heads, tolerance)
    return PublishedPlan(np.concatenate(even), _tasks(items), servers)


class _Items:
    """Head-tail pairs while they are moved: parallel arrays with room to grow."""

    def __init__(self, rows: list[tuple[int, int, int, int]], homes: list[int]):
        count = len(rows)
        self.count = count
        table = np.array(rows, np.int64).reshape(-1, 4)
        self.table = np.zeros((2 * count + 64, 6), np.int64)  # document, L, start, n, home, server
        self.table[:count, :4] = table
        self.table[:count, 4] = self.table[:count, 5] = homes

    @property
    def live(self) -> np.ndarray:
        return self.table[: self.count]

    def append(self, row) -> None:
        if self.count == len(self.table):
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        self.table[self.count] = row
        self.count += 1


def _placed(
    lengths: np.ndarray, first_document: int, server: int, tokens_per_server: int
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Items (document, L, start, n) from a server on, and their homes."""
    rows, homes = [], []
    room = tokens_per_server
    for document, length in enumerate(lengths.tolist(), first_document):
        start = 0
        while 2 * start < length:
            if room == 0:
                server, room = server + 1, tokens_per_server
            half = min(length - 2 * start, room) // 2
            rows.append((document, length, start, half))
            homes.append(server)
            start, room = start + half, room - 2 * half
    return rows, homes


def _balance(items: _Items, servers: int, heads: HeadShape, tolerance: float) -> None:
    q_bytes, kv_bytes = heads.q_row_bytes(), heads.kv_row_bytes()
    live = items.live
    pairs = live[:, 3] * (live[:, 1] + 1)
    load = np.bincount(live[:, 5], pairs, servers)
    mean = load.sum() / servers
    surplus = load - mean
    recipients = np.flatnonzero(surplus < 0)
    for server in recipients[np.argsort(surplus[recipients], kind="stable")].tolist():
        while -surplus[server] > tolerance * mean:
            live = items.live
            span = live[:, 1] + 1
            available = np.minimum(live[:, 3] * span, surplus[live[:, 5]])
            move = np.minimum(available, -surplus[server])
            donors = np.flatnonzero((move > 0) & (surplus[live[:, 5]] > 0))
            if not len(donors):
                break
            moved, width = move[donors], span[donors]
            price = (q_bytes * moved / width + kv_bytes * width) / moved
            at = donors[int(np.argmin(price))]
            document, length, start, half, home, donor = live[at].tolist()
            cost = half * (length + 1)
            if move[at] >= cost:
                live[at, 5] = server
            else:
                taken = int(move[at] // (length + 1))
                if taken == 0:
                    break
                cost = taken * (length + 1)
                live[at, 3] = half - taken
                items.append((document, length, start + half - taken, taken, home, server))
            surplus[donor] -= cost
            surplus[server] += cost


def _tasks(items: _Items) -> np.ndarray:
    """Two tasks an item, or one where head and tail touch."""
    document, length, start, half, home, server = items.live[items.live[:, 3] > 0].T
    touch = 2 * (start + half) == length
    tasks = np.zeros((2, len(document), len(TASK_FIELDS)), np.int64)
    tasks[:, :, DOCUMENT], tasks[:, :, HOME], tasks[:, :, SERVER] = document, home, server
    tasks[0, :, Q_START], tasks[0, :, Q_STOP] = start, np.where(touch, length - start, start + half)
    tasks[1, :, Q_START], tasks[1, :, Q_STOP] = length - start - half, length - start
    tasks[:, :, K_STOP] = tasks[:, :, Q_STOP]
    return sort_tasks(np.concatenate([tasks[0], tasks[1][~touch]]))
