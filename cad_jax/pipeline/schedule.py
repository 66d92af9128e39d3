"""Pipeline schedules as tables: which microbatch every stage runs in every tick. Host, numpy only.

All stages run the same phase in a tick, forward (F) or backward (B), so that one program with one
pool of attention servers walks the table:

    F 0 .. F w-1 | B 0, F w, B 1, F w+1, .. | B d .. last      (warm-up | steady | drain)

Activations go from stage s to s + 1 between F ticks, from the last stage to the first one with the
next chunk; cotangents go the other way between B ticks. What arrives is used in the very next tick
of its phase.

Shape letters: P stages, M microbatches, V virtual stages (chunks of layers) per stage.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

IDLE = -1  # in `microbatch` of a table where a stage has no work


class TickTable(NamedTuple):
    """The ticks of one phase: a row a tick, a column a stage; int32 [ticks, P] each.

    microbatch: IDLE where the stage has no work. chunk: virtual stage 0 .. V-1. slot: where the
    stage's input lies between its F and its B tick. Both are 0 where the stage is idle.
    """

    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray


@dataclass(frozen=True, eq=False)
class Schedule:
    """Two tables and how they alternate.

    Order: F ticks 0 .. warmup_ticks-1; then, for i in 0 .. steady_ticks-1, B tick i and F tick
    warmup_ticks+i; then the last drain_ticks B ticks. slots: inputs that every stage has room for.
    """

    stages: int
    microbatches: int
    virtual_stages: int
    forward: TickTable
    backward: TickTable
    warmup_ticks: int
    steady_ticks: int
    drain_ticks: int
    slots: int

    @property
    def ticks(self) -> int:
        """Ticks of each phase."""
        return len(self.forward.microbatch)

    @property
    def order(self) -> list[tuple[str, int]]:
        """("F" | "B", tick of that phase), as they are executed."""
        return _execution_order(self.ticks, self.warmup_ticks)

    @property
    def bubble(self) -> float:
        """Idle share of all (stage, tick) pairs, the same in both phases."""
        return float(np.mean(self.forward.microbatch == IDLE))

    @property
    def in_flight(self) -> np.ndarray:
        """Most (chunk, microbatch) inputs that a stage holds at once, int64 [P].

        With V = 1 that is microbatches; with V > 1 an input belongs to 1/V of the stage's layers.
        """
        return _peak_in_flight(self.order, self.forward.microbatch, self.backward.microbatch)

    @property
    def embedded(self) -> np.ndarray:
        """Per F tick the microbatch whose embedding enters stage 0, int32 [ticks]; -1 for none."""
        return _where_chunk(self.forward, 0, 0)

    @property
    def losses(self) -> np.ndarray:
        """Per B tick the microbatch whose loss the last stage computes, int32 [ticks]; -1 for none.

        Its input is what the last stage put out in the F tick executed just before.
        """
        return _where_chunk(self.backward, -1, self.virtual_stages - 1)

    @property
    def embedding_gradients(self) -> np.ndarray:
        """Per B tick the microbatch whose input cotangent leaves stage 0 for the embedding, int32
        [ticks]; -1 for none.
        """
        return _where_chunk(self.backward, 0, 0)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Phase-aligned 1F1B: stage s runs microbatch f - s in F tick f and b - (P-1-s) in B tick b.

    M + P - 1 ticks of each phase; stage s has at most min(M, 2 (P-s) - 1) microbatches in flight.
    Raises ValueError unless both arguments are at least 1.
    """
    return interleaved(stages, microbatches, 1)


