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
from rich.console import Console

from cad_jax.attention.planned import PlannedStrategy
from cad_jax.attention.strategies import Strategy, make_strategy
from cad_jax.attention_config import PLANNED_STRATEGIES
from cad_jax.checkpoint import Checkpointer
from cad_jax.config import RunConfig
from cad_jax.data import DocumentBatches
from cad_jax.feed import StepFeed
from cad_jax.metrics import MetricsLog, Reporter
from cad_jax.pipeline.schedule import Schedule
from cad_jax.pipeline.ticks import sample_ticks
from cad_jax.prefetch import Prefetcher
from cad_jax.processes import first_process, together
from cad_jax.ragged_check import check_platform, proven_strategies
from cad_jax.resume import check_resume, rounding_changes
from cad_jax.run_folder import CHECKPOINTS, begins_anew, check_folder, open_folder
from cad_jax.run_report import describe, draw_plan, summarise
from cad_jax.settled import (
    kept_transport,
    settled_tolerance,
    with_first_speeds,
    with_profile_digest,
    with_transport,
)
from cad_jax.sharding.cost import DEVICES, Device, find_device
from cad_jax.sharding.mesh import POOL_AXES, make_mesh
from cad_jax.sharding.tasks import DENSE_TRANSPORTS
from cad_jax.simulation.named_costs import named_costs
from cad_jax.train import Loop, Outcome, StopRequest
from cad_jax.train_step import TrainStep
from cad_jax.xla_options import check_options, gpu_options


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
        ValueError: heads do not divide over tp, a profile is not of the device, or a sample does not fit the configuration's own
            capacities, even at home.
    """
    attention, schedule = config.attention, config.schedule()
    tolerance, planner = attention.tolerance, attention.load_planner()
    assert tolerance is not None, "`settled_tolerance` goes before"
    costs = None
    if attention.profile is not None:
        costs = named_costs(device, attention.profile, option="attention.profile")
    nano_tokens = config.training.tokens_per_microbatch // config.nano_batches

    def strategy(
        nano_batches: int, samples: list[tuple[np.ndarray, ...]], candidates: Sequence[str]
    ) -> Strategy:
        plans = _planned_samples(schedule, samples, attention.capacity_plans)
        tokens = config.training.tokens_per_microbatch // nano_batches
        made = make_strategy(
            attention.strategy,
            servers=config.mesh.servers,
            tokens_per_server=config.tokens_per_server // nano_batches,
            heads=config.model.head_shape(config.mesh.tp),
            tolerance=tolerance,
            key_ranges=attention.key_ranges,
            planner=planner,
            speeds=attention.server_speeds,
            node=attention.node,
            cost_model=costs,
            placement=attention.placement,
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
        nano = strategy(2, [nanos for nanos in samples if len(nanos) == 2], candidates)
        if max_document_tokens <= nano_tokens:
            return nano, nano
        if nano.transport is not None:  # one for both: a run has a transport
            candidates = (nano.transport,)
    return strategy(1, [(np.concatenate(nanos),) for nanos in samples], candidates), nano


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
    config = with_profile_digest(with_first_speeds(config))
    together(config.check)  # imports a planner, which one process may lack
    if config.training.overlap == "signal":
        raise ValueError(
            "training.overlap (=signal) shrinks exchanges to one row, so that attention misses what "
            "it needs: it cannot train; use --overlap pingpong, and signal with cad-jax compile"
        )
    mesh = make_mesh(config.mesh.pp, config.mesh.dp, config.mesh.tp)
    platform = mesh.devices.flat[0].platform
    if config.attention.strategy in PLANNED_STRATEGIES:
        check_platform(config.attention, platform)
    if platform == "gpu":
        check_options(gpu_options({config.attention.asked_transport}))
    if not config.folder:
        raise ValueError(
            "--folder must name the folder of the run, got none: give one, such as runs/first"
        )
    first_process(lambda: _check_folder(folder, resume, reporter))
    data = together(lambda: open_data(config))
    config = settled_tolerance(config, data, folder, resume, reporter.say)
    strategy, nano_strategy = proven_strategies(
        lambda candidates: together(lambda: make_run_strategies(config, data, candidates)),
        mesh=mesh,
        platform=platform,
        attention=config.attention,
        kept=kept_transport(config, folder, resume, reporter.say),
        heads=config.model.head_shape(config.mesh.tp),
        dtype=config.model.dtype,
        say=reporter.say,
    )
    config = with_transport(config, strategy.transport)
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
            _say_rounding(reporter, rounding_changes(config, restored.config))
        first_process(lambda: config.save(folder))
        step = 0 if restored is None else restored.step
        describe(reporter, config, mesh, data, nano_strategy or strategy, step)
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
        first = jax.process_index() == 0
        metrics = together(
            lambda: MetricsLog(folder, resume_step=step if resume else None) if first else None
        )
        if metrics is not None:
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
                    summarise(reporter, config, data, metrics.records)
                    draw_plan(folder, loop)
        reporter.say(outcome.reason)
    return outcome


def _check_folder(folder: Path, resume: bool, reporter: Reporter) -> None:
    """Says so where a run that is to go on begins anew. Raises ValueError for a folder that is not fit."""
    check_folder(folder, resume)
    if resume and begins_anew(folder):
        absent = "" if folder.exists() else " (no such folder yet)"
        reporter.say(
            f"there is no checkpoint to resume from in {folder.absolute()}{absent}: the run begins at step 0"
        )


def _say_rounding(reporter: Reporter, changes: Sequence[str]) -> None:
    if changes:
        reporter.say(
            f"resuming with {', '.join(changes)}: the same tokens a step, and losses that differ by "
            "rounding from those of a run without a change"
        )
