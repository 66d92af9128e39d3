"""What the figures share: the published setting, batches of a row, CSV and intervals.

Every figure's script takes --batches and --out, writes one row a batch and strategy, and prints a table
published against ours. Everything is simulated on the host; nothing here ran on a GPU. Memory is that of the
published system for every planner: what is compared is how they plan.
"""

import argparse
import csv
import datetime
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cad_jax.sharding.cost import DEVICES, model_shape
from cad_jax.sharding.cost_model import (
    CostModel,
    LinearSpeed,
    Link,
    from_csv,
    layer_weights,
    shipped,
)
from cad_jax.sharding.plan import Plan
from cad_jax.simulation.setting import Setting, StepResult, pool_of
from cad_jax.simulation.step import (
    Overlap,
    pooled_step,
    pooled_works,
    tick_plans,
    works_of_plans,
)
from cad_jax.simulation.strategies import Transport, run_capacities
from cad_jax.simulation.wlb import best_wlb_step
from cad_jax.simulation.workloads import batches

FOLDER = Path("runs/figures")
BATCHES = 30
DEVICES_PER_RANK = 8  # tp, a node
KIB = 1024
H200_MEMORY_BYTES = 141e9
# Of the published measurements: 22 ms of linear layers forward for 64 Ki tokens of Llama 3 8B over tp 8,
# exposed tensor-parallel collectives, norms and element-wise work included (43 to 45 ms in a window of
# two nano-batches), backward 1.9 times that; a network of 40 GB/s a GPU, of which all-gathers reach
# GATHER_SHARE (fitted to figure 3a).
PUBLISHED_LINEAR_S, PUBLISHED_LINEAR_BACKWARD = 22e-3, 1.9
PUBLISHED_BYTES_S = 40e9
GATHER_SHARE = 0.85
# The published planner's tolerance in its runs, and those from which the fastest is taken on SAMPLE batches
# before those that are shown. A run that is left to choose does so before its first step, from .003 to .2; key ranges are
# its user's choice.
PUBLISHED_TOLERANCE = 0.1
SAMPLE = 3
TOLERANCES = (0.0, 0.01, 0.02, 0.05, 0.1)


def published_costs(kernel: str = "h200_fa2", bytes_s: float = PUBLISHED_BYTES_S) -> CostModel:
    """The published experiments' H200: kernel's grid of this project's derived profiles, and linear
    layers and network as measured there."""
    device = DEVICES["h200"]
    costs = from_csv(shipped(kernel), device)
    model = model_shape("llama3-8b")
    flops = 2 * 65_536 * layer_weights(model) / DEVICES_PER_RANK
    forward = np.array([PUBLISHED_LINEAR_S / flops])
    linear = LinearSpeed(np.array([1.0]), forward, forward * PUBLISHED_LINEAR_BACKWARD / 2)
    return replace(costs, linear=linear, between_nodes=Link(bytes_s, device.hop_latency_s))


def fair_costs(kernel: str, bytes_s: float = 50e9) -> CostModel:
    """The same GPU with linear layers at half the peak and the network's data sheet."""
    device = DEVICES["h200"]
    return replace(
        from_csv(shipped(kernel), device), between_nodes=Link(bytes_s, device.hop_latency_s)
    )


class Row(NamedTuple):
    """A point of a figure: `chunks` chunks of the longest document on `nodes` nodes."""

    model: str
    longest_tokens: int
    nodes: int
    chunks: int

    @property
    def tokens(self) -> int:
        """T, of a rank in one of two nano-batches."""
        return self.chunks * self.longest_tokens // (2 * self.nodes)

    def setting(self, costs: CostModel, **changes: Any) -> Setting:
        """The published runs: the feed-forward run again, which the measured linear layers contain;
        nothing of the head; keys gathered once (but packing: as is faster); all peers remote."""
        return replace(
            Setting(
                model_shape(self.model), costs, self.nodes, tp=DEVICES_PER_RANK, all_remote=True,
                gradient_bytes=1, gather_again=False, gather_share=GATHER_SHARE,
            ),
            **changes,
        )  # fmt: skip

    def fair_setting(self, kernel: str, bytes_s: float = 50e9) -> Setting:
        """`fair_costs`, of whose network all-gathers reach as much as all-to-alls."""
        return self.setting(fair_costs(kernel, bytes_s), gather_share=1.0)

    def batches(self, workload: str, number: int) -> list[list[np.ndarray]]:
        """Batches of two nano-batches; chunks and nano-batches are the same on every number of nodes."""
        nano_tokens = self.tokens * self.nodes
        return batches(
            workload,
            longest_tokens=self.longest_tokens,
            nano_tokens=nano_tokens,
            nano_batches=2,
            number=number,
        )


