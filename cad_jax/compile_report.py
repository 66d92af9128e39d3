"""What `cad-jax compile` does: compiles the training step of every strategy asked for, and reports whether its
exchanges overlap with compute and whether it fits: as tables and as JSON.
"""

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cad_jax.compiled_step import (
    Report,
    compile_step,
    sample_documents,
)
from cad_jax.config import RunConfig
from cad_jax.launch import PLANNED_STRATEGIES
from cad_jax.overlap import Collective
from cad_jax.sharding.clusters import USABLE_MEMORY, Topology
from cad_jax.sharding.cost_model import FAST_ATTENTION_EFFICIENCY, FAST_LINEAR_EFFICIENCY
from cad_jax.sharding.tasks import TILE_ROWS
from cad_jax.topologies import compile_only_mesh
from cad_jax.xla_options import WITHOUT_GPU, Value, check_options, gpu_options

GIB = 2**30
SMALL_BYTES = 2**20  # collectives below this share one line
_PASSES = {"forward": "fwd", "backward": "bwd", "other": ""}


def with_strategy(config: RunConfig, name: str) -> RunConfig:
    """The same run with another strategy: as a single stream, with whole keys, and with tp splitting
    weights, where that one knows nothing else."""
    key_ranges = config.attention.key_ranges if name == "cad" else 1
    attention = dataclasses.replace(config.attention, strategy=name, key_ranges=key_ranges)
    training, mesh = config.training, config.mesh
    if name not in PLANNED_STRATEGIES:
        training = dataclasses.replace(training, overlap="single_stream")
    if name.startswith("native"):
        mesh = dataclasses.replace(mesh, tp_splits="weights")
    return dataclasses.replace(config, attention=attention, training=training, mesh=mesh)


def with_twice_the_tokens(config: RunConfig) -> RunConfig:
    training = dataclasses.replace(
        config.training, tokens_per_microbatch=2 * config.training.tokens_per_microbatch
    )
    return dataclasses.replace(config, training=training)


