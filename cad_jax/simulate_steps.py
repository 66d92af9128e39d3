"""What `cad-jax simulate` simulates: documents, a cluster and strategies in; the same steps under each strategy out.

Works where jax is not installed.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console

from cad_jax.lengths_report import read_lengths
from cad_jax.pipeline.ticks import MicrobatchLengths
from cad_jax.pool_limits import check_memory
from cad_jax.sharding.clusters import CHIPS, USABLE_MEMORY
from cad_jax.sharding.cost import DEVICES, model_shape
from cad_jax.sharding.cost_model import CostModel
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.planners import load_planner
from cad_jax.sharding.speeds import check_speeds, read_speeds
from cad_jax.simulate_args import SimulateArgs, Strategy
from cad_jax.simulation.averages import (
    Averages,
    fastest_cad,
    fastest_home,
    fastest_published,
    transports_of,
)
from cad_jax.simulation.candidates import WLB_HEADROOMS, Candidate, Trials, draw_steps
from cad_jax.simulation.causes import with_causes
from cad_jax.simulation.named_costs import named_costs
from cad_jax.simulation.setting import Setting
from cad_jax.simulation.timeline import Timeline
from cad_jax.simulation.wlb import check_microbatches
from cad_jax.simulation.workloads import (
    LONG_TOKENS,
    PUBLISHED,
    SHORT_DOCUMENT_TOKENS,
    batches,
)

MANY_RANKS = 512  # from here on a strategy takes minutes
WORKLOAD_SEED = 42  # of the published batches, at --seed 0


def cost_model(args: SimulateArgs) -> CostModel:
    """The cost model that the arguments name."""
    return named_costs(DEVICES[args.device], args.profile, args.between_nodes_gb_s)


def drawn_steps(args: SimulateArgs, dp: int, lengths: np.ndarray | None) -> list[MicrobatchLengths]:
    """Documents of the steps, [steps][M][2] arrays of lengths; [M][1] in a step that has one too long to divide.

    lengths: of --lengths. Raises ValueError where one is too long, or the workload cannot have it.
    """
    nano_tokens, count = dp * args.tokens_per_rank, args.step_microbatches
    if lengths is not None:
        return draw_steps(lengths, args.step_count, count, 2 * nano_tokens, args.seed)
    _check_workload(args, nano_tokens)
    assert args.workload is not None
    drawn = batches(
        args.workload,
        longest_tokens=args.longest_tokens,
        nano_tokens=nano_tokens,
        nano_batches=2 * count,
        number=args.step_count,
        seed=WORKLOAD_SEED + args.seed,
    )
    return [[batch[2 * m : 2 * m + 2] for m in range(count)] for batch in drawn]


def _check_workload(args: SimulateArgs, nano_tokens: int) -> None:
    """Raises ValueError for a longest document that the workload cannot have, in the options' words."""
    product = f"--tokens-per-rank x --ranks / --pp (= {nano_tokens})"
    longest = args.longest_tokens
    if not SHORT_DOCUMENT_TOKENS <= longest <= nano_tokens:
        raise ValueError(
            f"--longest-tokens must be from {SHORT_DOCUMENT_TOKENS} to {product}, got {longest}: a "
            "document lies within one nano-batch; use shorter documents, more tokens or more ranks"
        )
    if args.workload in PUBLISHED and (longest % LONG_TOKENS or nano_tokens % longest):
        raise ValueError(
            f"--longest-tokens of {args.workload} must be a multiple of {LONG_TOKENS} and divide "
            f"{product}, got {longest}: use 65536 or 131072, or --workload mixed, which takes any"
        )


@dataclass(frozen=True)
class Simulation:
    """Every strategy's steps, in the order of the arguments, and the documents that they hold.

    documents: int64 [N], lengths of all steps. file: those of --lengths. undivided: steps with a document longer than
    half a microbatch, which run as a single stream. padding: share of the steps' tokens.
    """

    strategies: list[Averages]
    documents: np.ndarray
    file: np.ndarray | None
    undivided: int
    padding: float


