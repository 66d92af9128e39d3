"""What one step consumes, made on the host a step ahead: microbatches, their plans, device arrays.

Shape letters: M microbatches, N nano-batches of a microbatch, S servers, T tokens per server.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cad_jax.attention.prepared import StepFigures, combine_figures
from cad_jax.attention.strategies import Strategy
from cad_jax.data import DocumentBatches
from cad_jax.packed_batch import PackedBatch
from cad_jax.pipeline.schedule import Schedule
from cad_jax.pipeline.ticks import plan_step
from cad_jax.sharding.mesh import POOL_AXES
from cad_jax.train_step import Batch, TickArrays, TrainStep, stack, stack_microbatches


class StepWork(NamedTuple):
    """One step's input on the devices, and what the host knows of it."""

    batch: Batch
    arrays: Any
    digests: list[str]  # of the data and of each plan, equal on every process
    # (query, key) pairs of each server in the plan that has most of them, at home and as the strategy
    # spreads them, int64 [S] both.
    home_pairs: np.ndarray
    server_pairs: np.ndarray
    pairs: int  # of all microbatches and servers
    figures: dict[str, Any]  # fields of metrics.jsonl known before the step runs
    data_state: dict[str, Any]  # position of the data behind this step
    plan_s: float


class _Planned(NamedTuple):
    """A step's plans: token orders [M][N], arrays [M or ticks, N, ranks, ...], what they cost."""

    orders: list[list[np.ndarray | None]]
    arrays: Any
    figures: StepFigures
    digests: list[str]
    home_pairs: np.ndarray
    server_pairs: np.ndarray


def local_ranks(mesh: Mesh) -> list[int]:
    """The pool ranks of which this process holds a device, ascending."""
    by_rank = np.moveaxis(mesh.devices, mesh.axis_names.index("tp"), -1)
    by_rank = by_rank.reshape(-1, by_rank.shape[-1])
    mine = jax.process_index()
    return [r for r, row in enumerate(by_rank) if any(d.process_index == mine for d in row)]


def place_ranks(rows: np.ndarray, sharding: NamedSharding, ranks: Sequence[int]) -> jax.Array:
    """A global array [M, N, S, ...] from this process's ranks alone, `rows` [M, N, len(ranks), ...]."""
    servers = int(np.prod([sharding.mesh.shape[axis] for axis in POOL_AXES]))
    row_of_rank = {rank: row for row, rank in enumerate(ranks)}

    def part(index: Any) -> np.ndarray:
        wanted = [row_of_rank[rank] for rank in range(servers)[index[2]]]
        return rows[index[:2]][:, :, wanted]

    shape = (*rows.shape[:2], servers, *rows.shape[3:])
    return jax.make_array_from_callback(shape, sharding, part)


class StepFeed:
    """Makes the work of one step after another; called from one thread.

    strategy plans whole microbatches, nano_strategy nano-batches where data come in two of them: a
    step with a microbatch that could not be divided runs whole microbatches throughout.
    """

    def __init__(
        self,
        data: DocumentBatches,
        strategy: Strategy,
        train_step: TrainStep,
        mesh: Mesh,
        microbatches: int,
        nano_strategy: Strategy | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self._data = data
        self._strategy = strategy
        self._nano_strategy = nano_strategy
        self._train_step = train_step
        self._microbatches = microbatches
        self._schedule = schedule
        self._ranks = local_ranks(mesh)

    def make(self) -> StepWork:
        """The next step's work. Moves the data on.

        Raises:
            ValueError: data that cannot be read any more, or documents that no plan can hold.
        """
        packed = [next(self._data) for _ in range(self._microbatches)]
        data_state = self._data.state()
        planning = time.perf_counter()
        nano_batches = min(len(p.nano_lengths) for p in packed)
        if nano_batches < self._data.nano_batches:
            packed = [p.undivided() for p in packed]
        strategy = self._strategy if nano_batches == 1 else self._nano_strategy
        assert strategy is not None
        planned = self._plan(strategy, [p.nano_lengths for p in packed])
        batch = stack_microbatches(
            [_in_nano_batches(p, nano_batches) for p in packed], planned.orders
        )
        step = self._train_step
        placed = Batch(*(place_whole(field, step.batch_sharding) for field in batch))
        arrays = jax.tree.map(
            lambda rows: place_ranks(rows, step.arrays_sharding, self._ranks), planned.arrays
        )
        figures = planned.figures._asdict()
        del figures["plan_s"]
        lengths = np.concatenate([p.lengths for p in packed])
        return StepWork(
            batch=placed,
            arrays=arrays,
            digests=[self._data.store.digest, *planned.digests],
            home_pairs=planned.home_pairs,
            server_pairs=planned.server_pairs,
            pairs=int((lengths * (lengths + 1) // 2).sum()),
            figures={
                "tokens": self._microbatches * self._data.tokens_per_microbatch,
                "target_tokens": sum(p.target_tokens for p in packed),
                "padding_tokens": sum(p.padding_tokens for p in packed),
                "documents": sum(len(p.lengths) for p in packed),
                "nano_batches": nano_batches,
                **{_FIELDS.get(name, name): value for name, value in figures.items()},
            },
            data_state=data_state,
            plan_s=time.perf_counter() - planning,
        )

    def _plan(self, strategy: Strategy, lengths: Sequence[Sequence[np.ndarray]]) -> _Planned:
        if self._schedule is not None:
            plans = plan_step(self._schedule, strategy, lengths, self._ranks)
            ticks = TickArrays(plans.forward, plans.backward)
            busiest = np.unravel_index(plans.pairs.sum(axis=2).argmax(), plans.pairs.shape[:2])
            return _Planned(
                plans.orders,
                ticks,
                plans.figures,
                plans.digests,
                plans.home_pairs[busiest],
                plans.pairs[busiest],
            )
        prepared = [[strategy.prepare(n, ranks=self._ranks) for n in m] for m in lengths]
        every = [p for m in prepared for p in m]
        busiest = max(every, key=lambda p: int(p.pairs.sum()))
        return _Planned(
            [[p.order for p in m] for m in prepared],
            stack([[p.arrays for p in m] for m in prepared]),
            combine_figures([p.figures for p in every], [int(p.home_pairs.sum()) for p in every]),
            [p.digest for p in every],
            busiest.home_pairs,
            busiest.pairs,
        )


# metrics.jsonl's names where they differ from those of StepFigures.
_FIELDS = {
    "max_over_mean_home": "attn_max_over_mean_home",
    "max_over_mean": "attn_max_over_mean",
}


def _in_nano_batches(packed: PackedBatch, nano_batches: int) -> list[Batch]:
    fields = (packed.ids, packed.positions, packed.targets, packed.weights)
    parts = [np.split(field, nano_batches) for field in fields]
    return [Batch(*nano) for nano in zip(*parts, strict=True)]


def place_whole(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array from its whole value, of which each process copies its own part."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
