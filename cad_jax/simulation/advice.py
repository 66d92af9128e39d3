"""Which way of running one's own steps is fastest, and whether that is core attention disaggregation.
Host only; every figure is simulated.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from cad_jax.simulation.candidates import Candidate, Outcome, Trials, fastest
from cad_jax.simulation.step import Overlap
from cad_jax.simulation.strategies import Transport

TOLERANCES = (0.01, 0.02, 0.05, 0.1, 0.2)
TRANSPORTS: tuple[Transport, ...] = ("direct", "relay", "ragged")  # first of equals wins
KEY_RANGES = 8  # servers among which keys may be divided, besides 1
TIE = 0.002  # seconds that differ by less are the same
SHORT_ATTENTION = 0.1  # of compute: below it, contexts are short
EVEN_MAX_OVER_MEAN = 1.15  # of attention at home: below it, lengths are equal
MAX_BANDWIDTH_DOUBLINGS = 10
MAX_RING_RANKS = 64  # its hops and pieces grow with the square of the ranks

Reason = Literal[
    "one_rank", "memory", "short_contexts", "equal_lengths", "slow_network", "packing", "small_gain"
]


class Comparison(NamedTuple):
    """Outcomes of one cluster, model and documents.

    cad: every transport with every tolerance, capacities measured; ragged with keys divided among servers
    as well, where that pays; the best of each dense one with static capacities; the best of all as a single stream.
    others: home, all_gather, ring, wlb. best: of
    cad. free: the best one's outcome were its exchanges of no bytes, at the least tolerance.
    """

    cad: list[Outcome]
    others: list[Outcome]
    best: Outcome
    free: Outcome
    usable_bytes: float


class Verdict(NamedTuple):
    """alternative: the best of what cad_jax has besides cad. packing: of wlb, which it has not.
    gain, packing_gain: predicted seconds of these over cad's, less one. reasons: why not cad, the
    strongest first; none where cad is advised. needed_bytes_s: between nodes, per direction and device,
    where a slow network is in the way: with so much cad would be faster than the alternative.
    """

    use_cad: bool
    best: Outcome
    alternative: Outcome
    packing: Outcome | None
    gain: float
    packing_gain: float | None
    reasons: tuple[Reason, ...]
    needed_bytes_s: float | None
    text: str


def choose_tolerance(
    trials: Trials,
    transport: Transport,
    overlap: Overlap,
    usable_bytes: float = float("inf"),
    key_ranges: int = 1,
) -> tuple[Outcome, list[Outcome]]:
    """The outcome of the fastest tolerance, and those of all.

    Where exchanges hide behind compute, a small tolerance costs nothing and shortens the slowest server;
    where they do not, a larger one moves fewer bytes: the simulation weighs both. Of equal ones the
    largest, which moves least. Outcomes beyond usable_bytes count where no other is left.
    """
    outcomes = [
        trials.outcome(Candidate("cad", overlap, transport, tolerance, "measured", key_ranges))
        for tolerance in TOLERANCES
    ]
    best = fastest(
        _fitting(outcomes, usable_bytes), lambda o: -(o.candidate.tolerance or 0.0), tie=TIE
    )
    return best, outcomes


def compare(trials: Trials, usable_bytes: float) -> Comparison:
    """Simulates every candidate. usable_bytes: of a device's memory."""
    cad: list[Outcome] = []
    bests: list[Outcome] = []
    for transport in TRANSPORTS:
        best, outcomes = choose_tolerance(trials, transport, "pingpong", usable_bytes)
        cad += outcomes
        bests.append(best)
    divided, outcomes = choose_tolerance(trials, "ragged", "pingpong", usable_bytes, KEY_RANGES)
    cad += outcomes
    choices = [*bests, divided]
    best = fastest(_fitting(choices, usable_bytes), choices.index, tie=TIE)
    chosen = best.candidate
    padded = [o.candidate for o in bests if o.candidate.transport != "ragged"]
    cad += [trials.outcome(candidate._replace(capacities="static")) for candidate in padded]
    single = trials.outcome(chosen._replace(overlap="single_stream"))
    cad.append(single)
    best = fastest(_fitting([best, single], usable_bytes), [best, single].index, tie=0.0)
    others = [
        trials.outcome(Candidate("home", overlap, transport))
        for overlap in ("pingpong", "single_stream")
        for transport in TRANSPORTS
    ]
    others.append(trials.outcome(Candidate("all_gather")))
    if trials.setting.dp <= MAX_RING_RANKS:
        others.append(trials.outcome(Candidate("ring")))
    others.append(trials.outcome(Candidate("wlb"), wlb_memory_bytes=usable_bytes))
    least = chosen._replace(overlap="signal", tolerance=min(TOLERANCES), key_ranges=1)
    return Comparison(cad, others, best, trials.outcome(least), usable_bytes)


