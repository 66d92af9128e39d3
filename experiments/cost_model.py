"""Predicted against measured seconds of attention on held-out plans: one CPU core, forward and backward.

    python experiments/cost_model.py [--plans 6] [--rounds 3]

Profiles the core and, in the same rounds, times the kernel on the most and the least loaded server of plans that the profile
never saw: the buffers as the layout makes them, slack included, and lists of tasks with key sub-ranges. Prints
the median relative error with the profile of this run and with the shipped one (measured on another day), and
writes results/cost_model_cpu.csv, one row per server and direction. CPU seconds, medians over the rounds.
"""

import argparse
import csv
import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
import numpy as np

from cad_jax.profiler import (
    CPU_MODEL,
    SIZES,
    Kernels,
    attention_work,
    collect,
    measurements,
)
from cad_jax.sharding.cost import DEVICES
from cad_jax.sharding.cost_model import CostModel, from_csv, shipped
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.tasks import (
    K_START,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    TASK_FIELDS,
    Capacities,
    HeadShape,
)
from cad_jax.timing import Work, hardware, measure, pin_to_one_core

RESULTS = Path(__file__).parent / "results" / "cost_model_cpu.csv"
HEADS = HeadShape(CPU_MODEL.num_q_heads, CPU_MODEL.num_kv_heads, CPU_MODEL.head_dim)
SERVERS, TOKENS, LONGEST = 4, 2048, 8192
MIXES = ("spread", "short", "one_long", "equal")


class Held(NamedTuple):
    """One server of a plan: its tasks, and the kernel's work on them."""

    mix: str
    plan: int
    tasks: np.ndarray
    capacities: Capacities | None
    works: tuple[Work, Work]


def lengths_of(mix: str, rng: np.random.Generator) -> np.ndarray:
    """Documents that fill SERVERS * TOKENS tokens, int64, the last one cut."""
    total = SERVERS * TOKENS
    if mix == "equal":
        return np.full(total // 1024, 1024)
    if mix == "one_long":
        return np.r_[total // 2, np.full(total // 2 // 96, 96)]
    mean, spread = (700, 1.2) if mix == "spread" else (90, 0.8)
    drawn = np.clip(rng.lognormal(np.log(mean), spread, total).astype(np.int64), 1, LONGEST)
    return drawn[: np.searchsorted(np.cumsum(drawn), total)]


def planned(count: int) -> Iterator[Held]:
    """The most and the least loaded server of each plan."""
    kernels = Kernels.of("xla")
    for mix in MIXES:
        for number in range(count if mix in ("spread", "short") else 1):
            plan = plan_documents(
                lengths_of(mix, np.random.default_rng(number)), servers=SERVERS,
                tokens_per_server=TOKENS, max_document_tokens=LONGEST, tolerance=0.1,
                num_q_heads=HEADS.num_q_heads, num_kv_heads=HEADS.num_kv_heads,
                head_dim=HEADS.head_dim,
            )  # fmt: skip
            loads = plan.loads()
            for server in sorted({int(loads.argmax()), int(loads.argmin())}):
                arrays = plan.arrays([server])
                works = attention_work(
                    arrays.k_lo[0],
                    arrays.k_hi[0],
                    plan.capacities.key_rows,
                    HEADS,
                    "float32",
                    kernels,
                )
                yield Held(
                    mix, number, plan.tasks[plan.tasks[:, SERVER] == server], plan.capacities, works
                )


def sub_ranges(count: int) -> Iterator[Held]:
    """Lists of tasks of one document each, over a part of the keys: before, across and from the
    queries on.
    """
    kernels = Kernels.of("xla")
    for number in range(count):
        rng = np.random.default_rng(100 + number)
        tasks = np.zeros((6, len(TASK_FIELDS)), np.int64)
        tasks[:, 0] = np.arange(len(tasks))
        tasks[:, Q_START] = 128 * rng.integers(0, 40, len(tasks))
        tasks[:, Q_STOP] = tasks[:, Q_START] + 128 * rng.integers(1, 8, len(tasks))
        tasks[:, K_START] = 128 * rng.integers(0, tasks[:, Q_START] // 128 + 1)
        tasks[:, K_STOP] = rng.integers(tasks[:, K_START] + 1, tasks[:, Q_STOP] + 1)
        keys = tasks[:, K_STOP] - tasks[:, K_START]
        first = np.cumsum(keys) - keys
        lo, hi = [], []
        for task, base in zip(tasks, first, strict=True):
            last = (
                np.minimum(np.arange(task[Q_START], task[Q_STOP]) + 1, task[K_STOP]) - task[K_START]
            )
            lo.append(np.full(len(last), base))
            hi.append(base + np.maximum(last, 0))
        works = attention_work(
            np.concatenate(lo), np.concatenate(hi), int(keys.sum()), HEADS, "float32", kernels
        )
        yield Held("sub_ranges", number, tasks, None, works)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    pin_to_one_core()
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    timed = measurements(CPU_MODEL, "float32", "xla", SIZES["cpu", True])
    held = [*planned(args.plans), *sub_ranges(args.plans)]
    works = [w for m in timed for w in m.works] + [w for h in held for w in h.works]
    measure(works, args.rounds, lambda: None)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.csv"
        collect(timed, CPU_MODEL, "float32", "xla", ()).save(path)
        models = {
            "run": from_csv(path, DEVICES["cpu"]),
            "shipped": from_csv(shipped("cpu"), DEVICES["cpu"]),
        }

    rows = []
    for h in held:
        for direction, work in zip(("forward", "backward"), h.works, strict=True):
            predicted = {name: predict(model, h, direction) for name, model in models.items()}
            rows.append(
                {
                    "date": datetime.date.today().isoformat(),
                    "hardware": hardware(),
                    "load": load,
                    "jax": jax.__version__,
                    "mix": h.mix,
                    "plan": h.plan,
                    "tasks": len(h.tasks),
                    "direction": direction,
                    "measured_s": f"{work.seconds:.5g}",
                    **{f"predicted_{n}_s": f"{s:.5g}" for n, s in predicted.items()},
                    **{f"error_{n}": f"{s / work.seconds - 1:.4f}" for n, s in predicted.items()},
                }
            )
    for name in models:
        for direction in ("forward", "backward"):
            for mix in (*MIXES, "sub_ranges", "all"):
                errors = [
                    float(r[f"error_{name}"])
                    for r in rows
                    if r["direction"] == direction and mix in (r["mix"], "all")
                ]
                print(
                    f"profile of {name:8} {direction:8} {mix:10} {len(errors):3} servers: median error "
                    f"{np.median(np.abs(errors)):.1%}, median bias {np.median(errors):+.1%}, worst {np.abs(errors).max():.1%}"
                )
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"load {load} at the start; wrote {RESULTS}")


def predict(model: CostModel, held: Held, direction: str) -> float:
    """Seconds of one server's tasks."""
    alone = held.tasks.copy()
    alone[:, SERVER] = 0
    seconds = model.server_s(
        alone, 1, HEADS, backward=direction == "backward", capacities=held.capacities
    )
    return float(seconds[0])


if __name__ == "__main__":
    main()
