"""What `cad-jax advise` does: one's own document lengths, a cluster and a model in; the fastest way of training
on them out, or the reason why core attention disaggregation does not pay there. Works without jax.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from cad_jax.command_line import check_number, check_outputs, writing
from cad_jax.lengths_report import length_statistics, read_lengths, shortage, statistics_table
from cad_jax.pool_limits import MAX_MICROBATCHES, MAX_POOL_TOKENS, check_memory
from cad_jax.sharding.clusters import USABLE_MEMORY, Topology, parse_topology
from cad_jax.sharding.cost import model_shape
from cad_jax.sharding.cost_model import CostModel
from cad_jax.simulate_args import BANDWIDTHS_GB_S, PIPELINE_MICROBATCHES
from cad_jax.simulation.advice import Comparison, Verdict, compare, verdict
from cad_jax.simulation.candidates import (
    MAX_STEPS,
    Outcome,
    Strategy,
    Trials,
    draw_steps,
    enough_steps,
)
from cad_jax.simulation.named_costs import named_costs, profile_file
from cad_jax.simulation.setting import Setting

GIB = 2**30
STRATEGIES: tuple[Strategy, ...] = ("cad", "home", "all_gather", "ring", "wlb")
RECIPES = {"llama3-8b": "llama3_8b_h200"}  # by the model of their sizes


@dataclass(frozen=True)
class AdviseArgs:
    """Advises for or against CAD for documents, a cluster and a model. Everything printed is simulated or
    derived."""

    lengths: Path
    """File with one document length in tokens a line, such as `cad-jax lengths` writes."""
    topology: str
    """The cluster, DEVICE:NODESxDEVICES_PER_NODE of h100, h200 or b200, such as h200:8x8."""
    model: str = "llama3-8b"
    """Whose layers: llama3-8b, llama3-70b, llama-34b and others."""
    tokens_per_rank: int = 65_536
    """Tokens of a rank in a nano-batch (`plan` says --tokens-per-server); a microbatch has twice as many."""
    tp: int | None = None
    """Devices of a rank, which share its tokens; by default those of a node."""
    tp_splits: Literal["weights", "tokens"] = "tokens"
    """What tp splits outside attention, for the memory."""
    pp: int = 1
    """Pipeline stages."""
    microbatches: int | None = None
    """Of a step; by default 8 with stages, 1 without."""
    between_nodes_gb_s: Annotated[float | None, tyro.conf.arg(aliases=("--nodes-bandwidth",))] = (
        None
    )
    """Network of a GPU per direction, 1e9 bytes/s; by default the device's."""
    profile: str | None = None
    """Kernel times: a CSV of `cad-jax profile`, the name of one that ships (h200_fa2, h200_fa3), or
    "analytic". By default h200_fa3 on h100 and h200, else analytic."""
    margin: float = 0.02
    """CAD is advised where it is faster by more than this fraction."""
    steps: int | None = None
    """Steps that are drawn from the documents and simulated; by default four microbatches' worth,
    two from 32 ranks on."""
    seed: int = 0
    """Of the order in which they are drawn."""
    json: Path | None = None
    """Write every figure and the verdict here."""

    @property
    def step_microbatches(self) -> int:
        """M, given or by default."""
        return self.microbatches or (PIPELINE_MICROBATCHES if self.pp > 1 else 1)

    def check(self) -> None:
        """Raises ValueError for arguments that are wrong by themselves."""
        for name in ("tokens_per_rank", "tp", "pp"):
            flag = f"--{name.replace('_', '-')}"
            check_number(flag, getattr(self, name), 1, MAX_POOL_TOKENS, "use 1 or more")
        check_number("--microbatches", self.microbatches, 1, MAX_MICROBATCHES, "8 is usual")
        check_number("--steps", self.steps, 1, MAX_STEPS, "4 give a fair mean")
        check_number(
            "--between-nodes-gb-s", self.between_nodes_gb_s, *BANDWIDTHS_GB_S, "50 is 400 Gb/s"
        )
        check_number("--margin", self.margin, 0, 1, "0.02 is usual")
        check_number("--seed", self.seed, 0, 2**63 - 1, "0 is usual")
        check_outputs({"--json": self.json}, [self.lengths, profile_file(self.profile)])


@dataclass(frozen=True)
class Advice:
    """What was simulated and what follows from it."""

    topology: Topology
    setting: Setting
    steps: int
    comparison: Comparison
    verdict: Verdict
    largest_context: dict[Strategy, int]
    undivided_steps: int  # with a document longer than half a microbatch
    drawn_tokens: int  # of the documents of all steps


