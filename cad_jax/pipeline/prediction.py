"""Predicted seconds of a pipelined step from its documents, its schedule and analytic costs, for
three ways of planning attention. Host only.

Shape letters: P stages, M microbatches, N nano-batches, V virtual stages, T tokens of a rank.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from cad_jax.pipeline.schedule import IDLE, Schedule
from cad_jax.pipeline.ticks import MicrobatchLengths, check_microbatches, compositions
from cad_jax.sharding.cost import Device, ModelShape, server_loads
from cad_jax.sharding.cost_model import analytic
from cad_jax.sharding.packing import FillStep, pack, pack_step
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.tasks import HeadShape, home_tasks, stage_documents, stage_lengths


class TickSeconds(NamedTuple):
    """Seconds of one device in a tick of one virtual stage, all its layers."""

    linear_s: float  # forward, of T tokens
    linear_backward_s: float
    pair_s: float  # forward, of one (query, key) pair
    pair_backward_s: float
    loss_s: float  # head and loss of one B tick, forward and backward

    @property
    def recomputing_s(self) -> float:
        """Linear layers of a B tick that keeps the inputs of layers and what attention returned:
        forward again, then backward.
        """
        return self.linear_s + self.linear_backward_s


class WayOfPlanning(NamedTuple):
    """A step under one way of planning.

    lockstep_s: every stage waits for the slowest in every tick, as one program for all stages does.
    dataflow_s: a stage waits for its inputs alone; the same where all stages share their attention.
    attention_s: of lockstep_s, in attention. max_over_mean: pairs of the most loaded of all ranks
    over the mean, ticks weighted by pairs, idle ranks included.
    """

    lockstep_s: float
    dataflow_s: float
    attention_s: float
    max_over_mean: float


class TickPlan(NamedTuple):
    """The plan of a tick's nano-batch over the ranks of all stages. microbatches: [P], of each stage, IDLE for none. plan_s: host
    seconds that it took."""

    phase: Literal["F", "B"]
    tick: int
    microbatches: tuple[int, ...]
    nano: int
    plan: Plan
    plan_s: float

    @property
    def name(self) -> str:
        """In words."""
        held = ", ".join("none" if m == IDLE else str(m) for m in self.microbatches)
        return f"{self.phase}{self.tick}, nano-batch {self.nano} (microbatch of each stage: {held})"


@dataclass(frozen=True)
class StepPrediction:
    """A pipelined step in seconds, by three ways of planning attention.

    pool: one plan per tick over the ranks of all stages. per_stage: every stage balances its own
    microbatch over its own ranks. home: nothing moves. balanced_s: the step were attention spread
    evenly over all ranks in every tick. plan_s: host seconds that the plans of `pool` took. heaviest: of these plans the
    one of most pairs.

    Assumed: matrix products and attention alike run at `efficiency` of the device's peak, work is
    proportional to tokens and to (query, key) pairs, and nothing else takes time: exchanges,
    transfers between stages and parameter collectives hide, the optimizer costs nothing. A B tick
    runs its linear layers again but not their attention. Layers that stages do not divide evenly
    count as the fullest stage's. Head and loss are shared by all stages and cost every B tick the
    same. Linear work is the same on every rank, padding included, and idle stages do it as well.
    """

    schedule: Schedule
    seconds: TickSeconds
    efficiency: float
    pool: WayOfPlanning
    per_stage: WayOfPlanning
    home: WayOfPlanning
    balanced_s: float
    plan_s: float
    heaviest: TickPlan


def first_microbatches(
    lengths: np.ndarray, microbatches: int, tokens: int, *, fill: FillStep = pack_step
) -> list[list[np.ndarray]]:
    """The first M microbatches of `tokens` tokens that packing makes of these documents: [M][N]
    arrays of lengths. fill: what packs one of them, and into how many nano-batches
    (`packing.pack_step`, `nano_batches.pack_halves`); where it leaves one undivided, all are.

    ValueError where there are too few documents, or one is longer than a microbatch.
    """
    step = next(packed_steps(lengths, microbatches, tokens, fill=fill), [])
    if len(step) < microbatches:
        raise ValueError(
            f"a step needs {microbatches} microbatches of {tokens} tokens, the documents make up "
            f"{len(step)}: give more documents, or fewer microbatches or tokens"
        )
    return step


def packed_steps(
    lengths: np.ndarray, microbatches: int, tokens: int, *, fill: FillStep = pack_step
) -> Iterator[list[list[np.ndarray]]]:
    """The steps that packing makes of these documents, each as `first_microbatches` gives it; the last
    one may have fewer microbatches."""
    packed = pack(lengths, tokens, fill=fill)
    while step := list(islice(packed, microbatches)):
        nanos = [
            np.split(np.asarray(m.lengths, np.int64), np.cumsum(m.nano_pieces)[:-1]) for m in step
        ]
        if len({len(n) for n in nanos}) > 1:
            nanos = [[np.concatenate(n)] for n in nanos]
        yield nanos


def tick_seconds(
    model: ModelShape,
    schedule: Schedule,
    *,
    tokens: int,
    tp: int,
    device: Device,
    efficiency: float,
) -> TickSeconds:
    """tokens: T, of a rank in a microbatch. Raises ValueError for a device without a published peak,
    an efficiency outside (0, 1], or heads that tp does not divide.
    """
    costs = analytic(device, attention_efficiency=efficiency, linear_efficiency=efficiency)
    layers = -(-model.num_layers // (schedule.stages * schedule.virtual_stages))
    heads = device_heads(model, tp)
    head_flops = 2 * model.vocab_size * model.embedding_dim / schedule.stages / tp * tokens
    logits_s, gradients_s = (costs.product_s(head_flops, tokens, backward=b) for b in (False, True))
    return TickSeconds(
        linear_s=layers * costs.linear_s(model, tokens, tp),
        linear_backward_s=layers * costs.linear_s(model, tokens, tp, backward=True),
        pair_s=layers * costs.pair_s(heads),
        pair_backward_s=layers * costs.pair_s(heads, backward=True),
        loss_s=2 * logits_s + gradients_s,  # logits are computed twice
    )


def device_heads(model: ModelShape, tp: int) -> HeadShape:
    """Heads of one of tp devices, key heads replicated where there are fewer of them than devices.

    Raises ValueError where tp does not divide the heads.
    """
    query, key = model.num_q_heads, model.num_kv_heads
    if tp < 1 or query % tp or (key % tp and tp % key):
        raise ValueError(
            f"tp must divide the {query} query heads, and the {key} key heads or be a multiple of "
            f"them, got {tp}: use a power of two up to {query}"
        )
    return HeadShape(query // tp, max(key // tp, 1), model.head_dim)


def predict_step(
    schedule: Schedule,
    lengths: MicrobatchLengths,
    model: ModelShape,
    *,
    tokens_per_rank: int,
    dp: int,
    tp: int,
    device: Device,
    efficiency: float = 0.6,
    tolerance: float = 0.05,
    max_document_tokens: int | None = None,
) -> StepPrediction:
    """Plans one step in three ways and predicts its seconds.

    Args:
        schedule: P stages, M microbatches.
        lengths: [M][N], documents of each nano-batch (`first_microbatches`).
        model: whose FLOPs count; its heads travel.
        tokens_per_rank: T, of a rank in a microbatch, divided evenly among its nano-batches.
        dp: ranks of one stage; the pool has P * dp.
        tp: devices that share a rank's tokens.
        device: at whose peak work is counted.
        efficiency: fraction of that peak, in (0, 1].
        tolerance: of plans, see `plan_documents`.
        max_document_tokens: the longest document to come; by default a whole nano-batch.

    Raises:
        ValueError: arguments that do not fit each other, or documents that do not fit a nano-batch.
    """
    nano_batches = check_microbatches(schedule, lengths)
    if tokens_per_rank % nano_batches:
        raise ValueError(
            f"tokens_per_rank must be divisible by the {nano_batches} nano-batches of a "
            f"microbatch, got {tokens_per_rank}: use a multiple"
        )
    tokens_per_server = tokens_per_rank // nano_batches
    heads, stages, stage_tokens = device_heads(model, tp), schedule.stages, dp * tokens_per_server
    seconds = tick_seconds(
        model, schedule, tokens=tokens_per_rank, tp=tp, device=device, efficiency=efficiency
    )
    plan = partial(
        plan_documents, tokens_per_server=tokens_per_server, num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, tolerance=tolerance,
        max_document_tokens=min(max_document_tokens or stage_tokens, stage_tokens),
    )  # fmt: skip
    nanos = [[np.asarray(m[nano], np.int64) for m in lengths] for nano in range(nano_batches)]

    # Pairs of the most loaded rank; nano-batches run one after another, so they add up.
    per_stage, at_home = np.zeros((2, schedule.microbatches))
    for nano in nanos:
        for microbatch, documents in enumerate(nano):
            per_stage[microbatch] += plan(documents, servers=dp).loads().max()
            tasks = home_tasks(documents, tokens_per_server)
            at_home[microbatch] += server_loads(tasks, dp).max()
    distinct, of_tick = compositions(schedule)
    pool, mean = np.zeros((2, len(distinct)))
    heaviest, most_pairs, plan_s = None, -1, 0.0
    for at, tick in enumerate(distinct.tolist()):
        for nth, nano in enumerate(nanos):
            started = time.perf_counter()
            documents, starts = stage_documents(stage_lengths(tick, nano), stage_tokens)
            made = plan(documents, servers=stages * dp, starts=starts)
            loads = made.loads()
            seconds_taken = time.perf_counter() - started
            plan_s += seconds_taken
            pool[at] += loads.max()
            mean[at] += loads.mean()
            if loads.sum() > most_pairs:
                most_pairs, first = int(loads.sum()), int((of_tick == at).argmax())
                phase = "F" if first < schedule.ticks else "B"
                heaviest = TickPlan(
                    phase, first % schedule.ticks, tuple(tick), nth, made, seconds_taken
                )
    assert heaviest is not None

    table = np.concatenate([schedule.forward.microbatch, schedule.backward.microbatch])
    walk = _Walk(schedule, seconds, mean[of_tick])

    def shared(pairs: np.ndarray) -> WayOfPlanning:
        return walk.seconds(np.repeat(pairs[of_tick][:, None], stages, axis=1), shared=True)

    def own(pairs: np.ndarray) -> WayOfPlanning:
        return walk.seconds(np.where(table == IDLE, 0, pairs[table]))

    return StepPrediction(
        schedule=schedule,
        seconds=seconds,
        efficiency=efficiency,
        pool=shared(pool),
        per_stage=own(per_stage),
        home=own(at_home),
        balanced_s=shared(mean).lockstep_s,
        plan_s=plan_s,
        heaviest=heaviest,
    )


class _Walk(NamedTuple):
    """What turns pairs into seconds; mean_pairs: float64 [2 * ticks], F ticks first."""

    schedule: Schedule
    tick: TickSeconds
    mean_pairs: np.ndarray

    def seconds(self, pairs: np.ndarray, shared: bool = False) -> WayOfPlanning:
        """pairs [2 * ticks, P]: of the most loaded rank that a stage waits for, 0 where idle.
        shared: all stages wait for the same rank.
        """
        ticks, tick = self.schedule.ticks, self.tick
        backward = np.arange(2 * ticks) >= ticks
        attention = pairs * np.where(backward, tick.pair_backward_s, tick.pair_s)[:, None]
        other = np.where(backward, tick.recomputing_s + tick.loss_s, tick.linear_s)
        slowest = attention.max(axis=1)
        lockstep_s = float((slowest + other).sum())
        durations = attention + other[:, None]
        return WayOfPlanning(
            lockstep_s=lockstep_s,
            dataflow_s=lockstep_s if shared else dataflow_seconds(self.schedule, durations),
            attention_s=float(slowest.sum()),
            max_over_mean=float(pairs.max(axis=1).sum() / max(self.mean_pairs.sum(), 1e-9)),
        )


def dataflow_seconds(schedule: Schedule, durations: np.ndarray) -> float:
    """When the last stage is done if each begins a unit of work as soon as it has its input and is
    done with the unit before. durations: seconds [2 * ticks, P], F ticks first; idle ones are free.
    """
    last = schedule.stages * schedule.virtual_stages - 1
    clock = [0.0] * schedule.stages
    done: dict[tuple[str, int, int], float] = {}  # (phase, virtual stages before it, microbatch)
    for phase, tick in schedule.order:
        table = schedule.forward if phase == "F" else schedule.backward
        row = durations[tick if phase == "F" else schedule.ticks + tick]
        for stage in range(schedule.stages):
            microbatch = int(table.microbatch[tick, stage])
            if microbatch == IDLE:
                continue
            depth = int(table.chunk[tick, stage]) * schedule.stages + stage
            before = depth - 1 if phase == "F" else depth + 1
            ready = done[phase, before, microbatch] if 0 <= before <= last else 0.0
            clock[stage] = max(clock[stage], ready) + row[stage]
            done[phase, depth, microbatch] = clock[stage]
    return float(max(clock))
