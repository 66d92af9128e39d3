"""A plan to look at: work of servers before and after planning, who serves whom, where one document went. Works
without jax.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from cad_jax.sharding.plan import Plan
from cad_jax.sharding.tasks import (
    DOCUMENT,
    HOME,
    K_START,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    causal_pairs,
)

HOME_COLOR, PLANNED_COLOR = "C0", "C1"
WIDTHS = (11.0, 16.0)  # inches, of few and of many servers
INCHES_PER_SERVER = 0.18
MAX_CELLS = 128  # along one side of who serves whom


def plot(plan: Plan, path: str | Path, title: str, shares: np.ndarray | None = None) -> None:
    """Writes the three as PNG. title: of the whole. shares: float64 [S], pairs that each server should have, by default the mean."""
    width = float(np.clip(2 + INCHES_PER_SERVER * plan.servers, *WIDTHS))
    figure = Figure(figsize=(width, 9.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic(
        "AA;BC", width_ratios=[1, max(1.0, (width - 6.5) / 5.0)], height_ratios=[1, 1.5]
    )
    _draw_work(axes["A"], plan, shares)
    _draw_moves(axes["B"], plan)
    _draw_longest(axes["C"], plan)
    # Never over a bar, nor over the title.
    figure.legend(loc="outside upper center", ncols=3, frameon=False, title=title)
    figure.savefig(path, dpi=130, format="png")


def _draw_work(axes: Axes, plan: Plan, shares: np.ndarray | None) -> None:
    what = "mean" if shares is None else "share"
    unit = np.maximum(plan.loads().mean() if shares is None else shares, 1.0)
    server = np.arange(plan.servers)
    for offset, loads, color, name in (
        (-0.2, plan.home_loads(), HOME_COLOR, "home"),
        (0.2, plan.loads(), PLANNED_COLOR, "planned"),
    ):
        work = loads / unit
        label = f"{name}, most {work.max():.2f} times the {what}"
        axes.bar(server + offset, work, 0.4, color=color, label=label)
    line: dict = dict(color="black", linewidth=0.8, linestyle="--")
    axes.axhline(1 + plan.tolerance, **line, label=f"{what} + {plan.tolerance:.3g} (tolerance)")
    axes.set_title("work of each server", fontsize=10)
    axes.set_xlim(-0.6, plan.servers - 0.4)
    axes.set_xlabel("server")
    axes.set_ylabel(f"(query, key) pairs / {what}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_moves(axes: Axes, plan: Plan) -> None:
    """Work that leaves its home, by home and server."""
    tasks, servers = plan.tasks, plan.servers
    pairs = causal_pairs(*tasks[:, Q_START : K_STOP + 1].T)
    away = tasks[:, HOME] != tasks[:, SERVER]
    group = -(-servers // MAX_CELLS)  # ranks of a cell: single ones would be too small to see
    cells = -(-servers // group)
    moved = np.zeros((cells, cells))
    at = tuple(tasks[away][:, (HOME, SERVER)].T // group)
    np.add.at(moved, at, pairs[away])
    total = max(int(pairs.sum()), 1)
    shown = 100 * moved / (group * total / servers)
    edge = cells * group - 0.5
    image = axes.imshow(
        np.ma.masked_equal(shown, 0), cmap="YlOrRd", vmin=0, vmax=max(shown.max(), 1), aspect="auto",
        interpolation="nearest", extent=(-0.5, edge, edge, -0.5),
    )  # fmt: skip
    axes.set_title(
        f"who serves whom\n{moved.sum() / total:.0%} of the pairs leave home; what stays, the diagonal, is left out",
        fontsize=10,
    )
    axes.set_xlabel("server" if group == 1 else f"server, {group} in a cell")
    axes.set_ylabel("home rank")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(image, ax=axes, label="pairs, % of a server's mean")


def _draw_longest(axes: Axes, plan: Plan) -> None:
    """The longest document's tokens: where they live, and which servers compute their attention."""
    longest = int(plan.lengths.argmax()) if len(plan.lengths) else 0
    tokens = int(plan.lengths[longest]) if len(plan.lengths) else 0
    tasks = plan.tasks[plan.tasks[:, DOCUMENT] == longest]
    height = max(0.45, plan.servers / MAX_CELLS)
    for name, color, top in ((HOME, HOME_COLOR, 0.0), (SERVER, PLANNED_COLOR, -height)):
        for row in np.unique(tasks[:, name]).tolist():
            of_row = tasks[tasks[:, name] == row]
            spans = [(q, stop - q) for q, stop in of_row[:, (Q_START, Q_STOP)].tolist()]
            axes.broken_barh(spans, (row + top, height), color=color, linewidth=0)
    partial = ", some for a part of their keys" if tasks[:, K_START].any() else ""
    axes.set_title(
        f"the longest document, {tokens:,} tokens: its queries\nat home (lower bars), and where they are served "
        f"(upper bars){partial}",
        fontsize=10,
    )
    axes.set_xlim(0, max(tokens, 1))
    axes.set_ylim(plan.servers - 1 + height + 0.2, -height - 0.2)
    axes.set_xlabel("query, tokens from the document's start")
    axes.set_ylabel("rank")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
