"""What `cad-jax simulate` does: documents, a cluster and strategies in; seconds, shares, a trace out.

Works where jax is not installed.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from cad_jax.command_line import writing
from cad_jax.lengths_report import read_lengths
from cad_jax.pipeline.prediction import first_microbatches
from cad_jax.pool_limits import check_memory
from cad_jax.sharding.clusters import CHIPS, USABLE_MEMORY
from cad_jax.sharding.cost import DEVICES, model_shape
from cad_jax.sharding.cost_model import CostModel
from cad_jax.sharding.nano_batches import pack_halves
from cad_jax.sharding.packing import pack_step
from cad_jax.simulate_args import SimulateArgs, Strategy
from cad_jax.simulation.causes import with_causes
from cad_jax.simulation.named_costs import named_costs
from cad_jax.simulation.setting import Setting, StepResult
from cad_jax.simulation.step import pooled_step, pooled_works, stage_step, stage_works
from cad_jax.simulation.trace import plot_timeline, write_trace
from cad_jax.simulation.wlb import best_wlb_step, check_microbatches
from cad_jax.simulation.workloads import (
    LONG_TOKENS,
    PUBLISHED,
    SHORT_DOCUMENT_TOKENS,
    batches,
)

GIB = 2**30
MANY_RANKS = 512  # from here on a strategy takes minutes


def cost_model(args: SimulateArgs) -> CostModel:
    """The cost model that the arguments name."""
    return named_costs(DEVICES[args.device], args.profile, args.between_nodes_gb_s)


def microbatches(args: SimulateArgs, dp: int) -> list[list[np.ndarray]]:
    """Documents of the step, [M][2] arrays of lengths; [M][1] where one is too long to divide.

    ValueError where there are too few, or one is too long.
    """
    nano_tokens, count = dp * args.tokens_per_rank, args.step_microbatches
    if args.workload is not None:
        _check_workload(args, nano_tokens)
        (batch,) = batches(
            args.workload,
            longest_tokens=args.longest_tokens,
            nano_tokens=nano_tokens,
            nano_batches=2 * count,
            number=1,
        )
        return [batch[2 * m : 2 * m + 2] for m in range(count)]
    assert args.lengths is not None
    lengths = read_lengths(args.lengths)
    longest = int(lengths.max())
    if longest > 2 * nano_tokens:
        raise ValueError(
            f"a document must fit one stage's microbatch of 2 x {dp} x {args.tokens_per_rank} tokens, "
            f"and the longest has {longest}: use more ranks, more tokens, or fewer stages"
        )
    tokens, step_tokens = int(lengths.sum()), 2 * nano_tokens * count
    if tokens < step_tokens:
        raise ValueError(
            f"the documents must make up a step of {count} x 2 x {dp} x {args.tokens_per_rank} = "
            f"{step_tokens} tokens, and {args.lengths} has {tokens}: give more documents, or fewer "
            "microbatches, ranks or tokens"
        )
    fill = pack_halves if longest <= nano_tokens else pack_step
    return first_microbatches(lengths, count, 2 * nano_tokens, fill=fill)


def _check_workload(args: SimulateArgs, nano_tokens: int) -> None:
    """Raises ValueError for a longest document that the workload cannot have, in the options' words."""
    product = f"--tokens-per-rank x --ranks / --pp (= {nano_tokens})"
    longest = args.longest_tokens
    if not SHORT_DOCUMENT_TOKENS <= longest <= nano_tokens:
        raise ValueError(
            f"--longest-tokens must be from {SHORT_DOCUMENT_TOKENS} to {product}, got {longest}: a "
            "document lies within one nano-batch; use shorter documents, more tokens or more ranks"
        )
    if args.workload in PUBLISHED and (longest % LONG_TOKENS or nano_tokens % longest):
        raise ValueError(
            f"--longest-tokens of {args.workload} must be a multiple of {LONG_TOKENS} and divide "
            f"{product}, got {longest}: use 65536 or 131072, or --workload mixed, which takes any"
        )


def padding_share(args: SimulateArgs, documents: Sequence[Sequence[np.ndarray]]) -> float:
    """Of the step's tokens."""
    held = sum(int(nano.sum()) for microbatch in documents for nano in microbatch)
    slots = 2 * args.tokens_per_rank * args.ranks // args.pp * len(documents)
    return 1 - held / slots


