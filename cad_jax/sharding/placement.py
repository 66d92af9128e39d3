"""Placement: which rank holds which documents, by the order in which a step's documents are laid.

Order alone: which documents form a step or a nano-batch stays as it is packed, they lie end to end
with their padding last, and no document is cut.

- sequential: the order of packing.
- aligned: documents longer than a rank begin on rank boundaries; the others are dealt out, longest
  first, to the ranks of the fewest pairs, so that home loads are alike and few documents cross a
  boundary.
- searched: of both and some shuffles, the order whose plan costs least.

Pure functions of lengths, in integers, so that every host decides alike. Shape letters: T tokens per
server, S servers, N documents.
"""

import heapq
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from cad_jax.sharding.tasks import document_starts

Placement = Literal["sequential", "aligned", "searched"]
SHUFFLES = 6  # that a search tries
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def check_placement(placement: str) -> None:
    """Raises ValueError unless it is one of the ways there are."""
    if placement not in get_args(Placement):
        raise ValueError(
            f"placement must be one of {', '.join(get_args(Placement))}, got {placement!r}: "
            "sequential is the order of packing"
        )


def place(
    lengths: np.ndarray,
    placement: Placement,
    servers: int,
    tokens: int,
    cost: Callable[[np.ndarray], float] | None = None,
) -> np.ndarray:
    """The order in which documents are laid, int64 [N]: a permutation. tokens: T.

    lengths: int64 [N], together at most servers * tokens. cost: of lengths laid in one order, that a
    search needs: see `planners.wire_cost`. ValueError for an unknown placement, and for a search
    without a cost.
    """
    check_placement(placement)
    sequential = np.arange(len(lengths))
    if placement == "sequential":
        return sequential
    aligned = np.array(_Aligned(lengths.tolist(), servers, tokens).order(), np.int64)
    if placement == "aligned":
        return aligned
    if cost is None:
        raise ValueError("placement searched needs a cost: pass one, or use aligned")
    orders = [sequential, aligned, *(_shuffle(len(lengths), nth) for nth in range(SHUFFLES))]
    return min(orders, key=lambda order: cost(lengths[order]))  # the first of equals


def _shuffle(documents: int, nth: int) -> np.ndarray:
    """An order that looks random, the same with every version of numpy."""
    key = (np.arange(documents, dtype=np.uint64) + np.uint64(1 + nth * documents)) * _GOLDEN
    key = (key ^ (key >> np.uint64(29))) * _GOLDEN
    return np.argsort(key ^ (key >> np.uint64(32)), kind="stable")


class _Aligned:
    """Documents dealt out to ranks, then laid rank by rank."""

    def __init__(self, lengths: list[int], servers: int, tokens: int):
        self.lengths, self.servers, self.tokens = lengths, servers, tokens
        self.room = [tokens] * servers
        self.own: list[list[int]] = [[] for _ in range(servers)]
        self.spare: list[int] = []  # documents of no rank, shortest last
        by_length = sorted(range(len(lengths)), key=lambda d: (-lengths[d], d))
        long = [d for d in by_length if lengths[d] > tokens]
        pairs = self._begin(long)
        self._deal([d for d in by_length if lengths[d] <= tokens], pairs)

    def _begin(self, long: list[int]) -> list[int]:
        """Gives long documents ranks in a row each; returns the pairs that every rank then has."""
        rank, pairs = 0, [0] * self.servers
        for document in long:
            length, position = self.lengths[document], 0
            if rank * self.tokens + length > self.servers * self.tokens:
                self.spare.append(document)
                continue
            self.own[rank].append(document)
            while position < length:
                stop = min(position + self.tokens, length)
                pairs[rank] += (stop * (stop + 1) - position * (position + 1)) // 2
                self.room[rank] -= stop - position
                position = stop
                rank += 1
        return pairs

    def _deal(self, documents: list[int], pairs: list[int]) -> None:
        """Each document, longest first, to the rank of the fewest pairs that has room for it."""
        ranks = [(pairs[rank], rank) for rank in range(self.servers)]
        heapq.heapify(ranks)
        for document in documents:
            full, length = [], self.lengths[document]
            while ranks and self.room[ranks[0][1]] < length:
                full.append(heapq.heappop(ranks))
            if ranks:
                had, rank = ranks[0]
                heapq.heapreplace(ranks, (had + length * (length + 1) // 2, rank))
                self.room[rank] -= length
                self.own[rank].append(document)
            else:
                self.spare.append(document)
            for entry in full:  # of no use to longer documents, but to shorter ones
                if self.room[entry[1]] > 0:
                    heapq.heappush(ranks, entry)

    def order(self) -> list[int]:
        """The documents of rank after rank; spare ones, and then those of later ranks, fill what is left
        of each, the last of them across its boundary."""
        order: list[int] = []
        laid = 0
        spare = sorted(self.spare, key=lambda d: (-self.lengths[d], d))
        for rank in range(self.servers):
            for document in self.own[rank]:
                order.append(document)
                laid += self.lengths[document]
            while laid < (rank + 1) * self.tokens and spare:
                gap = (rank + 1) * self.tokens - laid
                at = next(
                    (i for i, d in enumerate(spare) if self.lengths[d] <= gap), len(spare) - 1
                )
                document = spare.pop(at)
                order.append(document)
                laid += self.lengths[document]
        return order + spare


def token_order(lengths: np.ndarray, order: np.ndarray, tokens: int) -> np.ndarray:
    """New position -> old one of every token, int64 [tokens]: documents end to end, laid in `order`;
    the padding behind them stays. lengths, order: int64 [N], as `place` takes and gives them."""
    laid = lengths[order]
    moved_by = document_starts(lengths)[order] - document_starts(laid)
    positions = np.arange(tokens)
    positions[: laid.sum()] += np.repeat(moved_by, laid)
    return positions
