"""Which way of running one's own steps is fastest, and whether that is core attention disaggregation.
Host only; every figure is simulated.
"""

from dataclasses import replace
from math import inf
from typing import Literal, NamedTuple

from cad_jax.simulation.candidates import Candidate, Outcome, Trials, fastest, fitting
from cad_jax.simulation.step import Overlap
from cad_jax.simulation.strategies import Transport

TOLERANCES = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2)
TRANSPORTS: tuple[Transport, ...] = ("direct", "relay", "ragged")  # first of equals wins
KEY_RANGES = 8  # servers among which keys may be divided, besides 1
TIE = 0.002  # seconds that differ by less are the same
SHORT_ATTENTION = 0.1  # of compute: below it, contexts are short
EVEN_MAX_OVER_MEAN = 1.15  # of attention at home: below it, lengths are equal
MAX_BANDWIDTH_DOUBLINGS = 10
MAX_RING_RANKS = 64  # its hops and pieces grow with the square of the ranks
PACKING = "variable-length packing with per-document context parallelism (WLB-LLM, not in cad_jax)"

Reason = Literal[
    "one_rank", "memory", "short_contexts", "equal_lengths", "slow_network", "packing", "small_gain"
]


class Comparison(NamedTuple):
    """Outcomes of one cluster, model and documents.

    cad: every transport with every tolerance, capacities measured; ragged with keys divided among servers as
    well, where that pays; the best of each dense one with static capacities; the best of all as a single stream.
    own: home, all_gather, ring. wlb: packing, which cad_jax has not. best: of cad. free: the fastest of cad
    over every tolerance, keys divided or not, were its exchanges of no bytes; no bandwidth between nodes makes
    it faster.
    """

    cad: list[Outcome]
    own: list[Outcome]
    wlb: Outcome
    best: Outcome
    free: Outcome
    usable_bytes: float

    @property
    def others(self) -> list[Outcome]:
        """All but cad."""
        return [*self.own, self.wlb]


class Verdict(NamedTuple):
    """alternative: the best of what cad_jax has besides cad; home, where that is as good as any. packing:
    of wlb, which it has not. gain, packing_gain: predicted seconds of these over cad's, less one. gains: the
    gain of each step. reasons: why not cad, the strongest first; none where cad is advised.
    needed_bytes_s: between nodes, per direction and device, where a slow network is in the way: with so much
    cad is advised, with half of it not.
    """

    use_cad: bool
    best: Outcome
    alternative: Outcome
    packing: Outcome | None
    gain: float
    packing_gain: float | None
    gains: tuple[float, ...]
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
        fitting(outcomes, usable_bytes), lambda o: -(o.candidate.tolerance or 0.0), tie=TIE
    )
    return best, outcomes


def compare(trials: Trials, usable_bytes: float) -> Comparison:
    """Simulates every candidate. usable_bytes: of a device's memory."""
    best, cad = _cad(trials, usable_bytes)
    wlb, free = _wlb(trials, usable_bytes), _free(trials)
    return Comparison(cad, _own(trials), wlb, best, free, usable_bytes)


def _cad(trials: Trials, usable_bytes: float) -> tuple[Outcome, list[Outcome]]:
    """The best, and all that were tried."""
    cad: list[Outcome] = []
    bests: list[Outcome] = []
    for transport in TRANSPORTS:
        best, outcomes = choose_tolerance(trials, transport, "pingpong", usable_bytes)
        cad += outcomes
        bests.append(best)
    divided, outcomes = choose_tolerance(trials, "ragged", "pingpong", usable_bytes, KEY_RANGES)
    cad += outcomes
    choices = [*bests, divided]
    best = fastest(fitting(choices, usable_bytes), choices.index, tie=TIE)
    padded = [o.candidate for o in bests if o.candidate.transport != "ragged"]
    cad += [trials.outcome(candidate._replace(capacities="static")) for candidate in padded]
    single = trials.outcome(best.candidate._replace(overlap="single_stream"))
    cad.append(single)
    return fastest(fitting([best, single], usable_bytes), [best, single].index, tie=0.0), cad


