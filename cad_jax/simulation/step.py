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
from cad_jax.sharding.tasks import Capacities, stage_documents, stage_lengths
from cad_jax.simulation import strategies
from cad_jax.simulation.execution import Mode, Stage
from cad_jax.simulation.memory import memory
from cad_jax.simulation.setting import (
    Setting,
    StepResult,
    boundary_s,
    head_seconds,
    own_memory,
    pool_of,
    result_of,
    sent_bytes,
)
from cad_jax.simulation.strategies import Pool, Transport
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
    pool = pool_of(setting, setting.ranks, tokens, longest)
    if strategy == "published":
        made = [
            [
                strategies.published_work(stages, pool, tolerance, setting.published_copy_byte_s)
                for stages in nanos
            ]
            for nanos in _ticks(setting, lengths)
        ]
        return [made[at] for at in compositions(one_f_one_b(setting.pp, len(lengths)))[1]]
    plans = tick_plans(setting, lengths, pool, tolerance)
    everything = [p for nanos in plans for p in nanos]
    chosen = transport or strategies.transport_of(everything, pool)
    held = strategies.run_capacities(everything, pool, chosen) if static_capacities else None
    return works_of_plans(setting, plans, pool, len(lengths), chosen, held)


def tick_plans(
    setting: Setting,
    lengths: MicrobatchLengths,
    pool: Pool,
    tolerance: float,
    key_ranges: int = 1,
    transport: Transport | None = None,
) -> list[list[Plan]]:
    """cad's plans, one for each different tick of `one_f_one_b(pp, M)` and nano-batch. pool: of the
    ranks of all stages. key_ranges, transport: see `strategies.plan`."""
    stage_tokens = setting.dp * pool.tokens_per_server
    placed = [
        [stage_documents(stages, stage_tokens) for stages in nanos]
        for nanos in _ticks(setting, lengths)
    ]
    return [
        [strategies.plan(d, pool, tolerance, starts, key_ranges, transport) for d, starts in nanos]
        for nanos in placed
    ]


def works_of_plans(
    setting: Setting,
    plans: Sequence[Sequence[Plan]],
    pool: Pool,
    microbatches: int,
    transport: Transport,
    capacities: Capacities | None,
) -> list[list[AttentionWork]]:
    """Work of each tick and nano-batch, [2 * ticks][N], from `tick_plans` of M microbatches.
    capacities: see `strategies.planned_work`."""
    made = [[strategies.planned_work(p, pool, transport, capacities) for p in n] for n in plans]
    return [made[at] for at in compositions(one_f_one_b(setting.pp, microbatches))[1]]


def _ticks(setting: Setting, lengths: MicrobatchLengths) -> list[list[list[np.ndarray]]]:
    """Documents of each stage, for each different tick and nano-batch."""
    schedule = one_f_one_b(setting.pp, len(lengths))
    nano_batches = check_microbatches(schedule, lengths)
    return [
        [stage_lengths(tick, [m[nano] for m in lengths]) for nano in range(nano_batches)]
        for tick in compositions(schedule)[0].tolist()
    ]