def verdict(trials: Trials, comparison: Comparison, margin: float) -> Verdict:
    """For cad only where it is predicted to be faster by more than `margin` than everything that cad_jax
    has besides, and not slower by more than that than packing. What does not fit the memory does not
    count, unless nothing does."""
    best, usable = comparison.best, comparison.usable_bytes
    own = [o for o in comparison.others if o.candidate.strategy != "wlb"]
    wlb = [o for o in comparison.others if o.candidate.strategy == "wlb"]
    nothing_fits = not any(o.memory_bytes <= usable for o in [best, *own, *wlb])
    alternative = fastest(_fitting(own, usable), lambda o: o.step_s, tie=0.0)
    packing = next((o for o in wlb if nothing_fits or o.memory_bytes <= usable), None)
    gain = alternative.step_s / best.step_s - 1
    packing_gain = None if packing is None else packing.step_s / best.step_s - 1
    needed = None
    if trials.setting.ranks == 1:
        reasons: tuple[Reason, ...] = ("one_rank",)
    elif best.memory_bytes > usable:
        reasons = ("memory",)
    elif gain <= margin:
        reasons = _why_not(comparison, alternative, margin)
        if "slow_network" in reasons:
            needed = _needed_bytes_s(trials, best.candidate, alternative.candidate, margin)
    elif packing_gain is not None and packing_gain < -margin:
        reasons = ("packing",)
    else:
        reasons = ()
    # What needs least is the answer where it is as good.
    home = [o for o in _fitting(own, usable) if o.candidate.strategy == "home"]
    if reasons and home:
        at_home = fastest(home, lambda o: o.step_s, tie=0.0)
        if at_home.step_s <= (1 + margin) * alternative.step_s:
            alternative = at_home
    result = Verdict(
        not reasons, best, alternative, packing, gain, packing_gain, reasons, needed, ""
    )
    return result._replace(text=_text(result, comparison, margin))


def describe(outcome: Outcome) -> str:
    """A candidate in words."""
    candidate = outcome.candidate
    parts = [candidate.transport or "", candidate.overlap]
    if candidate.strategy == "cad":
        parts += [f"tolerance {candidate.tolerance}", f"{candidate.capacities} capacities"]
        parts += [f"key ranges {candidate.key_ranges}"] * (candidate.key_ranges > 1)
    if candidate.strategy in ("all_gather", "ring", "wlb"):
        return candidate.strategy
    return f"{candidate.strategy} ({', '.join(p for p in parts if p)})"


def _fitting(outcomes: Sequence[Outcome], usable_bytes: float) -> list[Outcome]:
    return [o for o in outcomes if o.memory_bytes <= usable_bytes] or list(outcomes)


def _at_home(comparison: Comparison) -> Outcome:
    return next(o for o in comparison.others if o.candidate.strategy == "home")


def _why_not(comparison: Comparison, alternative: Outcome, margin: float) -> tuple[Reason, ...]:
    """Why cad gains so little."""
    if alternative.step_s / comparison.free.step_s - 1 > margin:
        return ("slow_network",)
    home = _at_home(comparison)
    reasons: list[Reason] = []
    if home.attention < SHORT_ATTENTION:
        reasons.append("short_contexts")
    if home.attention_max_over_mean < EVEN_MAX_OVER_MEAN:
        reasons.append("equal_lengths")
    return tuple(reasons) or ("small_gain",)