def costs_of(args: AdviseArgs, topology: Topology) -> CostModel:
    """Of the cluster's devices, in nodes of its size. Raises ValueError for an unfit profile."""
    device = replace(topology.device, devices_per_node=topology.devices_per_node)
    return named_costs(device, args.profile, args.between_nodes_gb_s)


def setting_of(args: AdviseArgs, topology: Topology) -> Setting:
    """What the steps run on. Raises ValueError where devices, heads or stages do not divide."""
    model, tp = model_shape(args.model), args.tp or topology.devices_per_node
    if topology.devices % (tp * args.pp):
        raise ValueError(
            f"--tp (={tp}) x --pp (={args.pp}) must divide the {topology.devices} devices of "
            f"{topology.name}: use divisors"
        )
    ranks = topology.devices // tp
    setting = Setting(
        model, costs_of(args, topology), ranks, tp, args.pp, again=1.0, head=True,
        tokens_over_tp=args.tp_splits == "tokens",
    )  # fmt: skip
    _ = setting.heads  # refuses a tp that does not divide them
    if 2 * args.step_microbatches < args.pp:
        raise ValueError(
            f"--microbatches (={args.step_microbatches}) must be at least half of --pp (={args.pp}), so that "
            f"packing has one for every stage: use {-(-args.pp // 2)} or more"
        )
    pool_tokens = 2 * args.tokens_per_rank * ranks
    if pool_tokens > MAX_POOL_TOKENS:
        raise ValueError(
            f"2 x --tokens-per-rank x ranks must be at most {MAX_POOL_TOKENS} tokens, got 2 x "
            f"{args.tokens_per_rank} x {ranks} = {pool_tokens}: use fewer tokens"
        )
    check_memory(ranks, documents=1)
    if args.tp_splits == "tokens" and args.tokens_per_rank % tp:
        raise ValueError(
            f"--tokens-per-rank (={args.tokens_per_rank}) must be divisible by --tp (={tp}), which "
            "splits tokens: use a multiple, or --tp-splits weights"
        )
    return setting


def advise(args: AdviseArgs, lengths: np.ndarray) -> Advice:
    """Simulates and judges. lengths: int64 [N]. Raises ValueError for bad input."""
    topology = parse_topology(args.topology)
    setting = setting_of(args, topology)
    microbatch_tokens = 2 * setting.dp * args.tokens_per_rank
    count = args.steps or enough_steps(setting.ranks, args.step_microbatches)
    steps = draw_steps(lengths, count, args.step_microbatches, microbatch_tokens, args.seed)
    drawn = [nano for step in steps for microbatch in step for nano in microbatch]
    check_memory(setting.ranks, args.pp * max(map(len, drawn)))
    trials = Trials(setting, steps, 2 * args.tokens_per_rank, int(lengths.max()))
    comparison = compare(trials, topology.usable_bytes)
    return Advice(
        topology, setting, len(steps), comparison, verdict(trials, comparison, args.margin),
        {s: trials.largest_context(s, topology.usable_bytes) for s in STRATEGIES},
        sum(len(step[0]) == 1 for step in steps), sum(int(nano.sum()) for nano in drawn),
    )  # fmt: skip


def shown(comparison: Comparison) -> list[Outcome]:
    """Rows worth reading: cad's best per transport, everything tried with the best transport, and the best of
    each other strategy."""
    best = comparison.best
    rows = [best]
    for transport in dict.fromkeys(o.candidate.transport for o in comparison.cad):
        of_transport = [o for o in comparison.cad if o.candidate.transport == transport]
        if transport == best.candidate.transport:
            rows[1:1] = [o for o in of_transport if o is not best]
        else:
            rows.append(min(of_transport, key=lambda o: o.step_s))
    for strategy in STRATEGIES[1:]:
        others = [o for o in comparison.others if o.candidate.strategy == strategy]
        rows += sorted(others, key=lambda o: o.step_s)[:1]
    return rows


