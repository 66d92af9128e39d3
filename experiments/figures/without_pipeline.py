"""Figure 9: speed over the packing baseline without a pipeline, and ours over the published planner.

    python -m experiments.figures.without_pipeline [--batches 30] [--out FOLDER]

Every model, longest document and cluster of the paper's table 3, on the two published workloads, a
shuffled mix and one long document among many of 128 tokens; the published kernel (FA2) with the published
network and linear layers, and FA3-class kernels with a fair baseline (memory headroom of 1.5).
"""

from collections.abc import Iterator
from typing import Any

from experiments.figures.common import (
    BATCHES,
    KIB,
    PUBLISHED_TOLERANCE,
    ROWS_3D,
    Arguments,
    Row,
    arguments,
    cad_step,
    fair_costs,
    interval,
    markdown,
    paired,
    published_costs,
    record,
    tuned,
    wlb,
    write,
)

WORKLOADS = ("pretrain", "prolong", "mixed", "one_long")
CLASSES = (("h200_fa2", 1.0), ("h200_fa3", 1.5))  # kernel, memory headroom of the baseline


def results(row: Row, workload: str, kernel: str, headroom: float, number: int) -> Iterator[Any]:
    """(batch, {strategy: result}) of every batch."""
    costs = published_costs() if kernel == "h200_fa2" else fair_costs(kernel)
    setting = row.setting(costs)
    tolerance = None
    for batch, nanos in enumerate(row.batches(workload, number)):
        tolerance = tolerance or tuned(setting, nanos, row)
        yield (
            batch,
            {
                "published": cad_step(
                    setting, nanos, row, strategy="published", tolerance=PUBLISHED_TOLERANCE
                ),
                "cad": cad_step(setting, nanos, row, tolerance=tolerance),
                "cad relay": cad_step(setting, nanos, row, tolerance=tolerance, transport="relay"),
                "wlb": wlb(setting, nanos, headroom),
            },
        )


def main(args: Arguments) -> None:
    records, lines = [], []
    for kernel, headroom in CLASSES:
        for row in ROWS_3D:
            for workload in WORKLOADS:
                steps: dict[str, list[float]] = {}
                for batch, by_name in results(row, workload, kernel, headroom, args.batches):
                    for name, result in by_name.items():
                        result = result._replace(strategy=name)
                        records.append(record("9", row, workload, batch, kernel, result))
                        steps.setdefault(name, []).append(result.step_s)
                lines.append(
                    (kernel[5:], row.model, row.longest_tokens // KIB, row.nodes, workload,
                     *(interval(paired(steps[a], steps[b])) for a, b in (
                         ("wlb", "published"), ("wlb", "cad"), ("published", "cad"),
                         ("cad relay", "cad"))))
                )  # fmt: skip
                print("|", " | ".join(map(str, lines[-1])), "|", flush=True)
    write(args.out / "figure_9.csv", records)
    print(
        markdown(
            ("kernel", "model", "longest, Ki tokens", "nodes", "workload",
             "published planner over baseline", "ours over baseline", "ours over published planner",
             "relay over ragged"),
            lines,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
