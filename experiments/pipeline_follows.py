"""A run with pipeline stages and ping-pong follows the loss of one device, in float32 on real documents.

    .venv/bin/python experiments/pipeline_follows.py

Three runs take the same documents in the same order, step by step, from the same start:
- pipeline: pp 2 with ping-pong on 8 virtual devices, dp and tp sharing the rest;
- one_device: everything on one device, whole microbatches one after the other;
- reordered: the same on one device with every sum in another order: the lanes of the embedding and of
  the feed-forward, the microbatches and the documents in each are reversed.
A line a step goes to results/pipeline_follows.csv: the three losses and how far the first and the last
are from one_device. Rounding grows from step to step: how far apart the two runs on one device get is
what no other run can be asked to beat. Ends with an error if the pipeline's loss differs by more than
1e-4 in the first 50 steps, or by more than the reordered run's ever does in all of them.
"""

import argparse
import csv
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cad_jax.config import AttentionConfig, MeshConfig, RunConfig, TrainingConfig
from cad_jax.data import DataConfig, DocumentBatches
from cad_jax.feed import StepFeed
from cad_jax.launch import make_run_strategies
from cad_jax.model_config import LlamaConfig
from cad_jax.optimizer import OptimizerConfig
from cad_jax.packed_batch import PackedBatch
from cad_jax.sharding.mesh import make_mesh
from cad_jax.train_step import TrainStep

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("step", "pipeline", "one_device", "reordered", "pipeline_apart", "reordered_apart")
STEPS = 200
CLOSE_STEPS, CLOSE = 50, 1e-4


def pipeline_config(tp: int) -> RunConfig:
    return RunConfig(
        name="pipeline_follows",
        folder="",
        model=LlamaConfig(
            vocab_size=264,
            embedding_dim=64,
            num_layers=4,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=16,
            ffn_dim=128,
            tied_embeddings=True,
            dtype="float32",
        ),
        data=DataConfig(source="stdlib", max_piece_tokens=512),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=20, total_steps=STEPS),
        mesh=MeshConfig(pp=2, dp=4 // tp, tp=tp, platform="cpu"),
        attention=AttentionConfig(kernel="xla"),
        training=TrainingConfig(
            steps=STEPS, tokens_per_microbatch=1024, microbatches=4, overlap="pingpong"
        ),
    )


def on_one_device(config: RunConfig) -> RunConfig:
    training = dataclasses.replace(config.training, overlap="single_stream")
    return dataclasses.replace(config, mesh=MeshConfig(platform="cpu"), training=training)


class Undivided:
    """The stream of `DocumentBatches` in two nano-batches, each microbatch as one."""

    nano_batches = 1

    def __init__(self, data: DocumentBatches) -> None:
        self._data = data
        self.store = data.store
        self.tokens_per_microbatch = data.tokens_per_microbatch
        self.max_document_tokens = data.max_document_tokens

    def __next__(self) -> PackedBatch:
        return next(self._data).undivided()

    def state(self) -> dict[str, Any]:
        return self._data.state()

    def sample_nano_lengths(self, batches: int) -> list[tuple[np.ndarray, ...]]:
        return [(lengths,) for lengths in self._data.sample_lengths(batches)]


class Reordered(Undivided):
    """The same with the microbatches of a step and the documents of a microbatch reversed."""

    def __init__(self, data: DocumentBatches, microbatches: int) -> None:
        super().__init__(data)
        self._microbatches = microbatches
        self._coming: list[PackedBatch] = []

    def __next__(self) -> PackedBatch:
        if not self._coming:
            self._coming = [
                backwards(super(Reordered, self).__next__()) for _ in range(self._microbatches)
            ]
        return self._coming.pop()


