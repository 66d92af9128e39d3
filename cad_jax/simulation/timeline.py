"""Events of all ranks over time: a compute stream and a network stream each. Host only.

Ranks advance together, as arrays: an event is a compute operation, or a collective of groups of
ranks, that starts on a rank once its streams are free and what it waits for is there. A collective
starts on all ranks of a group when the last of them has come.

Shape letters: R ranks of the timeline, r ranks of an event, a contiguous range.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

Stream = Literal["compute", "network"]
STREAMS: tuple[Stream, ...] = ("compute", "network")
COMPUTE_KINDS = ("linear", "head", "masked", "attention")


class Event(NamedTuple):
    """start_s, stop_s: float64 [r], of ranks [first_rank, first_rank + r)."""

    stream: Stream
    kind: str  # of COMPUTE_KINDS, or "exchange"
    label: str
    first_rank: int
    start_s: np.ndarray
    stop_s: np.ndarray


class Accounts(NamedTuple):
    """Where each rank's time went, float64 [R] each, in seconds.

    linear_s + head_s + masked_s + attention_s + exposed_s + waiting_s = the makespan.
    """

    linear_s: np.ndarray
    head_s: np.ndarray  # head and loss
    masked_s: (
        np.ndarray
    )  # on nothing: layers of idle pipeline stages, and heads where none has a loss
    attention_s: np.ndarray
    exposed_s: np.ndarray  # compute stood still while the rank's network was busy
    waiting_s: np.ndarray  # compute stood still, and so did the rank's network: for other ranks

    @property
    def idle_s(self) -> np.ndarray:
        """All time without work of its own."""
        return self.masked_s + self.exposed_s + self.waiting_s


@dataclass
class Timeline:
    """The streams of `ranks` ranks while they are simulated. slowdown: float64 [R], by which each one's seconds of compute
    are multiplied."""

    ranks: int
    slowdown: np.ndarray | None = None
    events: list[Event] = field(default_factory=list)
    _free: dict[Stream, np.ndarray] = field(init=False)
    _busy: dict[str, np.ndarray] = field(init=False)
    _exposed: np.ndarray = field(init=False)
    _pending: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list, init=False)

    def __post_init__(self):
        self._free = {stream: np.zeros(self.ranks) for stream in STREAMS}
        self._busy = {kind: np.zeros(self.ranks) for kind in COMPUTE_KINDS}
        self._exposed = np.zeros(self.ranks)

    def compute(self, kind: str, label: str, seconds, after, first_rank: int = 0) -> np.ndarray:
        """Runs `seconds` (float64 [r], or one for all) of one of COMPUTE_KINDS on ranks from
        first_rank on, where they are of mean speed, not before `after` [r]; returns when it is done, [r].
        """
        after = np.asarray(after, np.float64)
        ranks = slice(first_rank, first_rank + len(after))
        idle_from = self._free["compute"][ranks]
        start = np.maximum(after, idle_from)
        slower = 1.0 if self.slowdown is None else self.slowdown[ranks]
        stop = start + seconds * slower
        self._expose(ranks, idle_from, start)
        self._busy[kind][ranks] += stop - start
        self._free["compute"][ranks] = stop
        self.events.append(Event("compute", kind, label, first_rank, start, stop))
        return stop

    def collective(
        self,
        label: str,
        seconds,
        after,
        *,
        group_ranks: int,
        first_rank: int = 0,
    ) -> np.ndarray:
        """A collective of each `group_ranks` consecutive ranks, `seconds` (float64 [r], or one for
        all) from the moment all of a group have come; returns when each rank is done, [r].
        """
        after = np.asarray(after, np.float64)
        ranks = slice(first_rank, first_rank + len(after))
        ready = np.maximum(after, self._free["network"][ranks]).reshape(-1, group_ranks)
        start = np.repeat(ready.max(axis=1), group_ranks)
        stop = start + seconds
        self._free["network"][ranks] = stop
        self._pending.append((first_rank, start, stop))
        self.events.append(Event("network", "exchange", label, first_rank, start, stop))
        return stop

    @property
    def makespan_s(self) -> float:
        return float(max(free.max(initial=0.0) for free in self._free.values()))

    def accounts(self) -> Accounts:
        """Of everything so far, every rank up to the makespan."""
        end = np.full(self.ranks, self.makespan_s)
        self._expose(slice(0, self.ranks), self._free["compute"], end)
        self._free["compute"] = end
        busy = {f"{kind}_s": self._busy[kind] for kind in COMPUTE_KINDS}
        waiting = np.maximum(end - sum(busy.values()) - self._exposed, 0.0)
        return Accounts(**busy, exposed_s=self._exposed, waiting_s=waiting)

    def _expose(self, ranks: slice, idle_from: np.ndarray, idle_to: np.ndarray) -> None:
        """Adds what collectives overlap with [idle_from, idle_to): of one rank they never overlap."""
        kept = []
        for first, start, stop in self._pending:
            low, high = max(first, ranks.start), min(first + len(start), ranks.stop)
            if low < high:
                theirs, ours = (
                    slice(low - first, high - first),
                    slice(low - ranks.start, high - ranks.start),
                )
                begin = np.maximum(start[theirs], idle_from[ours])
                finish = np.minimum(stop[theirs], idle_to[ours])
                self._exposed[low:high] += np.maximum(finish - begin, 0.0)
            if (stop > self._free_of(first, len(stop), ranks, idle_to)).any():
                kept.append((first, start, stop))
        self._pending = kept

    def _free_of(self, first: int, count: int, ranks: slice, idle_to: np.ndarray) -> np.ndarray:
        """Until when compute of these ranks is settled, [count]."""
        settled = self._free["compute"].copy()
        settled[ranks] = np.maximum(settled[ranks], idle_to)
        return settled[first : first + count]


def intervals(events: Sequence[Event], rank: int) -> Iterator[tuple[Event, float, float]]:
    """Events of one rank that take time: (event, start, stop) in seconds, in order of issue."""
    for event in events:
        at = rank - event.first_rank
        if 0 <= at < len(event.start_s) and event.stop_s[at] > event.start_s[at]:
            yield event, float(event.start_s[at]), float(event.stop_s[at])
