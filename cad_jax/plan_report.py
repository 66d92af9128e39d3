"""What `cad-jax plan` does: read lengths, plan them, and report as a table, JSON and a plot.

Works where jax is not installed. Shape letters: T tokens per server, S servers.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from cad_jax import schedule_report
from cad_jax.sharding.cost import DEVICES, attention_flops, model_shape
from cad_jax.sharding.placement import Placement, check_placement, place
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.planners import load_planner, plan_with, wire_cost
from cad_jax.sharding.tasks import TILE_ROWS

MIB, GIB = 2**20, 2**30
MAX_DOCUMENT_TOKENS = 2**31 - 1
MAX_POOL_TOKENS = 2**31  # one document that fills it has 2^61 pairs: all counts stay in 64 bits
# Planning holds tables of servers x servers, and of servers x documents. Bytes per entry of each, the
# most that was seen, over pools of 300 to 2,000 servers: one document that spans all of them.
SERVER_PAIR_BYTES, SERVER_DOCUMENT_BYTES = 220, 12
MAX_PLOT_INCHES = 24.0


@dataclass(frozen=True)
class PlanArgs:
    """Plans the documents of a list of lengths over a pool of servers, and reports the plan."""

    lengths: Path
    """File with one document length in tokens a line; blank lines are skipped."""
    servers: int
    """Ranks of the pool: each owns tokens, each computes core attention."""
    tokens_per_server: int
    """Tokens each rank owns; the first servers x tokens-per-server tokens are planned."""
    model: str = "llama3-8b"
    """Whose attention heads travel: llama3-8b, llama3-70b, llama-34b and others."""
    tolerance: float = 0.05
    """How far over the mean the most loaded server may be."""
    key_ranges: int = 1
    """Servers among which the keys of one query may be divided; their partial outputs merge at home.
    At 1 every task has its whole causal prefix; 8 lowers traffic of long documents the most."""
    transport: Literal["auto", "direct", "relay", "ragged"] = "auto"
    """How rows travel: capacities are for it, and keys are divided where it then sends less."""
    node: int = 1
    """Servers of a node, within which bytes are cheap."""
    planner: str | None = None
    """module:function in the place of this project's planner, `cad_jax.plan_documents`: takes its
    arguments, returns a plan. The plan is checked."""
    placement: Placement = "sequential"
    """Which rank gets which documents, by their order: sequential as listed, aligned to ranks, or
    searched for the fewest bytes on the wire of the transport."""
    repeat: int = 1
    """Plan so many times; the median and the 99th percentile of the seconds go into the JSON."""
    json: Path | None = None
    """Write the plan and its figures here, as `cad_jax.Plan.load` reads them: a plan to run."""
    plot: Path | None = None
    """Draw work per server before and after planning here (PNG)."""
    pp: int = 1
    """Pipeline stages among which the servers are divided; above 1 a whole step is planned tick by
    tick, and its seconds are predicted."""
    microbatches: int = 8
    """Microbatches of that step."""
    virtual_stages: int = 1
    """Parts of the model per stage; above 1 the schedule is interleaved."""
    tp: int = 1
    """Devices that share a server's tokens, for that prediction."""
    pingpong: bool = False
    """Divide that step's microbatches into two nano-batches."""

    def __post_init__(self) -> None:
        if self.plot is not None and self.plot.suffix.lower() != ".png":
            raise ValueError(f"--plot (={self.plot}) must name a file that ends in .png: add that")
        for name in ("key_ranges", "node", "repeat"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} (={getattr(self, name)}) must be at least 1: use 1")
        check_placement(self.placement)
        changed = self.transport != "auto" or self.placement != "sequential" or self.planner
        if self.pp > 1 and changed:
            raise ValueError(
                "--transport, --planner and --placement are of one microbatch's plan, and --pp predicts "
                "steps of plans by tick: leave one or the other out"
            )
        if self.pp < 1:
            raise ValueError(f"--pp (={self.pp}) must be at least 1; use 1 for no pipeline")
        given = (self.microbatches, self.virtual_stages, self.tp, self.pingpong)
        if self.pp == 1 and given != (8, 1, 1, False):
            raise ValueError(
                "--microbatches, --virtual-stages, --tp and --pingpong describe a pipelined step: "
                "give --pp above 1 with them, or leave them out"
            )


