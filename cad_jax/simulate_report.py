"""What `cad-jax simulate` reports: the same steps under each strategy as a table, JSON, a trace and a timeline.

Works where jax is not installed.
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from cad_jax.command_line import writing
from cad_jax.lengths_report import shortage
from cad_jax.sharding.clusters import USABLE_MEMORY
from cad_jax.simulate_args import SimulateArgs
from cad_jax.simulate_steps import Simulation, cost_model, simulate, usable_bytes
from cad_jax.simulation.advice import TOLERANCES
from cad_jax.simulation.averages import Averages, transports_of
from cad_jax.simulation.trace import plot_timeline, unit_of, write_trace

GIB = 2**30


def fits(row: Averages, device: str) -> bool | None:
    """Whether the steps fit the device; None where its memory is not known."""
    usable = usable_bytes(device)
    return None if usable is None else row.memory.total <= usable


def table(simulation: Simulation, args: SimulateArgs, label: str) -> Table:
    """The figures for people."""
    rows = simulation.strategies
    tp = f" x {args.tp} devices" if args.tp > 1 else ""
    one = args.step_count == 1
    title = "One step" if one else f"Means of {args.step_count} steps"
    result = Table(
        title=f"{title} of {args.model} on {args.ranks} ranks{tp}, simulated",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )

    each, unit = unit_of(rows[0].step_s)

    def digits(seconds: float, number: int) -> str:
        value = seconds / each
        return f"{value:,.0f}" if value >= 1000 else f"{value:.{number}g}"

    def length(row: Averages) -> str:
        least, most = (digits(s, 3) for s in row.range_s)
        return digits(row.step_s, 4) + ("" if one else f"\n{least}-{most}")

    columns: dict[str, Callable[[Averages, dict[str, float]], str]] = {
        "strategy": lambda r, f: f"{r.name}\n{r.detail}".rstrip(),
        unit: lambda r, f: length(r),
        "ratio": lambda r, f: f"{r.step_s / rows[0].step_s:.3f}",
        "MFU": lambda r, f: "-" if math.isnan(f["mfu"]) else f"{f['mfu']:.1%}",
        "ex-\nposed": lambda r, f: f"{f['exposed_communication']:.1%}",
        "idle": lambda r, f: f"{f['idle']:.1%}",
        "bubble": lambda r, f: f"{f['bubble']:.1%}",
        "max/\nmean": lambda r, f: f"{f['attention_max_over_mean']:.3f}",
        "sent": lambda r, f: f"{f['wire_bytes_mean'] / GIB:.1f}",
        "held": lambda r, f: (
            f"{f['memory_bytes'] / GIB:.0f}" + "!" * (fits(r, args.device) is False)
        ),
    }
    if args.pp == 1:
        del columns["bubble"]
    for name in columns:
        result.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=True)
    for row in rows:
        figures = row.figures()
        result.add_row(*(cell(row, figures) for cell in columns.values()))
    beyond = "" if usable_bytes(args.device) is None else f", ! beyond {USABLE_MEMORY:.0%} of it"
    bubble = (
        "bubble: share of a schedule's ticks in which a stage has no microbatch, in lockstep (cad, "
        "planner, published) or not; "
    )
    keys = ", tolerance and (k) --key-ranges" if args.key_ranges > 1 else " and tolerance"
    result.caption = (
        f"under a name: its transport{keys}, or replicas; "
        f"{'' if one else f'under {unit}: shortest and longest step; '}"
        f"ratio: time over {rows[0].name}'s; idle: share of all rank-seconds without work of a rank's "
        f"own; exposed: of them, on the network; {bubble if args.pp > 1 else ''}"
        f"sent: GiB of a device, in bfloat16; held: GiB of its memory{beyond}, derived, of published and wlb as those "
        f"systems keep it; kernel times {label}; MFU counts causal FLOPs, backward 2 times (linear) and "
        "2.5 times (attention) the forward, nothing run again; parameter collectives, optimizer and host "
        f"take no time; padding {simulation.padding:.1%} of the tokens"
    )
    return result


def notes(simulation: Simulation, args: SimulateArgs) -> Iterator[str]:
    """What the steps hold, and how transports and tolerances came about, line by line."""
    held, file, steps = simulation.documents, simulation.file, args.step_count
    what = f"{steps} step{'s' * (steps > 1)} of {args.step_microbatches} x 2 x {args.ranks // args.pp} x "
    what += f"{args.tokens_per_rank:,} tokens"
    if file is None:
        yield (
            f"{what}, workload {args.workload}, --seed {args.seed}: a token lies in a document of "
            f"{context_tokens(held):,.0f} tokens on average"
        )
    else:
        assert args.lengths is not None
        share = int(held.sum()) / int(file.sum())
        yield (
            f"{what} drawn from {args.lengths}, --seed {args.seed}, {share:.1%} of its tokens: a token lies in a document "
            f"of {context_tokens(held):,.0f} tokens on average, in the whole file of {context_tokens(file):,.0f}"
        )
        if repeated := shortage(
            args.lengths,
            file,
            int(held.sum()),
            "these steps",
            f"documents come {share:.2f} times on average",
        ):
            yield repeated
    if simulation.undivided:
        yield (
            f"{simulation.undivided} of {steps} steps hold a document longer than half a microbatch and run as a single "
            "stream"
        )
    names = {row.name for row in simulation.strategies}
    transports = transports_of(args.transport, args.device)
    open_, options = [], []
    if len(transports) > 1 and names & {"cad", "planner", "home"}:
        open_.append(f"transport (of {', '.join(transports)})")
        options.append("--transport")
    if args.tolerance is None and names & {"cad", "planner", "published"}:
        open_.append(f"tolerance (of {', '.join(map(str, TOLERANCES))})")
        options.append("--tolerance")
    if open_:
        fix = "fixes it" if len(options) == 1 else "fix them"
        yield f"{' and '.join(open_)}: of fewest simulated seconds, as in training; {', '.join(options)} {fix}"
    if any(row.candidate.transport == "ragged" for row in simulation.strategies):
        yield "ragged must pass a self-test when a run begins; --transport direct or relay simulates a run without it"


def context_tokens(lengths: np.ndarray) -> float:
    """Mean over the tokens, of the tokens of the document that each lies in."""
    as_float = lengths.astype(np.float64)
    return float((as_float**2).sum() / max(as_float.sum(), 1.0))


def figures(simulation: Simulation, args: SimulateArgs, label: str) -> dict[str, Any]:
    """Everything as plain values, null for what is not known."""

    def plain(row: Averages) -> dict[str, Any]:
        values = {n: None if math.isnan(v) else v for n, v in row.figures().items()}
        return values | {
            "label": "simulated",
            "memory": row.memory._asdict(),
            "memory_label": "derived",
            "fits": fits(row, args.device),
            **row.plain(),
        }

    return {
        "label": "simulated",
        "kernel_times": label,
        "model": args.model,
        "ranks": args.ranks,
        "tp": args.tp,
        "pp": args.pp,
        "microbatches": args.step_microbatches,
        "steps": args.step_count,
        "seed": args.seed,
        "documents_tokens": int(simulation.documents.sum()),
        "context_tokens": context_tokens(simulation.documents),
        "padding": simulation.padding,
        "usable_bytes": usable_bytes(args.device),
        "strategies": {row.name: plain(row) for row in simulation.strategies},
    }


def run(args: SimulateArgs, console: Console | None = None) -> list[Averages]:
    """Simulates, prints the table, writes JSON, trace and plot where asked; returns each strategy's steps.

    Raises ValueError for bad input, before anything is written.
    """
    console = console or Console()
    simulation = simulate(args, console)
    rows, label = simulation.strategies, cost_model(args).label
    console.print(table(simulation, args, label))
    for note in notes(simulation, args):
        console.print(note, highlight=False, markup=False)
    for row in rows:
        if fits(row, args.device) is False:
            console.print(
                f"{row.name} does not fit: {row.memory.total / GIB:.0f} GiB, of which "
                f"{USABLE_MEMORY:.0%} of {args.device}'s memory holds "
                f"{(usable_bytes(args.device) or 0) / GIB:.0f}: use more ranks, stages or --tp"
            )
    first = rows[0]
    shown = first.results[first.typical]
    title = f"{first.described}, step {first.typical + 1} of {len(first.results)}"
    if args.json is not None:
        with writing(args.json) as path:
            path.write_text(json.dumps(figures(simulation, args, label), indent=1))
        console.print(f"wrote {args.json}")
    if args.trace is not None:
        with writing(args.trace) as path:
            write_trace(shown.timeline.events, args.ranks, title, path)
        console.print(f"wrote {args.trace}: {title}", highlight=False)
    if args.plot is not None:
        on = f"{args.model} on {args.ranks} ranks of {args.tp} {args.device}"
        with writing(args.plot) as path:
            plot_timeline(shown.timeline.events, args.ranks, f"{title}: {on}, simulated", path)
        console.print(f"wrote {args.plot}: {title}", highlight=False)
    return rows
