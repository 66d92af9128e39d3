"""What `cad-jax simulate` does: documents, a cluster and strategies in; seconds, shares, a trace out.

Works where jax is not installed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from cad_jax.pipeline.prediction import first_microbatches
from cad_jax.plan_report import read_lengths
from cad_jax.sharding.cost import DEVICES, Device, model_shape
from cad_jax.sharding.cost_model import CostModel, Link, analytic, from_csv, shipped
from cad_jax.sharding.nano_batches import pack_halves
from cad_jax.sharding.packing import pack_step
from cad_jax.simulation.setting import Setting, StepResult
from cad_jax.simulation.step import Overlap, pooled_step, pooled_works, stage_step, stage_works
from cad_jax.simulation.trace import plot_timeline, write_trace
from cad_jax.simulation.wlb import best_wlb_step
from cad_jax.simulation.workloads import WORKLOADS, batches

Strategy = Literal["cad", "published", "home", "all_gather", "ring", "wlb"]
GIB = 2**30


@dataclass(frozen=True)
class SimulateArgs:
    """Simulates one training step, event by event, under each strategy. Everything printed is simulated."""

    ranks: int
    """Ranks of the pool, all pipeline stages together; each is tp devices."""
    tokens_per_rank: int
    """Tokens of a rank in a nano-batch."""
    lengths: Path | None = None
    """File with one document length in tokens a line, packed as in training; or give --workload."""
    workload: str | None = None
    """Instead of --lengths: pretrain, prolong (as published), shuffled, mixed or one_long."""
    longest_tokens: int = 131_072
    """Longest document of --workload."""
    strategies: tuple[Strategy, ...] = ("cad", "published", "home", "all_gather", "ring", "wlb")
    """Which to simulate; the trace and the plot show the first."""
    model: str = "llama3-8b"
    """Whose layers: llama3-8b, llama3-70b, llama-34b and others."""
    device: str = "h200"
    """Of the cluster: h200, h100, a100, b200."""
    profile: str = "h200_fa3"
    """Kernel times: a CSV of `cad-jax profile`, the name of one that ships (h200_fa2, h200_fa3), or
    "analytic" for a fixed fraction of the device's peak."""
    tp: int = 8
    """Devices that share a rank's tokens."""
    pp: int = 1
    """Pipeline stages."""
    microbatches: int = 1
    """Of a step, on every rank."""
    tolerance: float = 0.05
    """Of cad and of the published planner."""
    transport: Literal["auto", "direct", "relay", "exact"] = "auto"
    """Of cad; auto takes direct or relay, exact moves only the rows needed, without padding."""
    overlap: Overlap = "pingpong"
    """How cad and the published planner's exchanges lie beside compute."""
    between_nodes_gb_s: float | None = None
    """Network of a GPU per direction, 1e9 bytes/s; by default the device's."""
    recompute: float = 1.0
    """Share of the linear layers that a backward runs again; this trainer runs all of them."""
    all_remote: bool = False
    """Peers within a node count as if they were in another."""
    headroom: float = 1.0
    """Of wlb: memory for so many times a microbatch's mean tokens."""
    json: Path | None = None
    """Write the figures here."""
    trace: Path | None = None
    """Write the first strategy's events here, for ui.perfetto.dev."""
    plot: Path | None = None
    """Draw the first strategy's timeline here (PNG)."""

    def __post_init__(self) -> None:
        if (self.lengths is None) == (self.workload is None):
            raise ValueError("give documents once: either --lengths FILE or --workload NAME")
        if self.workload is not None and self.workload not in WORKLOADS:
            raise ValueError(
                f"--workload must be one of {', '.join(WORKLOADS)}, got {self.workload}"
            )
        if self.device not in DEVICES:
            raise ValueError(f"--device must be one of {', '.join(DEVICES)}, got {self.device}")
        if not self.strategies:
            raise ValueError("--strategies must name at least one: cad, for instance")
        if self.plot is not None and self.plot.suffix.lower() != ".png":
            raise ValueError(f"--plot (={self.plot}) must name a file that ends in .png: add that")
        for name in ("ranks", "tokens_per_rank", "tp", "pp", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}"
                )
        if not 0 <= self.recompute <= 1:
            raise ValueError(
                f"--recompute must be from 0 to 1, got {self.recompute}: 1 is all of it"
            )
        if self.between_nodes_gb_s is not None and not self.between_nodes_gb_s > 0:
            raise ValueError(
                f"--between-nodes-gb-s must be positive, got {self.between_nodes_gb_s}: 50 is 400 Gb/s"
            )
        for path in (self.json, self.trace, self.plot):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"cannot write {path}: make the folder {path.parent} first")


def cost_model(args: SimulateArgs) -> CostModel:
    """The cost model that the arguments name."""
    device: Device = DEVICES[args.device]
    if args.profile == "analytic":
        costs = analytic(device)
    else:
        file = Path(args.profile)
        costs = from_csv(file if file.suffix == ".csv" else shipped(args.profile), device)
    if args.between_nodes_gb_s is None:
        return costs
    link = Link(1e9 * args.between_nodes_gb_s, costs.between_nodes.latency_s)
    return replace(costs, between_nodes=link)


