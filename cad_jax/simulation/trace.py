"""A simulated step to look at: a trace for Perfetto, and a timeline as PNG. Host only."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cad_jax.simulation.timeline import STREAMS, Event, intervals

COLORS = {
    "linear": "#8fa8c8",
    "head": "#5b7fae",
    "attention": "#d9822b",
    "masked": "#d6d6d6",
    "exchange": "#4c9a6a",
}
IN_WORDS = {
    "linear": "linear layers",
    "head": "output head + loss",
    "masked": "a stage without a microbatch",
    "exchange": "exchange (network)",
}
MAX_TRACED_RANKS, MAX_DRAWN_RANKS = 64, 16
# Seconds of one, and where it begins.
UNITS = ((60.0, "min", 300.0), (1.0, "s", 1.0), (1e-3, "ms", 0.0))


def shown_ranks(ranks: int, most: int) -> list[int]:
    """All ranks, or `most` of them spread evenly."""
    return sorted(set(np.linspace(0, ranks - 1, min(ranks, most)).round().astype(int).tolist()))


def unit_of(seconds: float) -> tuple[float, str]:
    """Seconds of the unit in which so many are read best, and its name: ms, s or min."""
    return next((each, name) for each, name, least in UNITS if seconds >= least)


def duration(seconds: float) -> str:
    """In the unit in which it is read best, to three digits."""
    each, name = unit_of(seconds)
    value = seconds / each
    return f"{value:,.0f} {name}" if value >= 1000 else f"{value:.3g} {name}"


def write_trace(events: Sequence[Event], ranks: int, title: str, path: str | Path) -> None:
    """Chrome's trace format, which ui.perfetto.dev reads: a process a rank (at most MAX_TRACED_RANKS of
    them, spread evenly), a thread a stream, times in microseconds. title: of the step, in every process's name.
    """
    lines = []
    for rank in shown_ranks(ranks, MAX_TRACED_RANKS):
        lines.append(_name("process_name", rank, 0, f"{title}: rank {rank}"))
        lines += [_name("thread_name", rank, nth, s) for nth, s in enumerate(STREAMS)]
        for event, start, stop in intervals(events, rank):
            lines.append(
                {
                    "name": event.label,
                    "cat": event.kind,
                    "ph": "X",
                    "pid": rank,
                    "tid": STREAMS.index(event.stream),
                    "ts": 1e6 * start,
                    "dur": 1e6 * (stop - start),
                }
            )
    trace = {"traceEvents": lines, "displayTimeUnit": "ms", "otherData": {"step": title}}
    Path(path).write_text(json.dumps(trace))


def plot_timeline(events: Sequence[Event], ranks: int, title: str, path: str | Path) -> None:
    """The whole step, and below it about two layers of the forward and of the backward, as PNG: per rank a
    bar of its compute and below it, where it can be seen, a thinner one of its network.
    """
    shown = shown_ranks(ranks, MAX_DRAWN_RANKS)
    end = max((float(e.stop_s.max()) for e in events), default=1.0)
    layers = sum(
        e.kind == "attention" and e.first_rank == events[0].first_rank for e in events
    )  # attention calls, forward and backward, of the first stage
    window = end * min(1.0, 8 / max(layers, 1))
    turn = _first_backward(events, end)
    later = turn + 0.3 * (end - turn)
    figure = Figure(figsize=(14, 2.0 + 0.75 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplot_mosaic("AA;BC")
    panels = (
        ("A", 0.0, end, "the step: compute (its network is in the panels below)"),
        (
            "B",
            turn * 0.4,
            turn * 0.4 + window,
            "in the forward: compute, and in the thin rows network",
        ),
        ("C", later, later + 2 * window, "in the backward: compute, and in the thin rows network"),
    )
    for name, start, stop, what in panels:
        # Marks of a hundred exchanges a rank would overlap, or fall between pixels.
        _draw(grid[name], events, shown, start, stop, network=name != "A")
        grid[name].set_title(what, fontsize=9)
    figure.suptitle(f"{title}, {duration(end)}; white: waiting", fontsize=10)
    kinds = {event.kind for event in events if (event.stop_s > event.start_s).any()}
    held = [kind for kind in COLORS if kind in kinds]
    figure.legend(
        handles=[Patch(color=COLORS[kind], label=IN_WORDS.get(kind, kind)) for kind in held],
        loc="outside lower center", ncols=max(len(held), 1), frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=120)


def _draw(
    axes: Axes, events: Sequence[Event], shown: list[int], start: float, stop: float, network: bool
) -> None:
    each, unit = unit_of(stop)
    kinds = [kind for kind in COLORS if network or kind != "exchange"]
    for row, rank in enumerate(shown):
        bars: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for event, first, last in intervals(events, rank):
            if event.kind in bars and last > start and first < stop:
                bars[event.kind].append((first / each, (last - first) / each))
        for kind, spans in bars.items():
            low, high = (row + 0.55, 0.25) if kind == "exchange" else (row, 0.5 if network else 0.8)
            # The shortest exchange is a hairline still: none falls between two pixels.
            width = 0.6 if kind == "exchange" else 0
            axes.broken_barh(spans, (low, high), color=COLORS[kind], linewidth=width)
    axes.set_xlim(start / each, stop / each)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.set_ylim(len(shown), -0.2)
    axes.set_yticks(np.arange(len(shown)) + 0.4, [str(rank) for rank in shown])
    axes.set_ylabel("rank")
    axes.set_xlabel(f"{unit} from the step's start")


def _first_backward(events: Sequence[Event], end: float) -> float:
    """When the first backward attention begins."""
    starts = (float(e.start_s.min()) for e in events if e.kind == "attention" and "back" in e.label)
    return min(starts, default=end / 2)


def _name(what: str, pid: int, tid: int, name: str) -> dict:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
