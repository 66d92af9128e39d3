"""Figure 4a: what variable-length packing leaves uneven in memory, by data parallelism.

    python -m experiments.figures.packing_memory [--batches 30] [--out FOLDER]

Llama 3 8B, one chunk of 512K tokens a replica of CP 4 (nodes of 8 devices; batches grow with DP): bytes of a device of the
fullest and of the emptiest replica, whose tokens follow from packing by work, with no memory headroom and with 1.1. Derived:
weights undivided by DP, every layer's rows and gathered keys kept, as in figure 3b.
"""

from typing import Any

import numpy as np

from cad_jax.simulation.memory import memory
from cad_jax.simulation.wlb import BREAK_EVEN_TOKENS, pack_by_work
from experiments.figures.common import (
    BATCHES,
    DEVICES_PER_RANK,
    KIB,
    Arguments,
    Row,
    arguments,
    markdown,
    published_costs,
    write,
)

CHUNK, CP = 512 * KIB, 4
GB = {1: "82.0 to 82.4", 2: "79.1 to 85.6", 4: "77.9 to 88.2", 8: "78.4 to 91.1"}  # published
HEADROOMS = (1.0, 1.1)


def replica_bytes(tokens: float) -> float:
    """Of a device whose replica holds so many tokens."""
    setting = Row("llama3-8b", CHUNK, CP, 1).setting(published_costs())
    own = tokens / CP
    return memory(
        setting.model, setting.heads, tp=DEVICES_PER_RANK, pp=1, tokens_in_flight=own, keeps_ffn=True,
        gathered_tokens=(CP - 1) * own,
    ).total  # fmt: skip


def main(args: Arguments) -> None:
    records: list[dict[str, Any]] = []
    lines = []
    for dp, said in GB.items():
        row = Row("llama3-8b", CHUNK, CP * dp, 2 * dp)  # a nano-batch is a whole batch here
        cells = []
        for headroom in HEADROOMS:
            found = []
            for number, nanos in enumerate(row.batches("pretrain", args.batches)):
                bins = pack_by_work(
                    nanos[0],
                    dp,
                    break_even_tokens=BREAK_EVEN_TOKENS["llama3-8b"],
                    headroom=headroom,
                )
                held = [replica_bytes(float(b.sum())) / 1e9 for b in bins]
                found.append((min(held), max(held)))
                records.append(
                    {"figure": "4a", "dp": dp, "headroom": headroom, "batch": number,
                     "least_gb": f"{min(held):.2f}", "most_gb": f"{max(held):.2f}", "label": "derived"}
                )  # fmt: skip
            least, most = np.mean(found, axis=0)
            cells += [f"{least:.1f} to {most:.1f}", f"{np.mean([m / n for n, m in found]):.3f}"]
        low, high = map(float, said.split(" to "))
        lines.append((f"DP {dp}", said, f"{high / low:.3f}", *cells))
    write(args.out / "figure_4a.csv", records)
    print(
        markdown(
            ("replicas", "published, GB", "most over least",
             *(f"{what}, headroom {h:g}" for h in HEADROOMS for what in ("derived, GB", "most over least"))),
            lines,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
