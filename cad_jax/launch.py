"""From a configuration to a finished run: check everything, build the parts, run the loop, report.

Whatever a person can get wrong is refused here, before the first step is compiled and before
anything in the run folder changes.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from cad_jax.attention.planned import PlannedStrategy
from cad_jax.attention.strategies import Strategy, make_strategy
from cad_jax.checkpoint import Checkpointer
from cad_jax.config import RunConfig, check_resume
from cad_jax.data import DocumentBatches, reference_entropies
from cad_jax.feed import StepFeed
from cad_jax.metrics import MetricsLog, Reporter, mean_loss, plot_loss, plot_plan
from cad_jax.pipeline.schedule import Schedule
from cad_jax.pipeline.ticks import sample_ticks
from cad_jax.prefetch import Prefetcher
from cad_jax.processes import first_process, together
from cad_jax.ragged_check import check_platform, proven_strategies
from cad_jax.run_folder import CHECKPOINTS, check_folder, check_nothing_lost, open_folder
from cad_jax.sharding.cost import DEVICES, Device, find_device
from cad_jax.sharding.mesh import POOL_AXES, make_mesh
from cad_jax.sharding.tasks import DENSE_TRANSPORTS
from cad_jax.tolerance import settled
from cad_jax.train import Loop, Outcome, StopRequest
from cad_jax.train_step import TrainStep
from cad_jax.xla_options import check_options, gpu_options

PLANNED_STRATEGIES = ("cad", "home")  # those with capacities to set


def open_data(config: RunConfig) -> DocumentBatches:
    """The run's documents.

    Raises:
        ValueError: they cannot be read, are empty, too long, or have ids the model does not know.
    """
    data = DocumentBatches(config.data, config.training.tokens_per_microbatch, config.nano_batches)
    if data.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size (={config.model.vocab_size}) must hold every id of tokenizer "
            f"{config.data.tokenizer!r}, which has {data.vocab_size}; set model.vocab_size to that"
        )
    return data


def make_run_strategies(
    config: RunConfig, data: DocumentBatches, candidates: Sequence[str] = DENSE_TRANSPORTS
) -> tuple[Strategy, Strategy | None]:
    """`make_strategies` from the run's first microbatches: the same whenever it starts or resumes."""
    planned = config.attention.strategy in PLANNED_STRATEGIES
    samples = data.sample_nano_lengths(config.attention.capacity_plans) if planned else []
    return make_strategies(
        config,
        samples,
        data.max_document_tokens,
        device=find_device(jax.devices()[0].device_kind) or DEVICES["h200"],
        kernel=config.attention.kernel,
        candidates=candidates,
    )


def make_strategies(
    config: RunConfig,
    samples: list[tuple[np.ndarray, ...]],
    max_document_tokens: int,
    *,
    device: Device,
    kernel: str,
    candidates: Sequence[str] = DENSE_TRANSPORTS,
) -> tuple[Strategy, Strategy | None]:
    """The attention strategy of whole microbatches and, with two nano-batches, that of those; where
    no document is too long for a nano-batch, the latter is both.

    Args:
        config: checked.
        samples: document lengths of microbatches to come, by nano-batch: capacities hold the plans
            of attention.capacity_plans of them, or of a pipeline's ticks over them.
        max_document_tokens: the longest document to come.
        device, kernel, candidates: see `make_strategy`.

    Raises:
        ValueError: heads do not divide over tp, or a sample does not fit the configuration's own
            capacities, even at home.
    """
    attention, schedule = config.attention, config.schedule()
    tolerance = attention.tolerance
    assert tolerance is not None, "`tolerance.settled` goes before"
    nano_tokens = config.training.tokens_per_microbatch // config.nano_batches

    def strategy(nano_batches: int, samples: list[tuple[np.ndarray, ...]]) -> Strategy:
        plans = _planned_samples(schedule, samples, attention.capacity_plans)
        tokens = config.training.tokens_per_microbatch // nano_batches
        made = make_strategy(
            attention.strategy,
            servers=config.mesh.servers,
            tokens_per_server=config.tokens_per_server // nano_batches,
            heads=config.model.head_shape(config.mesh.tp),
            tolerance=tolerance,
            key_ranges=attention.key_ranges,
            capacities=attention.capacities,
            transport=attention.transport,
            candidates=candidates,
            sample_lengths=plans,
            kernel=kernel,
            axis_names=POOL_AXES,
            max_document_tokens=min(max_document_tokens, tokens),
            element_bytes=jnp.dtype(config.model.dtype).itemsize,
            device=device,
            tp=config.mesh.tp,
            stages=config.mesh.pp,
            head_axis=config.head_axis,
        )
        if attention.capacities is not None and isinstance(made, PlannedStrategy):
            for sample in plans:
                made.plan_sample(sample)
        return made

    nano = None
    if config.nano_batches == 2:
        nano = strategy(2, [nanos for nanos in samples if len(nanos) == 2])
        if max_document_tokens <= nano_tokens:
            return nano, nano
    return strategy(1, [(np.concatenate(nanos),) for nanos in samples]), nano


