"""The strong baseline of the published experiments: variable-length packing with per-document context
parallelism (WLB-LLM, arXiv 2503.17924; packing as in the code released with arXiv 2510.18121). Host only.

Documents of a step go to DP x M bins by attention and linear work; each bin is a microbatch of one
replica of CP ranks, every document spread over them head and tail.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cad_jax.sharding.tasks import TILE_ROWS
from cad_jax.simulation import strategies
from cad_jax.simulation.setting import Setting, StepResult, pool_of
from cad_jax.simulation.step import stage_step
from cad_jax.simulation.strategies import Pool
from cad_jax.simulation.work import AttentionWork

# Document length at which attention costs what linear layers do, by model, as the baseline was tuned.
BREAK_EVEN_TOKENS: Mapping[str, int] = {
    "llama3-8b": 64_000,
    "llama-34b": 131_072,
    "codellama-34b": 131_072,
    "llama3-70b": 170_000,
}
DEFAULT_BREAK_EVEN_TOKENS = 64_000


def pack_by_work(
    lengths: np.ndarray, bins: int, *, break_even_tokens: float, headroom: float
) -> list[np.ndarray]:
    """Documents into bins of about equal work, int64 arrays.

    Longest first, each goes to the bin of least work if its tokens stay within the limit, else to
    the bin of fewest tokens if that has room; what fits neither goes to the bin of least work in the
    end. Work of a document of l tokens: (l / b)^2 + l / b, b break_even_tokens. The limit: headroom times the mean
    tokens of a bin; the published experiments ran with 1.0, no headroom at all.

    Raises ValueError for fewer than one bin, or a headroom below 1.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}: one a microbatch of each replica")
    if headroom < 1:
        raise ValueError(
            f"headroom must be at least 1, got {headroom}: memory for the mean tokens of a bin; use "
            "1.0 for none to spare"
        )
    lengths = np.sort(np.asarray(lengths, np.int64))[::-1]
    limit = headroom * lengths.sum() / bins
    work, tokens = np.zeros(bins), np.zeros(bins, np.int64)
    placed: list[list[int]] = [[] for _ in range(bins)]
    left_over = []

    def place(at: int, length: int) -> None:
        placed[at].append(length)
        share = length / break_even_tokens
        work[at] += share * share + share
        tokens[at] += length

    for length in lengths.tolist():
        choices = (int(work.argmin()), int(tokens.argmin()))
        fitting = [at for at in choices if tokens[at] + length <= limit]
        if fitting:
            place(fitting[0], length)
        else:
            left_over.append(length)
    for length in left_over:
        place(int(work.argmin()), length)
    return [np.array(documents, np.int64) for documents in placed]


def wlb_step(
    setting: Setting,
    lengths: Sequence[np.ndarray],
    *,
    cp: int,
    microbatches: int = 1,
    headroom: float = 1.0,
    break_even_tokens: float | None = None,
) -> StepResult:
    """Variable-length packing with per-document context parallelism over cp ranks.

    lengths: documents of the step, in any division. microbatches: of each of the dp / cp replicas.
    headroom: memory for so many times the mean tokens of a microbatch.

    Raises ValueError where cp does not divide a stage's ranks.
    """
    if cp < 1 or setting.dp % cp:
        raise ValueError(
            f"cp must divide the {setting.dp} ranks of a stage, got {cp}: use a divisor"
        )
    replicas = setting.dp // cp
    documents = np.concatenate(list(lengths))
    limit = break_even_tokens or BREAK_EVEN_TOKENS.get(
        setting.model.name, DEFAULT_BREAK_EVEN_TOKENS
    )
    bins = pack_by_work(
        documents, replicas * microbatches, break_even_tokens=limit, headroom=headroom
    )
    works, tokens = [], []
    for nth in range(microbatches):
        held = bins[nth * replicas : (nth + 1) * replicas]
        rows = [-(-int(b.sum()) // cp) for b in held]
        parts = [
            packed_work(b, pool_of(setting, cp, max(t, 1)), setting.gather_again)
            for b, t in zip(held, rows, strict=True)
        ]
        works.append([_side_by_side(parts)])
        tokens.append(np.repeat(rows, cp))
    return stage_step(
        setting,
        [[documents]],
        works,
        tokens=tokens,
        name=f"wlb dp{replicas} cp{cp}",
        published=True,
    )


def packed_work(lengths: np.ndarray, pool: Pool, gather_again: bool) -> AttentionWork:
    """Per-document context parallelism at its best: gradients in the dtype of keys, and documents that would fall into
    pieces of less than a tile whole on one rank each, evenly in sum (in its favour). gather_again: see
    `strategies.gathered_work`.
    """
    lengths = np.asarray(lengths, np.int64)
    short = lengths < 2 * pool.servers * TILE_ROWS
    work = strategies.gathered_work(
        lengths[~short], pool, gather_again=gather_again, gradient_bytes=1
    )
    kinds, counts = np.unique(lengths[short], return_counts=True)
    forward, backward = (
        float(counts @ pool.costs.task_s(kinds, kinds, pool.heads, backward=b)) / pool.servers
        for b in (False, True)
    )
    return replace(work, forward_s=work.forward_s + forward, backward_s=work.backward_s + backward)


def check_microbatches(pp: int, microbatches: Sequence[int]) -> None:
    """Raises ValueError where packing has fewer microbatches than stages, whatever is chosen."""
    if max(microbatches) < pp:
        raise ValueError(
            f"packing (wlb) needs at least as many microbatches of a replica as stages (= {pp}), got at "
            f"most {max(microbatches)}: use more microbatches, fewer stages, or leave wlb out"
        )


def best_wlb_step(
    setting: Setting,
    lengths: Sequence[np.ndarray],
    *,
    microbatches: Sequence[int] = (1,),
    headroom: float = 1.0,
    memory_bytes: float = np.inf,
) -> StepResult:
    """The fastest, in memory, of all divisions of each stage's ranks into replicas and context parallelism, with
    gathered keys kept or gathered again; the one of least memory where none fits. microbatches: counts to choose
    from, those of at least pp.

    Raises ValueError where no count is.
    """
    check_microbatches(setting.pp, microbatches)
    results = [
        wlb_step(
            replace(setting, gather_again=again),
            lengths,
            cp=cp,
            microbatches=count,
            headroom=headroom,
        )
        for again in (False, True)
        for cp in range(1, setting.dp + 1)
        if setting.dp % cp == 0
        for count in microbatches
        if count >= setting.pp
    ]
    fitting = [r for r in results if r.memory.total <= memory_bytes]
    if not fitting:
        return min(results, key=lambda r: r.memory.total)
    return min(fitting, key=lambda r: r.step_s)


def _side_by_side(parts: Sequence[AttentionWork]) -> AttentionWork:
    """Works of replicas as the work of all their ranks."""
    first = parts[0]

    def joined(name: str):
        exchanges = [getattr(part, name) for part in parts]
        hops = tuple(np.concatenate(hop) for hop in zip(*(e.hops for e in exchanges), strict=True))
        return type(exchanges[0])(hops, np.concatenate([e.bytes for e in exchanges]))

    names = ("dispatch", "combine", "dispatch_backward", "combine_backward")
    return replace(
        first,
        forward_s=np.concatenate([p.forward_s for p in parts]),
        backward_s=np.concatenate([p.backward_s for p in parts]),
        query_rows=max(p.query_rows for p in parts),
        key_rows=max(p.key_rows for p in parts),
        **{name: joined(name) for name in names},
    )