def table(advice: Advice, label: str) -> Table:
    """The figures for people."""
    usable, setting = advice.topology.usable_bytes, advice.setting
    columns: dict[str, Callable[[Outcome], str]] = {
        "strategy": _name,
        "via": lambda o: o.candidate.transport or "",
        "tol.": lambda o: "" if o.candidate.tolerance is None else f"{o.candidate.tolerance}",
        "s": lambda o: f"{o.step_s:.4g}",
        "ratio": lambda o: f"{o.step_s / advice.comparison.best.step_s:.3f}",
        "ex-\nposed": lambda o: f"{o.exposed_communication:.1%}",
        "bub-\nble": lambda o: f"{o.bubble:.1%}",
        "idle": lambda o: f"{o.idle:.1%}",
        "max/\nmean": lambda o: f"{o.attention_max_over_mean:.2f}",
        "sent": lambda o: f"{o.wire_bytes_mean / GIB:.0f}",
        "held": lambda o: f"{o.memory_bytes / GIB:.0f}" + "!" * (o.memory_bytes > usable),
    }
    if setting.pp == 1:
        del columns["bub-\nble"]
    result = Table(
        title=f"One step of {setting.model.name} on {advice.topology.name}: {setting.ranks} ranks x "
        f"{setting.tp} devices, simulated",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for name in columns:
        left = name in ("strategy", "via")
        result.add_column(name, justify="left" if left else "right", overflow="fold")
    for outcome in shown(advice.comparison):
        result.add_row(*(cell(outcome) for cell in columns.values()))
    result.caption = (
        "cad: measured capacities, whole prefixes of keys, ping-pong, unless named; means over the steps; "
        "idle: share of all rank-seconds without work of a rank's own; exposed: of them, on the network; "
        "bubble: of a schedule's ticks; sent: GiB of a device, in bfloat16; held: GiB of a device, estimated, ! beyond "
        f"{USABLE_MEMORY:.0%} of it; kernel times {label}; parameter collectives, optimizer and host take "
        "no time"
    )
    return result


def _name(outcome: Outcome) -> str:
    strategy, overlap = outcome.candidate.strategy, outcome.candidate.overlap
    if strategy in ("cad", "home") and overlap == "single_stream":
        return f"{strategy}, 1 stream"
    if outcome.candidate.key_ranges > 1:
        return f"{strategy}, {outcome.candidate.key_ranges} ranges"
    return f"{strategy}, static" if outcome.candidate.capacities == "static" else strategy


def context_text(advice: Advice) -> str:
    """The largest context of each strategy."""
    fitting = ", ".join(f"{name} {tokens:,}" for name, tokens in advice.largest_context.items())
    return (
        f"largest context, tokens of a document alone in a nano-batch, that fits {USABLE_MEMORY:.0%} of a "
        f"device's memory (estimated): {fitting}"
    )


def repetition_text(advice: Advice, args: AdviseArgs, lengths: np.ndarray) -> str | None:
    """How often documents come where the steps need more than there are, and that they may come twice where
    what `draw_steps` packs before them, and holds back, needs more; None where neither does."""
    microbatches, drawn = advice.steps * args.step_microbatches, advice.drawn_tokens
    simulated = f"{microbatches} simulated microbatches"
    return shortage(
        args.lengths, lengths, drawn, simulated,
        f"every document comes {drawn / int(lengths.sum()):.2f} times on average, in other orders; with more "
        "documents steps would differ more",
    ) or shortage(
        args.lengths, lengths, 2 * drawn + drawn // advice.steps,
        f"{simulated} and those packed before them or held back", "a document may come twice",
    )  # fmt: skip


def sample_text(advice: Advice, args: AdviseArgs, lengths: np.ndarray) -> str:
    """How much of the documents the verdict rests on, and how it differs from step to step."""
    judged, share = advice.verdict, advice.drawn_tokens / int(lengths.sum())
    held = f"{share:.1%} of" if share <= 1 else f"{share:.2f} times"
    least, most = min(judged.gains), max(judged.gains)
    steps = "1 step" if advice.steps == 1 else f"{advice.steps} steps"
    gained = f"{least:z.1%}" + f" to {most:z.1%}, step by step" * (advice.steps > 1)
    text = (
        f"simulated: {steps} with {held} the tokens of {args.lengths}; cad's gain over "
        f"{judged.alternative.candidate.strategy}: {gained}"
    )
    if least <= args.margin < most and judged.reasons not in (("one_rank",), ("memory",)):
        text += f"; the margin of {100 * args.margin:.3g}% lies between: other steps (--seed, --steps) may change the verdict"
    return text


def advised(advice: Advice) -> Outcome:
    """The best of what cad_jax has, whether it fits or not."""
    judged = advice.verdict
    return judged.best if judged.use_cad or "packing" in judged.reasons else judged.alternative


def train_flags(advice: Advice, args: AdviseArgs) -> str:
    """The best of what cad_jax has as arguments of `cad-jax train`."""
    candidate, setting = advised(advice).candidate, advice.setting
    flags = [
        f"--mesh.pp {setting.pp} --mesh.dp {setting.dp} --mesh.tp {setting.tp}",
        *([f"--mesh.tp-splits {args.tp_splits}"] if setting.tp > 1 else []),
        f"--training.tokens-per-microbatch {2 * setting.dp * args.tokens_per_rank}",
        f"--training.microbatches {args.step_microbatches}",
        f"--attention {candidate.strategy} --overlap {candidate.overlap}",
    ]
    if candidate.transport is not None:
        flags.append(f"--attention.transport {candidate.transport}")
    if candidate.tolerance is not None:
        flags.append(f"--attention.tolerance {candidate.tolerance}")
    if candidate.key_ranges > 1:
        flags.append(f"--attention.key-ranges {candidate.key_ranges}")
    return " ".join(flags)


def train_text(advice: Advice, args: AdviseArgs) -> str:
    """The same as a command, where a recipe has the model's sizes."""
    flags, recipe = train_flags(advice, args), RECIPES.get(args.model)
    strategy, before = advised(advice).candidate.strategy, ""
    if "packing" in advice.verdict.reasons:
        before = f"cad_jax cannot run packing; what follows is its own fastest, {strategy}\n"
    if recipe is None:
        return f"{before}arguments for cad-jax train RECIPE, where the recipe has the sizes of {args.model}:\n{flags}"
    nodes, each, processes = advice.topology.nodes, "", ""
    if nodes > 1:
        each = f" on each of the {nodes} nodes, I from 0 to {nodes - 1},"
        processes = f" --processes {nodes} --coordinator HOST:PORT --process-id I"
    return (
        f"{before}to train with {strategy},{each} with your JSON lines for data/*.jsonl and the model's tokenizer for tokenizer.json:\n"
        f"cad-jax train {recipe} --data.paths 'data/*.jsonl' --data.tokenizer tokenizer.json {flags}{processes}"
    )


def figures(advice: Advice, args: AdviseArgs, lengths: np.ndarray) -> dict[str, Any]:
    """Everything as plain values."""

    def fits(outcome: Outcome) -> bool:
        return outcome.memory_bytes <= advice.topology.usable_bytes

    def plain(outcome: Outcome | None) -> dict[str, Any] | None:
        if outcome is None:
            return None
        named = {"candidate": None, "fits": fits(outcome)}
        return outcome._asdict() | outcome.candidate._asdict() | named

    comparison, judged, costs = advice.comparison, advice.verdict, advice.setting.costs
    return {
        "label": "simulated",
        "memory_label": "derived",
        "kernel_times": costs.label,
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(args).items()},
        "ranks": advice.setting.ranks,
        "tp": advice.setting.tp,
        "between_nodes_bytes_s": costs.between_nodes.bytes_s,
        "lengths": length_statistics(lengths)._asdict(),
        "microbatches": args.step_microbatches,
        "steps": advice.steps,
        "undivided_steps": advice.undivided_steps,
        "passes_over_lengths": advice.drawn_tokens / int(lengths.sum()),
        "usable_bytes": comparison.usable_bytes,
        "outcomes": [plain(o) for o in comparison.cad + comparison.others],
        "free_exchanges": plain(comparison.free),
        "largest_context_tokens": advice.largest_context,
        "verdict": {
            "use_cad": judged.use_cad,
            "reasons": list(judged.reasons),
            "gain": judged.gain,
            "gain_of_each_step": list(judged.gains),
            "least_gain": min(judged.gains),
            "most_gain": max(judged.gains),
            "margin": args.margin,
            "best": plain(judged.best),
            "alternative": plain(judged.alternative),
            "packing": plain(judged.packing),
            "packing_gain": judged.packing_gain,
            "needed_between_nodes_bytes_s": judged.needed_bytes_s,
            "train_recipe": RECIPES.get(args.model),
            "train_flags": train_flags(advice, args) if fits(advised(advice)) else None,
            "text": judged.text,
        },
    }


