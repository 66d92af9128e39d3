"""Figure 5: throughput of FlashAttention-2 on H200 by rows of a shard.

    python -m experiments.figures.kernel_shards [--out FOLDER]

32K query rows a call in shards of so many, contexts drawn from 128 to 16K keys, 4 query heads and 1 key head. The shipped table was
fitted to these points and to whole documents (experiments/h200_profiles.py), so this shows how well three constants describe
both; below 128 rows a shard costs a whole tile. Derived.
"""

from typing import Any

from cad_jax.sharding.cost import DEVICES, attention_flops
from cad_jax.sharding.cost_model import from_csv, shipped
from cad_jax.sharding.tasks import HeadShape
from experiments.figures.common import Arguments, arguments, markdown, write
from experiments.h200_profiles import FORWARD, SHARDS

BATCHES = 0  # nothing is drawn
HEADS = HeadShape(4, 1, 128)


def main(args: Arguments) -> None:
    costs = from_csv(shipped("h200_fa2"), DEVICES["h200"])
    records: list[dict[str, Any]] = []
    for point in FORWARD["fa2"]:
        if point.source != SHARDS:
            continue
        seconds = float(costs.task_s(point.q_rows, point.k_rows, HEADS).mean())
        flops = point.flops * attention_flops(HEADS, 1) / attention_flops(HeadShape(1, 1, 128), 1)
        ours = flops / seconds / 1e12
        records.append(
            {"figure": "5", "shard_rows": int(point.q_rows[0]), "published_tflops": point.tflops_s,
             "table_tflops": f"{ours:.0f}", "over_published": f"{ours / point.tflops_s:.3f}", "label": "derived"}
        )  # fmt: skip
    write(args.out / "figure_5.csv", records)
    rows = (tuple(r.values())[1:5] for r in records)
    print(markdown(("rows of a shard", "published, TFLOP/s", "table", "over published"), rows))


if __name__ == "__main__":
    main(arguments(__doc__, batches=0))
