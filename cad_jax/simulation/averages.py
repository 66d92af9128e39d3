"""The same drawn steps under one strategy after another, each in its fastest way. Host only; every figure is simulated."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cad_jax.pipeline.memory import StepMemory
from cad_jax.sharding.tasks import DENSE_TRANSPORTS
from cad_jax.simulation.advice import TIE, TOLERANCES, TRANSPORTS, choose_tolerance
from cad_jax.simulation.candidates import Candidate, Trials, fastest, fitting
from cad_jax.simulation.memory import Memory
from cad_jax.simulation.setting import StepResult
from cad_jax.simulation.step import Overlap
from cad_jax.simulation.strategies import Transport

MOST = ("wire_bytes_max",)  # of all steps; other figures are means


class Averages(NamedTuple):
    """A strategy over the drawn steps. name: as it was asked for. candidate: how the steps ran. results: of each.
    memory: see `Trials.memory`."""

    name: str
    candidate: Candidate
    results: list[StepResult]
    memory: Memory | StepMemory

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return float(np.mean([r.step_s for r in self.results]))

    @property
    def range_s(self) -> tuple[float, float]:
        """Seconds of the shortest and of the longest step."""
        seconds = [r.step_s for r in self.results]
        return min(seconds), max(seconds)

    @property
    def detail(self) -> str:
        """What the name leaves open: transport, tolerance and key ranges, or how ranks are divided into replicas."""
        if self.candidate.strategy == "wlb":
            divisions = {r.strategy.removeprefix("wlb ") for r in self.results}
            return divisions.pop() if len(divisions) == 1 else "by step"
        ranges = self.candidate.key_ranges
        known = (
            self.candidate.transport,
            self.candidate.tolerance,
            f"k{ranges}" if ranges > 1 else None,
        )
        return " ".join(str(value) for value in known if value is not None)

    @property
    def described(self) -> str:
        """The same in a line."""
        if self.candidate.strategy == "wlb":
            return f"{self.name}, {self.detail}"
        tolerance = self.candidate.tolerance
        parts = [
            self.name,
            self.candidate.transport,
            None if tolerance is None else f"tolerance {tolerance}",
            f"key ranges {self.candidate.key_ranges}" if self.candidate.key_ranges > 1 else None,
        ]
        return ", ".join(part for part in parts if part is not None)

    @property
    def typical(self) -> int:
        """The step whose seconds are nearest to the mean."""
        return int(np.argmin([abs(r.step_s - self.step_s) for r in self.results]))

    def figures(self) -> dict[str, float]:
        """`StepResult.figures` over the steps: means, but of MOST the most."""
        steps = [r.figures() for r in self.results]
        figures = {
            name: float((np.max if name in MOST else np.mean)([f[name] for f in steps]))
            for name in steps[0]
        }
        return figures | {"memory_bytes": self.memory.total}

    def plain(self) -> dict[str, Any]:
        """How the steps ran, and the seconds of each."""
        return {
            "overlap": self.candidate.overlap,
            "transport": self.candidate.transport,
            "tolerance": self.candidate.tolerance,
            "key_ranges": self.candidate.key_ranges,
            "steps": [{"name": r.strategy, "step_s": r.step_s} for r in self.results],
        }


def transports_of(asked: str, device: str) -> tuple[Transport, ...]:
    """Those to choose from: the one asked for, or for "auto" all that a device has, as in training."""
    usual = DENSE_TRANSPORTS if device == "cpu" else TRANSPORTS
    return tuple(t for t in TRANSPORTS if t == asked or (asked == "auto" and t in usual))


def fastest_cad(
    trials: Trials,
    overlap: Overlap,
    transports: Sequence[Transport],
    tolerance: float | None,
    usable_bytes: float,
    key_ranges: int = 1,
) -> Candidate:
    """cad by the transport, and where tolerance is None by the tolerance, of fewest simulated seconds.
    key_ranges: of its plans."""
    fixed = [Candidate("cad", overlap, t, tolerance, "measured", key_ranges) for t in transports]
    if tolerance is not None:
        return _fastest(trials, fixed, usable_bytes)
    bests = [choose_tolerance(trials, t, overlap, usable_bytes, key_ranges)[0] for t in transports]
    return fastest(fitting(bests, usable_bytes), bests.index, tie=TIE).candidate


def fastest_published(
    trials: Trials, overlap: Overlap, tolerance: float | None, usable_bytes: float
) -> Candidate:
    """The published planner, where tolerance is None with the one of fewest simulated seconds, of equal ones the largest."""
    tolerances = sorted(TOLERANCES, reverse=True) if tolerance is None else [tolerance]
    tried = [Candidate("published", overlap, None, t) for t in tolerances]
    return _fastest(trials, tried, usable_bytes)


def fastest_home(
    trials: Trials, overlap: Overlap, transports: Sequence[Transport], usable_bytes: float
) -> Candidate:
    """home in `overlap` or as a single stream, by the transport of fewest simulated seconds."""
    overlaps = dict.fromkeys((overlap, "single_stream"))
    tried = [Candidate("home", o, t) for o, t in product(overlaps, transports)]
    return _fastest(trials, tried, usable_bytes, tie=0.0)


def _fastest(
    trials: Trials, tried: Sequence[Candidate], usable_bytes: float, tie: float = TIE
) -> Candidate:
    """Of equal ones the first."""
    if len(tried) == 1:
        return tried[0]
    outcomes = [trials.outcome(candidate) for candidate in tried]
    return fastest(fitting(outcomes, usable_bytes), outcomes.index, tie=tie).candidate