def interleaved(stages: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Phase-aligned interleaved 1F1B: microbatches in groups of P, each group through one chunk
    after another. With one virtual stage it is `one_f_one_b`, for any M.

    M V + P - 1 ticks of each phase. Raises ValueError unless all arguments are at least 1 and, with
    more than one virtual stage, M is a multiple of P.
    """
    for name, value, what in (
        ("stages", stages, "the ranks along pp"),
        ("microbatches", microbatches, "the microbatches of a step"),
        ("virtual_stages", virtual_stages, "the chunks of layers of each stage"),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}: give {what}")
    if virtual_stages > 1 and microbatches % stages:
        raise ValueError(
            f"with more than one virtual stage (virtual_stages = {virtual_stages}) microbatches "
            f"must be a multiple of stages (= {stages}), got {microbatches}: use "
            f"{-(-microbatches // stages) * stages} microbatches, or one virtual stage"
        )
    units = microbatches * virtual_stages
    tick = np.arange(units + stages - 1)[:, None]
    stage = np.arange(stages)
    forward = _units(tick - stage, stages, microbatches, virtual_stages)
    microbatch, chunk = _units(tick - (stages - 1 - stage), stages, microbatches, virtual_stages)
    backward = microbatch, np.where(microbatch == IDLE, 0, virtual_stages - 1 - chunk)
    warmup_ticks = virtual_stages * stages
    order = _execution_order(len(tick), warmup_ticks)
    slots = int(_peak_in_flight(order, forward[0], backward[0]).max())
    forward_slot, backward_slot = _assign_slots(order, forward, backward, slots)
    return Schedule(
        stages=stages,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
        forward=_table(*forward, forward_slot),
        backward=_table(*backward, backward_slot),
        warmup_ticks=warmup_ticks,
        steady_ticks=len(tick) - warmup_ticks,
        drain_ticks=warmup_ticks,
        slots=slots,
    )


def _units(
    unit: np.ndarray, stages: int, microbatches: int, virtual_stages: int
) -> tuple[np.ndarray, np.ndarray]:
    """(microbatch, how many chunks of it went before) of a stage's units, which are numbered group
    by group, within a group chunk by chunk; IDLE and 0 outside of all units.
    """
    if virtual_stages == 1:  # groups make no difference, and the last one may be short
        microbatch, chunk = unit, np.zeros_like(unit)
    else:
        group, rest = np.divmod(unit, stages * virtual_stages)
        chunk, nth = np.divmod(rest, stages)
        microbatch = group * stages + nth
    works = (unit >= 0) & (unit < microbatches * virtual_stages)
    return np.where(works, microbatch, IDLE), np.where(works, chunk, 0)


def _execution_order(ticks: int, warmup_ticks: int) -> list[tuple[str, int]]:
    """("F" | "B", tick) as they are executed."""
    steady = range(ticks - warmup_ticks)
    pairs = [event for i in steady for event in (("B", i), ("F", warmup_ticks + i))]
    drain = [("B", tick) for tick in range(ticks - warmup_ticks, ticks)]
    return [("F", tick) for tick in range(warmup_ticks)] + pairs + drain


def _peak_in_flight(
    order: list[tuple[str, int]], forward: np.ndarray, backward: np.ndarray
) -> np.ndarray:
    """Most inputs between their F and their B tick, per stage, from the tables' microbatches."""
    change = {"F": (forward != IDLE).astype(np.int64), "B": -(backward != IDLE).astype(np.int64)}
    return np.cumsum([change[phase][tick] for phase, tick in order], axis=0).max(axis=0)


def _assign_slots(
    order: list[tuple[str, int]],
    forward: tuple[np.ndarray, np.ndarray],
    backward: tuple[np.ndarray, np.ndarray],
    slots: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Slots of both tables, [ticks, P] each: every F unit takes the slot that is free for longest.

    As many slots as the peak in flight suffice for that. With V = 1 it comes to microbatch modulo
    slots.
    """
    forward_slot, backward_slot = (np.zeros(forward[0].shape, np.int64) for _ in range(2))
    for stage in range(forward[0].shape[1]):
        free, held = deque(range(slots)), {}
        for phase, tick in order:
            microbatch, chunk = forward if phase == "F" else backward
            if microbatch[tick, stage] == IDLE:
                continue
            unit = microbatch[tick, stage], chunk[tick, stage]
            if phase == "F":
                held[unit] = forward_slot[tick, stage] = free.popleft()
            else:
                backward_slot[tick, stage] = held.pop(unit)
                free.append(backward_slot[tick, stage])
    return forward_slot, backward_slot


def _table(microbatch: np.ndarray, chunk: np.ndarray, slot: np.ndarray) -> TickTable:
    table = TickTable(*(x.astype(np.int32) for x in (microbatch, chunk, slot)))
    for column in table:
        column.flags.writeable = False
    return table


def _where_chunk(table: TickTable, stage: int, chunk: int) -> np.ndarray:
    """The stage's microbatch per tick where it runs `chunk`, else IDLE."""
    here = table.chunk[:, stage] == chunk  # an idle stage's microbatch is IDLE, whatever its chunk
    return np.where(here, table.microbatch[:, stage], IDLE).astype(np.int32)
