"""Figures 4b and 6: what variable-length packing leaves uneven, by data parallelism.

    python -m experiments.figures.packing_limits [--batches 30] [--out FOLDER]

Llama 3 8B on 8 nodes, eight chunks of 512K tokens a step as DP x CP = 8: ranks' time spent waiting for others,
with no memory headroom (as the published baseline ran), with 1.1 and 1.5 times; throughput relative to the
best division; beside them the published planner and this project's.
"""

import numpy as np

from cad_jax.simulation.setting import StepResult
from cad_jax.simulation.wlb import wlb_step
from experiments.figures.common import (
    BATCHES,
    KIB,
    PUBLISHED_TOLERANCE,
    Arguments,
    Row,
    arguments,
    cad_step,
    markdown,
    published_costs,
    record,
    write,
)

ROW = Row("llama3-8b", 512 * KIB, 8, 8)
IDLE = {1: 1.7, 2: 1.9, 4: 19.2, 8: 55.4}  # %, published, of the packing baseline
PLANNER_IDLE = 2.1  # %, published, of its planner
HEADROOMS = (1.0, 1.1, 1.5)


def main(args: Arguments) -> None:
    setting = ROW.setting(published_costs())
    records, waiting, seconds = [], {}, {}
    for number, nanos in enumerate(ROW.batches("pretrain", args.batches)):
        results: dict[tuple[int | str, float], StepResult] = {
            (dp, headroom): wlb_step(setting, nanos, cp=8 // dp, headroom=headroom)
            for dp in IDLE
            for headroom in HEADROOMS
        }
        results["published", 0.0] = cad_step(
            setting, nanos, ROW, strategy="published", tolerance=PUBLISHED_TOLERANCE
        )
        results["cad", 0.0] = cad_step(setting, nanos, ROW, tolerance=0.01)
        for key, result in results.items():
            dp, headroom = key
            name = dp if isinstance(dp, str) else f"dp{dp} headroom {headroom:g}"
            result = result._replace(strategy=name)
            records.append(record("4b, 6", ROW, "pretrain", number, "h200_fa2", result))
            waiting.setdefault(key, []).append(100 * result.figures()["waiting"])
            seconds.setdefault(key, []).append(result.step_s)
    write(args.out / "figure_4b_6.csv", records)
    best = min(np.sum(seconds[dp, 1.0]) for dp in IDLE)
    lines = []
    for dp, said in IDLE.items():
        none = waiting[dp, 1.0]
        low, high = np.percentile(none, [10, 90])
        lines.append(
            (f"DP {dp}, CP {8 // dp}", said, f"{np.mean(none):.1f} ({low:.1f} to {high:.1f})",
             *(f"{np.mean(waiting[dp, h]):.1f}" for h in HEADROOMS[1:]),
             f"{best / np.sum(seconds[dp, 1.0]):.2f}")
        )  # fmt: skip
    for name, said in (("published", PLANNER_IDLE), ("cad", "")):
        lines.append(
            (f"planner: {name}", said, f"{np.mean(waiting[name, 0.0]):.1f}", "", "",
             f"{best / np.sum(seconds[name, 0.0]):.2f}")
        )  # fmt: skip
    print(
        markdown(
            ("division", "published idle, %", "simulated waiting, %: mean (10th to 90th of batches)",
             "headroom 1.1", "headroom 1.5", "throughput over the best division"),
            lines,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
