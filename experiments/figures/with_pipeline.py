"""Figure 10: speed over the packing baseline with a pipeline, and the published losing point.

    python -m experiments.figures.with_pipeline [--batches 5] [--out FOLDER]

Every row of the paper's table 4. Stages, microbatches and (of the baseline) DP x CP come from a grid on the
first batch, what does not fit 141 GB left out: the fastest plan of each planner, and per batch the fastest of
the baseline's four best, with stages ("4D") and with as many as none. "run" is a figure of the released repository's own benchmarks of September
2025 (ProLong), not of the paper's final runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cad_jax.simulation.setting import Setting, StepResult
from cad_jax.simulation.step import pooled_step, pooled_works
from cad_jax.simulation.wlb import wlb_step
from cad_jax.simulation.workloads import batches
from experiments.figures.common import (
    H200_MEMORY_BYTES,
    KIB,
    Arguments,
    Row,
    arguments,
    fair_costs,
    interval,
    markdown,
    paired,
    published_costs,
    record,
    write,
)

TABLE_4 = tuple(
    Row(model, longest * KIB, nodes, chunks)
    for model, sizes, table in (
        ("llama3-8b", (8, 16, 32), {128: (32, 64, 128), 256: (16, 32, 32), 512: (8, 8, 16)}),
        ("llama-34b", (16, 32, 64), {128: (32, 64, 128), 256: (16, 32, 32), 384: (8, 8, 16)}),
    )
    for longest, counts in table.items()
    for nodes, chunks in zip(sizes, counts, strict=True)
)
LOSING = Row("llama3-8b", 512 * KIB, 16, 8)
RUNS = {  # ProLong: (model, Ki tokens, nodes): speed-up
    ("llama3-8b", 128, 8): 1.48, ("llama3-8b", 128, 16): 1.42, ("llama3-8b", 128, 32): 1.63,
    ("llama3-8b", 256, 8): 1.16, ("llama3-8b", 256, 16): 1.43, ("llama3-8b", 256, 32): 1.52,
    ("llama3-8b", 512, 16): 0.985, ("llama3-8b", 512, 32): 1.39,
}  # fmt: skip
STAGES = (2, 4)
PUBLISHED_TOLERANCE, TOLERANCE = 0.15, 0.02
WORKLOADS = ("pretrain", "prolong", "mixed")
BASELINE_FINALISTS = 4
BATCHES = 5  # the grids alone take most of the time


class Division(NamedTuple):
    """pp stages, k chunks in a nano-batch, M microbatches of two."""

    pp: int
    chunks: int
    microbatches: int


def divisions(row: Row, stages: Sequence[int]) -> Iterator[Division]:
    for pp in stages:
        for chunks in (1, 2, 4, 8):
            microbatches, rest = divmod(row.chunks, 2 * chunks)
            if rest == 0 and microbatches >= pp:
                yield Division(pp, chunks, microbatches)


def documents(row: Row, workload: str, number: int) -> list[list[np.ndarray]]:
    return batches(
        workload, longest_tokens=row.longest_tokens, nano_tokens=row.longest_tokens,
        nano_batches=row.chunks, number=number,
    )  # fmt: skip


def planned(
    setting: Setting, row: Row, chunks: Sequence[np.ndarray], at: Division, strategy, tolerance
) -> StepResult:
    divided = replace(setting, pp=at.pp)
    nanos = [
        np.concatenate(chunks[n * at.chunks : (n + 1) * at.chunks])
        for n in range(2 * at.microbatches)
    ]
    lengths = [nanos[2 * m : 2 * m + 2] for m in range(at.microbatches)]
    tokens = at.chunks * row.longest_tokens // divided.dp
    works = pooled_works(
        divided, lengths, strategy=strategy, tokens=tokens, tolerance=tolerance,
        transport="ragged" if strategy == "cad" else None, longest=row.longest_tokens,
    )  # fmt: skip
    name = f"{strategy} pp{at.pp} m{at.microbatches}"
    return pooled_step(divided, lengths, works, tokens=tokens, name=name, published=True)


def best_division(setting, row, chunks, strategy, tolerance, stages) -> Division:
    results = {
        at: planned(setting, row, chunks, at, strategy, tolerance) for at in divisions(row, stages)
    }
    fitting = {a: r for a, r in results.items() if r.memory.total <= H200_MEMORY_BYTES}
    if not fitting:
        return min(results, key=lambda at: results[at].memory.total)
    return min(fitting, key=lambda at: fitting[at].step_s)


def baseline_grid(row: Row, stages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """pp, cp, microbatches of each replica."""
    for pp in stages:
        dp = row.nodes // pp
        for cp in (c for c in (1, 2, 4, 8, 16, 32, 64) if c <= dp and dp % c == 0):
            for microbatches in sorted({pp, 2 * pp, 4 * pp, max(row.chunks * cp // dp, pp)}):
                yield pp, cp, microbatches


def baseline(setting, chunks, at, headroom) -> StepResult:
    pp, cp, microbatches = at
    return wlb_step(
        replace(setting, pp=pp), chunks, cp=cp, microbatches=microbatches, headroom=headroom
    )


def finalists(setting, row, chunks, headroom, stages) -> list[tuple[int, int, int]]:
    results = {at: baseline(setting, chunks, at, headroom) for at in baseline_grid(row, stages)}
    fitting = [a for a, r in results.items() if r.memory.total <= H200_MEMORY_BYTES]
    if not fitting:
        return [min(results, key=lambda at: results[at].memory.total)]
    return sorted(fitting, key=lambda at: results[at].step_s)[:BASELINE_FINALISTS]


def main(args: Arguments) -> None:
    records, lines = [], []
    for kernel, headroom in (("h200_fa2", 1.0), ("h200_fa3", 1.5)):
        for row in TABLE_4:
            costs = published_costs() if kernel == "h200_fa2" else fair_costs(kernel)
            setting = row.setting(costs)
            for workload in WORKLOADS:
                steps: dict[str, list[float]] = {}
                every = documents(row, workload, args.batches)
                runs = {
                    "published": ("published", PUBLISHED_TOLERANCE, STAGES),
                    "cad": ("cad", TOLERANCE, STAGES),
                    "cad without stages": ("cad", TOLERANCE, (1,)),
                }
                chosen = {
                    name: best_division(setting, row, every[0], *run) for name, run in runs.items()
                }
                final = {
                    name: finalists(setting, row, every[0], headroom, stages)
                    for name, stages in (("wlb 4D", STAGES), ("wlb", (1,)))
                }
                for number, chunks in enumerate(every):
                    results = {
                        name: planned(setting, row, chunks, chosen[name], *run[:2])
                        for name, run in runs.items()
                    }
                    for name, candidates in final.items():
                        tried = (baseline(setting, chunks, at, headroom) for at in candidates)
                        results[name] = min(tried, key=lambda r: r.step_s)
                    for name, result in results.items():
                        result = result._replace(strategy=f"{name}: {result.strategy}")
                        records.append(record("10", row, workload, number, kernel, result))
                        steps.setdefault(name, []).append(result.step_s)
                key = (row.model, row.longest_tokens // KIB, row.nodes)
                run = RUNS.get(key, "") if workload == "prolong" else ""
                lines.append(
                    (kernel[5:], *key, workload, run,
                     *(interval(paired(steps[a], steps[b])) for a, b in (
                         ("wlb 4D", "published"), ("wlb 4D", "cad"),
                         ("wlb", "published"), ("wlb", "cad without stages"),
                         ("published", "cad"))))
                )  # fmt: skip
                print("|", " | ".join(map(str, lines[-1])), "|", flush=True)
    write(args.out / "figure_10.csv", records)
    print(
        markdown(
            ("kernel", "model", "longest, Ki tokens", "nodes", "workload", "run",
             "published planner over baseline", "ours over baseline",
             "published planner over baseline without stages", "both without stages, ours over baseline", "ours over published planner"),
            lines,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
