"""Plans of a whole pipelined step: one per (tick, F or B, nano-batch), over the ranks of all stages.

In a tick every stage holds another microbatch, and ranks of idle stages serve the others. Pool rank
s * dp + d is rank d of stage s; a stage's documents lie end to end from its first token. Ticks that
run the same microbatches on the same stages share a plan. Host only.

Shape letters: P stages, S ranks of all stages, M microbatches, N nano-batches of a microbatch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cad_jax.attention.prepared import (
    PreparedTicks,
    StepFigures,
    combine_figures,
)
from cad_jax.pipeline.schedule import Schedule
from cad_jax.sharding.cost import max_over_mean
from cad_jax.sharding.tasks import stage_lengths

MicrobatchLengths = Sequence[Sequence[np.ndarray]]  # [M][N], document lengths of each nano-batch


class TickStrategy(Protocol):
    """What planning needs of an attention strategy; see `attention.strategies.Strategy`."""

    def prepare_ticks(
        self,
        ticks: Sequence[Sequence[int]],
        lengths: Sequence[np.ndarray],
        ranks: Sequence[int] | None = None,
    ) -> PreparedTicks: ...


@dataclass(frozen=True)
class StepPlans:
    """A step made ready on the host.

    forward, backward: pytrees of numpy arrays [ticks, N, S (or the ranks asked for), ...], of the F
    and the B ticks. orders: [M][N], the token order of each nano-batch over the ranks of its stage
    (`Prepared.order`). home_pairs, pairs: int64 [2 * ticks, N, S], (query, key) pairs of every rank
    at home and as the strategy spreads them, F ticks first. digests: equal on all hosts that
    prepared the same.
    """

    forward: Any
    backward: Any
    orders: list[list[np.ndarray | None]]
    home_pairs: np.ndarray
    pairs: np.ndarray
    figures: StepFigures
    digests: list[str]

    @property
    def max_over_mean(self) -> np.ndarray:
        """Pairs of the most loaded rank over the mean, float64 [2 * ticks, N], F ticks first."""
        return np.array([[max_over_mean(nano) for nano in tick] for tick in self.pairs])


def plan_step(
    schedule: Schedule,
    strategy: TickStrategy,
    lengths: MicrobatchLengths,
    ranks: Sequence[int] | None = None,
) -> StepPlans:
    """Everything the devices need to walk `schedule` over these documents.

    Args:
        schedule: for as many stages as the strategy.
        strategy: of `make_strategy(..., stages=schedule.stages)`.
        lengths: [M][N], document lengths of each nano-batch, laid end to end over the ranks of one
            stage, padding last.
        ranks: of all stages, in pool order; all by default.

    Raises:
        ValueError: microbatches, nano-batches or stages that do not fit each other, or documents
            that do not fit a stage or the strategy's capacities.
    """
    started = time.perf_counter()
    nano_batches = check_microbatches(schedule, lengths)
    distinct, of_tick = compositions(schedule)
    nanos = [
        strategy.prepare_ticks(distinct.tolist(), [m[nano] for m in lengths], ranks)
        for nano in range(nano_batches)
    ]
    prepared = [nano.ticks[at] for at in of_tick for nano in nanos]
    ticks = schedule.ticks

    def stacked(first: int, last: int) -> Any:
        arrays = [p.arrays for p in prepared[first * nano_batches : last * nano_batches]]
        return _stack(arrays, (last - first, nano_batches))

    home_pairs, pairs = (
        np.reshape([getattr(p, name) for p in prepared], (2 * ticks, nano_batches, -1))
        for name in ("home_pairs", "pairs")
    )
    forward, backward = stacked(0, ticks), stacked(ticks, 2 * ticks)
    figures = combine_figures([p.figures for p in prepared], pairs.sum(axis=2).ravel().tolist())
    return StepPlans(
        forward=forward,
        backward=backward,
        orders=[
            list(of_microbatch) for of_microbatch in zip(*(n.orders for n in nanos), strict=True)
        ],
        home_pairs=home_pairs,
        pairs=pairs,
        figures=figures._replace(plan_s=time.perf_counter() - started),
        digests=[tick.digest for nano in nanos for tick in nano.ticks],
    )


def sample_ticks(schedule: Schedule, lengths: MicrobatchLengths) -> list[list[np.ndarray]]:
    """Every different tick of a step as the document lengths of its stages, one array each: the
    sample lengths from which `make_strategy` takes capacities.
    """
    nano_batches = check_microbatches(schedule, lengths)
    return [
        stage_lengths(tick, [m[nano] for m in lengths])
        for tick in compositions(schedule)[0].tolist()
        for nano in range(nano_batches)
    ]


def compositions(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """The microbatch of each stage (-1: none) in the different ticks there are, int [n, P], and
    which of these each tick is, [2 * ticks], F ticks first.
    """
    rows = np.concatenate([schedule.forward.microbatch, schedule.backward.microbatch])
    distinct, of_tick = np.unique(rows, axis=0, return_inverse=True)
    return distinct, of_tick.reshape(-1)


def check_microbatches(schedule: Schedule, lengths: MicrobatchLengths) -> int:
    """Nano-batches of every microbatch. Raises ValueError unless they fit the schedule and agree."""
    if len(lengths) != schedule.microbatches:
        raise ValueError(
            f"a step must have the schedule's {schedule.microbatches} microbatches, got "
            f"{len(lengths)}: make the schedule for microbatches={len(lengths)}"
        )
    counts = {len(nanos) for nanos in lengths}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(
            "all microbatches of a step must have as many nano-batches, at least one, got "
            f"{[len(nanos) for nanos in lengths]}: cut all of them alike"
        )
    return counts.pop()


def _stack(trees: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Trees of (named) tuples and arrays as one, whose arrays [*shape, ...] hold theirs."""
    first = trees[0]
    if isinstance(first, tuple):
        parts = [_stack(children, shape) for children in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return np.stack(trees).reshape(*shape, *first.shape)
