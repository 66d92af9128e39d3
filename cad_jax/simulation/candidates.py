"""Ways of running one's own steps, each simulated over the same drawn steps. Host only.

Shape letters: M microbatches, N nano-batches of a microbatch, S ranks of a pool, T tokens of a rank in a
nano-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from cad_jax.pipeline.memory import StepMemory
from cad_jax.pipeline.prediction import packed_steps
from cad_jax.pipeline.ticks import MicrobatchLengths
from cad_jax.sharding.capacities import (
    capacities_from_plans,
    default_capacities,
    home_capacities,
)
from cad_jax.sharding.nano_batches import pack_halves
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.tasks import TILE_ROWS, Capacities
from cad_jax.simulation.memory import Memory
from cad_jax.simulation.setting import Setting, StepResult, own_memory, pool_of
from cad_jax.simulation.step import (
    Overlap,
    pooled_step,
    pooled_works,
    stage_step,
    stage_works,
    tick_plans,
    works_of_plans,
)
from cad_jax.simulation.strategies import Pool, Transport
from cad_jax.simulation.wlb import best_wlb_step

Strategy = Literal["cad", "published", "home", "all_gather", "ring", "wlb"]
Shapes = Literal["measured", "static"]
AS_PUBLISHED: tuple[Strategy, ...] = ("published", "wlb")  # memory is that of those systems
WLB_HEADROOMS = (1.0, 2.0)  # the published one, and what a device's memory may allow
MICROBATCHES = 4  # to simulate, at least
LARGE_POOL_RANKS, LARGE_MICROBATCHES = 32, 2  # a large pool holds many documents
MAX_STEPS = 10_000
MAX_CONTEXT_TOKENS = 2**31  # of a pool: rows are int32


class Candidate(NamedTuple):
    """A way of running a step.

    transport: of cad and home. tolerance: of cad's planner and the published one. key_ranges: of cad's planner.
    capacities: of cad, measured on the plans of these very steps, or static, from arguments alone.
    """

    strategy: Strategy
    overlap: Overlap = "single_stream"
    transport: Transport | None = None
    tolerance: float | None = None
    capacities: Shapes | None = None
    key_ranges: int = 1


class Outcome(NamedTuple):
    """What the simulation says of a candidate: means over the steps, shares of all rank-seconds.

    bubble: of the schedule, share of ticks. idle: all time without work of its own, exposed communication
    included. attention: share of attention in all compute. attention_max_over_mean: seconds of the ranks'
    attention over a step. memory_bytes: estimated, of a device. each_step_s: seconds, step by step.
    """

    candidate: Candidate
    step_s: float
    mfu: float
    exposed_communication: float
    idle: float
    bubble: float
    attention: float
    attention_max_over_mean: float
    wire_bytes_mean: float
    memory_bytes: float
    each_step_s: tuple[float, ...]


def enough_steps(ranks: int, microbatches: int) -> int:
    """Steps of so many microbatches from which means are taken unless told otherwise."""
    worth = MICROBATCHES if ranks < LARGE_POOL_RANKS else LARGE_MICROBATCHES
    return -(-worth // microbatches)


def draw_steps(
    lengths: np.ndarray, steps: int, microbatches: int, microbatch_tokens: int, seed: int = 0
) -> list[MicrobatchLengths]:
    """Documents of steps in a row as training packs them, [steps][M][N] arrays of lengths, from random
    orders of the documents one after another.

    N is 2, or 1 in a step that holds a document longer than half a microbatch. As many steps go before
    them: packing holds long documents back until others come that match them, and at first none are held.

    Raises ValueError where all documents are empty, or one is longer than a microbatch.
    """
    lengths = lengths[lengths > 0]
    total, longest = int(lengths.sum()), int(lengths.max(initial=0))
    if total == 0:
        raise ValueError(
            "document lengths must not all be 0: put lengths in tokens there, as cad-jax lengths does"
        )
    if longest > microbatch_tokens:
        raise ValueError(
            f"a document must fit one stage's microbatch of {microbatch_tokens} tokens, and the longest "
            f"has {longest}: use more ranks or more tokens a rank, or cut documents"
        )
    rng = np.random.default_rng(seed)
    epochs = (2 * steps + 1) * microbatches * microbatch_tokens // total + 2
    arrivals = np.concatenate([rng.permutation(lengths) for _ in range(epochs)])
    packed = packed_steps(arrivals, microbatches, microbatch_tokens, fill=pack_halves)
    return list(islice(packed, steps, 2 * steps))


@dataclass(frozen=True, eq=False)
class Trials:
    """Steps to simulate, and what they run on.

    steps: [steps][M][N] arrays of lengths. rank_tokens: N T, of a rank in a microbatch. longest: the
    longest document to come.
    """

    setting: Setting
    steps: Sequence[MicrobatchLengths]
    rank_tokens: int
    longest: int
    plans: dict[tuple[float, int, Transport | None], list[list[list[Plan]]]] = field(
        default_factory=dict, repr=False
    )

    def on(self, setting: Setting) -> "Trials":
        """The same steps and plans with other costs."""
        return replace(self, setting=setting)

    def results(
        self,
        candidate: Candidate,
        *,
        wlb_memory_bytes: float = np.inf,
        wlb_headrooms: Sequence[float] = WLB_HEADROOMS,
    ) -> Iterator[StepResult]:
        """Every step as simulated, one after another.

        wlb_memory_bytes: what the division into replicas that wlb chooses must fit, if any does. wlb_headrooms: see
        `best_wlb_step`, the fastest of these.
        """
        setting, strategy = self.setting, candidate.strategy
        for at, step in enumerate(self.steps):
            nano_batches = len(step[0])
            tokens = self._nano_tokens(nano_batches)
            longest = self._longest(nano_batches)
            if strategy == "cad":
                assert candidate.transport is not None, candidate
                pool, plans = self._pool(nano_batches), self._plans(candidate)[at]
                works = works_of_plans(
                    setting, plans, pool, len(step), candidate.transport,
                    self._capacities(candidate, nano_batches),
                )  # fmt: skip
                yield pooled_step(setting, step, works, tokens=tokens, overlap=candidate.overlap)
            elif strategy == "published":
                assert candidate.tolerance is not None, candidate
                works = pooled_works(
                    setting, step, strategy=strategy, tokens=tokens, tolerance=candidate.tolerance,
                    longest=longest,
                )  # fmt: skip
                yield pooled_step(
                    setting, step, works, tokens=tokens, overlap=candidate.overlap, name=strategy,
                    published=True,
                )  # fmt: skip
            elif strategy == "wlb":
                yield self._packed(step, wlb_memory_bytes, wlb_headrooms)
            else:
                works = stage_works(
                    setting, step, strategy=strategy, tokens=tokens, longest=longest,
                    transport=candidate.transport or "ragged",
                )  # fmt: skip
                yield stage_step(
                    setting, step, works, tokens=tokens, overlap=candidate.overlap, name=strategy
                )

    def outcome(self, candidate: Candidate, *, wlb_memory_bytes: float = np.inf) -> Outcome:
        """wlb_memory_bytes: see `results`."""
        results = list(self.results(candidate, wlb_memory_bytes=wlb_memory_bytes))
        figures = [r.figures() for r in results]

        def mean(name: str) -> float:
            return float(np.mean([f[name] for f in figures]))

        attention, linear = mean("attention_s_mean"), mean("linear_s_mean") + mean("head_s_mean")
        return Outcome(
            candidate, mean("step_s"), mean("mfu"), mean("exposed_communication"), mean("idle"),
            mean("bubble"), attention / (attention + linear), mean("attention_max_over_mean"),
            mean("wire_bytes_mean"), self.memory(candidate, results).total, tuple(f["step_s"] for f in figures),
        )  # fmt: skip

    def largest_context(self, strategy: Strategy, usable_bytes: float) -> int:
        """Tokens of the longest document that fits so much memory of every device, where it fills one
        nano-batch of two alone; cad with static capacities. 0 where none does, at most what int32 rows
        allow. wlb counts as all_gather over all ranks of a stage.
        """
        dp = self.setting.dp

        def fits(tiles: int) -> bool:
            tokens = tiles * TILE_ROWS
            held = self._held(strategy, tokens, dp * tokens)
            return self._estimate(held, 2 * tokens, 2).total <= usable_bytes

        low, high = 0, MAX_CONTEXT_TOKENS // (dp * TILE_ROWS)
        while low < high:  # low fits, or is 0; all beyond high do not
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low * dp * TILE_ROWS

    # Simulating.

    def _packed(
        self, step: MicrobatchLengths, memory_bytes: float, headrooms: Sequence[float]
    ) -> StepResult:
        """The fastest of packings with more or less room for uneven bins that fits the memory."""
        nanos = [nano for microbatch in step for nano in microbatch]
        results = [
            best_wlb_step(
                self.setting, nanos, microbatches=(len(step), 2 * len(step)), headroom=headroom,
                memory_bytes=memory_bytes,
            )
            for headroom in headrooms
        ]  # fmt: skip
        fitting = [r for r in results if r.memory.total <= memory_bytes]
        return min(fitting or results[:1], key=lambda r: r.step_s)

    def _nano_tokens(self, nano_batches: int) -> int:
        return self.rank_tokens // nano_batches

    def _longest(self, nano_batches: int) -> int:
        return min(self.longest, self.setting.dp * self._nano_tokens(nano_batches))

    def _pool(self, nano_batches: int) -> Pool:
        tokens, longest = self._nano_tokens(nano_batches), self._longest(nano_batches)
        return pool_of(self.setting, self.setting.ranks, tokens, longest)

    def _plans(self, candidate: Candidate) -> list[list[list[Plan]]]:
        """Of each step: its ticks' and nano-batches'."""
        tolerance, key_ranges = candidate.tolerance, candidate.key_ranges
        assert tolerance is not None, candidate
        # Whole prefixes are the same for all transports; where keys are divided depends on theirs.
        transport = candidate.transport if key_ranges > 1 else None
        key = tolerance, key_ranges, transport
        made = self.plans.get(key)
        if made is None:
            made = self.plans[key] = [
                tick_plans(
                    self.setting, step, self._pool(len(step[0])), tolerance, key_ranges, transport
                )
                for step in self.steps
            ]
        return made

    def _capacities(self, candidate: Candidate, nano_batches: int) -> Capacities:
        """Of cad's program for so many nano-batches."""
        longest = self._longest(nano_batches)
        if candidate.capacities == "static":
            pool = self._pool(nano_batches)
            return default_capacities(
                pool.servers, pool.tokens_per_server, pool.heads, longest, candidate.transport,
                partials=min(candidate.key_ranges, pool.servers),
            )  # fmt: skip
        plans = [
            plan
            for step, ticks in zip(self.steps, self._plans(candidate), strict=True)
            if len(step[0]) == nano_batches
            for nanos in ticks
            for plan in nanos
        ]
        return capacities_from_plans(
            plans, max_document_tokens=longest, transport=candidate.transport
        )

    # Memory.

    def memory(self, candidate: Candidate, results: Sequence[StepResult]) -> Memory | StepMemory:
        """Of a device: the fullest of the programs that the steps need, divided in two, or not, and of the published
        systems that of the step that needs most. results: of these steps."""
        if candidate.strategy in AS_PUBLISHED:
            return max((r.memory for r in results), key=lambda m: m.total)
        programs = []
        for nano_batches in sorted({len(step[0]) for step in self.steps}):
            if candidate.strategy == "cad":
                held = self._capacities(candidate, nano_batches)
            else:
                tokens = self._nano_tokens(nano_batches)
                held = self._held(candidate.strategy, tokens, self._longest(nano_batches))
            programs.append(self._estimate(held, self.rank_tokens, nano_batches))
        return max(programs, key=lambda m: m.total)

    def _held(self, strategy: Strategy, tokens: int, longest: int) -> Capacities:
        """A rank's buffers by static arguments alone."""
        setting = self.setting
        pool = setting.ranks, tokens, setting.heads, longest
        if strategy == "cad":
            return default_capacities(*pool, "direct")
        held = home_capacities(*pool)
        if strategy == "home":
            return held
        return replace(held, key_rows=tokens * (2 if strategy == "ring" else setting.dp))

    def _estimate(self, capacities: Capacities, rank_tokens: int, nano_batches: int) -> StepMemory:
        return own_memory(
            self.setting, capacities.query_rows, capacities.key_rows, rank_tokens=rank_tokens,
            nano_batches=nano_batches, microbatches=len(self.steps[0]),
        )  # fmt: skip


def fastest(outcomes: Sequence[Outcome], preferred: Callable[[Outcome], float], tie: float):
    """Of the outcomes within a fraction `tie` of the fewest seconds, the one that `preferred` puts
    first (the least)."""
    least = min(o.step_s for o in outcomes)
    return min((o for o in outcomes if o.step_s <= (1 + tie) * least), key=preferred)


def fitting(outcomes: Sequence[Outcome], usable_bytes: float) -> list[Outcome]:
    """Those in so much memory, or where none is, all."""
    return [o for o in outcomes if o.memory_bytes <= usable_bytes] or list(outcomes)