def read_lengths(path: str | Path) -> np.ndarray:
    """Document lengths, int64 [N], of a file with one whole number a line.

    ValueError names file and line where a line is anything else, or the file has no lengths.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"cannot read document lengths from {path} ({error}): pass a text file with one whole "
            "number a line"
        ) from error
    lengths = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        whole = text.isascii() and text.isdigit() and len(text) < 20
        if not whole or int(text) > MAX_DOCUMENT_TOKENS:
            raise ValueError(
                f"{path}, line {number}: a document length is a whole number of tokens from 0 to "
                f"{MAX_DOCUMENT_TOKENS}, got {text[:40]!r}: correct or remove the line"
            )
        lengths.append(int(text))
    if not lengths:
        raise ValueError(
            f"{path} holds no document lengths: put one whole number of tokens on each line"
        )
    return np.array(lengths, np.int64)


def first_tokens(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """The documents that make up the first `tokens` tokens, the last one cut; fewer are padding."""
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, tokens))
    if last == len(ends):
        return lengths
    kept = lengths[: last + 1].copy()
    kept[-1] -= ends[last] - tokens
    return kept


def planning_bytes(servers: int, documents: int) -> int:
    """Memory that planning so many documents over so many servers may take at its peak."""
    return servers * (servers * SERVER_PAIR_BYTES + documents * SERVER_DOCUMENT_BYTES)


def available_bytes() -> float:
    """Memory this process may still take; infinity where the system does not say."""
    limits = [math.inf]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")  # a container's limit, where there is one
        limit, used = (int((group / f"memory.{x}").read_text()) for x in ("max", "current"))
        limits.append(limit - used)
    except (OSError, ValueError):  # another system, another kind of group, "max" for no limit
        pass
    return min(limits)


def check_sizes(args: PlanArgs) -> None:
    """Raises ValueError for a pool or a tolerance that no plan can be made for."""
    for name in ("servers", "tokens_per_server"):
        if getattr(args, name) < 1:
            raise ValueError(
                f"{name} must be at least 1, got {getattr(args, name)}: a pool has ranks with tokens"
            )
    if math.isinf(args.tolerance):
        raise ValueError(f"tolerance must be a finite number, got {args.tolerance}: 0.05 is usual")
    pool_tokens = args.servers * args.tokens_per_server
    if pool_tokens > MAX_POOL_TOKENS:
        raise ValueError(
            f"servers x tokens_per_server must be at most {MAX_POOL_TOKENS} tokens, got "
            f"{args.servers} x {args.tokens_per_server} = {pool_tokens}: plan fewer of either"
        )


def check_memory(servers: int, documents: int) -> None:
    """Raises ValueError, before anything large is allocated, where a plan may not fit the memory."""
    needed, available = planning_bytes(servers, documents), available_bytes()
    if needed > available:
        raise ValueError(
            f"a plan must fit the memory that is free ({available / GIB:.1f} GiB), and {documents} "
            f"documents over {servers} servers may take {needed / GIB:.1f} GiB, in tables that grow "
            "with servers x (servers + documents): plan fewer servers, or on a larger machine"
        )


def report(plan: Plan, seconds: Sequence[float]) -> dict:
    """A plan as `Plan.load` reads it, with its figures; bytes are of one forward of one layer, bf16.
    seconds: what planning it took, once or several times."""
    bytes_in, bytes_out = plan.bytes_in(), plan.bytes_out()
    return plan.to_json() | {
        "plan_s": seconds[0],
        "plan_s_median": float(np.median(seconds)),
        "plan_s_p99": float(np.percentile(seconds, 99, method="higher")),
        "bytes_in_mean": float(bytes_in.mean()),
        "bytes_in_max": int(bytes_in.max()),
        "bytes_out_max": int(bytes_out.max()),
        "wire_bytes": plan.wire_bytes(),
    }


def table(plan: Plan, figures: dict, model: str) -> Table:
    """The figures for people."""
    peak = DEVICES["h200"].peak_flops
    assert peak is not None
    home, planned = plan.home_loads(), plan.loads()
    tokens = int(plan.lengths.sum())
    result = Table(
        title=f"Plan of {plan.servers} servers x {plan.tokens_per_server} tokens, {model}"
    )
    result.add_column("figure")
    result.add_column("home", justify="right")
    result.add_column("planned", justify="right")

    def attention_ms(loads: np.ndarray) -> str:
        return f"{1e3 * attention_flops(plan.heads, int(loads.max())) / peak:.2f}"

    def mib(value: float) -> str:
        return f"{value / MIB:.1f}"

    result.add_row("documents", "", f"{len(plan.lengths)}")
    result.add_row("tokens", "", f"{tokens}")
    result.add_row("padding tokens", "", f"{plan.servers * plan.tokens_per_server - tokens}")
    result.add_row("longest document", "", f"{int(plan.lengths.max(initial=0))}")
    result.add_row("tasks, moved", "", f"{len(plan.tasks)}, {plan.moves}")
    result.add_row(
        "max / mean pairs", f"{plan.max_over_mean_home:.3f}", f"{plan.max_over_mean:.3f}"
    )
    result.add_row("slowest server, ms at H200 peak", attention_ms(home), attention_ms(planned))
    result.add_row("MiB in, mean", "", mib(figures["bytes_in_mean"]))
    result.add_row("MiB in, worst", "", mib(figures["bytes_in_max"]))
    result.add_row("MiB out, worst", "", mib(figures["bytes_out_max"]))
    for transport, wire in figures["wire_bytes"].items():
        result.add_row(f"MiB on the wire, {transport}", "", mib(wire))
    result.add_row("planning, ms (median)", "", f"{1e3 * figures['plan_s_median']:.1f}")
    result.caption = "bytes: a server, one forward of one layer, bf16"
    return result


def plot(plan: Plan, path: str | Path) -> None:
    """Bars of work per server, at home and planned, in units of the mean, as PNG."""
    width = min(max(6.0, 1.5 + 0.18 * plan.servers), MAX_PLOT_INCHES)
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    home, planned = plan.home_loads(), plan.loads()
    mean = max(planned.mean(), 1.0)
    server = np.arange(plan.servers)
    axes.bar(server - 0.2, home / mean, 0.4, label=f"home, max {plan.max_over_mean_home:.2f}")
    axes.bar(server + 0.2, planned / mean, 0.4, label=f"planned, max {plan.max_over_mean:.2f}")
    axes.axhline(1 + plan.tolerance, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("server")
    axes.set_ylabel("(query, key) pairs / mean")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper center", ncols=2, frameon=False)  # never over a bar
    figure.savefig(path, dpi=150)


def run(args: PlanArgs, console: Console | None = None) -> Plan:
    """Plans, prints the table, writes JSON and plot where asked; returns the plan.

    Raises ValueError for bad input, before anything is written.
    """
    console = console or Console()
    shape = model_shape(args.model)
    check_sizes(args)
    for path in (args.json, args.plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"cannot write {path}: make the folder {path.parent} first")
    everything = read_lengths(args.lengths)
    prediction = None
    if args.pp > 1:
        prediction = schedule_report.predict(
            everything,
            servers=args.servers,
            tokens_per_server=args.tokens_per_server,
            pp=args.pp,
            microbatches=args.microbatches,
            virtual_stages=args.virtual_stages,
            tp=args.tp,
            pingpong=args.pingpong,
            model=args.model,
            tolerance=args.tolerance,
        )
    lengths = first_tokens(everything, args.servers * args.tokens_per_server)
    check_memory(args.servers, len(lengths))

    planner = plan_documents if args.planner is None else load_planner(args.planner)
    options: dict[str, Any] = dict(
        num_q_heads=shape.num_q_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        tolerance=args.tolerance, key_ranges=args.key_ranges, node=args.node,
        transport=None if args.transport == "auto" else args.transport,
    )  # fmt: skip

    def timed(lengths: np.ndarray, servers: int, tokens: int) -> tuple[Plan, float]:
        pool: dict[str, Any] = dict(servers=servers, tokens_per_server=tokens)
        longest: dict[str, Any] = dict(max_document_tokens=max(int(lengths.max()), 1))
        start = time.perf_counter()
        cost = wire_cost(planner, **options, **pool, **longest)
        order = place(lengths, args.placement, servers, tokens, cost)
        plan = plan_with(planner, lengths[order], **options, **pool, **longest)
        return plan, time.perf_counter() - start

    # A run loads the compiled planner once: a small plan that moves work does so here.
    timed(np.array([8 * TILE_ROWS]), servers=2, tokens=4 * TILE_ROWS)
    with console.status(f"planning {len(lengths)} documents over {args.servers} servers"):
        runs = [timed(lengths, args.servers, args.tokens_per_server) for _ in range(args.repeat)]
    plan = runs[0][0]
    figures = report(plan, [plan_s for _, plan_s in runs])
    console.print(table(plan, figures, args.model))
    if prediction is not None:
        console.print(schedule_report.table(prediction, args.model))
        figures["step"] = schedule_report.figures(prediction)
    if plan.fallback_tasks:
        console.print(f"{plan.fallback_tasks} tasks stay at home: a capacity would not hold them")
    if args.json is not None:
        args.json.write_text(json.dumps(figures))
        console.print(f"wrote {args.json}")
    if args.plot is not None:
        plot(plan, args.plot)
        console.print(f"wrote {args.plot}")
    return plan