def microbatches(args: SimulateArgs, dp: int) -> list[list[np.ndarray]]:
    """Documents of the step, [M][2] arrays of lengths; [M][1] where one is too long to divide.

    ValueError where there are too few, or one is too long.
    """
    nano_tokens = dp * args.tokens_per_rank
    if args.workload is not None:
        (batch,) = batches(
            args.workload,
            longest_tokens=args.longest_tokens,
            nano_tokens=nano_tokens,
            nano_batches=2 * args.microbatches,
            number=1,
        )
        return [batch[2 * m : 2 * m + 2] for m in range(args.microbatches)]
    assert args.lengths is not None
    lengths = read_lengths(args.lengths)
    longest = int(lengths.max())
    if longest > 2 * nano_tokens:
        raise ValueError(
            f"a document must fit one stage's microbatch of 2 x {dp} x {args.tokens_per_rank} tokens, "
            f"and the longest has {longest}: use more ranks, more tokens, or fewer stages"
        )
    fill = pack_halves if longest <= nano_tokens else pack_step
    packed = first_microbatches(lengths, args.microbatches, 2 * nano_tokens, fill=fill)
    return packed


def simulate(args: SimulateArgs) -> list[StepResult]:
    """Every strategy's step, in the order of the arguments. Raises ValueError for bad input."""
    setting = Setting(
        model_shape(args.model), cost_model(args), args.ranks, args.tp, args.pp, args.recompute,
        args.all_remote, head=True,
    )  # fmt: skip
    documents = microbatches(args, setting.dp)
    nano_batches = len(documents[0])
    tokens = 2 * args.tokens_per_rank // nano_batches
    longest = max(int(n.max(initial=0)) for m in documents for n in m)

    def pooled(name: Literal["cad", "published"]) -> StepResult:
        transport = None if args.transport == "auto" else args.transport
        works = pooled_works(
            setting, documents, strategy=name, tokens=tokens, tolerance=args.tolerance,
            transport=transport, longest=longest,
        )  # fmt: skip
        return pooled_step(
            setting, documents, works, tokens=tokens, overlap=args.overlap, name=name
        )

    def staged(name: Literal["home", "all_gather", "ring"]) -> StepResult:
        works = stage_works(setting, documents, strategy=name, tokens=tokens, longest=longest)
        return stage_step(setting, documents, works, tokens=tokens, name=name)

    def packed() -> StepResult:
        everything = [n for m in documents for n in m]
        return best_wlb_step(
            setting, everything, microbatches=(args.microbatches, 2 * args.microbatches),
            headroom=args.headroom,
        )  # fmt: skip

    run: dict[Strategy, Callable[[], StepResult]] = {
        "cad": lambda: pooled("cad"),
        "published": lambda: pooled("published"),
        "home": lambda: staged("home"),
        "all_gather": lambda: staged("all_gather"),
        "ring": lambda: staged("ring"),
        "wlb": packed,
    }
    return [run[name]() for name in args.strategies]


def table(results: list[StepResult], args: SimulateArgs, label: str) -> Table:
    """The figures for people."""
    tp = f" x {args.tp} devices" if args.tp > 1 else ""
    title = f"One step of {args.model} on {args.ranks} ranks{tp}, simulated"
    result = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    columns: dict[str, Callable[[StepResult, dict[str, float]], str]] = {
        "strategy": lambda r, f: r.strategy.replace("wlb ", "wlb\n"),
        "s": lambda r, f: f"{r.step_s:.3f}",
        "ratio": lambda r, f: f"{r.step_s / results[0].step_s:.3f}",
        "MFU": lambda r, f: f"{r.mfu:.1%}",
        "exposed": lambda r, f: f"{f['exposed_communication']:.1%}",
        "bubble": lambda r, f: f"{f['bubble']:.1%}",
        "waiting": lambda r, f: f"{f['waiting']:.1%}",
        "max/mean": lambda r, f: f"{r.attention_max_over_mean:.3f}",
        "sent": lambda r, f: f"{f['wire_bytes_mean'] / GIB:.1f}",
        "held": lambda r, f: f"{f['memory_bytes'] / GIB:.0f}",
    }
    if args.pp == 1:
        del columns["bubble"]
    for name in columns:
        result.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for r in results:
        figures = r.figures()
        result.add_row(*(cell(r, figures) for cell in columns.values()))
    result.caption = (
        f"exposed, bubble, waiting: shares of all rank-seconds; sent, held: GiB of a device; kernel times {label}; MFU counts causal FLOPs, backward 2 times "
        "(linear) and 2.5 times (attention) the forward, nothing run again; parameter collectives, "
        "optimizer and host take no time; memory is derived"
    )
    return result


def run(args: SimulateArgs, console: Console | None = None) -> list[StepResult]:
    """Simulates, prints the table, writes JSON, trace and plot where asked; returns the results.

    Raises ValueError for bad input, before anything is written.
    """
    console = console or Console()
    results = simulate(args)
    label = cost_model(args).label
    console.print(table(results, args, label))
    first = results[0]
    if args.json is not None:
        figures: dict[str, Any] = {
            "label": "simulated",
            "kernel_times": label,
            "model": args.model,
            "ranks": args.ranks,
            "tp": args.tp,
            "pp": args.pp,
            "steps": {r.strategy: r.figures() | {"memory": r.memory._asdict()} for r in results},
        }
        args.json.write_text(json.dumps(figures, indent=1))
        console.print(f"wrote {args.json}")
    if args.trace is not None:
        write_trace(first.timeline.events, args.ranks, args.trace)
        console.print(f"wrote {args.trace}")
    if args.plot is not None:
        title = (
            f"{first.strategy}: {args.model}, {args.ranks} ranks, {first.step_s:.2f} s simulated"
        )
        plot_timeline(first.timeline.events, args.ranks, title, args.plot)
        console.print(f"wrote {args.plot}")
    return results
