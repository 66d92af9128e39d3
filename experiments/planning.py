"""Plans of four lists of document lengths: bytes against a plain greedy, placements, and bounds.

    .venv/bin/python experiments/planning.py plans      # bytes and planning time, 8 to 512 servers
    .venv/bin/python experiments/planning.py placement  # orders of a step's documents
    .venv/bin/python experiments/planning.py bounds     # against a mixed-integer solver, and a lower bound

Bytes are derived from plans (one forward of one layer, Llama-3-8B, bf16, 64K tokens a server, tolerance
0.05); times are CPU seconds of this process, measured. Reads ../shared/data, writes results/.
"""

import argparse
import csv
import datetime
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cad_jax.sharding.placement import place  # noqa: E402
from cad_jax.sharding.plan import Plan  # noqa: E402
from cad_jax.sharding.planner import plan_documents  # noqa: E402
from cad_jax.sharding.planners import wire_cost  # noqa: E402
from cad_jax.sharding.routing import route  # noqa: E402
from cad_jax.sharding.tasks import DENSE_TRANSPORTS, TILE_ROWS  # noqa: E402
from cad_jax.timing import hardware  # noqa: E402
from tests.generators import REAL_LENGTH_LISTS, real_batches  # noqa: E402
from tests.sharding.exact_plans import best_units, least_worst  # noqa: E402
from tests.sharding.strided_batches import strided_batches  # noqa: E402
from tests.sharding.test_planner import PLAIN_GREEDY_MIB  # noqa: E402

TOKENS, BATCHES, MIB = 65536, 6, 2**20
HEADS: dict[str, Any] = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
KINDS = {"whole prefixes": ("relay", 1), "key sub-ranges": ("ragged", 8)}
BOUND_TILE = 4096  # rows of a tile the solver works in
BOUND_CELLS = 32768, 16384  # tokens of a cell of the lower bound: the better one counts
SOLVED_BATCHES = 2
SOLVER_S = 20.0


def arguments(name: str, servers: int, transport: str, key_ranges: int) -> dict[str, Any]:
    longest = 131072 if name.endswith("128k") else 524288
    return HEADS | dict(
        servers=servers, tokens_per_server=TOKENS, max_document_tokens=longest, transport=transport,
        key_ranges=key_ranges,
    )  # fmt: skip


def batches(name: str, servers: int) -> list[np.ndarray]:
    """One after another; of 512 servers' worth the lists hold one."""
    if servers > 64:
        return strided_batches(name, servers * TOKENS, 2)
    return list(real_batches(name, servers * TOKENS, BATCHES))


def timed_plan(lengths: np.ndarray, options: dict, repeats: int) -> tuple[Plan, float]:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        plan = plan_documents(lengths, **options)
        seconds.append(time.process_time() - start)
    return plan, float(np.median(seconds))


def on_the_wire(plan: Plan) -> tuple[float, float]:
    """(the busiest rank's max(in, out) over the mean of ranks, the part of a rank's bytes that is padding),
    forward, under the plan's transport: what relays take in and pass on is counted as well."""
    routing = route(plan, plan.capacities.transport)
    hops = (*routing.dispatch.pair_units, *(units.T for units in routing.output.pair_units))
    others = 1 - np.eye(plan.servers, dtype=np.int64)
    between = np.sum([units * others for units in hops], axis=0)
    busiest = max(between.sum(1).max(), between.sum(0).max())
    mean = between.sum() / plan.servers
    blocks = sum(int(units.max()) for units in hops) * (plan.servers - 1)
    dense = plan.capacities.transport in DENSE_TRANSPORTS
    return float(busiest / mean), float(1 - mean / blocks) if dense else 0.0


