"""Figures 11 and 12: what hides, and what a tolerance costs.

    python -m experiments.figures.tolerances [--batches 30] [--out FOLDER]

Pretrain, documents of at most 128K tokens. Figure 11: exchanges of nothing (signal), ping-pong and single
stream, of the published planner at tolerance 0.05. Figure 12: step time and bytes by tolerance, published
planner and this project's.
"""

import numpy as np

from experiments.figures.common import (
    BATCHES,
    KIB,
    Arguments,
    Row,
    arguments,
    cad_step,
    interval,
    markdown,
    paired,
    published_costs,
    record,
    write,
)

ROWS = tuple(
    Row(model, 128 * KIB, nodes, nodes // (1 if model == "llama3-8b" else 2))
    for model in ("llama3-8b", "llama-34b")
    for nodes in (8, 16)
)
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)


def main(args: Arguments) -> None:
    costs = published_costs()
    records, hiding, sweep = [], [], []
    for row in ROWS:
        setting = row.setting(costs)
        steps: dict[str, list[float]] = {}
        sent: dict[str, list[float]] = {}
        for number, nanos in enumerate(row.batches("pretrain", args.batches)):
            results = {
                overlap: cad_step(
                    setting, nanos, row, strategy="published", tolerance=0.05, overlap=overlap
                )
                for overlap in ("pingpong", "single_stream", "signal")
            }
            for strategy in ("published", "cad"):
                for tolerance in TOLERANCES:
                    results[f"{strategy} {tolerance:g}"] = cad_step(
                        setting, nanos, row, strategy=strategy, tolerance=tolerance
                    )
            for name, result in results.items():
                result = result._replace(strategy=name)
                records.append(record("11, 12", row, "pretrain", number, "h200_fa2", result))
                steps.setdefault(name, []).append(result.step_s)
                sent.setdefault(name, []).append(float(result.wire_bytes.max()))
        name = f"{row.model}, {row.nodes} nodes"
        hiding.append(
            (name, interval(paired(steps["pingpong"], steps["signal"])),
             interval(paired(steps["single_stream"], steps["pingpong"])))
        )  # fmt: skip
        for strategy in ("published", "cad"):
            base = f"{strategy} 0"
            sweep.append(
                (name, strategy, *(
                    f"{np.sum(steps[f'{strategy} {t:g}']) / np.sum(steps[base]):.3f} / "
                    f"{np.sum(sent[f'{strategy} {t:g}']) / np.sum(sent[base]):.2f}"
                    for t in TOLERANCES))
            )  # fmt: skip
    write(args.out / "figure_11_12.csv", records)
    print(markdown(("figure 11, published planner", "ping-pong over signal (about 1 published)",
                    "single stream over ping-pong (1.10 to 1.17 published)"), hiding))  # fmt: skip
    print(markdown(("figure 12: step time / worst rank's bytes, over those at 0", "planner",
                    *(f"{t:g}" for t in TOLERANCES)), sweep))  # fmt: skip


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
