"""What a run says of itself: configuration, mesh and documents before the first step, a summary after the last."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cad_jax.attention.strategies import Strategy
from cad_jax.config import RunConfig
from cad_jax.data import DataConfig, DocumentBatches, DocumentStatistics, reference_entropies
from cad_jax.metrics import Reporter, mean_loss, plot_loss, plot_plan
from cad_jax.run_folder import LOSS_PLOT, PLAN_PLOT
from cad_jax.train import Loop


def describe(
    reporter: Reporter,
    config: RunConfig,
    mesh: Mesh,
    data: DocumentBatches,
    strategy: Strategy,
    step: int,
) -> None:
    """Configuration, mesh and document statistics, before the first step that follows `step`."""
    model, training, stats = config.model, config.training, data.statistics()
    step_tokens = training.tokens_per_microbatch * training.microbatches
    kind = mesh.devices.flat[0].device_kind
    rows = [
        ("recipe", f"{config.name}, run folder {config.folder}"),
        (
            "model",
            f"{model.num_parameters / 1e6:,.1f} M parameters: {model.num_layers} layers, embedding "
            f"{model.embedding_dim}, heads {model.num_q_heads}/{model.num_kv_heads} x "
            f"{model.head_dim}, ffn {model.ffn_dim}, {model.dtype}",
        ),
        (
            "mesh",
            f"pp {config.mesh.pp}, dp {config.mesh.dp}, tp {config.mesh.tp} on {mesh.size} x {kind}, "
            f"{jax.process_count()} process{'es' if jax.process_count() > 1 else ''}"
            + (f"; tp splits {config.mesh.tp_splits}" if config.mesh.tp > 1 else ""),
        ),
        *_pipeline(config),
        (
            "attention",
            f"{config.attention.strategy}: {config.mesh.servers} servers x "
            f"{config.tokens_per_server // config.nano_batches:,} tokens, tolerance "
            f"{config.attention.tolerance}, {training.overlap}",
        ),
        *_planning(config),
        ("exchange", strategy.describe()),
        ("step", f"{step_tokens:,} tokens in {training.microbatches} microbatch(es)"),
        *(_overlap(data) if data.nano_batches == 2 else []),
        (
            "documents",
            f"{stats.documents:,} ({stats.zero_length_documents:,} empty), {stats.tokens:,} tokens; "
            f"length median {stats.median_tokens:,.0f}, 90% {stats.p90_tokens:,.0f}, longest "
            f"{stats.max_tokens:,}",
        ),
        (
            "pieces",
            f"{stats.pieces:,} of at most {data.max_document_tokens:,} tokens an epoch; "
            f"{stats.context_lost_tokens:,} of {stats.target_tokens:,} target tokens lose context"
            + _cure(config.data, stats)
            + (f", {stats.truncated_tokens:,} tokens dropped" if stats.truncated_tokens else ""),
        ),
    ]
    reporter.table("cad_jax train", rows)
    if step:
        reporter.say(f"resuming after step {step}")
    reporter.say("the first step is compiled, which takes longer than a step")


def _cure(data: DataConfig, stats: DocumentStatistics) -> str:
    """How much context pieces cost, and how documents stay whole."""
    if stats.context_lost_tokens == 0:
        return ""
    cure = "a larger --training.tokens-per-microbatch"
    if data.max_piece_tokens is not None:
        cure = f"--data.max-piece-tokens None, with {cure},"
    return f" ({stats.context_lost_tokens / stats.target_tokens:.1%}; {cure} keeps documents whole)"


def _planning(config: RunConfig) -> list[tuple[str, str]]:
    """What is not as usual in how it plans."""
    attention, said = config.attention, []
    if attention.planner is not None:
        said.append(f"planner {attention.planner}")
    if attention.placement != "sequential":
        said.append(f"documents placed {attention.placement}")
    if attention.server_speeds is not None:
        slow, fast = min(attention.server_speeds), max(attention.server_speeds)
        said.append(f"speeds of servers {slow:.3g} to {fast:.3g}; max/mean weighs servers by them")
    if attention.node > 1:
        said.append(f"{attention.node} servers a node")
    if attention.profile is not None:
        said.append(f"plans compared by {attention.profile}")
    return [("planning", "; ".join(said))] if said else []


def _pipeline(config: RunConfig) -> list[tuple[str, str]]:
    schedule = config.schedule()
    if schedule is None:
        return []
    name = "1F1B"
    if schedule.virtual_stages > 1:
        name = f"interleaved 1F1B, {schedule.virtual_stages} virtual stages each"
    idle = " (a step needs as many microbatches as stages to keep all of them at work)"
    return [
        (
            "pipeline",
            f"{schedule.stages} stages, {name}, {schedule.microbatches} microbatches: "
            f"{schedule.ticks} ticks forward, {schedule.ticks} backward, bubble of linear work "
            f"{schedule.bubble:.0%}{idle if schedule.microbatches < schedule.stages else ''}; "
            f"{schedule.slots} microbatches kept a stage, remat {config.training.remat}",
        )
    ]


def _overlap(data: DocumentBatches) -> list[tuple[str, str]]:
    return [
        (
            "overlap",
            f"nano-batches of {data.tokens_per_nano_batch:,} tokens; {data.undivided_microbatches:,} "
            "documents an epoch are longer, and a step with one of them runs single_stream, as a "
            "second program",
        )
    ]


def _references(data: DocumentBatches) -> dict[str, float]:
    """Cross-entropies to compare a loss with, nats per target token."""
    entropies = reference_entropies(data.store)
    references = {"token frequencies alone": entropies.unigram_nats}
    if entropies.bigram_nats is not None:
        references["token bigrams alone"] = entropies.bigram_nats
    return references


def summarise(
    reporter: Reporter, config: RunConfig, data: DocumentBatches, records: list[dict[str, Any]]
) -> None:
    """Summary and loss curve of whatever steps there were, those before a resume included."""
    if not records:
        return
    references = _references(data)
    plot_loss(Path(config.folder) / LOSS_PLOT, records, references)
    seconds, tokens = (sum(r[name] for r in records) for name in ("step_s", "tokens"))
    padding = sum(r["padding_tokens"] for r in records) / tokens
    later = records[1:] or records  # the first step compiles
    median = {
        name: float(np.median([r[name] for r in later]))
        for name in ("step_s", "plan_s", "attn_max_over_mean_home", "attn_max_over_mean")
    }
    waits = sum(r["plan_wait_s"] for r in later) / sum(r["step_s"] for r in later)
    fallbacks = sum(r["fallback_tasks"] for r in records)
    step, asked = records[-1]["step"], config.training.steps
    undivided = sum(r.get("nano_batches", 1) < config.nano_batches for r in records)
    why = ": a document longer than half a microbatch cannot be divided" if undivided else ""
    overlap = [("overlap", f"{undivided} of {len(records)} steps ran single_stream{why}")]
    rows = [
        ("steps", f"{step} of {asked}" if step <= asked else f"{step}, past the {asked} asked for"),
        (
            "tokens",
            f"{tokens:,} ({padding:.2%} padding) in {seconds / 60:.1f} min, "
            f"{tokens / seconds:,.0f} a second; median step {median['step_s']:.3f} s",
        ),
        (
            "attention work",
            f"median max/mean over servers {median['attn_max_over_mean_home']:.3f} at home, "
            f"{median['attn_max_over_mean']:.3f} as spread; {fallbacks} tasks fell back home",
        ),
        (
            "planning",
            f"median {1e3 * median['plan_s']:.1f} ms a step, hidden but for {waits:.2%} of the time",
        ),
        ("loss, last 3 steps", f"{mean_loss(records):.3f} nats per target token"),
        *(overlap if config.nano_batches > 1 else []),
        *((f"for comparison, {name}", f"{nats:.3f}") for name, nats in references.items()),
        ("run folder", config.folder),
    ]
    reporter.table("summary", rows)


def draw_plan(folder: Path, loop: Loop) -> None:
    """Work per server of the last step of this process."""
    work = loop.last_work
    if work is not None:
        speeds = loop.config.attention.server_speeds
        plot_plan(folder / PLAN_PLOT, loop.step, work.home_pairs, work.server_pairs, speeds)