def pooled_step(
    setting: Setting,
    lengths: MicrobatchLengths,
    works: Sequence[Sequence[AttentionWork]],
    *,
    tokens: int,
    overlap: Overlap = "pingpong",
    name: str = "cad",
    published: bool = False,
) -> StepResult:
    """A step whose ranks of all stages share their attention, tick after tick in lockstep.

    works: of `pooled_works`, for the same lengths. Idle stages run linear layers on nothing, and
    attention for the others; all stages share head and loss alike. published: memory is that of the
    published system, not of this project's trainer.
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
    timeline = Timeline(setting.ranks, setting.slowdown)
    stage = Stage(timeline, 0, np.zeros(setting.ranks))
    for phase, tick in schedule.order:
        table = schedule.forward if phase == "F" else schedule.backward
        stage.masked = np.repeat(table.microbatch[tick] == IDLE, setting.dp)
        if phase == "F":
            stage.forward(works[tick], linear, setting.layers, mode)
        else:
            scored = schedule.losses[tick] != IDLE
            stage.run("head" if scored else "masked", "head", head)
            stage.backward(works[schedule.ticks + tick], linear, setting.layers, mode)
        if setting.pp > 1:
            seconds = boundary_s(setting, tokens * nano_batches)
            after = stage.exchange(
                f"to next stage {phase} {tick}", seconds, setting.ranks, stage.ready
            )
            stage.ready = after
    attended = np.array([[w.forward_s for w in nanos] for nanos in works[: schedule.ticks]])
    query_rows, key_rows = _most_rows(works)
    if published:
        flight = int(schedule.in_flight.max()) * tokens * nano_batches
        held = memory(
            setting.model, setting.heads, tp=setting.tp, pp=setting.pp, tokens_in_flight=flight,
            keeps_ffn=setting.keeps_ffn, weight_shards=setting.dp, query_rows=query_rows,
            key_rows=key_rows,
        )  # fmt: skip
    else:
        held = own_memory(
            setting, query_rows, key_rows, rank_tokens=tokens * nano_batches,
            nano_batches=nano_batches, microbatches=len(lengths),
        )  # fmt: skip
    return result_of(
        name, setting, schedule, lengths, timeline, attended.sum(axis=(0, 1)),
        sent_bytes(works, setting.layers, schedule.ticks), held,
    )  # fmt: skip


def _most_rows(works: Sequence[Sequence[AttentionWork]]) -> tuple[int, int]:
    """Query and key rows of the fullest buffers."""
    every = [work for nanos in works for work in nanos]
    return max(w.query_rows for w in every), max(w.key_rows for w in every)


def stage_works(
    setting: Setting,
    lengths: MicrobatchLengths,
    *,
    strategy: Literal["home", "all_gather", "ring"],
    tokens: int,
    transport: Transport = "ragged",
    longest: int | None = None,
) -> list[list[AttentionWork]]:
    """Work of each microbatch and nano-batch over the ranks of one stage: [M][N]."""
    pool = pool_of(setting, setting.dp, tokens, longest)

    def work(nano: np.ndarray) -> AttentionWork:
        if strategy == "home":
            return strategies.planned_work(strategies.at_home(nano, pool), pool, transport)
        if strategy == "ring":
            return strategies.ring_work(nano, pool, gradient_bytes=setting.gradient_bytes)
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
    published: bool = False,
) -> StepResult:
    """A step whose stages share nothing but what they hand on; the ranks of a stage may be several
    replicas that never wait for each other before the end.

    works: [M][N] over the ranks of one stage. tokens: T, or int [M] arrays [dp] of a nano-batch of each
    rank. published: see `pooled_step`.
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
    timeline = Timeline(setting.ranks, setting.slowdown)
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
                head = head_seconds(setting, tokens[microbatch] * nano_batches)
                stage.run("head", "head", head)
                stage.backward(works[microbatch], lin, setting.layers, mode)
            done[phase, s, microbatch] = stage.ready
    attended = np.array([[w.forward_s for w in nanos] for nanos in works]).sum(axis=(0, 1))
    most = max(float(t.max()) for t in tokens) * nano_batches
    query_rows, key_rows = _most_rows(works)
    if published:
        in_flight = min(len(works), setting.pp) * most
        kept = works[0][0].group_ranks - 1 if works[0][0].keeps_gathered else 0
        held = memory(
            setting.model, setting.heads, tp=setting.tp, pp=setting.pp, tokens_in_flight=in_flight,
            keeps_ffn=setting.keeps_ffn, weight_shards=dp, gathered_tokens=kept * in_flight,
            query_rows=query_rows, key_rows=0 if kept else key_rows,
        )  # fmt: skip
    else:
        held = own_memory(
            setting, query_rows, key_rows, rank_tokens=int(most), nano_batches=nano_batches,
            microbatches=len(works),
        )  # fmt: skip
    return result_of(
        name, setting, schedule, lengths, timeline, np.tile(attended, setting.pp),
        np.tile(sent_bytes(works, setting.layers, len(works)), setting.pp), held,
    )  # fmt: skip
