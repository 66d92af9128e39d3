"""A run with pipeline stages and ping-pong follows the loss of one device, in float32 on real documents.

    .venv/bin/python experiments/pipeline_follows.py

Runs that take the same documents in the same order, step by step, from the same start:
- pipeline: pp 2 with ping-pong on 8 virtual devices, dp and tp sharing the rest;
- one_device: everything on one device, whole microbatches one after the other;
- reordered_1 to reordered_3: the same on one device with sums in other orders: the lanes of the
  embedding and of the feed-forward, a step's microbatches and each one's documents are shuffled.
A line a step goes to results/pipeline_follows.csv: the losses, how far the pipeline's is from that of
one_device (pipeline_apart), and how far apart those on one device are (one_device_apart). Rounding
grows from step to step, and no run can be asked to stay nearer to another than two runs on one device
do. Ends with an error if the pipeline's loss is further than 1e-4 off in the first 50 steps, or ever
further off than two runs on one device are apart at most.
"""

import argparse
import csv
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
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
REORDERED = 3  # runs
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
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20, total_steps=STEPS),
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


class Shuffled(Undivided):
    """The same with the microbatches of a step and the documents of a microbatch shuffled."""

    def __init__(self, data: DocumentBatches, microbatches: int, rng: np.random.Generator) -> None:
        super().__init__(data)
        self._microbatches = microbatches
        self._rng = rng
        self._coming: list[PackedBatch] = []

    def __next__(self) -> PackedBatch:
        if not self._coming:
            step = [super(Shuffled, self).__next__() for _ in range(self._microbatches)]
            self._coming = [self._shuffled(step[m]) for m in self._rng.permutation(len(step))]
        return self._coming.pop()

    def _shuffled(self, packed: PackedBatch) -> PackedBatch:
        """An undivided microbatch with its documents in another order, padding last."""
        used = int(packed.lengths.sum())
        order = self._rng.permutation(len(packed.lengths))
        documents = np.split(np.arange(used), np.cumsum(packed.lengths)[:-1])
        rows = np.concatenate([*(documents[d] for d in order), np.arange(used, packed.ids.size)])
        lengths = packed.lengths[order]
        return packed._replace(
            lengths=lengths,
            document_ids=packed.document_ids[order],
            document_starts=packed.document_starts[order],
            ids=packed.ids[rows],
            positions=packed.positions[rows],
            targets=packed.targets[rows],
            weights=packed.weights[rows],
            nano_lengths=(lengths,),
        )


def shuffled_lanes(params: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The same network with the lanes of its embedding and of its feed-forward shuffled."""
    layers = params["layers"]
    embedding = rng.permutation(params["final_norm"].shape[0])
    ffn = rng.permutation(layers["ffn_up"].shape[2])
    layers = {name: value[:, embedding] for name, value in layers.items()}  # [L, E, ...]
    for name in ("ffn_gate", "ffn_up", "ffn_down"):
        layers[name] = layers[name][:, :, ffn]
    return {
        "embedding": params["embedding"][:, embedding],
        "final_norm": params["final_norm"][embedding],
        "layers": layers,
    }


class Run:
    """One configuration, compiled once, from which runs start.

    data: such as the strategies' capacities are taken from.
    """

    def __init__(self, config: RunConfig, data: Any) -> None:
        config.check()
        self._config = config
        self._mesh = make_mesh(config.mesh.pp, config.mesh.dp, config.mesh.tp)
        self._strategy, self._nano_strategy = make_run_strategies(config, data)
        self._step = TrainStep(
            config.model,
            self._mesh,
            self._strategy,
            config.optimizer,
            nano_strategy=self._nano_strategy,
            schedule=config.schedule(),
            tokens_over_tp=config.mesh.tp_splits == "tokens",
        )

    def losses(
        self, data: Any, change: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> Iterator[float]:
        """The loss of every step over `data`; change: of the parameters at the start."""
        step = self._step
        feed = StepFeed(
            data,
            self._strategy,
            step,
            self._mesh,
            self._config.training.microbatches,
            self._nano_strategy,
            self._config.schedule(),
        )
        state = step.init(self._config.training.seed)
        params = jax.device_put(change(state.params), step.state_shardings.params)
        state = state._replace(params=params)
        while True:
            work = feed.make()
            state, metrics = jax.block_until_ready(step.step(state, work.batch, work.arrays))
            yield float(metrics["loss"])


def all_losses(config: RunConfig) -> Iterator[tuple[float, ...]]:
    """Step by step the losses of pipeline, one_device and the reordered runs."""

    def data() -> DocumentBatches:
        return DocumentBatches(config.data, config.training.tokens_per_microbatch, 2)

    pipeline = Run(config, data())
    one_device = Run(on_one_device(config), Undivided(data()))
    reordered = []
    for seed in range(REORDERED):
        rng = np.random.default_rng(seed)
        documents = Shuffled(data(), config.training.microbatches, rng)
        reordered.append(one_device.losses(documents, partial(shuffled_lanes, rng=rng)))
    losses = pipeline.losses(data()), one_device.losses(Undivided(data())), *reordered
    return zip(*losses, strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tp", type=int, choices=(1, 2), default=2)
    results = ROOT / "experiments/results/pipeline_follows.csv"
    parser.add_argument("--out", type=Path, default=results)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    names = ("pipeline", "one_device", *(f"reordered_{i + 1}" for i in range(REORDERED)))
    start = time.perf_counter()
    apart = []
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", *names, "pipeline_apart", "one_device_apart"))
        steps = itertools.islice(all_losses(pipeline_config(arguments.tp)), arguments.steps)
        for step, losses in enumerate(steps, 1):
            pipeline, *one_device = losses
            apart.append((abs(pipeline - one_device[0]), max(one_device) - min(one_device)))
            writer.writerow((step, *losses, *(f"{x:.3g}" for x in apart[-1])))
            file.flush()
            if step % 10 == 0 or step == arguments.steps:
                minutes = (time.perf_counter() - start) / 60
                pipeline_apart, one_device_apart = np.max(apart, axis=0)
                print(
                    f"step {step}, {minutes:.1f} min: loss {pipeline:.4f}; furthest apart so far: "
                    f"pipeline and one device {pipeline_apart:.2e}, two on one device "
                    f"{one_device_apart:.2e}",
                    flush=True,
                )
    close, _ = np.max(apart[:CLOSE_STEPS], axis=0)
    pipeline_apart, one_device_apart = np.max(apart, axis=0)
    print(
        f"pipeline and one device: {close:.2e} in the first {CLOSE_STEPS} steps (allowed {CLOSE}), "
        f"{pipeline_apart:.2e} in all {len(apart)}; two on one device: {one_device_apart:.2e}"
    )
    if not (close <= CLOSE and pipeline_apart <= one_device_apart):
        sys.exit("the pipeline's loss does not follow that of one device")


if __name__ == "__main__":
    main()