def _own(trials: Trials) -> list[Outcome]:
    """What cad_jax has besides cad."""
    own = [
        trials.outcome(Candidate("home", overlap, transport))
        for overlap in ("pingpong", "single_stream")
        for transport in TRANSPORTS
    ]
    own.append(trials.outcome(Candidate("all_gather")))
    if trials.setting.dp <= MAX_RING_RANKS:
        own.append(trials.outcome(Candidate("ring")))
    return own


def _wlb(trials: Trials, usable_bytes: float) -> Outcome:
    return trials.outcome(Candidate("wlb"), wlb_memory_bytes=usable_bytes)


def _free(trials: Trials) -> Outcome:
    """The bound of `Comparison.free`: these exchanges have one hop, the fewest; what stages hand on is
    free as well."""
    unlimited = _with_bandwidth(trials, inf)
    ways: tuple[tuple[Transport, int], ...] = (("direct", 1), ("ragged", KEY_RANGES))
    outcomes = [
        unlimited.outcome(Candidate("cad", "signal", transport, tolerance, "measured", key_ranges))
        for tolerance in TOLERANCES
        for transport, key_ranges in ways
    ]
    return min(outcomes, key=lambda o: o.step_s)


def verdict(trials: Trials, comparison: Comparison, margin: float) -> Verdict:
    """For cad only where it is predicted to be faster by more than `margin` than everything that cad_jax
    has besides, and not slower by more than that than packing, of which the text says how it does. What does
    not fit the memory does not count, unless nothing does."""
    best, usable, own = comparison.best, comparison.usable_bytes, comparison.own
    nothing_fits = not any(o.memory_bytes <= usable for o in [best, *comparison.others])
    packing = comparison.wlb
    if not nothing_fits and packing.memory_bytes > usable:
        packing = None
    alternative = fastest(fitting(own, usable), lambda o: o.step_s, tie=0.0)
    needed = None
    if trials.setting.ranks == 1:
        reasons: tuple[Reason, ...] = ("one_rank",)
    elif best.memory_bytes > usable:
        reasons = ("memory",)
    elif _gain(best, alternative) <= margin:
        reasons = _why_not(comparison, alternative, margin)
        if "slow_network" in reasons:
            needed = _needed_bytes_s(trials, comparison, margin)
    elif packing is not None and _gain(best, packing) < -margin:
        reasons = ("packing",)
    else:
        reasons = ()
    # What needs least is the answer where it is as good.
    home = [o for o in fitting(own, usable) if o.candidate.strategy == "home"]
    if reasons and home:
        at_home = fastest(home, lambda o: o.step_s, tie=0.0)
        rivals = [alternative, best] if best.memory_bytes <= usable else [alternative]
        if all(_gain(rival, at_home) <= margin for rival in rivals):
            alternative = at_home
    gains = tuple(
        other / own - 1
        for other, own in zip(alternative.each_step_s, best.each_step_s, strict=True)
    )
    result = Verdict(
        not reasons, best, alternative, packing, _gain(best, alternative),
        None if packing is None else _gain(best, packing), gains, reasons, needed, "",
    )  # fmt: skip
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


def _gain(outcome: Outcome, over: Outcome) -> float:
    return over.step_s / outcome.step_s - 1


def _at_home(comparison: Comparison) -> Outcome:
    return next(o for o in comparison.own if o.candidate.strategy == "home")


def _why_not(comparison: Comparison, alternative: Outcome, margin: float) -> tuple[Reason, ...]:
    """Why cad gains so little."""
    if _gain(comparison.free, alternative) > margin:
        return ("slow_network",)
    home = _at_home(comparison)
    reasons: list[Reason] = []
    if home.attention < SHORT_ATTENTION:
        reasons.append("short_contexts")
    if home.attention_max_over_mean < EVEN_MAX_OVER_MEAN:
        reasons.append("equal_lengths")
    return tuple(reasons) or ("small_gain",)


def _with_bandwidth(trials: Trials, bytes_s: float) -> Trials:
    """Between nodes."""
    costs = trials.setting.costs
    link = costs.between_nodes._replace(bytes_s=bytes_s)
    return trials.on(replace(trials.setting, costs=replace(costs, between_nodes=link)))