def largest_tokens(small: Report, large: Report) -> int | None:
    """Tokens per rank that fit: peak bytes of two compilations on a straight line. None where it does not rise."""
    slope = (large.peak_bytes - small.peak_bytes) / (
        large.tokens_per_server - small.tokens_per_server
    )
    if slope <= 0:
        return None
    room = USABLE_MEMORY * small.device_bytes - small.peak_bytes
    tokens = small.tokens_per_server + room / slope
    return max(0, int(tokens) // TILE_ROWS * TILE_ROWS)


def collectives_table(report: Report) -> Table:
    """The step's collectives, a row for those alike, beside what the worst hidden of them runs; small ones together."""
    table = Table(
        title=f"{report.recipe} on {report.topology.name}, attention {report.attention}, "
        f"{report.overlap}, kernel {report.kernel}, {report.tokens_per_server:,} tokens per rank"
    )
    for column in ("where", "pass", "a step", "MiB", "beside", "ms", "hidden"):
        table.add_column(column, justify="left" if column in ("where", "beside") else "right")
    small = [c for c in report.prediction.collectives if c.bytes < SMALL_BYTES]
    alike: defaultdict[tuple, list[Collective]] = defaultdict(list)
    for c in report.prediction.collectives:
        if c.bytes >= SMALL_BYTES:
            alike[c.where, c.phase, c.bytes].append(c)
    for group in alike.values():
        worst = min(group, key=lambda c: (c.asynchronous, c.hidden_fraction))
        best = max(c.hidden_fraction for c in group)
        hidden = f"{worst.hidden_fraction:.0%}"
        table.add_row(
            " ".join(worst.where.split(" > ")[-2:]) + (" (metadata)" if worst.is_metadata else ""),
            _PASSES[worst.phase],
            f"{sum(c.executions for c in group)}",
            f"{worst.bytes / 2**20:,.0f}",
            _beside(worst),
            f"{1e3 * worst.predicted_s:.2f}",
            hidden if f"{best:.0%}" == hidden else f"{hidden} to {best:.0%}",
        )
    if small:
        exposed_ms = 1e3 * sum(c.exposed_s * c.executions for c in small)
        table.add_row(
            f"{len(small)} below 1 MiB", "", f"{sum(c.executions for c in small)}", "", "",
            f"{exposed_ms:.2f} exposed",
        )  # fmt: skip
    device = report.topology.device
    table.caption = (
        f"predicted: products at {FAST_LINEAR_EFFICIENCY:.0%} of {device.peak_flops or 0:.3g} FLOP/s, attention "
        f"{report.kernel} at {FAST_ATTENTION_EFFICIENCY[report.kernel][0]:.0%} and "
        f"{FAST_ATTENTION_EFFICIENCY[report.kernel][1]:.0%}, memory {device.memory_bytes_s / 1e12:.2f} TB/s, links "
        f"{device.within_node_bytes_s / 1e9:.0f} GB/s within and {device.between_nodes_bytes_s / 1e9:.0f} GB/s "
        "between nodes; MiB of a device's buffer"
    )
    return table


def _beside(collective: Collective) -> str:
    if not collective.asynchronous:
        return "synchronous"
    counts = Counter(entry.partition(":")[0] for entry in collective.between)
    shown = [f"{counts.pop(r)} {r}" for r in ("attention", "matmul", "loop") if r in counts]
    rest = counts.total()
    return ", ".join(shown + ([f"{rest} other"] if rest else [])) or "nothing"


def summary_table(report: Report) -> Table:
    """Overlap and memory in a few rows."""
    exchanges = [c for c in report.prediction.collectives if c.is_exchange and c.in_loop]
    alone = sum(not c.asynchronous for c in exchanges)
    idle = sum(c.asynchronous and not c.beside_compute for c in exchanges)
    limit = USABLE_MEMORY * report.device_bytes
    table = Table(title="in short", show_header=False)
    table.add_row(
        "exchanges in loops",
        f"{len(exchanges)}: {alone} synchronous, {idle} beside neither product nor attention; "
        f"{report.exchange}",
    )
    table.add_row(
        "seconds of a step",
        f"{_compute(report)} of compute, {report.prediction.attention_s:.3f} of it attention; "
        f"{report.prediction.exposed_s:.3f} exposed",
    )
    table.add_row(
        "memory of a device",
        f"arguments {report.argument_bytes / GIB:.1f} + temporaries {report.temp_bytes / GIB:.1f}, peak "
        f"{report.peak_bytes / GIB:.1f} of {report.device_bytes / GIB:.1f} GiB: "
        + ("fits" if report.peak_bytes <= limit else "DOES NOT FIT")
        + f" {USABLE_MEMORY:.0%}",
    )
    table.add_row("compilation", f"{report.compile_s:.1f} s")
    return table


def _compute(report: Report) -> str:
    return f"{report.prediction.compute_s:.3f}" + ("" if report.prediction.attention_s else " +")


def comparison_table(rows: Sequence[tuple[Report, int | None]]) -> Table:
    """Strategies side by side, with the largest tokens per rank that fit."""
    first = rows[0][0]
    table = Table(
        title=f"{first.recipe} on {first.topology.name}, {first.tokens_per_server:,} tokens per rank"
    )
    columns = ("attention", "sent GiB", "exchanged", "exposed s", "compute s", "peak GiB")
    for column in (*columns, "tokens that fit"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for report, tokens in rows:
        table.add_row(
            f"{report.attention}, {report.overlap}",
            f"{report.sent_bytes / GIB:.1f}",
            f"{report.exchanged_bytes / GIB:.1f}",
            f"{report.prediction.exposed_s:.3f}",
            _compute(report),
            f"{report.peak_bytes / GIB:.1f}",
            "?" if tokens is None else f"{tokens:,}",
        )
    table.caption = (
        "a device and step, predicted (+: attention, which is no kernel of its own there, comes on top); "
        f"sent by all collectives, and by attention's exchanges; tokens per rank within {USABLE_MEMORY:.0%} of memory, from a straight "
        "line through two compilations"
    )
    return table


def run(
    config: RunConfig,
    topology: Topology,
    strategies: Sequence[str],
    *,
    lengths: Path | None = None,
    json_path: Path | None = None,
    extra_options: Mapping[str, Value] | None = None,
    console: Console | None = None,
) -> list[Report]:
    """Compile and report each strategy; compare them where there are several. Returns the reports.

    Raises:
        ValueError: something does not fit together. No file is written; nothing is compiled, but for
            strategies named before one that cannot hold the documents.
    """
    console = console or Console()
    runs = [with_strategy(config, name) for name in strategies]
    for run_config in runs:
        run_config.check()
    if json_path is not None and not json_path.parent.is_dir():
        raise ValueError(f"cannot write {json_path}: make the folder {json_path.parent} first")
    compile_only_mesh(topology, config.mesh.pp, config.mesh.dp, config.mesh.tp)
    options = gpu_options({config.attention.asked_transport})
    options |= {**WITHOUT_GPU, **(extra_options or {})}
    check_options(options)
    documents = [sample_documents(run_config, lengths) for run_config in runs]
    several = len(runs) > 1
    rows: list[tuple[Report, int | None]] = []
    for run_config, drawn in zip(runs, documents, strict=True):
        report = compile_step(run_config, topology, drawn, options)
        console.print(collectives_table(report))
        console.print(summary_table(report))
        tokens = None
        if several:
            larger = with_twice_the_tokens(run_config)
            twice = compile_step(larger, topology, sample_documents(larger, lengths), options)
            tokens = largest_tokens(report, twice)
        rows.append((report, tokens))
    if several:
        console.print(comparison_table(rows))
    if json_path is not None:
        values = [report.to_json() | {"largest_tokens": tokens} for report, tokens in rows]
        json_path.write_text(json.dumps(values if several else values[0], indent=1))
        console.print(f"wrote {json_path}")
    return [report for report, _ in rows]
