"""What `cad-jax plan` does: a list of lengths in, a plan out, as a table and as JSON.

Works where jax is not installed.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from cad_jax import schedule_report
from cad_jax.command_line import writing
from cad_jax.lengths_report import read_lengths, shortage
from cad_jax.pipeline.prediction import TickPlan
from cad_jax.plan_args import PlanArgs
from cad_jax.plan_plot import plot
from cad_jax.pool_limits import check_memory
from cad_jax.sharding.cost import DEVICES, attention_flops, max_over_mean, model_shape
from cad_jax.sharding.cost_model import CostModel
from cad_jax.sharding.placement import place
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.planners import load_planner, plan_with, wire_cost
from cad_jax.sharding.speeds import check_speeds, read_speeds
from cad_jax.sharding.tasks import TILE_ROWS, home_tasks
from cad_jax.simulation.named_costs import named_costs

MIB = 2**20
# Figures of `Judge`, where asked for.
TABLED = {
    "max_over_share": "max / share of pairs, by speed",
    "attention_s_max_over_mean": "max / mean seconds, predicted",
    "attention_s_max": "slowest server, ms, predicted",
}


def first_tokens(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """The documents that make up the first `tokens` tokens, the last one cut; fewer are padding."""
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, tokens))
    if last == len(ends):
        return lengths
    kept = lengths[: last + 1].copy()
    kept[-1] -= ends[last] - tokens
    return kept


def speeds_of(args: PlanArgs) -> np.ndarray | None:
    """Of the servers, float64 [S], from a file; None where none is named. Raises ValueError for an unfit file."""
    if args.speeds is None:
        return None
    speeds = read_speeds(args.speeds)
    check_speeds(speeds, args.servers, str(args.speeds))
    return np.array(speeds)


class Judge(NamedTuple):
    """By what servers are judged besides pairs. costs: kernel times. speeds: float64 [S]."""

    costs: CostModel | None = None
    speeds: np.ndarray | None = None

    def shares(self, plan: Plan) -> np.ndarray | None:
        """Pairs that are each server's share by its speed, float64 [S]; None where speeds are alike."""
        if self.speeds is None:
            return None
        return plan.loads().sum() * self.speeds / self.speeds.sum()

    def attention_s(self, plan: Plan, tasks: np.ndarray) -> np.ndarray:
        """Of each server, one layer, forward and backward, float64 [S]."""
        assert self.costs is not None
        forward, backward = (
            self.costs.server_s(tasks, plan.servers, plan.heads, backward=b) for b in (False, True)
        )
        slower = 1.0 if self.speeds is None else self.speeds.mean() / self.speeds
        return (forward + backward) * slower

    def figures(self, plan: Plan) -> dict[str, Any]:
        """Before and after planning, as plain values."""
        result: dict[str, Any] = {}
        if self.speeds is not None:
            result["speeds"] = self.speeds.tolist()
            for name, loads in (("", plan.loads()), ("_home", plan.home_loads())):
                result[f"max_over_share{name}"] = max_over_mean(loads, self.speeds)
        if self.costs is not None:
            home = home_tasks(plan.lengths, plan.tokens_per_server, plan.starts)
            result["kernel_times"] = self.costs.label
            for name, tasks in (("", plan.tasks), ("_home", home)):
                seconds = self.attention_s(plan, tasks)
                result[f"attention_s_max{name}"] = float(seconds.max())
                result[f"attention_s_max_over_mean{name}"] = max_over_mean(seconds)
        return result


def report(plan: Plan, seconds: Sequence[float], judge: Judge) -> dict[str, Any]:
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
        **judge.figures(plan),
    }


def table(plan: Plan, figures: dict, title: str, tp: int = 1) -> Table:
    """The figures for people. tp: devices that share a server's heads, of which bytes are one's."""
    peak = DEVICES["h200"].peak_flops
    assert peak is not None
    home, planned = plan.home_loads(), plan.loads()
    tokens = int(plan.lengths.sum())
    result = Table(title=title)
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
    for name, what in TABLED.items():
        if name in figures:
            scale = 1e3 if name == "attention_s_max" else 1
            before, after = (f"{scale * figures[n]:.3f}" for n in (f"{name}_home", name))
            result.add_row(what, before, after)
    if "kernel_times" not in figures and "speeds" not in figures:
        result.add_row("slowest server, ms at H200 peak", attention_ms(home), attention_ms(planned))
    result.add_row("MiB in, mean", "", mib(figures["bytes_in_mean"]))
    result.add_row("MiB in, worst", "", mib(figures["bytes_in_max"]))
    result.add_row("MiB out, worst", "", mib(figures["bytes_out_max"]))
    for transport, wire in figures["wire_bytes"].items():
        result.add_row(f"MiB on the wire, {transport}", "", mib(wire))
    result.add_row("planning, ms (median)", "", f"{1e3 * figures['plan_s_median']:.1f}")
    of = "a server" if tp == 1 else "a device of a server"
    result.caption = f"bytes: {of}, one forward of one layer, bf16"
    if "kernel_times" in figures:
        result.caption += (
            "; predicted: attention of one layer, forward and backward, from kernel times "
            f"{figures['kernel_times']}"
        )
    return result