def _planned_samples(
    schedule: Schedule | None, samples: list[tuple[np.ndarray, ...]], count: int
) -> list[Any]:
    """What to plan for capacities: every nano-batch; of a pipeline, `count` ticks spread over those
    of as many steps as the samples fill, at least one."""
    if schedule is None or not samples:
        return [lengths for nanos in samples for lengths in nanos]
    per_step = schedule.microbatches
    starts = range(0, max(1, len(samples) // per_step) * per_step, per_step)
    steps = [[samples[(first + m) % len(samples)] for m in range(per_step)] for first in starts]
    ticks = [tick for step in steps for tick in sample_ticks(schedule, step)]
    return ticks[:: max(1, len(ticks) // count)]


def launch(config: RunConfig, resume: bool = False, console: Console | None = None) -> Outcome:
    """Train by `config` in its run folder; returns how it ended. Collective over all processes.

    resume: go on from the folder's newest whole checkpoint, from the start where there is none.

    Raises:
        ValueError: the configuration, the data or the folder are not fit to run. No step ran and no
            checkpoint was lost; damaged ones may have been renamed.
        NonFiniteLossError, PlanDisagreementError: see `train.Loop.run`.
    """
    reporter = Reporter(config.training.steps, console, quiet=jax.process_index() != 0)
    folder = Path(config.folder)
    config.check()
    if config.training.overlap == "signal":
        raise ValueError(
            "training.overlap (=signal) shrinks exchanges to one row, so that attention misses what "
            "it needs: it cannot train; use --overlap pingpong, and signal with cad-jax compile"
        )
    mesh = make_mesh(config.mesh.pp, config.mesh.dp, config.mesh.tp)
    platform = mesh.devices.flat[0].platform
    transport = config.attention.asked_transport
    if config.attention.strategy in PLANNED_STRATEGIES:
        check_platform(transport, platform)
    if platform == "gpu":
        check_options(gpu_options({transport}))
    first_process(lambda: check_folder(folder, resume))
    data = together(lambda: open_data(config))
    config = settled(config, data, folder, resume, reporter.say)
    strategy, nano_strategy = proven_strategies(
        lambda candidates: together(lambda: make_run_strategies(config, data, candidates)),
        mesh=mesh,
        platform=platform,
        transport=transport,
        heads=config.model.head_shape(config.mesh.tp),
        dtype=config.model.dtype,
        say=reporter.say,
    )
    train_step = TrainStep(
        config.model,
        mesh,
        strategy,
        config.optimizer,
        config.training.remat,
        nano_strategy=nano_strategy,
        schedule=config.schedule(),
        tokens_over_tp=config.head_axis is not None,
    )
    with ExitStack() as resources:
        first_process(
            lambda: resources.callback(open_folder(folder, resume).close)  # pyright: ignore
        )
        checkpointer = Checkpointer(folder / CHECKPOINTS, config.checkpoint, reporter.say)
        resources.callback(checkpointer.close)
        restored = None
        if resume:
            restored = checkpointer.restore(
                train_step.abstract_state(), lambda saved: check_resume(config, saved)
            )
        if restored is not None:
            together(lambda: data.restore(restored.data))
        elif resume:
            first_process(lambda: check_nothing_lost(folder))
        first_process(lambda: config.save(folder))
        step = 0 if restored is None else restored.step
        _describe(reporter, config, mesh, data, nano_strategy or strategy, resume, step)
        feed = StepFeed(
            data,
            strategy,
            train_step,
            mesh,
            config.training.microbatches,
            nano_strategy,
            config.schedule(),
        )
        data_state = data.state()
        prefetcher = Prefetcher(feed.make)
        resources.callback(prefetcher.close)
        metrics = None
        if jax.process_index() == 0:
            metrics = MetricsLog(folder, resume_step=step if resume else None)
            resources.callback(metrics.close)
        loop = Loop(
            config=config,
            mesh=mesh,
            train_step=train_step,
            state=train_step.init(config.training.seed) if restored is None else restored.state,
            step=step,
            data_state=data_state,
            prefetcher=prefetcher,
            checkpointer=checkpointer,
            metrics=metrics,
            reporter=reporter,
        )
        request = StopRequest()
        with request.listening():
            reporter.start(step)
            try:
                outcome = loop.run(request)
            finally:
                reporter.stop()
                if metrics is not None:
                    _report(reporter, config, data, metrics.records)
                    _plot_plan(folder, loop)
        reporter.say(outcome.reason)
    return outcome


def _describe(
    reporter: Reporter,
    config: RunConfig,
    mesh: Mesh,
    data: DocumentBatches,
    strategy: Strategy,
    resume: bool,
    step: int,
) -> None:
    """Configuration, mesh and document statistics, before the first step."""
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
            + (f", {stats.truncated_tokens:,} tokens dropped" if stats.truncated_tokens else ""),
        ),
    ]
    reporter.table("cad_jax train", rows)
    if resume:
        reporter.say(
            f"resuming after step {step}"
            if step
            else "there is no checkpoint to resume from: starting at step 0"
        )


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


def _report(
    reporter: Reporter, config: RunConfig, data: DocumentBatches, records: list[dict[str, Any]]
) -> None:
    """Summary and loss curve of whatever steps there were, those before a resume included."""
    if not records:
        return
    references = _references(data)
    plot_loss(Path(config.folder) / "loss.png", records, references)
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


def _plot_plan(folder: Path, loop: Loop) -> None:
    """Work per server of the last step of this process."""
    work = loop.last_work
    if work is not None:
        plot_plan(folder / "plan.png", loop.step, work.home_pairs, work.server_pairs)
