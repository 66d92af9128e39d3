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
MAX_TRACED_RANKS, MAX_DRAWN_RANKS = 64, 16


def shown_ranks(ranks: int, most: int) -> list[int]:
    """All ranks, or `most` of them spread evenly."""
    return sorted(set(np.linspace(0, ranks - 1, min(ranks, most)).round().astype(int).tolist()))


def write_trace(events: Sequence[Event], ranks: int, path: str | Path) -> None:
    """Chrome's trace format, which ui.perfetto.dev reads: a process a rank (at most MAX_TRACED_RANKS of
    them, spread evenly), a thread a stream, times in microseconds.
    """
    lines = []
    for rank in shown_ranks(ranks, MAX_TRACED_RANKS):
        lines.append(_name("process_name", rank, 0, f"rank {rank}"))
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
    Path(path).write_text(json.dumps({"traceEvents": lines, "displayTimeUnit": "ms"}))


def plot_timeline(events: Sequence[Event], ranks: int, title: str, path: str | Path) -> None:
    """The whole step, and below it about two layers of the forward and of the backward, as PNG: per rank a
    bar of its compute and a thinner one of its network.
    """
    shown = shown_ranks(ranks, MAX_DRAWN_RANKS)
    end = max((float(e.stop_s.max()) for e in events), default=1.0)
    layers = sum(
        e.kind == "attention" and e.first_rank == events[0].first_rank for e in events
    )  # attention calls, forward and backward, of the first stage
    window = end * min(1.0, 8 / max(layers, 1))
    turn = _first_backward(events, end)
    spans = [(0.0, end), (turn * 0.4, turn * 0.4 + window), (turn + 0.3 * (end - turn),) * 2]
    spans[2] = (spans[2][0], spans[2][0] + 2 * window)
    figure = Figure(figsize=(14, 2.0 + 0.75 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplot_mosaic("AA;BC")
    for axes, (start, stop), name in zip(
        grid.values(), spans, ("the step", "in the forward", "in the backward"), strict=True
    ):
        _draw(axes, events, shown, start, stop)
        axes.set_title(name, fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.legend(
        handles=[Patch(color=color, label=kind) for kind, color in COLORS.items()],
        loc="outside lower center", ncols=len(COLORS), frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, events: Sequence[Event], shown: list[int], start: float, stop: float) -> None:
    for row, rank in enumerate(shown):
        bars: dict[str, list[tuple[float, float]]] = {kind: [] for kind in COLORS}
        for event, first, last in intervals(events, rank):
            if last > start and first < stop:
                bars[event.kind].append((1e3 * first, 1e3 * (last - first)))
        for kind, spans in bars.items():
            low, high = (row + 0.55, 0.25) if kind == "exchange" else (row, 0.5)
            axes.broken_barh(spans, (low, high), color=COLORS[kind], linewidth=0)
    axes.set_xlim(1e3 * start, 1e3 * stop)
    axes.set_ylim(len(shown), -0.2)
    axes.set_yticks(np.arange(len(shown)) + 0.4, [str(rank) for rank in shown])
    axes.set_ylabel("rank")
    axes.set_xlabel("ms")


def _first_backward(events: Sequence[Event], end: float) -> float:
    """When the first backward attention begins."""
    starts = (float(e.start_s.min()) for e in events if e.kind == "attention" and "back" in e.label)
    return min(starts, default=end / 2)


def _name(what: str, pid: int, tid: int, name: str) -> dict:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
