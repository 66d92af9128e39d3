"""MagiAttention's setting: attention alone, 8K tokens a GPU, 64 query heads on 8 key heads, 8 to 64 H100.

    python -m experiments.figures.distributed_attention [--batches 30] [--out FOLDER]

Packed documents of a real distribution (ProLong's, each at most a quarter of the pool's tokens), causal;
TFLOP/s per GPU, forward and backward, of attention with everything it waits for: exchanges exposed, since
a single call has nothing else to hide behind, and hidden, as in a training step. Ours runs at the tolerance, the way
(transport, keys divided or not) and the knowledge of nodes that are fastest on eight batches before those shown; gradients
travel in the dtype of keys under every strategy. Published values were read off MagiAttention's charts (2 to 3%).
No tensor parallelism: a rank is a GPU, eight to a node.
"""

from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from cad_jax.sharding.cost import attention_flops
from cad_jax.sharding.tasks import HeadShape, causal_pairs
from cad_jax.simulation import strategies
from cad_jax.simulation.lengths import length_list
from cad_jax.simulation.strategies import Pool, Transport
from cad_jax.simulation.wlb import packed_work
from cad_jax.simulation.work import AttentionWork, Wire
from cad_jax.simulation.workloads import cut_into_chunks
from experiments.figures.common import (
    BATCHES,
    Arguments,
    Choice,
    arguments,
    fair_costs,
    markdown,
    write,
)

TOKENS = 8192
HEADS = HeadShape(64, 8, 128)
SAMPLE = 8  # batches of a single call each vary more than those of a training step
# Exchanges exposed, a larger tolerance than in training may pay: 1 leaves most of attention at home.
TOLERANCES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
WAYS: tuple[tuple[Transport, int], ...] = (("ragged", 1), ("relay", 1), ("ragged", 8))
EXPOSED = "cad", "all-gather CP", "all-gather CP, short whole", "ring"
HIDDEN = "cad, hidden", "all-gather CP, short whole, hidden"
STRATEGIES = EXPOSED + HIDDEN
PUBLISHED = {  # GPUs: MagiAttention native, all-gather ring, ring p2p; forward, backward
    8: ((459, 361), (288, 179), (89, 98)),
    16: ((426, 372), (292, 155), (69, 86)),
    32: ((314, 333), (241, 104), (48, 57)),
    64: ((237, 264), (180, 55), (29, 29)),
}


class Way(NamedTuple):
    """How ours runs. node: servers of a node as its planner knows them."""

    choice: Choice
    node: int

    def __str__(self) -> str:
        return f"{self.choice}, {'nodes' * (self.node > 1) or 'no nodes'} known"


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


def planned(documents: np.ndarray, pool: Pool, way: Way) -> AttentionWork:
    choice = way.choice
    known = replace(pool, node=way.node)
    plan = strategies.plan(
        documents, known, choice.tolerance, None, choice.key_ranges, choice.transport
    )
    return strategies.planned_work(plan, pool, choice.transport)


def choose(sample: list[np.ndarray], pool: Pool) -> tuple[Way, Way]:
    """The fastest ways, exchanges exposed and hidden, by seconds of these batches forward and backward."""
    spent: dict[Way, np.ndarray] = {}
    for transport, key_ranges in WAYS:
        for tolerance in TOLERANCES:
            for node in sorted({1, pool.wire.node_ranks}):
                way = Way(Choice(tolerance, transport, key_ranges), node)
                works = [planned(documents, pool, way) for documents in sample]
                spent[way] = np.array(
                    [sum(sum(seconds(w, hidden)) for w in works) for hidden in (False, True)]
                )
    exposed, hidden = (min(spent, key=lambda way: float(spent[way][i])) for i in (0, 1))
    return exposed, hidden


def gathered(documents: np.ndarray, pool: Pool) -> AttentionWork:
    """Every document over all ranks, as cad_jax's all_gather runs it."""
    return strategies.gathered_work(documents, pool, gather_again=True, gradient_bytes=1)


def rates(
    pool: Pool, documents: np.ndarray, ways: tuple[Way, Way]
) -> dict[str, tuple[float, float]]:
    """TFLOP/s per GPU, forward and backward, of every strategy."""
    exposed, hidden = (planned(documents, pool, way) for way in ways)
    whole = packed_work(documents, pool, gather_again=True)
    ring = strategies.ring_work(documents, pool, gradient_bytes=1)
    works = (
        (exposed, False), (gathered(documents, pool), False), (whole, False), (ring, False),
        (hidden, True), (whole, True),
    )  # fmt: skip
    pairs = int(causal_pairs(0 * documents, documents, 0 * documents, documents).sum())
    flops = attention_flops(HEADS, pairs) / pool.servers / 1e12
    made = {}
    for name, (work, beside) in zip(STRATEGIES, works, strict=True):
        forward, backward = seconds(work, beside)
        made[name] = flops / forward, 2.5 * flops / backward
    return made


def winner(mean: dict[str, np.ndarray], names: tuple[str, ...]) -> str:
    """Which of these is fastest, forward and backward, and ours, the first, over the fastest other."""
    best = [max(names, key=lambda n, i=i: mean[n][i]) for i in (0, 1)]
    others = np.max([mean[n] for n in names[1:]], axis=0)
    ratio = "{:.2f} / {:.2f}".format(*(mean[names[0]] / others))
    return f"{' / '.join(dict.fromkeys(best))}; {ratio}"


def main(args: Arguments) -> None:
    costs = fair_costs("h200_fa3")
    records, lines, wins = [], [], []
    for gpus, said in PUBLISHED.items():
        total = gpus * TOKENS
        lengths = length_list("prolong", 7)
        chunks = cut_into_chunks(lengths[lengths <= total // 4], total)
        pool = Pool(Wire(costs, gpus, 1), TOKENS, HEADS, total)
        ways = choose(list(islice(chunks, SAMPLE)), pool)
        every = [rates(pool, next(chunks), ways) for _ in range(args.batches)]
        for number, made in enumerate(every):
            records += [
                {"figure": "distributed attention", "gpus": gpus, "batch": number,
                 "strategy": name, "forward_tflops": f"{rate[0]:.1f}",
                 "backward_tflops": f"{rate[1]:.1f}", "label": "simulated"}
                for name, rate in made.items()
            ]  # fmt: skip
        mean = {name: np.mean([made[name] for made in every], axis=0) for name in STRATEGIES}
        shown = [*said, *(mean[name] for name in STRATEGIES)]
        lines.append((gpus, *("{:.0f} / {:.0f}".format(*rate) for rate in shown), *ways))
        magi = "{:.2f} / {:.2f}".format(*(mean["cad"] / said[0]))
        wins.append((gpus, winner(mean, EXPOSED), winner(mean, HIDDEN), magi))
    write(args.out / "distributed_attention.csv", records)
    print(
        markdown(
            ("GPUs", "Magi native, published", "all-gather, published", "ring, published",
             *STRATEGIES, "way of cad", "way of cad, hidden"),
            lines,
        )
    )  # fmt: skip
    print(
        markdown(
            ("GPUs", "fastest, exchanges exposed; cad over the best other",
             "fastest, exchanges hidden; cad over the other",
             "cad, exposed (simulated), over Magi native (published)"),
            wins,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(arguments(__doc__, batches=BATCHES))