def _needed_bytes_s(
    trials: Trials, cad: Candidate, alternative: Candidate, margin: float
) -> float | None:
    """Of doublings of the bandwidth between nodes, the first at which cad gains more than `margin`."""
    costs = trials.setting.costs
    for doubling in range(1, MAX_BANDWIDTH_DOUBLINGS + 1):
        bytes_s = costs.between_nodes.bytes_s * 2**doubling
        link = costs.between_nodes._replace(bytes_s=bytes_s)
        faster = trials.on(replace(trials.setting, costs=replace(costs, between_nodes=link)))
        own, other = faster.outcome(cad), faster.outcome(alternative)
        if other.step_s / own.step_s - 1 > margin:
            return bytes_s
    return None


def _text(verdict: Verdict, comparison: Comparison, margin: float) -> str:
    best, alternative = verdict.best, verdict.alternative
    home, free = _at_home(comparison), comparison.free
    predicted = (
        f"{best.step_s:.3f} s a step with {describe(best)}, {alternative.step_s:.3f} s with "
        f"{describe(alternative)}"
    )
    over = f"home attention is {home.attention_max_over_mean:.2f} max over mean"
    gib = 2**30
    because: dict[Reason, str] = {
        "one_rank": "there is one rank, and no other to share its attention with",
        "memory": f"cad needs {best.memory_bytes / gib:.0f} GiB of a device, estimated, and "
        f"{comparison.usable_bytes / gib:.0f} are usable",
        "short_contexts": f"short contexts: attention is {home.attention:.1%} of the compute, so that no "
        "way of spreading it matters",
        "equal_lengths": f"equal lengths: {over}, so that there is little to balance",
        "slow_network": f"slow network: exchanges cannot hide, {best.exposed_communication:.1%} of cad's "
        f"step waits for them; were they free, it would take {free.step_s:.3f} s",
        "packing": "variable-length packing with per-document context parallelism (WLB-LLM, not in cad_jax) "
        f"takes {verdict.packing.step_s if verdict.packing else 0:.3f} s",
        "small_gain": f"even with free exchanges cad would take {free.step_s:.3f} s; {over}, and attention "
        f"is {home.attention:.1%} of the compute",
    }
    packing = ""
    if verdict.packing is not None and "packing" not in verdict.reasons:
        packing = (
            f" Variable-length packing with per-document context parallelism (WLB-LLM, not in cad_jax) is "
            f"predicted at {verdict.packing.step_s:.3f} s."
        )
    if verdict.use_cad:
        return (
            f"Use CAD: {predicted}, which takes {verdict.gain:.1%} longer (margin {margin:.0%}).{packing}"
            f"{_ragged(verdict, comparison)}"
        )
    reasons = "; ".join(because[r] for r in verdict.reasons)
    cure = ""
    if verdict.needed_bytes_s is not None:
        cure = f" From {verdict.needed_bytes_s / 1e9:.3g} GB/s between nodes on cad would be faster than that."
    elif verdict.reasons == ("slow_network",):
        cure = (
            f" With up to {2**MAX_BANDWIDTH_DOUBLINGS} times the bandwidth between nodes cad would gain no more than "
            f"{margin:.0%} either."
        )
    gain = f"{verdict.gain:.1%}".replace("-0.0%", "0.0%")
    advised = f"use {alternative.candidate.strategy}"
    if alternative.memory_bytes > comparison.usable_bytes:
        advised = (
            "nothing that cad_jax has fits, use more devices, more stages, or fewer tokens a rank in more "
            "microbatches"
        )
    if verdict.reasons == ("packing",):
        advised = "of what cad_jax has cad is the fastest, but use packing instead"
    return (
        f"Do not use CAD here: {reasons}. Predicted: {predicted}, a gain of {gain} (margin "
        f"{margin:.0%}): {advised}.{cure}{packing}"
    )


def _ragged(verdict: Verdict, comparison: Comparison) -> str:
    """What is left where a run's self-test refuses the ragged transport."""
    chosen = verdict.best.candidate
    if chosen.transport != "ragged":
        return ""
    dense = [o for o in comparison.cad if o.candidate.transport != "ragged"]
    next_best = fastest(_fitting(dense, comparison.usable_bytes), lambda o: o.step_s, tie=0.0)
    seconds = next_best.step_s
    against = "still faster" if seconds < verdict.alternative.step_s else "no longer faster"
    return (
        f" Ragged exchanges must pass a self-test at the start of a run; without them "
        f"{describe(next_best)} takes {seconds:.3f} s, {against} than {verdict.alternative.candidate.strategy}."
    )
