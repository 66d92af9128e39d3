"""Predicted against measured seconds of training steps: two processes, one core each, one run.

    python experiments/simulated_against_measured.py [--batches 5] [--tokens-per-server 4096] [--rounds 5]

First both processes measure, at the same time and on the cores they are pinned to, what attention, linear layers and exchanges
take (`cad_jax.profiler`): the profile of this run. Then every strategy runs every batch in turn, as in
`real_time.py`, and `cad_jax.simulation` predicts the same steps from that profile: same documents, plans, transports and
capacities. What no layer holds (embedding, head, optimizer, sums of gradients over ranks) is not simulated; it is taken to be one
constant, measured less predicted of a mix that is not compared (documents of 128 tokens under home), and the
CSV has the prediction without it as well.
"""

import argparse
import csv
import datetime
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
import pinned_processes
from real_time import SERVERS, Mix, lengths_of

from cad_jax.attention.planned import PlannedStrategy
from cad_jax.attention.strategies import Strategy, make_strategy
from cad_jax.feed import local_ranks, place_ranks, place_whole
from cad_jax.model_config import LlamaConfig
from cad_jax.optimizer import OptimizerConfig
from cad_jax.packed_batch import document_positions, next_token_targets
from cad_jax.profiler import Sizes, collect, measurements, transfer_work
from cad_jax.sharding.cost import DEVICES, ModelShape
from cad_jax.sharding.cost_model import CostModel, from_csv, layer_weights
from cad_jax.sharding.mesh import make_mesh
from cad_jax.sharding.profile_table import Profile, TransferRow
from cad_jax.sharding.tasks import DENSE_TRANSPORTS, TRANSPORT_HOPS
from cad_jax.simulation import strategies
from cad_jax.simulation.setting import Setting, pool_of
from cad_jax.simulation.step import stage_step, stage_works
from cad_jax.timing import measure
from cad_jax.train_step import Batch, TrainStep, stack, stack_microbatches

SHAPE = ModelShape("small", 2, 256, 4, 2, 64, 768, 264)
MODEL = LlamaConfig(
    vocab_size=SHAPE.vocab_size,
    embedding_dim=SHAPE.embedding_dim,
    num_layers=SHAPE.num_layers,
    num_q_heads=SHAPE.num_q_heads,
    num_kv_heads=SHAPE.num_kv_heads,
    head_dim=SHAPE.head_dim,
    ffn_dim=SHAPE.ffn_dim,
    tied_embeddings=True,
    dtype="float32",
)
STRATEGIES = ("cad", "home", "all_gather", "ring")
MIXES = ("equal", "stdlib", "one_long")
CALIBRATION = "short"
FLOAT32_BYTES = 4
# The backward runs a layer's products again but for the last one, whose result only the next layer's input needs.
AGAIN = 1 - SHAPE.ffn_dim * SHAPE.embedding_dim / layer_weights(SHAPE)
FIELDS = (
    "date", "hardware", "load", "mix", "tokens_per_server", "batch", "home_max_over_mean", "strategy",
    "transport", "measured_s", "layers_predicted_s", "predicted_s", "predicted_over_measured",
)  # fmt: skip


def profile(args: argparse.Namespace, mesh: jax.sharding.Mesh) -> Profile:
    """Of this process's core while the other one measures the same, with exchanges between the two."""
    tiles = tuple(2**i for i in range(8) if 128 * 2**i <= args.tokens_per_server)
    sizes = Sizes(tiles, tiles, 1024, (args.tokens_per_server,), (), args.rounds)
    timed = measurements(SHAPE, "float32", "xla", sizes)
    measure([work for m in timed for work in m.works], args.rounds, lambda: None)
    held = collect(timed, SHAPE, "float32", "xla", ("two processes at the same time",))
    return Profile(held.header, (*held.rows, *exchanges(mesh, args.rounds)))


def exchanges(mesh: jax.sharding.Mesh, rounds: int) -> list[TransferRow]:
    """Seconds that pass until both processes have what the other one sent."""
    rows = []
    for transport in DENSE_TRANSPORTS:
        hops = TRANSPORT_HOPS[transport]
        for slot_rows in (64, 1024, 16384):
            run = transfer_work(mesh, hops, slot_rows, 1).prepare()
            seconds = []
            for _ in range(rounds + 1):
                jax.block_until_ready(run())  # both begin together
                begin = time.perf_counter()
                jax.block_until_ready(run())
                seconds.append(time.perf_counter() - begin)
            wire_bytes = hops * slot_rows * 256 * (SERVERS - 1)
            median = float(np.median(seconds[1:]))
            rows.append(TransferRow(transport, "within_node", SERVERS, hops, wire_bytes, median))
    return rows


def predicted_s(strategy: Strategy, lengths: np.ndarray, tokens: int, costs: CostModel) -> float:
    """Of the layers, forward and backward."""
    setting = Setting(
        SHAPE, costs, SERVERS, tp=1, again=AGAIN, gradient_bytes=1, element_bytes=FLOAT32_BYTES
    )
    documents = [[lengths]]
    if isinstance(strategy, PlannedStrategy):
        work = strategies.planned_work(
            strategy.plan(lengths),
            pool_of(setting, SERVERS, tokens),
            strategy.transport,  # pyright: ignore[reportArgumentType] - one of these names
            strategy.capacities,
        )
        works = [[work]]
    else:
        works = stage_works(
            setting,
            documents,
            strategy=strategy.name,  # pyright: ignore[reportArgumentType] - one of these names
            tokens=tokens,
        )
    return stage_step(setting, documents, works, tokens=tokens, name=strategy.name).step_s


