"""Seconds per training step of every strategy: two processes, one core each, one run.

    python experiments/real_time.py [--batches 8] [--out experiments/results/real_time_cpu.csv]

Two processes of `jax.distributed` (gloo), each pinned to one core, hold one device each of a mesh of
two servers. For each mix of documents every strategy has its own compiled step of the same model;
all strategies run every batch in turn, so that a drift of the machine meets them alike. Reported:
the median of a strategy's seconds and, batch by batch, the ratio of its seconds to those of cad,
with a bootstrap 95% interval of the median ratio. The CSV holds every single time.
"""

import argparse
import csv
import datetime
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pinned_processes
from pinned_processes import median_interval

from cad_jax.attention.strategies import make_strategy
from cad_jax.data import DataConfig, DocumentBatches, document_positions, next_token_targets
from cad_jax.feed import local_ranks, place_ranks, place_whole
from cad_jax.model_config import LlamaConfig
from cad_jax.optimizer import OptimizerConfig
from cad_jax.sharding.mesh import make_mesh
from cad_jax.train_step import Batch, TrainStep, stack, stack_microbatches

SERVERS = pinned_processes.PROCESSES
FIELDS = (
    "date",
    "hardware",
    "mix",
    "tokens_per_server",
    "batch",
    "home_max_over_mean",
    "cad_max_over_mean",
    "strategy",
    "step_s",
)


@dataclass(frozen=True)
class Mix:
    """Documents of one comparison, and who takes part in it."""

    name: str
    tokens_per_server: int
    strategies: tuple[str, ...]


BLOCKWISE = ("cad", "home", "all_gather", "ring", "native")
DENSE = ("cad", "native_dense")  # the dense masked form does not fit at 8K tokens a server
DENSE_BATCHES = 2  # a step of it takes ten times as long
MIXES = tuple(
    Mix(name, tokens, strategies)
    for tokens, strategies in ((8192, BLOCKWISE), (4096, DENSE))
    for name in ("equal", "stdlib", "one_long")
)


def lengths_of(mix: Mix, batches: int) -> list[np.ndarray]:
    """Document lengths of each batch, int64, at most SERVERS * tokens_per_server tokens each."""
    tokens = SERVERS * mix.tokens_per_server
    if mix.name == "equal":
        return [np.full(16, tokens // 16)] * batches
    if mix.name == "one_long":
        return [np.asarray([tokens // 2] + [64] * (tokens // 2 // 64))] * batches
    data = DocumentBatches(DataConfig(max_piece_tokens=tokens // 2), tokens)
    return data.sample_lengths(batches)


def worker(args: argparse.Namespace) -> None:
    """One of the two processes; process 0 writes the CSV."""
    mesh = make_mesh(dp=SERVERS)
    ranks = local_ranks(mesh)
    model = LlamaConfig(
        vocab_size=264,
        embedding_dim=256,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        ffn_dim=768,
        tied_embeddings=True,
        dtype="float32",
    )
    rng = np.random.default_rng(0)
    rows = []
    for mix in MIXES:
        if args.mix and mix.name not in args.mix:
            continue
        count = args.batches if mix.strategies == BLOCKWISE else min(args.batches, DENSE_BATCHES)
        batches = lengths_of(mix, count)
        tokens = SERVERS * mix.tokens_per_server
        runs = {}
        for name in mix.strategies:
            strategy = make_strategy(
                name,
                servers=SERVERS,
                tokens_per_server=mix.tokens_per_server,
                heads=model.head_shape(1),
                sample_lengths=batches,
                max_document_tokens=tokens // 2,
                kernel="auto" if name == "native_dense" else "xla",
            )
            step = TrainStep(model, mesh, strategy, OptimizerConfig())
            runs[name] = (strategy, step, step.init(0))
        barrier = jax.jit(jnp.sum)
        for number in range(-1, len(batches)):  # -1 compiles
            lengths = batches[max(number, 0)]
            ids = rng.integers(0, 256, tokens).astype(np.int32)
            targets, weights = next_token_targets(ids, lengths)
            batch = Batch(ids, document_positions(lengths, tokens), targets, weights)
            figures, seconds = {}, {}
            turn = max(number, 0) % len(mix.strategies)
            for name in mix.strategies[turn:] + mix.strategies[:turn]:
                strategy, step, state = runs[name]
                prepared = strategy.prepare(lengths, ranks=ranks)
                stacked = stack_microbatches([[batch]], [[prepared.order]])
                arrays = stack([[prepared.arrays]])
                rows_of, ranks_of = step.batch_sharding, step.arrays_sharding
                placed = jax.tree.map(lambda x, s=rows_of: place_whole(x, s), stacked)
                arrays = jax.tree.map(lambda x, s=ranks_of: place_ranks(x, s, ranks), arrays)
                jax.block_until_ready(barrier(placed.weights))
                start = time.perf_counter()
                state, metrics = jax.block_until_ready(step.step(state, placed, arrays))
                seconds[name] = time.perf_counter() - start
                figures[name] = prepared.figures
                runs[name] = (strategy, step, state)
            if number < 0 or args.process_id:
                continue
            shown = ", ".join(f"{n} {seconds[n]:.2f}" for n in mix.strategies)
            print(f"{mix.name} {mix.tokens_per_server} batch {number}: {shown} s", flush=True)
            rows += [
                {
                    "date": datetime.date.today().isoformat(),
                    "hardware": args.hardware,
                    "mix": mix.name,
                    "tokens_per_server": mix.tokens_per_server,
                    "batch": number,
                    "home_max_over_mean": round(figures["cad"].max_over_mean_home, 4),
                    "cad_max_over_mean": round(figures["cad"].max_over_mean, 4),
                    "strategy": name,
                    "step_s": round(seconds[name], 5),
                }
                for name in mix.strategies
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
        "| mix | tokens a server | home max/mean, median | strategy | median s | over cad, median (95%) |",
        "|---|---|---|---|---|---|",
    ]
    for mix in dict.fromkeys((r["mix"], r["tokens_per_server"]) for r in rows):
        mine = [r for r in rows if (r["mix"], r["tokens_per_server"]) == mix]
        seconds = {
            s: np.asarray([float(r["step_s"]) for r in mine if r["strategy"] == s])
            for s in dict.fromkeys(r["strategy"] for r in mine)
        }
        home = np.median([float(r["home_max_over_mean"]) for r in mine])
        for name, values in seconds.items():
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(*median_interval(values / seconds["cad"]))
            lines.append(
                f"| {mix[0]} | {mix[1]} | {home:.2f} | {name} | {np.median(values):.2f} | {ratio} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batches", type=int, default=8, help="batches of each mix")
    parser.add_argument("--mix", nargs="*", choices=("equal", "stdlib", "one_long"))
    parser.add_argument("--out", default="experiments/results/real_time_cpu.csv")
    pinned_processes.add_arguments(parser)
    args = parser.parse_args()
    if args.process_id is None:
        lengths_of(Mix("stdlib", 8192, ()), 1)  # builds the token store before the clock runs
    if pinned_processes.run(args, worker):
        print(table(Path(args.out)))


if __name__ == "__main__":
    main()