def run(args: AdviseArgs, console: Console | None = None) -> Advice:
    """Simulates, prints tables and verdict, writes JSON where asked; returns the advice.

    Raises ValueError for bad input, before anything is written.
    """
    console = console or Console()
    args.check()
    lengths = read_lengths(args.lengths)
    with console.status("simulating steps under every strategy"):
        advice = advise(args, lengths)
    console.print(statistics_table(length_statistics(lengths), f"documents of {args.lengths}"))
    if repeated := repetition_text(advice, args, lengths):
        console.print(repeated, highlight=False, markup=False)
    console.print(table(advice, advice.setting.costs.label))
    if advice.undivided_steps:
        console.print(
            f"{advice.undivided_steps} of {advice.steps} steps hold a document longer than half a microbatch and run "
            "as a single stream"
        )
    console.print(context_text(advice), highlight=False)
    console.print(advice.verdict.text, highlight=False)
    console.print(sample_text(advice, args, lengths), highlight=False, markup=False)
    if advised(advice).memory_bytes <= advice.topology.usable_bytes:
        console.print(train_text(advice, args), highlight=False, soft_wrap=True)
    if args.json is not None:
        with writing(args.json) as path:
            path.write_text(json.dumps(figures(advice, args, lengths), indent=1))
        console.print(f"wrote {args.json}")
    return advice