@dataclass(frozen=True)
class Simulation:
    """Every strategy's step, in the order of the arguments, and the share of the step that is padding."""

    results: list[StepResult]
    padding: float


def simulate(args: SimulateArgs, console: Console) -> Simulation:
    """Raises ValueError for bad input, before the first strategy."""
    args.check()
    setting = Setting(
        model_shape(args.model), cost_model(args), args.ranks, args.tp, args.pp, args.recompute,
        args.all_remote, head=True, tokens_over_tp=args.tp_splits == "tokens",
    )  # fmt: skip
    setting = with_causes(setting, args.causes)
    _ = setting.heads  # refuses a tp that does not divide them
    packings = (args.step_microbatches, 2 * args.step_microbatches)
    if "wlb" in args.strategies:
        check_microbatches(args.pp, packings)
    documents = microbatches(args, setting.dp)
    check_memory(args.ranks, args.pp * max(len(n) for m in documents for n in m))
    nano_batches = len(documents[0])
    tokens = 2 * args.tokens_per_rank // nano_batches
    longest = max(int(n.max(initial=0)) for m in documents for n in m)

    names = feasible(args.strategies, tokens, console)

    def pooled(name: Literal["cad", "published"]) -> StepResult:
        transport = None if args.transport == "auto" else args.transport
        works = pooled_works(
            setting, documents, strategy=name, tokens=tokens, tolerance=args.tolerance,
            transport=transport, longest=longest,
        )  # fmt: skip
        return pooled_step(
            setting, documents, works, tokens=tokens, overlap=args.overlap, name=name,
            published=name == "published",
        )  # fmt: skip

    def staged(name: Literal["home", "all_gather", "ring"]) -> StepResult:
        works = stage_works(setting, documents, strategy=name, tokens=tokens, longest=longest)
        return stage_step(setting, documents, works, tokens=tokens, name=name)

    def packed() -> StepResult:
        everything = [n for m in documents for n in m]
        return best_wlb_step(
            setting, everything, microbatches=packings, headroom=args.headroom,
            memory_bytes=usable_bytes(args.device) or math.inf,
        )  # fmt: skip

    run: dict[Strategy, Callable[[], StepResult]] = {
        "cad": lambda: pooled("cad"),
        "published": lambda: pooled("published"),
        "home": lambda: staged("home"),
        "all_gather": lambda: staged("all_gather"),
        "ring": lambda: staged("ring"),
        "wlb": packed,
    }
    many = args.ranks >= MANY_RANKS
    if many:
        console.print(
            f"{args.ranks} ranks: each strategy takes minutes; name fewer --strategies, or --ranks, for "
            "an answer sooner"
        )
    results = []
    for nth, name in enumerate(names, 1):
        began = time.perf_counter()
        with console.status(f"simulating {name}, {nth} of {len(names)}"):
            results.append(run[name]())
        if many:
            console.print(f"{name}: simulated in {time.perf_counter() - began:.0f} s")
    return Simulation(results, padding_share(args, documents))


def feasible(names: Sequence[Strategy], tokens: int, console: Console) -> list[Strategy]:
    """Strategies without the published planner where a rank's `tokens` in a nano-batch are odd: it deals in pairs
    of equal halves. ValueError where no other was asked for."""
    if tokens % 2 == 0 or "published" not in names:
        return list(names)
    cure = f"an even number of tokens of a rank in a nano-batch, got {tokens}"
    if len(names) == 1:
        raise ValueError(f"the published planner needs {cure}: use an even --tokens-per-rank")
    console.print(f"published is left out: its planner needs {cure}")
    return [name for name in names if name != "published"]


def usable_bytes(device: str) -> float | None:
    """Of a device's memory, for a step; None where its memory is not known."""
    return USABLE_MEMORY * CHIPS[device].memory_bytes if device in CHIPS else None


def fits(result: StepResult, device: str) -> bool | None:
    """Whether the step fits the device; None where its memory is not known."""
    usable = usable_bytes(device)
    return None if usable is None else result.memory.total <= usable


