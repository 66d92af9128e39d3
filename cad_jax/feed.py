"""What one step consumes, made on the host a step ahead: microbatches, their plans, device arrays.

Shape letters: M microbatches, S servers, T tokens per server.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cad_jax.attention.strategies import StepFigures, Strategy
from cad_jax.data import DocumentBatches
from cad_jax.sharding.mesh import POOL_AXES
from cad_jax.train_step import Batch, TrainStep, stack_microbatches


class StepWork(NamedTuple):
    """One step's input on the devices, and what the host knows of it."""

    batch: Batch
    arrays: Any
    digests: list[str]  # of the data and of each microbatch's plan, equal on every process
    home_pairs: np.ndarray  # (query, key) pairs of each server of the first microbatch at home
    server_pairs: np.ndarray  # the same as the strategy spreads them, int64 [S] both
    pairs: int  # of all microbatches and servers
    figures: dict[str, Any]  # fields of metrics.jsonl known before the step runs
    data_state: dict[str, Any]  # position of the data behind this step
    plan_s: float


def local_ranks(mesh: Mesh) -> list[int]:
    """The pool ranks of which this process holds a device, ascending."""
    by_rank = np.moveaxis(mesh.devices, mesh.axis_names.index("tp"), -1)
    by_rank = by_rank.reshape(-1, by_rank.shape[-1])
    mine = jax.process_index()
    return [r for r, row in enumerate(by_rank) if any(d.process_index == mine for d in row)]


def place_ranks(rows: np.ndarray, sharding: NamedSharding, ranks: Sequence[int]) -> jax.Array:
    """A global array [M, S, ...] from this process's ranks alone, `rows` [M, len(ranks), ...]."""
    servers = int(np.prod([sharding.mesh.shape[axis] for axis in POOL_AXES]))
    row_of_rank = {rank: row for row, rank in enumerate(ranks)}

    def part(index: Any) -> np.ndarray:
        wanted = [row_of_rank[rank] for rank in range(servers)[index[1]]]
        return rows[index[0]][:, wanted]

    return jax.make_array_from_callback((rows.shape[0], servers, *rows.shape[2:]), sharding, part)


def combined_figures(figures: Sequence[StepFigures], pairs: Sequence[int]) -> dict[str, Any]:
    """A step's figures from those of its microbatches.

    Microbatches run one after another, so a step's balance is the sum of their maxima over the sum
    of their means: ratios weigh by pairs. Bytes are the mean, or the worst, of the microbatches.
    """
    weights = np.maximum(np.asarray(pairs, np.float64), 1e-9)
    used: dict[str, float] = {}
    for figure in figures:
        for name, fraction in figure.capacity_used.items():
            used[name] = max(used.get(name, 0.0), float(fraction))
    home = np.average([f.max_over_mean_home for f in figures], weights=weights)
    planned = np.average([f.max_over_mean for f in figures], weights=weights)
    return {
        "attn_max_over_mean_home": float(home),
        "attn_max_over_mean": float(planned),
        "exchange_bytes_mean": float(np.mean([f.exchange_bytes_mean for f in figures])),
        "exchange_bytes_max": float(max(f.exchange_bytes_max for f in figures)),
        "wire_bytes": float(max(f.wire_bytes for f in figures)),
        "capacity_used": used,
        "fallback_tasks": int(sum(f.fallback_tasks for f in figures)),
    }


class StepFeed:
    """Makes the work of one step after another; called from one thread."""

    def __init__(
        self,
        data: DocumentBatches,
        strategy: Strategy,
        train_step: TrainStep,
        mesh: Mesh,
        microbatches: int,
    ) -> None:
        self._data = data
        self._strategy = strategy
        self._train_step = train_step
        self._microbatches = microbatches
        self._ranks = local_ranks(mesh)

    def make(self) -> StepWork:
        """The next step's work. Moves the data on.

        Raises:
            ValueError: data that cannot be read any more, or documents that no plan can hold.
        """
        packed = [next(self._data) for _ in range(self._microbatches)]
        data_state = self._data.state()
        planning = time.perf_counter()
        prepared = [self._strategy.prepare(batch.lengths, ranks=self._ranks) for batch in packed]
        batch, arrays = stack_microbatches(
            [Batch(b.ids, b.positions, b.targets, b.weights) for b in packed],
            [p.order for p in prepared],
            [p.arrays for p in prepared],
        )
        sharding = self._train_step.batch_sharding
        placed = Batch(*(place_whole(field, sharding) for field in batch))
        arrays = jax.tree.map(lambda rows: place_ranks(rows, sharding, self._ranks), arrays)
        pairs = [int(p.home_pairs.sum()) for p in prepared]
        figures = {
            "tokens": self._microbatches * self._data.tokens_per_microbatch,
            "target_tokens": sum(b.target_tokens for b in packed),
            "padding_tokens": sum(b.padding_tokens for b in packed),
            "documents": sum(len(b.lengths) for b in packed),
            **combined_figures([p.figures for p in prepared], pairs),
        }
        return StepWork(
            batch=placed,
            arrays=arrays,
            digests=[self._data.store.digest, *(p.digest for p in prepared)],
            home_pairs=prepared[0].home_pairs,
            server_pairs=prepared[0].pairs,
            pairs=sum(pairs),
            figures=figures,
            data_state=data_state,
            plan_s=time.perf_counter() - planning,
        )


def place_whole(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array from its whole value, of which each process copies its own part."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