def padding(args: PlanArgs, lengths: np.ndarray) -> str | None:
    """What to say where the documents do not fill the plan, or the step; None where they do."""
    servers, tokens = args.servers, args.tokens_per_server
    what, slots = f"{servers} servers x {tokens:,}", servers * tokens
    if args.pp > 1:
        what = (
            f"a step of {args.microbatches} microbatches of {servers // args.pp} ranks x {tokens:,}"
        )
        slots = args.microbatches * (servers // args.pp) * tokens
    return shortage(args.lengths, lengths, slots, what, "the rest is padding")


def title_of(args: PlanArgs, plan: Plan, tick: TickPlan | None) -> str:
    """Of table and picture: what was planned, of whose documents, by whom."""
    what = "Plan: " if tick is None else f"Plan of the step's heaviest tick, {tick.name}\n"
    planner = "cad_jax.plan_documents" if args.planner is None else args.planner
    return (
        f"{what}{args.model}, {plan.servers} servers x {plan.tokens_per_server:,} tokens, documents of "
        f"{args.lengths.name}, planner {planner}"
    )


def run(args: PlanArgs, console: Console | None = None) -> Plan:
    """Plans, prints the table, writes JSON and plot where asked; returns the plan, with stages that of the step's
    heaviest tick.

    Raises ValueError for bad input, before anything is written.
    """
    console = console or Console()
    args.check()
    judge = Judge(
        None if args.profile is None else named_costs(DEVICES[args.device], args.profile),
        speeds_of(args),
    )
    everything = read_lengths(args.lengths)
    lengths = first_tokens(everything, args.servers * args.tokens_per_server)
    check_memory(args.servers, len(lengths))
    prediction, tick = None, None
    if args.pp > 1:
        with console.status(f"planning the ticks of a step over {args.servers} servers"):
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
        tick = prediction.heaviest
        plan, seconds = tick.plan, [tick.plan_s]
    else:
        with console.status(f"planning {len(lengths)} documents over {args.servers} servers"):
            plan, seconds = timed_plans(args, lengths, judge)
    figures, title = report(plan, seconds, judge), title_of(args, plan, tick)
    console.print(table(plan, figures, title, args.tp))
    if padded := padding(args, everything):
        console.print(padded, highlight=False, markup=False)
    if prediction is not None:
        console.print(schedule_report.table(prediction, args.model))
        figures["step"] = schedule_report.figures(prediction)
    if plan.fallback_tasks:
        console.print(f"{plan.fallback_tasks} tasks stay at home: a capacity would not hold them")
    if args.json is not None:
        text = json.dumps(figures)
        with writing(args.json) as path:
            path.write_text(text)
        console.print(f"wrote {args.json}")
    if args.plot is not None:
        with writing(args.plot) as path:
            plot(plan, path, title, judge.shares(plan))
        console.print(f"wrote {args.plot}")
    return plan


def timed_plans(args: PlanArgs, lengths: np.ndarray, judge: Judge) -> tuple[Plan, list[float]]:
    """The plan of these documents, and the seconds of each time that it was made."""
    shape = model_shape(args.model)
    planner = plan_documents if args.planner is None else load_planner(args.planner)
    options: dict[str, Any] = dict(
        servers=args.servers, tokens_per_server=args.tokens_per_server,
        num_q_heads=shape.num_q_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        max_document_tokens=max(int(lengths.max()), 1), tolerance=args.tolerance,
        key_ranges=args.key_ranges, node=args.node,
        transport=None if args.transport == "auto" else args.transport,
    )  # fmt: skip
    # A planner of one's own need not know of what is not asked for.
    options |= {} if judge.costs is None else {"cost_model": judge.costs}
    options |= {} if judge.speeds is None else {"speeds": judge.speeds}

    def timed() -> tuple[Plan, float]:
        start = time.perf_counter()
        cost = wire_cost(planner, **options)
        order = place(lengths, args.placement, args.servers, args.tokens_per_server, cost)
        plan = plan_with(planner, lengths[order], **options)
        return plan, time.perf_counter() - start

    # A run loads the compiled planner once: a small plan that moves work does so here.
    warm = np.array([8 * TILE_ROWS])
    plan_documents(
        warm, servers=2, tokens_per_server=4 * TILE_ROWS, num_q_heads=2, num_kv_heads=1, head_dim=64,
        key_ranges=args.key_ranges,
    )  # fmt: skip
    runs = [timed() for _ in range(args.repeat)]
    return runs[0][0], [plan_s for _, plan_s in runs]