def simulate(args: SimulateArgs, console: Console) -> Simulation:
    """Raises ValueError for bad input, before the first strategy."""
    args.check()
    setting = setting_of(args)
    packings = (args.step_microbatches, 2 * args.step_microbatches)
    if "wlb" in args.strategies:
        check_microbatches(args.pp, packings)
    lengths = None if args.lengths is None else read_lengths(args.lengths)
    steps = drawn_steps(args, setting.dp, lengths)
    nanos = [nano for step in steps for microbatch in step for nano in microbatch]
    check_memory(args.ranks, args.pp * max(map(len, nanos)))
    documents = np.concatenate(nanos)
    longest = int((documents if lengths is None else lengths).max(initial=0))
    trials = Trials(setting, steps, 2 * args.tokens_per_rank, longest)
    # Its plans are made with a planner of one's own; all others are this project's.
    planned = Trials(
        replace(setting, planner=plan_documents if args.planner is None else load_planner(args.planner)),
        steps, trials.rank_tokens, longest,
    )  # fmt: skip
    usable = usable_bytes(args.device) or math.inf
    transports = transports_of(args.transport, args.device)

    def candidate(name: Strategy) -> Candidate:
        if name in ("cad", "planner"):
            own = planned if name == "planner" else trials
            return fastest_cad(
                own, args.overlap, transports, args.tolerance, usable, args.key_ranges
            )
        if name == "published":
            return fastest_published(trials, args.overlap, args.tolerance, usable)
        if name == "home":
            return fastest_home(trials, args.overlap, transports, usable)
        return Candidate(name)

    names = feasible(
        args.all_strategies, 2 * args.tokens_per_rank // max(map(_divided, steps)), console
    )
    many = args.ranks >= MANY_RANKS
    if many:
        console.print(
            f"{args.ranks} ranks: each strategy takes minutes; name --tolerance and --transport, fewer --steps, "
            "--strategies or --ranks, for an answer sooner"
        )
    headrooms = WLB_HEADROOMS if args.headroom is None else (args.headroom,)
    rows = []
    for nth, name in enumerate(names, 1):
        began = time.perf_counter()
        with console.status(f"simulating {name}, {nth} of {len(names)}"):
            chosen = candidate(name)
            own = planned if name == "planner" else trials
            results = own.results(chosen, wlb_memory_bytes=usable, wlb_headrooms=headrooms)
            # Events are many, and only those of the first are shown.
            kept = (r if nth == 1 else r._replace(timeline=Timeline(0)) for r in results)
            held = list(kept)
            rows.append(Averages(name, chosen, held, own.memory(chosen, held)))
        if many:
            console.print(f"{name}: simulated in {time.perf_counter() - began:.0f} s")
    slots = 2 * args.tokens_per_rank * setting.dp * args.step_microbatches * len(steps)
    return Simulation(
        rows, documents, lengths, sum(_divided(step) == 1 for step in steps),
        1 - int(documents.sum()) / slots,
    )  # fmt: skip


def setting_of(args: SimulateArgs) -> Setting:
    """What the steps run on. Raises ValueError for numbers, a profile or speeds that do not fit each other."""
    setting = Setting(
        model_shape(args.model), cost_model(args), args.ranks, args.tp, args.pp, args.recompute,
        args.all_remote, head=True, tokens_over_tp=args.tp_splits == "tokens", node=args.node,
    )  # fmt: skip
    setting = with_causes(setting, args.causes)
    _ = setting.heads  # refuses a tp that does not divide them
    if args.speeds is not None:
        speeds = read_speeds(args.speeds)
        check_speeds(speeds, args.ranks, str(args.speeds))
        setting = replace(setting, speeds=speeds)
    return setting


def _divided(step: MicrobatchLengths) -> int:
    """Nano-batches of each of its microbatches."""
    return len(step[0])


def feasible(names: Sequence[Strategy], tokens: int, console: Console) -> list[Strategy]:
    """Strategies without the published planner where a rank's `tokens` in a nano-batch are odd: it deals in pairs
    of equal halves. ValueError where no other was asked for."""
    if tokens % 2 == 0 or "published" not in names:
        return list(names)
    cure = f"an even number of tokens of a rank in a nano-batch, got {tokens}"
    if len(names) == 1:
        raise ValueError(f"the published planner needs {cure}: use an even --tokens-per-rank")
    console.print(f"published is left out: its planner needs {cure}")
    return [name for name in names if name != "published"]


def usable_bytes(device: str) -> float | None:
    """Of a device's memory, for a step; None where its memory is not known."""
    return USABLE_MEMORY * CHIPS[device].memory_bytes if device in CHIPS else None
