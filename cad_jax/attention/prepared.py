"""What the host prepares of a microbatch, or of a pipeline's tick, and what that costs. Host only.

Shape letters: T tokens per server, S servers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class StepFigures(NamedTuple):
    """What a prepared microbatch or tick costs. Bytes are of one layer's forward, per rank."""

    plan_s: float  # host seconds spent preparing
    # (query, key) pairs of the worst rank over the mean, tokens at home; by speed where ranks are not alike
    max_over_mean_home: float
    max_over_mean: float  # the same as this strategy really spreads them
    exchange_bytes_mean: float  # bytes into a rank, mean over ranks
    exchange_bytes_max: float  # the worst rank's bytes in or out
    wire_bytes: float  # bytes a rank hands to collectives, padding and tokens-to-heads included
    capacity_used: dict[str, float]  # fraction of each capacity
    fallback_tasks: int  # tasks kept at home for want of capacity


class Prepared(NamedTuple):
    """A microbatch made ready on the host.

    order: int64 [S * T], new position -> global token, to be applied to ids, positions and targets;
    None where tokens stay. arrays: a pytree of numpy arrays with leading dim S (or the ranks asked
    for). home_pairs, pairs: int64 [S], (query, key) pairs of each rank at home and under this
    strategy. digest: equal on all hosts that prepared the same.
    """

    order: np.ndarray | None
    arrays: Any
    figures: StepFigures
    digest: str
    home_pairs: np.ndarray
    pairs: np.ndarray


class PreparedTicks(NamedTuple):
    """Ticks of a pipeline made ready on the host.

    ticks: each over the ranks of all stages, in pool order; tokens stay within their microbatch, so
    `order` is None. orders: `Prepared.order` of each microbatch over the ranks of its own stage.
    """

    ticks: list[Prepared]
    orders: list[np.ndarray | None]


def combine_figures(figures: Sequence[StepFigures], pairs: Sequence[int]) -> StepFigures:
    """Figures of what runs one after another, from those of its parts and the pairs of each.

    The balance of the whole is the sum of the parts' maxima over the sum of their means: ratios
    weigh by pairs. Bytes are the mean, or the worst, of the parts; seconds and tasks add up.
    """
    weights = np.maximum(np.asarray(pairs, np.float64), 1e-9)
    used: dict[str, float] = {}
    for part in figures:
        for name, fraction in part.capacity_used.items():
            used[name] = max(used.get(name, 0.0), float(fraction))

    def weighed(name: str) -> float:
        return float(np.average([getattr(f, name) for f in figures], weights=weights))

    return StepFigures(
        plan_s=float(sum(f.plan_s for f in figures)),
        max_over_mean_home=weighed("max_over_mean_home"),
        max_over_mean=weighed("max_over_mean"),
        exchange_bytes_mean=float(np.mean([f.exchange_bytes_mean for f in figures])),
        exchange_bytes_max=float(max(f.exchange_bytes_max for f in figures)),
        wire_bytes=float(max(f.wire_bytes for f in figures)),
        capacity_used=used,
        fallback_tasks=int(sum(f.fallback_tasks for f in figures)),
    )
