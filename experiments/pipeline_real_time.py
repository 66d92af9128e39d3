"""Seconds per step of a pipeline of two stages: one plan for both stages against none, in one run.

    python experiments/pipeline_real_time.py [--batches 6] [--out FILE]

Two processes of `jax.distributed` (gloo), each pinned to one core, hold a stage each (pp 2, dp 1; M
microbatches). In every tick the stages run different microbatches: `cad` shares their attention
between both, `home` leaves it to the stage whose tokens it is. Both run every step in turn, so that a
drift of the machine meets them alike. Reported per mix: the ratio of their seconds, step by step, with
a bootstrap 95% interval of the median. The CSV holds every single time.
"""

import argparse
import csv
import datetime
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pinned_processes
from pinned_processes import median_interval

from cad_jax.attention.strategies import make_strategy
from cad_jax.data import DataConfig, DocumentBatches
from cad_jax.feed import StepFeed
from cad_jax.model_config import LlamaConfig
from cad_jax.optimizer import OptimizerConfig
from cad_jax.packed_batch import PackedBatch, document_positions, next_token_targets
from cad_jax.pipeline.schedule import interleaved
from cad_jax.pipeline.ticks import sample_ticks
from cad_jax.sharding.mesh import make_mesh
from cad_jax.train_step import TrainStep

STAGES, MICROBATCHES, TOKENS = pinned_processes.PROCESSES, 4, 8192
MIXES = ("equal", "alternating", "stdlib")
STRATEGIES = ("cad", "home")
MODEL = LlamaConfig(
    vocab_size=264,
    embedding_dim=256,
    num_layers=4,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_dim=768,
    tied_embeddings=True,
    dtype="float32",
)
FIELDS = (
    "date",
    "hardware",
    "mix",
    "step",
    "home_max_over_mean",
    "cad_max_over_mean",
    "strategy",
    "step_s",
)


def lengths_of(mix: str, steps: int) -> list[np.ndarray]:
    """Document lengths of every microbatch of these steps, int64, at most TOKENS tokens each."""
    count = steps * MICROBATCHES
    if mix == "equal":
        return [np.full(8, TOKENS // 8)] * count
    if mix == "alternating":  # whatever the tick, one stage has the long document
        return [np.full(1, TOKENS), np.full(TOKENS // 64, 64)] * (count // 2)
    data = DocumentBatches(DataConfig(max_piece_tokens=TOKENS), TOKENS)
    return data.sample_lengths(count)


class Documents:
    """Microbatches of given lengths with random ids, as `data.DocumentBatches` gives them."""

    store = SimpleNamespace(digest="")
    tokens_per_microbatch, nano_batches = TOKENS, 1

    def __init__(self, lengths: list[np.ndarray]) -> None:
        self._coming = iter(lengths)
        self._rng = np.random.default_rng(0)

    def __next__(self) -> PackedBatch:
        lengths = np.asarray(next(self._coming), np.int64)
        ids = self._rng.integers(0, 256, TOKENS).astype(np.int32)
        targets, weights = next_token_targets(ids, lengths)
        return PackedBatch(
            lengths=lengths,
            document_ids=np.arange(len(lengths)),
            document_starts=np.zeros(len(lengths), np.int64),
            ids=ids,
            positions=document_positions(lengths, TOKENS),
            targets=targets,
            weights=weights,
            padding_tokens=int(TOKENS - lengths.sum()),
            target_tokens=int(weights.sum()),
            context_lost_tokens=0,
            nano_lengths=(lengths,),
        )

    def state(self) -> dict:
        return {}


def worker(args: argparse.Namespace) -> None:
    """One of the two processes; process 0 writes the CSV."""
    mesh = make_mesh(pp=STAGES)
    schedule = interleaved(STAGES, MICROBATCHES, 1)
    barrier = jax.jit(jnp.sum)
    rows = []
    for mix in args.mix or MIXES:
        lengths = lengths_of(mix, args.batches)
        steps = [
            [(m,) for m in lengths[i : i + MICROBATCHES]]
            for i in range(0, len(lengths), MICROBATCHES)
        ]
        runs = {}
        for name in STRATEGIES:
            strategy = make_strategy(
                name,
                servers=STAGES,
                tokens_per_server=TOKENS,
                heads=MODEL.head_shape(1),
                sample_lengths=[tick for step in steps for tick in sample_ticks(schedule, step)],
                max_document_tokens=TOKENS,
                kernel="xla",
                axis_names=("pp", "dp"),
                stages=STAGES,
            )
            step = TrainStep(MODEL, mesh, strategy, OptimizerConfig(), schedule=schedule)
            first = lengths[:MICROBATCHES]  # once more, to compile
            feed = StepFeed(
                Documents([*first, *lengths]),  # pyright: ignore[reportArgumentType]
                strategy,
                step,
                mesh,
                MICROBATCHES,
                schedule=schedule,
            )
            runs[name] = [step, feed, step.init(0)]
        for number in range(-1, args.batches):
            seconds, figures = {}, {}
            for name in STRATEGIES if number % 2 else STRATEGIES[::-1]:
                step, feed, state = runs[name]
                work = feed.make()
                jax.block_until_ready(barrier(work.batch.weights))
                start = time.perf_counter()
                state, _ = jax.block_until_ready(step.step(state, work.batch, work.arrays))
                seconds[name] = time.perf_counter() - start
                figures[name] = work.figures
                runs[name][2] = state
            if number < 0 or args.process_id:
                continue
            print(mix, number, {name: round(s, 2) for name, s in seconds.items()}, flush=True)
            rows += [
                {
                    "date": datetime.date.today().isoformat(),
                    "hardware": args.hardware,
                    "mix": mix,
                    "step": number,
                    "home_max_over_mean": round(figures["cad"]["attn_max_over_mean_home"], 4),
                    "cad_max_over_mean": round(figures["cad"]["attn_max_over_mean"], 4),
                    "strategy": name,
                    "step_s": round(seconds[name], 4),
                }
                for name in STRATEGIES
            ]
    jax.distributed.shutdown()
    if not args.process_id:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)


def table(path: Path) -> str:
    """The Markdown table of a CSV."""
    rows = list(csv.DictReader(path.open()))
    lines = [
        "| mix | max/mean without and with planning, median | s with planning | without over with, median (95%) |",
        "|---|---|---|---|",
    ]
    for mix in dict.fromkeys(r["mix"] for r in rows):
        own = [r for r in rows if r["mix"] == mix]
        cad, home = (
            np.asarray([float(r["step_s"]) for r in own if r["strategy"] == name])
            for name in STRATEGIES
        )
        loads = [
            np.median([float(r[f"{name}_max_over_mean"]) for r in own]) for name in ("home", "cad")
        ]
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*median_interval(home / cad))
        lines.append(f"| {mix} | {loads[0]:.2f}, {loads[1]:.2f} | {np.median(cad):.2f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batches", type=int, default=6, help="steps of each mix")
    parser.add_argument("--mix", nargs="*", choices=MIXES)
    parser.add_argument("--out", default="experiments/results/pipeline_real_time_cpu.csv")
    pinned_processes.add_arguments(parser)
    args = parser.parse_args()
    if args.process_id is None:
        lengths_of("stdlib", 1)  # builds the token store before the clock runs
    if pinned_processes.run(args, worker):
        print(table(Path(args.out)))


if __name__ == "__main__":
    main()