def backwards(packed: PackedBatch) -> PackedBatch:
    """An undivided microbatch with its documents in reverse, padding last."""
    ends = np.cumsum(packed.lengths)
    rows = [np.arange(end - n, end) for end, n in zip(ends, packed.lengths, strict=True)]
    order = np.concatenate([*rows[::-1], np.arange(ends[-1], packed.ids.size)])
    lengths = packed.lengths[::-1]
    return packed._replace(
        lengths=lengths,
        document_ids=packed.document_ids[::-1],
        document_starts=packed.document_starts[::-1],
        ids=packed.ids[order],
        positions=packed.positions[order],
        targets=packed.targets[order],
        weights=packed.weights[order],
        nano_lengths=(lengths,),
    )


def reversed_lanes(params: dict[str, Any]) -> dict[str, Any]:
    """The same network with the lanes of its embedding and of its feed-forward in reverse."""

    def reverse(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
        name = path[-1].key
        in_layers = len(path) > 1
        if name.startswith("ffn_") and value.ndim == 3:
            value = value[:, :, ::-1]  # [L, E, F]
        embedding_axis = 1 if in_layers or value.ndim == 2 else 0
        return jax.numpy.flip(value, embedding_axis)

    return jax.tree_util.tree_map_with_path(reverse, params)


def losses_of(
    config: RunConfig, data: Any, change: Callable[[dict[str, Any]], dict[str, Any]] | None = None
) -> Iterator[float]:
    """The loss of every step of a run from its start; change: of the parameters at the start."""
    config.check()
    mesh = make_mesh(config.mesh.pp, config.mesh.dp, config.mesh.tp)
    strategy, nano_strategy = make_run_strategies(config, data)
    schedule = config.schedule()
    step = TrainStep(
        config.model,
        mesh,
        strategy,
        config.optimizer,
        nano_strategy=nano_strategy,
        schedule=schedule,
        tokens_over_tp=config.mesh.tp_splits == "tokens",
    )
    microbatches = config.training.microbatches
    feed = StepFeed(data, strategy, step, mesh, microbatches, nano_strategy, schedule)
    state = step.init(config.training.seed)
    if change is not None:
        params = jax.device_put(change(state.params), step.state_shardings.params)
        state = state._replace(params=params)
    while True:
        work = feed.make()
        state, metrics = jax.block_until_ready(step.step(state, work.batch, work.arrays))
        yield float(metrics["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tp", type=int, choices=(1, 2), default=2)
    results = ROOT / "experiments/results/pipeline_follows.csv"
    parser.add_argument("--out", type=Path, default=results)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    config = pipeline_config(arguments.tp)
    one_device = on_one_device(config)
    microbatches = config.training.microbatches

    def data() -> DocumentBatches:
        return DocumentBatches(config.data, config.training.tokens_per_microbatch, 2)

    runs = (
        losses_of(config, data()),
        losses_of(one_device, Undivided(data())),
        losses_of(one_device, Reordered(data(), microbatches), reversed_lanes),
    )
    start = time.perf_counter()
    apart = []
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for step, losses in zip(
            range(1, arguments.steps + 1), zip(*runs, strict=True), strict=False
        ):
            pipeline, plain, reordered = losses
            apart.append((abs(pipeline - plain), abs(reordered - plain)))
            writer.writerow((step, *losses, *(f"{x:.3g}" for x in apart[-1])))
            file.flush()
            if step % 10 == 0 or step == arguments.steps:
                minutes = (time.perf_counter() - start) / 60
                furthest, furthest_reordered = np.max(apart, axis=0)
                print(
                    f"step {step}, {minutes:.1f} min: loss {plain:.4f}; furthest from one device "
                    f"so far: pipeline {furthest:.2e}, reordered {furthest_reordered:.2e}",
                    flush=True,
                )
    close, _ = np.max(apart[:CLOSE_STEPS], axis=0)
    furthest, furthest_reordered = np.max(apart, axis=0)
    print(
        f"furthest from one device: pipeline {close:.2e} in the first {CLOSE_STEPS} steps (allowed "
        f"{CLOSE}), {furthest:.2e} in all {len(apart)}; one device reordered "
        f"{furthest_reordered:.2e}"
    )
    if not (close <= CLOSE and furthest <= furthest_reordered):
        sys.exit("the pipeline's loss does not follow that of one device")


if __name__ == "__main__":
    main()
