"""Verdicts over simulated outcomes: the bandwidth that cad needs, and what is said of packing."""

from pathlib import Path

import numpy as np
import pytest

from cad_jax.advise_report import AdviseArgs, setting_of
from cad_jax.sharding.clusters import parse_topology
from cad_jax.simulation.advice import KEY_RANGES, TOLERANCES, Comparison, compare, verdict
from cad_jax.simulation.candidates import Candidate, Trials, draw_steps

LADDER_BYTES_S = (12.5e9, 25e9, 50e9, 100e9)
PACKING = "variable-length packing with per-document context parallelism (WLB-LLM, not in cad_jax)"


def compared(bytes_s: float) -> tuple[Trials, Comparison]:
    """Of two long documents among short ones, with so much between nodes."""
    lengths, topology = np.array([20_000, 20_000, *[200] * 400]), "h200:2x8"
    args = AdviseArgs(
        Path("l"), topology, model="llama3-1b", tp=1, tokens_per_rank=2048,
        between_nodes_gb_s=bytes_s / 1e9,
    )  # fmt: skip
    setting = setting_of(args, parse_topology(topology))
    trials = Trials(setting, draw_steps(lengths, 1, 1, 2 * 16 * 2048), 2 * 2048, 20_000)
    return trials, compare(trials, 1e12)


@pytest.fixture(scope="module")
def ladder() -> dict[float, tuple[Trials, Comparison]]:
    return {bytes_s: compared(bytes_s) for bytes_s in LADDER_BYTES_S}


def test_no_bandwidth_makes_cad_faster_than_free_exchanges(ladder) -> None:
    """Nor whole prefixes or divided keys, with whichever tolerance."""
    trials, unlimited = compared(1e18)
    free = unlimited.free.step_s
    for _, comparison in ladder.values():
        assert comparison.free.step_s == pytest.approx(free, rel=1e-12)
        assert free <= min(o.step_s for o in comparison.cad)
    tried = [
        trials.outcome(Candidate("cad", "pingpong", "ragged", tolerance, "measured", key_ranges))
        for tolerance in TOLERANCES
        for key_ranges in (1, KEY_RANGES)
    ]
    assert free <= min(o.step_s for o in [*unlimited.cad, *tried]) < 1.002 * free


def test_the_bandwidth_that_is_needed_is_the_first_at_which_cad_is_advised(
    ladder, monkeypatch
) -> None:
    """Against a comparison at every doubling, where another tolerance is best with more bandwidth; with
    margins beyond what cad gains at any of them, and beyond what it gains at all."""
    monkeypatch.setattr("cad_jax.simulation.advice.MAX_BANDWIDTH_DOUBLINGS", 3)
    assert len({c.best.candidate.tolerance for _, c in ladder.values()}) > 1
    answers = []
    for margin in (0.02, 0.3, 0.5):
        trials, comparison = ladder[12.5e9]
        judged = verdict(trials, comparison, margin)
        assert judged.reasons == ("slow_network",)
        advised = [
            bytes_s
            for bytes_s, (_, c) in ladder.items()
            if min(o.step_s for o in c.own) > (1 + margin) * c.best.step_s
            and c.wlb.step_s >= (1 - margin) * c.best.step_s
        ]
        answers.append(min(advised, default=None))
        assert judged.needed_bytes_s == answers[-1]
        said = "With up to 8 times the bandwidth between nodes CAD would not be advised either."
        assert (said in judged.text) == (not advised)
    assert answers[0] is not None and answers[1:] == [None, None]


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (0.97, f"Do not use CAD here: {PACKING} takes {{:.3f}} s"),
        (0.99, f"Use CAD, or {PACKING}, which does about as well, {{:.3f}} s a step: "),
        (1.01, f"Use CAD, or {PACKING}, which does about as well, {{:.3f}} s a step: "),
        (1.03, f" Predicted for {PACKING}: {{:.3f}} s."),
    ],
)
def test_packing_is_weighed_within_the_margin(packed: float, says: str, ladder) -> None:
    """packed: its seconds over those of cad."""
    trials, comparison = ladder[100e9]
    wlb = comparison.wlb._replace(step_s=packed * comparison.best.step_s)
    judged = verdict(trials, comparison._replace(wlb=wlb), 0.02)
    assert says.format(wlb.step_s) in judged.text
    assert f"{comparison.best.step_s:.3f} s a step with cad" in judged.text
    assert judged.use_cad == (packed > 0.98)
    assert judged.text.startswith("Use CAD: ") == (packed > 1.02)


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (0.05, f", or {PACKING}, which is predicted to be faster, {{:.3f}} s a step."),
        (1.01, f", or {PACKING}, which does about as well, {{:.3f}} s a step."),
        (2.0, f". Predicted for {PACKING}: {{:.3f}} s."),
    ],
)
def test_packing_that_is_as_good_as_the_alternative_stands_beside_it(
    packed: float, says: str, ladder
) -> None:
    """packed: its seconds over those of the alternative; the margin is 0.9."""
    trials, comparison = ladder[100e9]
    alternative = verdict(trials, comparison, 0.9).alternative
    wlb = comparison.wlb._replace(step_s=packed * alternative.step_s)
    judged = verdict(trials, comparison._replace(wlb=wlb), 0.9)
    assert not judged.use_cad and judged.alternative is alternative
    assert f"use {alternative.candidate.strategy}{says.format(wlb.step_s)}" in judged.text