def plans() -> list[dict]:
    rows = []
    for name in REAL_LENGTH_LISTS:
        for servers in (8, 32, 64, 512):
            for kind, way in KINDS.items():
                figures = []
                options = arguments(name, servers, *way)
                for lengths in batches(name, servers):
                    plan, cpu_s = timed_plan(lengths, options, 5)
                    came, left = plan.bytes_in() / MIB, plan.bytes_out() / MIB
                    busiest = np.maximum(came, left).max() / came.mean()
                    wire = on_the_wire(plan)
                    figures.append((came.mean(), came.max(), busiest, *wire, 1e3 * cpu_s))
                mean, worst, busiest, filled, padding, cpu_ms = np.mean(figures, 0)
                sent = 1.0 if way[0] in DENSE_TRANSPORTS else filled  # dense blocks have one size
                query, key, plain_worst = PLAIN_GREEDY_MIB.get((name, servers), (np.nan,) * 3)
                rows.append(
                    {
                        "list": name, "servers": servers, "plans": kind, "transport": way[0],
                        "mib_in_mean": f"{mean:.0f}", "mib_in_worst": f"{worst:.0f}",
                        "mean_over_plain": f"{mean / (query + key):.3f}",
                        "worst_over_plain": f"{worst / plain_worst:.3f}",
                        "busiest_in_or_out_over_mean_in": f"{busiest:.2f}",
                        "busiest_on_the_wire_padded": f"{sent:.2f}",
                        "busiest_on_the_wire_unpadded": f"{filled:.2f}",
                        "padding": f"{padding:.3f}",
                        "planning_cpu_ms": f"{cpu_ms:.2f}",
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def placement() -> list[dict]:
    rows = []
    for name in REAL_LENGTH_LISTS:
        for servers in (8, 32, 64):
            for transport, key_ranges in KINDS.values():
                options = arguments(name, servers, transport, key_ranges)
                cost = wire_cost(plan_documents, **options)
                figures = {}
                for lengths in batches(name, servers):
                    for way in ("sequential", "aligned", "searched"):
                        laid = lengths[place(lengths, way, servers, TOKENS, cost)]
                        plan = plan_documents(laid, **options)
                        figures.setdefault(way, []).append(
                            (plan.max_over_mean_home, cost(laid), plan.bytes_in().max())
                        )
                means = {way: np.array(found) for way, found in figures.items()}
                row = {"list": name, "servers": servers, "transport": transport}
                for way, found in means.items():
                    over = (found / means["sequential"]).mean(0)
                    row |= {
                        f"{way}_home_max_over_mean": f"{found[:, 0].mean():.2f}",
                        f"{way}_wire": f"{over[1]:.3f}",
                        f"{way}_worst_in": f"{over[2]:.3f}",
                    }
                rows.append(row)
                print(row, flush=True)
    return rows


def bounds() -> list[dict]:
    """Eight servers: MiB in of the worst one, and what no plan with whole prefixes at 1.05 is below. Of the first
    batches also, with documents rounded to whole tiles, the sum of units in and S times the worst one's."""
    rows = []
    for name in REAL_LENGTH_LISTS:
        for number, lengths in enumerate(batches(name, 8)):
            plan = plan_documents(lengths, **arguments(name, 8, "relay", 1))
            unit_mib = plan.heads.unit_heads * plan.heads.head_dim * 2 / MIB
            most = int(1.05 * plan.loads().mean())
            least = max(
                least_worst(lengths, 8, TOKENS, plan.heads, most, cell, SOLVER_S)
                for cell in BOUND_CELLS
            )
            row = {
                "list": name, "batch": number, "worst_mib": f"{plan.bytes_in().max() / MIB:.0f}",
                "least_worst_mib": f"{least * unit_mib:.0f}", "units": "", "solver_s": SOLVER_S,
                "over_best_found": "", "over_proven_least": "",
            }  # fmt: skip
            rows.append(row)
            if number >= SOLVED_BATCHES:
                print(row, flush=True)
                continue
            ends = np.rint(np.cumsum(lengths) / BOUND_TILE).astype(np.int64) * TILE_ROWS
            tiled = np.diff(np.append(0, ends))
            tiled = tiled[tiled > 0]
            tokens = TOKENS // BOUND_TILE * TILE_ROWS
            plan = plan_documents(tiled, servers=8, tokens_per_server=tokens, **HEADS)
            units = plan.travelling_rows().units_in(plan.heads)
            ours = float(units.sum() + 8 * units.max())
            loads = plan.loads()
            most = max(int(loads.max()), int(1.05 * loads.mean()))
            found = best_units(tiled, 8, tokens, plan.heads, most, SOLVER_S)
            row |= {
                "units": f"{ours:.0f}",
                "over_best_found": f"{ours / found.best:.3f}",
                "over_proven_least": f"{ours / found.least:.3f}",
            }
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    ways = {"plans": plans, "placement": placement, "bounds": bounds}
    parser.add_argument("what", choices=ways)
    what = parser.parse_args().what
    rows = ways[what]()
    about = {"date": str(datetime.date.today()), "hardware": hardware()}
    path = ROOT / "experiments" / "results" / f"{'planner' if what == 'plans' else what}_cpu.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *about])
        writer.writeheader()
        writer.writerows(row | about for row in rows)
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