# Table 3 of the paper (no pipeline): chunks of the longest length at 8, 16, 32 nodes.
ROWS_3D = tuple(
    Row(model, longest * KIB, nodes, chunks)
    for model, table in (
        ("llama3-8b", {128: (8, 16, 32), 256: (4, 8, 16), 512: (2, 4, 8)}),
        ("llama-34b", {128: (4, 8, 16), 256: (2, 4, 8), 512: (2, 4, 8)}),
    )
    for longest, counts in table.items()
    for nodes, chunks in zip((8, 16, 32), counts, strict=True)
)


# This project's plans by what they depend on, documents included; neither kernels nor networks are part of that, so
# that one set serves all of them, and equal batches.
Plans = dict[Any, list[list[Plan]]]


def step_of_plans(
    setting: Setting,
    lengths: Sequence[Sequence[np.ndarray]],
    tokens: int,
    longest: int,
    *,
    tolerance: float,
    transport: Transport = "ragged",
    overlap: Overlap = "pingpong",
    key_ranges: int = 1,
    plans: Plans | None = None,
) -> StepResult:
    """This project's step of microbatches [M][N]. plans: which it takes from there or adds to."""
    pool = pool_of(setting, setting.ranks, tokens, longest)
    plans = {} if plans is None else plans
    documents = tuple(nano.tobytes() for microbatch in lengths for nano in microbatch)
    planned_for = transport if key_ranges > 1 else None  # whole prefixes are the same for all
    key = (
        setting.pp, setting.ranks, setting.heads, tokens, tolerance, key_ranges, planned_for, documents,
    )  # fmt: skip
    if key not in plans:
        plans[key] = tick_plans(setting, lengths, pool, tolerance, key_ranges, planned_for)
    made = plans[key]
    held = run_capacities([p for nanos in made for p in nanos], pool, transport)
    works = works_of_plans(setting, made, pool, len(lengths), transport, held)
    return pooled_step(
        setting, lengths, works, tokens=tokens, overlap=overlap, name="cad", published=True
    )


def cad_step(
    setting: Setting,
    nanos: Sequence[np.ndarray],
    row: Row,
    *,
    strategy: Literal["cad", "published"] = "cad",
    tolerance: float = 0.05,
    transport: Transport = "ragged",
    overlap: Overlap = "pingpong",
    key_ranges: int = 1,
    plans: Plans | None = None,
) -> StepResult:
    """A step of one microbatch of two nano-batches. transport, key_ranges, plans: of cad."""
    if strategy == "cad":
        return step_of_plans(
            setting, [nanos], row.tokens, row.longest_tokens, tolerance=tolerance,
            transport=transport, overlap=overlap, key_ranges=key_ranges, plans=plans,
        )  # fmt: skip
    works = pooled_works(
        setting, [nanos], strategy=strategy, tokens=row.tokens, tolerance=tolerance
    )
    return pooled_step(
        setting, [nanos], works, tokens=row.tokens, overlap=overlap, name=strategy, published=True
    )


class Choice(NamedTuple):
    """How this project runs."""

    tolerance: float
    transport: Transport = "ragged"
    key_ranges: int = 1

    def __str__(self) -> str:
        divided = ", keys divided" * (self.key_ranges > 1)
        return f"{self.transport}, {self.tolerance:g}{divided}"


WAYS: tuple[tuple[Transport, int], ...] = (("ragged", 1), ("relay", 1), ("ragged", 8))


def choose(
    setting: Setting, sample: Sequence[Sequence[np.ndarray]], row: Row, plans: Plans
) -> Choice:
    """The fastest way and tolerance on these batches: divided keys need room for their tiles.
    plans: see `step_of_plans`."""

    def seconds(choice: Choice) -> float:
        return sum(
            cad_step(setting, nanos, row, **choice._asdict(), plans=plans).step_s
            for nanos in sample
        )

    return min((Choice(t, *way) for way in WAYS for t in TOLERANCES), key=seconds)


