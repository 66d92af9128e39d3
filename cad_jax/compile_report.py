"""What `cad-jax compile` does: compiles the training step of every strategy asked for, and reports whether its
exchanges overlap with compute and whether it fits: as tables and as JSON.
"""

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cad_jax.attention_config import OF_CAD, PLANNED_STRATEGIES, AttentionConfig
from cad_jax.command_line import check_outputs, writing
from cad_jax.compiled_step import (
    Report,
    compile_step,
    sample_documents,
)
from cad_jax.config import RunConfig
from cad_jax.overlap import Collective
from cad_jax.settled import with_speeds
from cad_jax.sharding.clusters import USABLE_MEMORY, Topology
from cad_jax.sharding.cost_model import FAST_ATTENTION_EFFICIENCY, FAST_LINEAR_EFFICIENCY
from cad_jax.sharding.tasks import TILE_ROWS
from cad_jax.topologies import compile_only_mesh
from cad_jax.xla_options import WITHOUT_GPU, Value, check_options, gpu_options

GIB = 2**30
SMALL_BYTES = 2**20  # collectives below this share one line
_PASSES = {"forward": "fwd", "backward": "bwd", "other": ""}


def with_strategy(config: RunConfig, name: str) -> RunConfig:
    """The same run with another strategy: as a single stream, without what cad's plans are told, in the order
    of packing, and with tp splitting weights, where that one knows nothing else."""
    changes: dict[str, Any] = {"strategy": name}
    if name != "cad":
        changes |= {field: getattr(AttentionConfig, field) for field in OF_CAD}
    if name not in PLANNED_STRATEGIES or (name, config.attention.placement) == ("home", "searched"):
        changes["placement"] = "sequential"
    attention = dataclasses.replace(config.attention, **changes)
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
    """Tokens of a rank in a microbatch that fit: peak bytes of two compilations on a straight line. None where it does not rise."""
    slope = (large.peak_bytes - small.peak_bytes) / (
        large.tokens_per_server - small.tokens_per_server
    )
    if slope <= 0:
        return None
    room = USABLE_MEMORY * small.device_bytes - small.peak_bytes
    tokens = small.tokens_per_server + room / slope
    return max(0, int(tokens) // TILE_ROWS * TILE_ROWS)


def duration(seconds: float) -> str:
    """Three digits, in the largest unit of which there is one."""
    rounded = float(f"{seconds:.3g}")
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if rounded * scale >= 1 or not rounded:
            return f"{rounded * scale:g} {unit}"
    return f"{1e9 * rounded:g} ns"


def size(count: float) -> str:
    """Three digits, in GiB or what is smaller."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return (
                f"{count / scale:.3g} {unit}"
                if count < 1000 * scale
                else f"{count / scale:.0f} {unit}"
            )
    return f"{count:.0f} B"


def collectives_table(report: Report) -> Table:
    """The step's collectives, a row for those alike, beside what the worst hidden of them runs; small ones together."""
    table = Table(
        title=f"{report.recipe} on {report.topology.name}, attention {report.attention}, "
        f"{report.overlap}, kernel {report.kernel}, {report.tokens_per_server:,} tokens of a rank in a microbatch"
    )
    for column in ("where", "pass", "a step", "MiB", "beside", "takes", "hidden"):
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
            duration(worst.predicted_s),
            hidden if f"{best:.0%}" == hidden else f"{hidden} to {best:.0%}",
        )
    if small:
        exposed_s = sum(c.exposed_s * c.executions for c in small)
        table.add_row(
            f"{len(small)} below 1 MiB", "", f"{sum(c.executions for c in small)}", "", "",
            f"{duration(exposed_s)} exposed",
        )  # fmt: skip
    device = report.topology.device
    table.caption = (
        f"predicted: products at {FAST_LINEAR_EFFICIENCY:.0%} of {device.peak_flops or 0:.3g} FLOP/s (bfloat16), attention "
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
        "a step, predicted",
        f"{_compute(report)} of compute, {duration(report.prediction.attention_s)} of it attention; "
        f"{duration(report.prediction.exposed_s)} exposed",
    )
    table.add_row(
        "memory of a device",
        f"arguments {size(report.argument_bytes)} + temporaries {size(report.temp_bytes)}, peak "
        f"{size(report.peak_bytes)} of {size(report.device_bytes)}: "
        + ("fits" if report.peak_bytes <= limit else "DOES NOT FIT")
        + f" {USABLE_MEMORY:.0%}",
    )
    table.add_row("compilation", f"{report.compile_s:.1f} s")
    return table


def _compute(report: Report) -> str:
    return duration(report.prediction.compute_s) + ("" if report.prediction.attention_s else " +")


def comparison_table(rows: Sequence[tuple[Report, int | None]]) -> Table:
    """Strategies side by side, with the most tokens of a rank in a microbatch that fit."""
    first = rows[0][0]
    table = Table(
        title=f"{first.recipe} on {first.topology.name}, {first.tokens_per_server:,} tokens of a rank in a microbatch"
    )
    columns = ("attention", "sent", "exchanged", "exposed", "compute", "peak")
    for column in (*columns, "tokens that fit"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for report, tokens in rows:
        table.add_row(
            f"{report.attention}, {report.overlap}",
            size(report.sent_bytes),
            size(report.exchanged_bytes),
            duration(report.prediction.exposed_s),
            _compute(report),
            size(report.peak_bytes),
            "?" if tokens is None else f"{tokens:,}",
        )
    table.caption = (
        "a device and step, predicted (+: attention, which is no kernel of its own there, comes on top); "
        f"sent by all collectives, and by attention's exchanges; tokens of a rank in a microbatch within {USABLE_MEMORY:.0%} of memory, from a straight "
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
    runs = [with_speeds(with_strategy(config, name)) for name in strategies]
    for run_config in runs:
        run_config.check()
    check_outputs({"--json": json_path}, chain([lengths], config.input_files()))
    compile_only_mesh(topology, config.mesh.pp, config.mesh.dp, config.mesh.tp)
    options = gpu_options({config.attention.asked_transport})
    options |= {**WITHOUT_GPU, **(extra_options or {})}
    check_options(options)
    documents = [sample_documents(run_config, lengths) for run_config in runs]
    if documents[0].repetition is not None:
        console.print(documents[0].repetition, highlight=False, markup=False)
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
        text = json.dumps(values if several else values[0], indent=1)
        with writing(json_path) as path:
            path.write_text(text)
        console.print(f"wrote {json_path}")
    return [report for report, _ in rows]
