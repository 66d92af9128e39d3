"""What `cad-jax plan --pp` adds: a pipelined step planned tick by tick, and its predicted seconds.

Works where jax is not installed. Shape letters: P stages, M microbatches, T tokens of a rank.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from cad_jax.pipeline.prediction import StepPrediction, first_microbatches, predict_step
from cad_jax.pipeline.schedule import interleaved
from cad_jax.sharding.cost import DEVICES, model_shape
from cad_jax.sharding.nano_batches import pack_halves
from cad_jax.sharding.packing import pack_step

WAYS: Mapping[str, str] = {
    "pool": "one plan a tick for all stages",
    "per_stage": "each stage plans for itself",
    "home": "nothing moves",
}


def predict(
    lengths: np.ndarray,
    *,
    servers: int,
    tokens_per_server: int,
    pp: int,
    microbatches: int,
    virtual_stages: int,
    tp: int,
    pingpong: bool,
    model: str,
    tolerance: float,
) -> StepPrediction:
    """The first step's prediction, on H200. servers: pp x dp ranks; tokens_per_server: T, of a rank
    in a microbatch.

    Raises:
        ValueError: numbers that do not fit each other, too few documents, one too long.
    """
    if servers % pp:
        raise ValueError(
            f"servers (={servers}) must be divisible by pp (={pp}): every stage has as many ranks; "
            f"use {-(-servers // pp) * pp} servers"
        )
    layers, parts, dp = model_shape(model).num_layers, pp * virtual_stages, servers // pp
    if virtual_stages >= 1 and layers % parts:
        raise ValueError(
            f"layers of {model} (={layers}) must be divisible by pp x virtual_stages (={pp} x "
            f"{virtual_stages}), each virtual stage holds as many: use other numbers of either"
        )
    if pingpong and dp * tokens_per_server % 2:
        raise ValueError(
            f"servers / pp x tokens_per_server (= {dp} x {tokens_per_server}) must be even for ping-pong, "
            "which halves a stage's microbatch: use an even number of tokens per server"
        )
    # Before the schedule: its tables grow with the microbatches.
    if microbatches >= 1 and int(lengths.sum()) < microbatches:
        raise ValueError(
            f"a step needs documents for each of its {microbatches} microbatches, and these have "
            f"{int(lengths.sum())} tokens in all: give more documents, or fewer microbatches"
        )
    schedule = interleaved(pp, microbatches, virtual_stages)
    longest, tokens = int(lengths.max()), dp * tokens_per_server
    if longest > tokens:
        raise ValueError(
            f"a document must fit one stage's microbatch of servers / pp x tokens_per_server (= {dp} "
            f"x {tokens_per_server}) tokens, and the longest has {longest}: use more tokens per "
            "server, more servers, or fewer stages"
        )
    fill = pack_halves if pingpong else pack_step
    return predict_step(
        schedule,
        first_microbatches(lengths, microbatches, tokens, fill=fill),
        model_shape(model),
        tokens_per_rank=tokens_per_server,
        dp=dp,
        tp=tp,
        device=DEVICES["h200"],
        tolerance=tolerance,
    )


def figures(prediction: StepPrediction) -> dict[str, Any]:
    """The prediction as plain values."""
    schedule = prediction.schedule
    return {
        "label": "derived",
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "virtual_stages": schedule.virtual_stages,
        "ticks_of_each_phase": schedule.ticks,
        "bubble": schedule.bubble,
        "in_flight": schedule.in_flight.tolist(),
        "stash_slots": schedule.slots,
        "efficiency": prediction.efficiency,
        "balanced_s": prediction.balanced_s,
        "plan_s": prediction.plan_s,
        "heaviest_tick": prediction.heaviest.name,
        **{name: getattr(prediction, name)._asdict() for name in WAYS},
    }


def table(prediction: StepPrediction, model: str) -> Table:
    """The prediction for people."""
    schedule = prediction.schedule
    result = Table(
        title=f"One step: {schedule.stages} stages, {schedule.microbatches} microbatches, {model}",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for name in (
        "attention",
        "max / mean\npairs",
        "lockstep,\ns",
        "dataflow,\ns",
        "over the\nfirst",
    ):
        left = name == "attention"
        result.add_column(name, justify="left" if left else "right", no_wrap=True)
    for name, what in WAYS.items():
        way = getattr(prediction, name)
        ratio = way.lockstep_s / prediction.pool.lockstep_s
        result.add_row(
            what,
            f"{way.max_over_mean:.3f}",
            f"{way.lockstep_s:.2f}",
            f"{way.dataflow_s:.2f}",
            f"{ratio:.2f}",
        )
    result.caption = (
        f"{schedule.ticks} ticks of each phase, bubble {schedule.bubble:.1%}, in flight "
        f"{schedule.in_flight.tolist()}, {schedule.slots} stash slots; derived: H200 at "
        f"{prediction.efficiency:.0%} of its peak, travel hidden; plans took "
        f"{prediction.plan_s:.1f} s. In lockstep every stage waits for the slowest in each tick, by "
        "dataflow for its inputs alone; over the first: in lockstep"
    )
    return result
