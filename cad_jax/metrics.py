"""What a run reports: metrics.jsonl, TensorBoard events, progress on the console, two plots.

metrics.jsonl holds one line a step with exactly the fields of `FIELDS`. Losses are in nats per target
token, times in seconds, bytes per server for one forward of one layer; attention's max over mean weighs
servers by their speeds where they are given.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tensorboardX import SummaryWriter

from cad_jax.sharding.cost import max_over_mean

METRICS_FILE, EVENTS = "metrics.jsonl", "tensorboard"
FIELDS = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "target_tokens",
    "padding_tokens",
    "documents",
    "nano_batches",
    "step_s",
    "plan_s",
    "plan_wait_s",
    "data_wait_s",
    "checkpoint_s",
    "tokens_per_s",
    "mfu",
    "attn_max_over_mean_home",
    "attn_max_over_mean",
    "exchange_bytes_mean",
    "exchange_bytes_max",
    "wire_bytes",
    "capacity_used",
    "fallback_tasks",
    "compiles",
)
PLAIN_LINES = 60  # about so many lines for a run that is not watched on a terminal


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; a last line cut short by a crash is left out.

    Raises:
        ValueError: another line is no record; a resumed run would drop what comes after it.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").split("\n")
    records = [_record(line) for line in lines]
    whole = records.index(None) if None in records else len(records)
    if any(line.strip() for line in lines[whole + 1 :]):
        raise ValueError(
            f"{path}, line {whole + 1}: a line must be the record of a step, got {lines[whole][:40]!r}: remove "
            "that line, or move the file away"
        )
    return [record for record in records[:whole] if record is not None]


def _record(line: str) -> dict[str, Any] | None:
    """None where the line is not the whole record of a step."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


class MetricsLog:
    """Appends one record a step to metrics.jsonl and TensorBoard; `records` holds all of them.

    resume_step: lines after this step (written after the checkpoint that the run resumes from) are
    dropped, so that a resumed run reads as one run; where none would be left, the old file is kept
    under another name. None starts empty.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        self.records = []
        path = folder / METRICS_FILE
        if resume_step is not None:
            written = read_metrics(folder)
            self.records = [r for r in written if r["step"] <= resume_step]
            if written and not self.records:  # the run starts again: keep what it had reached
                os.replace(path, _free_name(path))
            rewritten = path.with_suffix(".tmp")
            rewritten.write_text("".join(json.dumps(r) + "\n" for r in self.records))
            os.replace(rewritten, path)
        self._file = path.open("a", buffering=1)
        purge = None if resume_step is None else resume_step + 1
        self._events = SummaryWriter(str(folder / EVENTS), purge_step=purge)

    def write(self, record: dict[str, Any]) -> None:
        assert tuple(record) == FIELDS, sorted(set(FIELDS) ^ set(record))
        self._file.write(json.dumps(record) + "\n")
        self.records.append(record)
        for name, value in record.items():
            if name == "capacity_used":
                for capacity, used in value.items():
                    self._events.add_scalar(f"capacity_used/{capacity}", used, record["step"])
            elif name != "step" and value is not None:
                self._events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._file.close()
        self._events.close()


def _free_name(path: Path) -> Path:
    """The path with the first number behind its stem that is not taken."""
    number = 1
    while (free := path.with_stem(f"{path.stem}_{number}")).exists():
        number += 1
    return free


class Reporter:
    """Console output of process 0: a progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, steps: int, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(soft_wrap=True, highlight=False)
        self._quiet = quiet
        self._steps = steps
        self._every = max(1, steps // PLAIN_LINES)
        self._progress = None
        if self.console.is_terminal and not quiet:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar = self._progress.add_task("train", total=steps, figures="compiling")

    def say(self, line: str) -> None:
        if not self._quiet:
            self.console.print(line, markup=False)

    def table(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        if self._quiet:
            return
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def start(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, total=max(step, self._steps))
            self._progress.start()

    def step(self, record: dict[str, Any]) -> None:
        figures = (
            f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s  attention max/mean "
            f"{record['attn_max_over_mean_home']:.2f} -> {record['attn_max_over_mean']:.2f}"
        )
        if self._progress is not None:
            self._progress.update(self._bar, completed=record["step"], figures=figures)
        elif record["step"] % self._every == 0 or record["step"] in (1, self._steps):
            self.say(f"step {record['step']}/{self._steps}  {figures}")

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def mean_loss(records: Sequence[dict[str, Any]], last: int = 3) -> float:
    """Loss of the last steps, weighted by their target tokens; NaN without any."""
    weights = [r["target_tokens"] for r in records[-last:]]
    losses = [r["loss"] for r in records[-last:]]
    return float(np.average(losses, weights=weights)) if sum(weights) else math.nan


def plot_loss(path: Path, records: Sequence[dict[str, Any]], references: dict[str, float]) -> None:
    """Loss per step, with horizontal lines at the references (nats per target token)."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in records], [r["loss"] for r in records], linewidth=1.2)
    for index, (name, value) in enumerate(references.items()):
        axes.axhline(value, linestyle="--", linewidth=0.9, color=f"C{index + 1}")
        axes.annotate(
            f"{name} {value:.2f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
            color=f"C{index + 1}",
        )
    axes.set(xlabel="step", ylabel="cross-entropy, nats per target token")
    FigureCanvasAgg(figure).print_png(str(path))


def plot_plan(
    path: Path,
    step: int,
    home_pairs: np.ndarray,
    planned_pairs: np.ndarray,
    speeds: Sequence[float] | None = None,
) -> None:
    """Attention work per server in one plan, before and after planning. Both [S], (query, key) pairs. speeds: [S],
    relative, where servers are not alike."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    servers = np.arange(len(home_pairs))
    for offset, pairs, name in ((-0.2, home_pairs, "at home"), (0.2, planned_pairs, "planned")):
        ratio = max_over_mean(pairs, speeds)
        axes.bar(servers + offset, pairs / 1e6, 0.38, label=f"{name}: max/mean {ratio:.3f}")
    shares = np.ones(len(servers)) if speeds is None else np.array(speeds)
    even = home_pairs.sum() / 1e6 * shares / shares.sum()
    axes.hlines(even, servers - 0.5, servers + 0.5, linestyle="--", linewidth=0.9, color="gray")
    axes.set(
        xlabel="server",
        ylabel="million (query, key) pairs",
        title=f"attention work per server, busiest plan of step {step}",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=2, frameon=False)  # never over a bar
    FigureCanvasAgg(figure).print_png(str(path))
