"""Plans of four lists of document lengths: bytes against a plain greedy, placements, and bounds.

    .venv/bin/python experiments/planning.py plans      # bytes and planning time, 8 to 512 servers
    .venv/bin/python experiments/planning.py placement  # orders of a step's documents
    .venv/bin/python experiments/planning.py bounds     # against a mixed-integer solver

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
from cad_jax.sharding.tasks import TILE_ROWS  # noqa: E402
from cad_jax.timing import hardware  # noqa: E402
from tests.generators import REAL_LENGTH_LISTS, real_batches  # noqa: E402
from tests.sharding.exact_plans import best_units  # noqa: E402
from tests.sharding.strided_batches import strided_batches  # noqa: E402
from tests.sharding.test_planner import PLAIN_GREEDY_MIB  # noqa: E402

TOKENS, BATCHES, MIB = 65536, 6, 2**20
HEADS: dict[str, Any] = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
KINDS = {"whole prefixes": ("relay", 1), "key sub-ranges": ("ragged", 8)}
BOUND_TILE = 4096  # rows of a tile the solver works in
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
                    figures.append((came.mean(), came.max(), busiest, 1e3 * cpu_s))
                mean, worst, busiest, cpu_ms = np.mean(figures, 0)
                query, key, plain_worst = PLAIN_GREEDY_MIB.get((name, servers), (np.nan,) * 3)
                rows.append(
                    {
                        "list": name, "servers": servers, "plans": kind, "transport": way[0],
                        "mib_in_mean": f"{mean:.0f}", "mib_in_worst": f"{worst:.0f}",
                        "mean_over_plain": f"{mean / (query + key):.3f}",
                        "worst_over_plain": f"{worst / plain_worst:.3f}",
                        "busiest_in_or_out_over_mean_in": f"{busiest:.2f}",
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
    """Eight servers, documents rounded to whole tiles; units in: their sum and S times the worst."""
    rows = []
    for name in REAL_LENGTH_LISTS:
        for number, lengths in enumerate(batches(name, 8)[:2]):
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
            rows.append(
                {
                    "list": name, "batch": number, "units": f"{ours:.0f}", "solver_s": SOLVER_S,
                    "over_best_found": f"{ours / found.best:.3f}",
                    "over_proven_least": f"{ours / found.least:.3f}",
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
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