class Runs:
    """Compiled steps of one mix, by strategy."""

    def __init__(self, mesh, names: tuple[str, ...], tokens: int, batches: list[np.ndarray]):
        self.mesh, self.ranks, self.tokens = mesh, local_ranks(mesh), tokens
        self.rng = np.random.default_rng(0)
        self.barrier = jax.jit(jnp.sum)
        self.held = {}
        for name in names:
            strategy = make_strategy(
                name, servers=SERVERS, tokens_per_server=tokens, heads=MODEL.head_shape(1),
                sample_lengths=batches, max_document_tokens=SERVERS * tokens // 2, kernel="xla",
            )  # fmt: skip
            step = TrainStep(MODEL, mesh, strategy, OptimizerConfig())
            self.held[name] = [strategy, step, step.init(0)]

    def seconds(self, name: str, lengths: np.ndarray) -> tuple[float, float]:
        """Of one step, and home's max over mean."""
        strategy, step, state = self.held[name]
        total = SERVERS * self.tokens
        ids = self.rng.integers(0, 256, total).astype(np.int32)
        targets, weights = next_token_targets(ids, lengths)
        batch = Batch(ids, document_positions(lengths, total), targets, weights)
        prepared = strategy.prepare(lengths, ranks=self.ranks)
        stacked = stack_microbatches([[batch]], [[prepared.order]])
        placed = jax.tree.map(lambda x: place_whole(x, step.batch_sharding), stacked)
        arrays = jax.tree.map(
            lambda x: place_ranks(x, step.arrays_sharding, self.ranks), stack([[prepared.arrays]])
        )
        jax.block_until_ready(self.barrier(placed.weights))
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(step.step(state, placed, arrays))
        self.held[name][2] = state
        return time.perf_counter() - begin, prepared.figures.max_over_mean_home


def worker(args: argparse.Namespace) -> None:
    """One of the two processes; process 0 writes the CSV."""
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    mesh, tokens = make_mesh(dp=SERVERS), args.tokens_per_server
    measured = profile(args, mesh)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.csv"
        measured.save(path)
        costs = from_csv(path, DEVICES["cpu"])
    rows, outside_s = [], 0.0
    for mix in (CALIBRATION, *(args.mix or MIXES)):
        short = np.full(SERVERS * tokens // 128, 128)
        lengths = (
            [short] * args.batches
            if mix == CALIBRATION
            else lengths_of(Mix(mix, tokens, ()), args.batches)
        )
        names = ("home",) if mix == CALIBRATION else STRATEGIES
        runs = Runs(mesh, names, tokens, lengths)
        layers = {
            (name, number): predicted_s(runs.held[name][0], batch, tokens, costs)
            for name in names
            for number, batch in enumerate(lengths)
        }
        seconds: dict[tuple[str, int], float] = {}
        uneven = {}
        for number in range(-1, len(lengths)):  # -1 compiles
            turn = max(number, 0) % len(names)
            for name in names[turn:] + names[:turn]:
                took, over = runs.seconds(name, lengths[max(number, 0)])
                seconds[name, number] = took
                if name == "home":
                    uneven[number] = over
        if mix == CALIBRATION:
            gaps = [seconds["home", n] - layers["home", n] for n in range(len(lengths))]
            outside_s = float(np.median(gaps))
            print(f"outside the layers: {outside_s:.3f} s of {seconds['home', 0]:.3f}", flush=True)
            continue
        for (name, number), layers_s in layers.items():
            took, predicted = seconds[name, number], layers_s + outside_s
            rows.append(
                dict(
                    zip(
                        FIELDS,
                        (
                            datetime.date.today().isoformat(), args.hardware, load, mix, tokens,
                            number, f"{uneven[number]:.3f}", name,
                            runs.held[name][0].transport or "", f"{took:.4f}", f"{layers_s:.4f}",
                            f"{predicted:.4f}", f"{predicted / took:.3f}",
                        ),
                        strict=True,
                    )
                )
            )  # fmt: skip
    jax.distributed.shutdown()
    if not args.process_id:
        with open(args.out, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        measured.save(Path(args.out).with_name("profile_two_processes_cpu.csv"))


def table(path: Path) -> str:
    """Medians over batches as Markdown."""
    rows = list(csv.DictReader(path.open()))
    lines = [
        "| mix | strategy | measured, median s | predicted, median s | predicted over measured (its range) |",
        "|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((r["mix"], r["strategy"]) for r in rows):
        mine = [r for r in rows if (r["mix"], r["strategy"]) == key]
        measured, predicted, ratio = (
            np.array([float(r[name]) for r in mine])
            for name in ("measured_s", "predicted_s", "predicted_over_measured")
        )
        of_medians = np.median(predicted) / np.median(measured)
        lines.append(
            f"| {key[0]} | {key[1]} | {np.median(measured):.3f} | {np.median(predicted):.3f} | "
            f"{of_medians:.3f} ({ratio.min():.3f} to {ratio.max():.3f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batches", type=int, default=5, help="batches of each mix")
    parser.add_argument("--tokens-per-server", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5, help="of the profile")
    parser.add_argument("--mix", nargs="*", choices=MIXES)
    parser.add_argument("--out", default="experiments/results/simulated_against_measured_cpu.csv")
    pinned_processes.add_arguments(parser)
    args = parser.parse_args()
    if args.process_id is None:
        lengths_of(Mix("stdlib", args.tokens_per_server, ()), 1)  # builds the token store first
    if pinned_processes.run(args, worker):
        print(table(Path(args.out)))


if __name__ == "__main__":
    main()