def wlb(setting: Setting, nanos: Sequence[np.ndarray], headroom: float = 1.0) -> StepResult:
    """The best DP x CP in memory."""
    result = best_wlb_step(setting, nanos, headroom=headroom, memory_bytes=H200_MEMORY_BYTES)
    return result._replace(strategy=f"wlb headroom {headroom:g}")


def all_points(
    figure: Callable[..., tuple[list[dict[str, Any]], list[tuple]]],
    points: Sequence[tuple[Any, ...]],
) -> tuple[list[dict[str, Any]], list[tuple]]:
    """Records and lines of a figure's points. Lines are printed as they come, and sorted by what they begin with."""
    records, lines = [], []
    for made, more in on_all_cores(figure, points):
        records += made
        lines += more
        for line in more:
            print("|", " | ".join(map(str, line)), "|", flush=True)
    return records, sorted(lines, key=lambda line: line[0])


def record(
    figure: str, row: Row, workload: str, batch: int, kernel: str, result: StepResult
) -> dict[str, Any]:
    """A line of the CSV."""
    return {
        "figure": figure, "model": row.model, "workload": workload,
        "longest_tokens": row.longest_tokens, "nodes": row.nodes, "batch": batch,
        "strategy": result.strategy, "kernel": kernel, **rounded(result.figures()),
        "label": "simulated",
    }  # fmt: skip


def rounded(figures: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.6g}" for name, value in figures.items()}


def write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Records as CSV, with the date and what hardware was simulated."""
    made = {"hardware": "H200, not run on", "date": datetime.date.today().isoformat()}
    rows = [record | made for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")


def paired(
    over: Sequence[float], under: Sequence[float], seed: int = 0
) -> tuple[float, float, float]:
    """Sum of `over` by sum of `under`, and its 95% interval by paired bootstrap over batches."""
    a, b = np.asarray(over, float), np.asarray(under, float)
    picks = np.random.default_rng(seed).integers(len(a), size=(2000, len(a)))
    ratios = a[picks].sum(1) / b[picks].sum(1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(a.sum() / b.sum()), float(low), float(high)


def interval(values: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*values)


def ratio(over: Sequence[float], under: Sequence[float], workload: str) -> str:
    """Sum of `over` by sum of `under` with what tells how it varies: an interval where batches are drawn alike. Those of
    "prolong" are not, long documents come first: both halves. "one_long" has two batches in all: the least and most.
    """
    value, low, high = paired(over, under)
    if workload == "prolong":
        half = len(over) // 2
        if half == 0:
            return f"{value:.3f}"
        first, second = sum(over[:half]) / sum(under[:half]), sum(over[half:]) / sum(under[half:])
        return f"{value:.3f} (halves {first:.3f}, {second:.3f})"
    if workload == "one_long":
        each = [a / b for a, b in zip(over, under, strict=True)]
        low, high = min(each), max(each)
    return interval((value, low, high))


def on_all_cores[Result](
    work: Callable[..., Result], every: Sequence[tuple[Any, ...]]
) -> Iterator[Result]:
    """work(*arguments) of each, in order, in as many processes as there are cores. work: a module's function."""
    if len(every) == 1:
        yield from starmap(work, every)
        return
    context = multiprocessing.get_context("spawn")  # numba's threads do not survive a fork
    with ProcessPoolExecutor(mp_context=context) as pool:
        yield from pool.map(work, *zip(*every, strict=True))


class Arguments(NamedTuple):
    """Of a figure."""

    batches: int
    out: Path


def arguments(description: str | None, batches: int = BATCHES) -> Arguments:
    """From the command line. batches: by default; 0 for a figure that draws none."""
    about = " ".join((description or "").partition("\n\n")[0].split())
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    if batches:
        help_text = "batches a row; time grows with them, intervals shrink"
        parser.add_argument("--batches", type=int, default=batches, help=help_text)
    help_text = "folder of the CSV; made where it is missing"
    parser.add_argument("--out", type=Path, default=FOLDER, help=help_text)
    given = parser.parse_args()
    if batches and given.batches < 1:
        parser.error(f"--batches must be at least 1, got {given.batches}: 1 shows no interval")
    return Arguments(given.batches if batches else 0, given.out)


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(x) for x in row) + " |" for row in rows]
    return "\n".join(lines)