def table(simulation: Simulation, args: SimulateArgs, label: str) -> Table:
    """The figures for people."""
    results = simulation.results
    tp = f" x {args.tp} devices" if args.tp > 1 else ""
    title = f"One step of {args.model} on {args.ranks} ranks{tp}, simulated"
    result = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    columns: dict[str, Callable[[StepResult, dict[str, float]], str]] = {
        "strategy": lambda r, f: r.strategy.replace("wlb ", "wlb\n"),
        "s": lambda r, f: f"{r.step_s:.4g}",
        "ratio": lambda r, f: f"{r.step_s / results[0].step_s:.3f}",
        "MFU": lambda r, f: "-" if math.isnan(r.mfu) else f"{r.mfu:.1%}",
        "ex-\nposed": lambda r, f: f"{f['exposed_communication']:.1%}",
        "idle": lambda r, f: f"{f['idle']:.1%}",
        "bubble": lambda r, f: f"{f['bubble']:.1%}",
        "max/\nmean": lambda r, f: f"{r.attention_max_over_mean:.3f}",
        "sent": lambda r, f: f"{f['wire_bytes_mean'] / GIB:.1f}",
        "held": lambda r, f: (
            f"{f['memory_bytes'] / GIB:.0f}" + "!" * (fits(r, args.device) is False)
        ),
    }
    if args.pp == 1:
        del columns["bubble"]
    for name in columns:
        result.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for r in results:
        figures = r.figures()
        result.add_row(*(cell(r, figures) for cell in columns.values()))
    beyond = "" if usable_bytes(args.device) is None else f", ! beyond {USABLE_MEMORY:.0%} of it"
    bubble = (
        "bubble: share of a schedule's ticks in which a stage has no microbatch, in lockstep (cad, "
        "published) or not; "
    )
    result.caption = (
        f"ratio: seconds over {results[0].strategy}'s; idle: share of all rank-seconds without work of a "
        f"rank's own; exposed: of them, on the network; {bubble if args.pp > 1 else ''}"
        f"sent: GiB of a device, in bfloat16; held: GiB of its memory{beyond}, derived, of published and wlb as those "
        f"systems keep it; kernel times {label}; MFU counts causal FLOPs, backward 2 times (linear) and "
        "2.5 times (attention) the forward, nothing run again; parameter collectives, optimizer and host "
        f"take no time; padding {simulation.padding:.1%} of the step's tokens"
    )
    return result


def figures(simulation: Simulation, args: SimulateArgs, label: str) -> dict[str, Any]:
    """Everything as plain values, null for what is not known."""

    def plain(result: StepResult) -> dict[str, Any]:
        values = {n: None if math.isnan(v) else v for n, v in result.figures().items()}
        return values | {
            "label": "simulated",
            "memory": result.memory._asdict(),
            "memory_label": "derived",
            "fits": fits(result, args.device),
        }

    return {
        "label": "simulated",
        "kernel_times": label,
        "model": args.model,
        "ranks": args.ranks,
        "tp": args.tp,
        "pp": args.pp,
        "microbatches": args.step_microbatches,
        "padding": simulation.padding,
        "usable_bytes": usable_bytes(args.device),
        "steps": {r.strategy: plain(r) for r in simulation.results},
    }


def run(args: SimulateArgs, console: Console | None = None) -> list[StepResult]:
    """Simulates, prints the table, writes JSON, trace and plot where asked; returns the results.

    Raises ValueError for bad input, before anything is written.
    """
    console = console or Console()
    simulation = simulate(args, console)
    results, label = simulation.results, cost_model(args).label
    console.print(table(simulation, args, label))
    for result in results:
        if fits(result, args.device) is False:
            console.print(
                f"{result.strategy} does not fit: {result.memory.total / GIB:.0f} GiB, of which "
                f"{USABLE_MEMORY:.0%} of {args.device}'s memory holds "
                f"{(usable_bytes(args.device) or 0) / GIB:.0f}: use more ranks, stages or --tp"
            )
    first = results[0]
    if args.json is not None:
        with writing(args.json) as path:
            path.write_text(json.dumps(figures(simulation, args, label), indent=1))
        console.print(f"wrote {args.json}")
    if args.trace is not None:
        with writing(args.trace) as path:
            write_trace(first.timeline.events, args.ranks, path)
        console.print(f"wrote {args.trace}")
    if args.plot is not None:
        title = (
            f"{first.strategy}: {args.model}, ranks {args.ranks}, {first.step_s:.3g} s simulated; white: "
            "waiting" + ("; masked: a stage without a microbatch" if args.pp > 1 else "")
        )
        with writing(args.plot) as path:
            plot_timeline(first.timeline.events, args.ranks, title, path)
        console.print(f"wrote {args.plot}")
    return results
