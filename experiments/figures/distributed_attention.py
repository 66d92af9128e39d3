"""MagiAttention's setting: attention alone, 8K tokens a GPU, 64 query heads on 8 key heads, 8 to 64 H100.

    python -m experiments.figures.distributed_attention [--batches 30] [--out FOLDER]

Packed documents of a real distribution (ProLong's, each at most a quarter of the pool's tokens), causal;
TFLOP/s per GPU, forward and backward, of attention with everything it waits for: exchanges exposed, since
a single call has nothing else to hide behind, and hidden, as in a training step. Published values were read off
MagiAttention's charts (2 to 3%). No tensor parallelism: a rank is a GPU, eight to a node.
"""

import numpy as np

from cad_jax.sharding.cost import attention_flops
from cad_jax.sharding.tasks import HeadShape, causal_pairs
from cad_jax.simulation import strategies
from cad_jax.simulation.lengths import length_list
from cad_jax.simulation.strategies import Pool
from cad_jax.simulation.work import AttentionWork, Wire
from cad_jax.simulation.workloads import cut_into_chunks
from experiments.figures.common import BATCHES, Arguments, arguments, fair_costs, markdown, write

TOKENS = 8192
HEADS = HeadShape(64, 8, 128)
PUBLISHED = {  # GPUs: MagiAttention native, all-gather ring, ring p2p; forward / backward
    8: ("459 / 361", "288 / 179", "89 / 98"),
    16: ("426 / 372", "292 / 155", "69 / 86"),
    32: ("314 / 333", "241 / 104", "48 / 57"),
    64: ("237 / 264", "180 / 55", "29 / 29"),
}


def seconds(work: AttentionWork, hidden: bool) -> tuple[float, float]:
    """Forward and backward of the slowest rank: its kernels, and exchanges before and after or (hidden,
    or a ring) beside them."""

    def passed(kernels, steps, before, after) -> float:
        times = [float(h.max()) for h in (*before.hops, *after.hops)]
        if steps:
            beside = [max(float(s.max()), t) for s, t in zip(steps, times, strict=False)]
            rest = sum(times[len(steps) - 1 :])
            return sum(beside[: len(steps) - 1]) + float(steps[-1].max()) + rest
        compute = float(kernels.max())
        return max(compute, sum(times)) if hidden else compute + sum(times)

    return (
        passed(work.forward_s, work.forward_steps, work.dispatch, work.combine),
        passed(work.backward_s, work.backward_steps, work.dispatch_backward, work.combine_backward),
    )


def main(args: Arguments) -> None:
    costs = fair_costs("h200_fa3")
    records, lines = [], []
    for gpus, said in PUBLISHED.items():
        total = gpus * TOKENS
        lengths = length_list("prolong", 7)
        chunks = cut_into_chunks(lengths[lengths <= total // 4], total)
        rates: dict[str, list[tuple[float, float]]] = {}
        for number in range(args.batches):
            documents = next(chunks)
            pool = Pool(Wire(costs, gpus, 1), TOKENS, HEADS, total)
            plan = strategies.plan(documents, pool, 0.05)
            works = {
                "cad exposed": (strategies.planned_work(plan, pool, "ragged"), False),
                "cad hidden": (strategies.planned_work(plan, pool, "ragged"), True),
                "all_gather": (strategies.gathered_work(documents, pool, gather_again=True), False),
                "ring": (strategies.ring_work(documents, pool), False),
            }
            pairs = int(causal_pairs(0 * documents, documents, 0 * documents, documents).sum())
            flops = attention_flops(HEADS, pairs) / gpus / 1e12
            for name, (work, hidden) in works.items():
                forward, backward = seconds(work, hidden)
                rate = flops / forward, 2.5 * flops / backward
                rates.setdefault(name, []).append(rate)
                records.append(
                    {"figure": "distributed attention", "gpus": gpus, "batch": number,
                     "strategy": name, "forward_tflops": f"{rate[0]:.1f}",
                     "backward_tflops": f"{rate[1]:.1f}", "label": "simulated"}
                )  # fmt: skip
        lines.append(
            (gpus, *said, *("{:.0f} / {:.0f}".format(*np.mean(rates[n], axis=0)) for n in rates))
        )
    write(args.out / "distributed_attention.csv", records)
    print(
        markdown(
            ("GPUs", "Magi native, published", "all-gather, published", "ring, published",
             "cad, exposed", "cad, hidden", "all-gather CP", "ring"),
            lines,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
