"""One training step of every strategy, event by event. Host only.

Ranks are pipeline stages times data-parallel ranks, each of tp devices. Strategies with one pool for all
stages walk the schedule's ticks in lockstep; the others' stages wait for their own inputs alone.

Shape letters: P stages, M microbatches, N nano-batches of a microbatch, S ranks of a pool, T tokens of
a rank in a nano-batch.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from cad_jax.pipeline.schedule import IDLE, one_f_one_b
from cad_jax.pipeline.ticks import MicrobatchLengths, check_microbatches, compositions
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.tasks import stage_documents, stage_lengths
from cad_jax.simulation import strategies
from cad_jax.simulation.execution import Mode, Stage
from cad_jax.simulation.memory import memory
from cad_jax.simulation.setting import (
    Setting,
    StepResult,
    boundary_s,
    head_seconds,
    pool_of,
    result_of,
    sent_bytes,
)
from cad_jax.simulation.strategies import Transport
from cad_jax.simulation.timeline import Timeline
from cad_jax.simulation.work import AttentionWork, linear_work, signal

Overlap = Literal["pingpong", "single_stream", "signal"]


def pooled_works(
    setting: Setting,
    lengths: MicrobatchLengths,
    *,
    strategy: Literal["cad", "published"],
    tokens: int,
    tolerance: float,
    transport: Transport | None = None,
    longest: int | None = None,
    static_capacities: bool = True,
) -> list[list[AttentionWork]]:
    """Work of each tick of `one_f_one_b(pp, M)`, F ticks first, and nano-batch: [2 * ticks][N].

    tokens: T. transport: of cad; by default the one of fewer predicted seconds. static_capacities:
    exchanges as large as capacities that hold 99.9% of these plans, as in a run, instead of what each
    plan needs.
    """
    schedule = one_f_one_b(setting.pp, len(lengths))
    nano_batches = check_microbatches(schedule, lengths)
    pool = pool_of(setting, setting.ranks, tokens, longest)
    distinct, of_tick = compositions(schedule)
    stage_tokens = setting.dp * tokens
    ticks = [
        [stage_lengths(tick, [m[nano] for m in lengths]) for nano in range(nano_batches)]
        for tick in distinct.tolist()
    ]
    if strategy == "published":
        made = [
            [strategies.published_work(stages, pool, tolerance) for stages in nanos]
            for nanos in ticks
        ]
    else:
        plans: list[list[Plan]] = []
        for nanos in ticks:
            placed = [stage_documents(stages, stage_tokens) for stages in nanos]
            plans.append([strategies.plan(d, pool, tolerance, starts) for d, starts in placed])
        everything = [p for nanos in plans for p in nanos]
        chosen = transport or strategies.transport_of(everything, pool)
        held = (
            strategies.run_capacities(everything, pool, chosen)
            if static_capacities and chosen != "exact"
            else None
        )
        made = [[strategies.planned_work(p, pool, chosen, held) for p in nanos] for nanos in plans]
    return [made[at] for at in of_tick]


def pooled_step(
    setting: Setting,
    lengths: MicrobatchLengths,
    works: Sequence[Sequence[AttentionWork]],
    *,
    tokens: int,
    overlap: Overlap = "pingpong",
    name: str = "cad",
) -> StepResult:
    """A step whose ranks of all stages share their attention, tick after tick in lockstep.

    works: of `pooled_works`, for the same lengths. Idle stages run linear layers on nothing, and
    attention for the others.
    """
    schedule = one_f_one_b(setting.pp, len(lengths))
    wire = setting.wire(setting.ranks)
    if overlap == "signal":
        works = [[signal(work, wire) for work in nanos] for nanos in works]
    mode: Mode = "single_stream" if overlap == "single_stream" else "pingpong"
    nano_batches = len(works[0])
    per_rank = np.full(setting.ranks, tokens)
    linear = [
        linear_work(setting.model, setting.costs, per_rank, setting.tp, again=setting.again)
    ] * nano_batches
    head = head_seconds(setting, per_rank * nano_batches)
    timeline = Timeline(setting.ranks)
    stage = Stage(timeline, 0, np.zeros(setting.ranks))
    for phase, tick in schedule.order:
        table = schedule.forward if phase == "F" else schedule.backward
        stage.masked = np.repeat(table.microbatch[tick] == IDLE, setting.dp)
        if phase == "F":
            stage.forward(works[tick], linear, setting.layers, mode)
        else:
            stage.run("linear", "head", head)
            stage.backward(works[schedule.ticks + tick], linear, setting.layers, mode)
        if setting.pp > 1:
            seconds = boundary_s(setting, tokens * nano_batches)
            after = stage.exchange(
                f"to next stage {phase} {tick}", seconds, setting.ranks, stage.ready
            )
            stage.ready = after
    attended = np.array([[w.forward_s for w in nanos] for nanos in works[: schedule.ticks]])
    held = max((w for nanos in works for w in nanos), key=lambda w: w.query_rows)
    keys = max((w for nanos in works for w in nanos), key=lambda w: w.key_rows)
    flight = int(schedule.in_flight.max()) * tokens * nano_batches
    return result_of(
        name, setting, lengths, timeline, attended.sum(axis=(0, 1)),
        sent_bytes(works, setting.layers, schedule.ticks),
        memory(
            setting.model, setting.heads, tp=setting.tp, pp=setting.pp, tokens_in_flight=flight,
            keeps_ffn=setting.keeps_ffn, weight_shards=setting.dp, query_rows=held.query_rows,
            key_rows=keys.key_rows,
        ),
    )  # fmt: skip


def stage_works(
    setting: Setting,
    lengths: MicrobatchLengths,
    *,
    strategy: Literal["home", "all_gather", "ring"],
    tokens: int,
    transport: Transport = "exact",
    longest: int | None = None,
) -> list[list[AttentionWork]]:
    """Work of each microbatch and nano-batch over the ranks of one stage: [M][N]."""
    pool = pool_of(setting, setting.dp, tokens, longest)

    def work(nano: np.ndarray) -> AttentionWork:
        if strategy == "home":
            return strategies.planned_work(strategies.at_home(nano, pool), pool, transport)
        if strategy == "ring":
            return strategies.ring_work(nano, pool)
        return strategies.gathered_work(
            nano,
            pool,
            gather_again=setting.gather_again,
            gradient_bytes=setting.gradient_bytes,
        )

    return [[work(nano) for nano in microbatch] for microbatch in lengths]


def stage_step(
    setting: Setting,
    lengths: MicrobatchLengths,
    works: Sequence[Sequence[AttentionWork]],
    *,
    tokens: Sequence[np.ndarray] | int,
    overlap: Overlap = "single_stream",
    name: str = "home",
) -> StepResult:
    """A step whose stages share nothing but what they hand on; the ranks of a stage may be several
    replicas that never wait for each other before the end.

    works: [M][N] over the ranks of one stage. tokens: T, or int [M] arrays [dp] of a nano-batch of each
    rank.
    """
    schedule = one_f_one_b(setting.pp, len(works))
    dp, nano_batches = setting.dp, len(works[0])
    if isinstance(tokens, int):
        tokens = [np.full(dp, tokens)] * len(works)
    if overlap == "signal":
        works = [[signal(work, setting.wire(dp)) for work in nanos] for nanos in works]
    mode: Mode = "pingpong" if overlap != "single_stream" else "single_stream"
    linear = [
        linear_work(setting.model, setting.costs, t, setting.tp, again=setting.again)
        for t in tokens
    ]
    timeline = Timeline(setting.ranks)
    stages = [Stage(timeline, s * dp, np.zeros(dp)) for s in range(setting.pp)]
    done: dict[tuple[str, int, int], np.ndarray] = {}
    for phase, tick in schedule.order:
        table = schedule.forward if phase == "F" else schedule.backward
        for s, stage in enumerate(stages):
            microbatch = int(table.microbatch[tick, s])
            if microbatch == IDLE:
                continue
            before = done.get((phase, s - 1 if phase == "F" else s + 1, microbatch))
            if before is not None:
                sent = boundary_s(setting, tokens[microbatch] * nano_batches)
                stage.ready = np.maximum(stage.ready, before + sent)
            lin = [linear[microbatch]] * nano_batches
            if phase == "F":
                stage.forward(works[microbatch], lin, setting.layers, mode)
            else:
                stage.run(
                    "linear", "head", head_seconds(setting, tokens[microbatch] * nano_batches)
                )
                stage.backward(works[microbatch], lin, setting.layers, mode)
            done[phase, s, microbatch] = stage.ready
    attended = np.array([[w.forward_s for w in nanos] for nanos in works]).sum(axis=(0, 1))
    most = max(float(t.max()) for t in tokens) * nano_batches
    in_flight = min(len(works), setting.pp) * most
    first = works[0][0]
    kept = 0.0
    if not setting.gather_again and first.dispatch.hops and not first.forward_steps:
        kept = in_flight * (first.group_ranks - 1)
    return result_of(
        name, setting, lengths, timeline, np.tile(attended, setting.pp),
        np.tile(sent_bytes(works, setting.layers, len(works)), setting.pp),
        memory(
            setting.model, setting.heads, tp=setting.tp, pp=setting.pp, tokens_in_flight=in_flight,
            keeps_ffn=setting.keeps_ffn, weight_shards=dp, gathered_tokens=kept, query_rows=first.query_rows,
            key_rows=0 if kept else first.key_rows,
        ),
    )  # fmt: skip
