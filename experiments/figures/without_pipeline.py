"""Figure 9: speed over the packing baseline without a pipeline, and ours over the published planner.

    python -m experiments.figures.without_pipeline [--batches 30] [--out FOLDER]

Every model, longest document and cluster of the paper's table 3, on the two published workloads, a
shuffled mix and one long document among many of 128 tokens; the published kernel (FA2) with the published
network and linear layers, and FA3-class kernels with a fair baseline (memory headroom of 1.5). Ours over the
published planner: both with exchanges alone, and with the copies that the published system was measured to make around
its own (`cad_jax.simulation.causes`).
"""

from collections.abc import Iterator

import numpy as np

from cad_jax.simulation.causes import with_causes
from cad_jax.simulation.setting import Setting, StepResult
from experiments.figures.common import (
    BATCHES,
    KIB,
    PUBLISHED_TOLERANCE,
    ROWS_3D,
    Arguments,
    Choice,
    Plans,
    Row,
    arguments,
    cad_step,
    choose,
    fair_costs,
    interval,
    markdown,
    paired,
    published_costs,
    record,
    wlb,
    write,
)

WORKLOADS = ("pretrain", "prolong", "mixed", "one_long")
CLASSES = (("h200_fa2", 1.0), ("h200_fa3", 1.5))  # kernel, memory headroom of the baseline


NO_IDLE_TIME = "no idle time"  # the published planner's mean rank at work: no planner is faster
PAIRS = (  # seconds of the first over those of the second
    ("wlb", "published"), ("wlb", "cad"), ("published", "cad"), ("published with copies", "cad"),
    ("published", NO_IDLE_TIME),
)  # fmt: skip


def results(
    row: Row, workload: str, number: int, chosen: dict[str, Choice]
) -> Iterator[tuple[int, str, str, StepResult]]:
    """(batch, kernel, strategy, result) of every batch. A batch is planned once for both kernels; how ours runs is
    chosen on the first ones."""
    settings = {
        kernel: row.setting(published_costs() if kernel == "h200_fa2" else fair_costs(kernel))
        for kernel, _ in CLASSES
    }
    every = row.batches(workload, number)
    plans: Plans = {}
    for kernel, setting in settings.items():
        chosen[kernel] = choose(setting, every, row, plans)
    for batch, nanos in enumerate(every):
        for kernel, headroom in CLASSES:
            setting = settings[kernel]
            made = {
                "published": published(setting, nanos, row),
                "published with copies": published(with_causes(setting, ("copies",)), nanos, row),
                "cad": cad_step(setting, nanos, row, **chosen[kernel]._asdict(), plans=plans),
                "wlb": wlb(setting, nanos, headroom),
            }
            for name, result in made.items():
                yield batch, kernel, name, result


def published(setting: Setting, nanos: list[np.ndarray], row: Row) -> StepResult:
    return cad_step(setting, nanos, row, strategy="published", tolerance=PUBLISHED_TOLERANCE)


def main(args: Arguments) -> None:
    records, lines = [], []
    for row in ROWS_3D:
        for workload in WORKLOADS:
            steps: dict[tuple[str, str], list[float]] = {}
            chosen: dict[str, Choice] = {}
            for batch, kernel, name, result in results(row, workload, args.batches, chosen):
                shown = result._replace(strategy=name)
                records.append(record("9", row, workload, batch, kernel, shown))
                steps.setdefault((kernel, name), []).append(result.step_s)
                if name == "published":
                    figures = result.figures()
                    work_s = figures["linear_s_mean"] + figures["attention_s_mean"]
                    steps.setdefault((kernel, NO_IDLE_TIME), []).append(work_s)
            for kernel, _ in CLASSES:
                ratios = (interval(paired(steps[kernel, a], steps[kernel, b])) for a, b in PAIRS)
                at = row.model, row.longest_tokens // KIB, row.nodes, workload
                lines.append((kernel[5:], *at, chosen[kernel], *ratios))
                print("|", " | ".join(map(str, lines[-1])), "|", flush=True)
    lines.sort(key=lambda line: line[0])
    write(args.out / "figure_9.csv", records)
    print(
        markdown(
            ("kernel", "model", "longest, Ki tokens", "nodes", "workload", "ours: transport, tolerance",
             "published planner over baseline", "ours over baseline", "ours over published planner",
             "the same, its copies counted", "at most: no idle time at all"),
            lines,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