def _needed_bytes_s(trials: Trials, comparison: Comparison, margin: float) -> float | None:
    """Of doublings of the bandwidth between nodes, the first with which cad is advised. At each one
    everything is chosen again, for all that competes grows faster too: a gain may come and go."""
    setting, usable, free = trials.setting, comparison.usable_bytes, comparison.free
    if setting.ranks * setting.tp <= setting.costs.device.devices_per_node:
        return None
    for doubling in range(1, MAX_BANDWIDTH_DOUBLINGS + 1):
        bytes_s = setting.costs.between_nodes.bytes_s * 2**doubling
        faster = _with_bandwidth(trials, bytes_s)
        alternative = fastest(fitting(_own(faster), usable), lambda o: o.step_s, tie=0.0)
        if _gain(free, alternative) <= margin:
            return None  # nor with more: the alternative only becomes faster
        best, _ = _cad(faster, usable)
        if best.memory_bytes > usable or _gain(best, alternative) <= margin:
            continue
        packing = _wlb(faster, usable)
        if packing.memory_bytes > usable or _gain(best, packing) >= -margin:
            return bytes_s
        if _gain(free, packing) < -margin:
            return None
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
        "packing": f"{PACKING} takes {verdict.packing.step_s if verdict.packing else 0:.3f} s",
        "small_gain": f"even with free exchanges cad would take {free.step_s:.3f} s; {over}, and attention "
        f"is {home.attention:.1%} of the compute",
    }
    also, packing = _packing(verdict, comparison.usable_bytes, margin)
    allowed = f"margin {100 * margin:.3g}%"
    if verdict.use_cad:
        return (
            f"Use CAD{also}: {predicted}, which takes {verdict.gain:.1%} longer ({allowed}).{packing}"
            f"{_ragged(verdict, comparison)}"
        )
    reasons = "; ".join(because[r] for r in verdict.reasons)
    cure = ""
    if verdict.needed_bytes_s is not None:
        cure = (
            f" With {verdict.needed_bytes_s / 1e9:.6g} GB/s between nodes CAD would be advised, with half of "
            "that it would not."
        )
    elif verdict.reasons == ("slow_network",):
        cure = f" With up to {2**MAX_BANDWIDTH_DOUBLINGS} times the bandwidth between nodes CAD would not be advised either."
    advised = f"use {alternative.candidate.strategy}{also}"
    if alternative.memory_bytes > comparison.usable_bytes:
        advised = (
            "nothing that cad_jax has fits, use more devices, more stages, or fewer tokens a rank in more "
            "microbatches"
        )
    if verdict.reasons == ("packing",):
        advised = "of what cad_jax has cad is the fastest, but use packing instead"
    return (
        f"Do not use CAD here: {reasons}. Predicted: {predicted}, a gain of {verdict.gain:z.1%} "
        f"({allowed}): {advised}.{cure}{packing}"
    )


def _packing(verdict: Verdict, usable_bytes: float, margin: float) -> tuple[str, str]:
    """What to say of packing beside the advice, where it does as well or better, and else after it."""
    packing = verdict.packing
    if packing is None or "packing" in verdict.reasons:
        return "", ""
    advised = verdict.best if verdict.use_cad else verdict.alternative
    behind = _gain(advised, packing)
    if behind > margin or advised.memory_bytes > usable_bytes:
        return "", f" Predicted for {PACKING}: {packing.step_s:.3f} s."
    does = "does about as well" if behind >= -margin else "is predicted to be faster"
    return f", or {PACKING}, which {does}, {packing.step_s:.3f} s a step", ""


def _ragged(verdict: Verdict, comparison: Comparison) -> str:
    """What is left where a run's self-test refuses the ragged transport."""
    chosen = verdict.best.candidate
    if chosen.transport != "ragged":
        return ""
    dense = [o for o in comparison.cad if o.candidate.transport != "ragged"]
    next_best = fastest(fitting(dense, comparison.usable_bytes), lambda o: o.step_s, tie=0.0)
    seconds = next_best.step_s
    against = "still faster" if seconds < verdict.alternative.step_s else "no longer faster"
    return (
        f" Ragged exchanges must pass a self-test at the start of a run; without them "
        f"{describe(next_best)} takes {seconds:.3f} s, {against} than {verdict.alternative.candidate.strategy}."
    )
