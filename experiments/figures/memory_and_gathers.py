"""Figures 3a and 3b: what all-gathers take of a step, and memory by what holds it.

    python -m experiments.figures.memory_and_gathers [--out FOLDER]

Llama 3 8B, documents of 32K tokens, 128 Ki tokens a rank of 8 devices, context parallelism over all ranks.
Published values were read off the plots.
"""

import numpy as np

from cad_jax.simulation.memory import memory
from cad_jax.simulation.wlb import wlb_step
from experiments.figures.common import (
    KIB,
    Arguments,
    Row,
    arguments,
    markdown,
    published_costs,
    record,
    write,
)

BATCHES = 0  # all documents are alike: none are drawn
GATHER_PERCENT = {2: 3, 4: 6, 8: 13.5, 16: 26.5, 32: 39.5}  # % of latency, by nodes
MEMORY_SHARE = {  # %: weights and optimizer, q k v out, gathered keys, feed-forward, by CP
    2: (24, 17, 4.5, 54),
    4: (21.5, 17, 8.5, 53),
    8: (19, 16, 16, 49),
    16: (16, 14, 27.5, 42.5),
}


def main(args: Arguments) -> None:
    costs = published_costs()
    records, shares = [], []
    for nodes, said in GATHER_PERCENT.items():
        row = Row("llama3-8b", 128 * KIB, nodes, nodes)
        setting = row.setting(costs)
        documents = np.full(row.tokens * 2 * nodes // (32 * KIB), 32 * KIB)
        result = wlb_step(setting, [documents], cp=nodes)
        records.append(record("3a", row, "equal 32K", 0, "h200_fa2", result))
        ours = 100 * result.figures()["exposed_communication"]
        shares.append((nodes, said, f"{ours:.1f}"))
    write(args.out / "figure_3a.csv", records)
    print(markdown(("nodes = CP", "published, % of latency in all-gathers", "simulated"), shares))
    lines = []
    for cp, said in MEMORY_SHARE.items():
        row = Row("llama3-8b", 128 * KIB, cp, cp)
        setting = row.setting(costs)
        held = memory(
            setting.model, setting.heads, tp=8, pp=1, tokens_in_flight=2 * row.tokens, keeps_ffn=True,
            gathered_tokens=2 * row.tokens * cp,
        )  # fmt: skip
        parts = (held.weights, held.attention_rows, held.gathered_keys, held.ffn_rows)
        ours = " / ".join(f"{100 * p / held.total:.1f}" for p in parts)
        lines.append((cp, " / ".join(map(str, said)), ours, f"{held.total / 1e9:.0f}"))
    print(
        markdown(
            ("CP", "published, %: weights / attention rows / gathered keys / feed-forward",
             "derived", "GB"),
            lines,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
