"""Batches of documents: the two published workloads as they were generated, a shuffled mix, and one
long document among many short ones. Host only.

A workload is a stream of documents. The published ones are cut at the ends of chunks as long as the
longest document; what a cut leaves begins the next chunk as a document of its own. A batch is a
number of nano-batches that follow one another.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice

import numpy as np

from cad_jax.simulation.lengths import length_list

Batch = list[np.ndarray]  # document lengths of each nano-batch, int64 [documents]

LONG_TOKENS = 65_536  # from here on a document counts as long: four copies, and never thinned out
LONG_COPIES = 4
SHORT_SHARE = 0.5  # of the shorter documents that "pretrain" keeps
DRAWN_DOCUMENTS = 10_000  # of "pretrain", without replacement
ROUND_TOKENS = 16
STRETCHED_SHARE = 0.3  # of the long documents of "prolong", set to the longest length
MIXED_LONGEST_SHARE = 0.59  # of the tokens of "mixed" in documents of the longest length
SHORT_DOCUMENT_TOKENS = 128  # of "one_long"


def batches(
    workload: str,
    *,
    longest_tokens: int,
    nano_tokens: int,
    nano_batches: int,
    number: int,
    seed: int = 42,
) -> list[Batch]:
    """`number` batches of `nano_batches` nano-batches of nano_tokens tokens, in the workload's order.

    workload: of WORKLOADS. longest_tokens: the longest document. Of PUBLISHED workloads it is also
    the chunk at whose ends documents are cut, a multiple of LONG_TOKENS that divides nano_tokens; the
    others cut documents at the ends of nano-batches alone.

    Raises ValueError for an unknown workload, or sizes it cannot have.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {workload!r}")
    for name, value in (("nano_batches", nano_batches), ("number", number)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}: simulate one or more")
    if not SHORT_DOCUMENT_TOKENS <= longest_tokens <= nano_tokens:
        raise ValueError(
            f"longest_tokens must be from {SHORT_DOCUMENT_TOKENS} to nano_tokens (= {nano_tokens}), "
            f"got {longest_tokens}: a document lies within one nano-batch"
        )
    if workload == "one_long":
        return one_long(longest_tokens, nano_tokens, nano_batches, number, seed)
    if workload not in PUBLISHED:
        stream = cut_into_chunks(WORKLOADS[workload](longest_tokens, seed), nano_tokens)
        return [list(islice(stream, nano_batches)) for _ in range(number)]
    if longest_tokens % LONG_TOKENS or nano_tokens % longest_tokens:
        raise ValueError(
            f"longest_tokens of workload {workload!r} must be a multiple of {LONG_TOKENS} and divide "
            f"nano_tokens (= {nano_tokens}), got {longest_tokens}: lengths are stretched by a whole "
            "factor, and nano-batches hold whole chunks; mixed and one_long take any sizes"
        )
    stream = cut_into_chunks(WORKLOADS[workload](longest_tokens, seed), longest_tokens)

    def nano_batch() -> np.ndarray:
        return np.concatenate(list(islice(stream, nano_tokens // longest_tokens)))

    return [[nano_batch() for _ in range(nano_batches)] for _ in range(number)]


def pretrain_documents(chunk_tokens: int, seed: int) -> np.ndarray:
    """Documents of "pretrain", int64 [DRAWN_DOCUMENTS]: half of the short ones of the WLB-LLM list and
    four copies of the long ones, drawn without replacement, all stretched by chunk_tokens /
    LONG_TOKENS and rounded up to ROUND_TOKENS.
    """
    lengths = length_list("wlb_llm", seed)
    short, long = lengths[lengths < LONG_TOKENS], lengths[lengths >= LONG_TOKENS]
    kept = short[: int(len(short) * SHORT_SHARE)]
    pool = np.concatenate([kept, np.repeat(long, LONG_COPIES)])
    drawn = np.random.default_rng(seed + 1).choice(pool, DRAWN_DOCUMENTS, replace=False)
    return -(-drawn * (chunk_tokens // LONG_TOKENS) // ROUND_TOKENS) * ROUND_TOKENS


def prolong_documents(chunk_tokens: int, seed: int) -> np.ndarray:
    """Documents of "prolong", int64 [n], in the published order: first every long one, four copies
    each, a STRETCHED_SHARE of them set to chunk_tokens; then half of the short ones. Nothing is
    shuffled, so that hardly any batch holds long and short documents.
    """
    long, short = _prolong_parts(chunk_tokens, seed)
    return np.concatenate([long, short])


def shuffled_documents(chunk_tokens: int, seed: int) -> np.ndarray:
    """The documents of "prolong" in random order, int64 [n]."""
    documents = prolong_documents(chunk_tokens, seed)
    return np.random.default_rng(seed + 2).permutation(documents)


def mixed_documents(chunk_tokens: int, seed: int) -> np.ndarray:
    """Short documents of ProLong in random order with documents of chunk_tokens strewn in evenly at
    random, which hold MIXED_LONGEST_SHARE of the tokens; int64 [n].
    """
    rng = np.random.default_rng(seed + 3)
    short = length_list("prolong", seed)
    short = short[short < chunk_tokens]
    share = MIXED_LONGEST_SHARE / (1 - MIXED_LONGEST_SHARE)
    longest = max(1, round(share * short.sum() / chunk_tokens))
    return rng.permutation(np.concatenate([short, np.full(longest, chunk_tokens)]))


def one_long(
    longest_tokens: int, nano_tokens: int, nano_batches: int, number: int, seed: int
) -> list[Batch]:
    """Batches with one document of longest_tokens, first in a nano-batch drawn at random, and
    otherwise documents of SHORT_DOCUMENT_TOKENS."""
    nanos = np.random.default_rng(seed).integers(nano_batches, size=number)

    def filled(tokens: int) -> np.ndarray:
        full, rest = divmod(tokens, SHORT_DOCUMENT_TOKENS)
        return np.array([SHORT_DOCUMENT_TOKENS] * full + [rest] * (rest > 0), np.int64)

    short = filled(nano_tokens)
    long = np.concatenate([[longest_tokens], filled(nano_tokens - longest_tokens)])
    return [[long if n == at else short for n in range(nano_batches)] for at in nanos.tolist()]


def cut_into_chunks(
    documents: np.ndarray | Iterator[np.ndarray], chunk_tokens: int
) -> Iterator[np.ndarray]:
    """Documents in order as chunks of exactly chunk_tokens tokens; a rest that fills none is left out.

    documents: int64 [n], or several such arrays one after another.
    """
    chunk: list[int] = []
    room = chunk_tokens
    for array in [documents] if isinstance(documents, np.ndarray) else documents:
        for length in array.tolist():
            while length > 0:
                taken = min(length, room)
                chunk.append(taken)
                length, room = length - taken, room - taken
                if room == 0:
                    yield np.array(chunk, np.int64)
                    chunk, room = [], chunk_tokens


def _prolong_parts(chunk_tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = length_list("prolong", seed)
    short, long = lengths[lengths < LONG_TOKENS], lengths[lengths >= LONG_TOKENS]
    long = np.repeat(long, LONG_COPIES)
    stretched = np.random.default_rng(seed + 1).random(len(long)) < STRETCHED_SHARE
    return np.where(stretched, chunk_tokens, long), short[: int(len(short) * SHORT_SHARE)]


def _again_and_again(make: Callable[[int, int], np.ndarray]):
    """A stream that draws anew, with another seed, where a list is used up."""

    def stream(chunk_tokens: int, seed: int) -> Iterator[np.ndarray]:
        return (make(chunk_tokens, seed + 1000 * nth) for nth in count())

    return stream


PUBLISHED = ("pretrain", "prolong", "shuffled")  # cut at chunk ends, and stretched
WORKLOADS: Mapping[str, Callable[[int, int], Iterator[np.ndarray]]] = {
    "pretrain": _again_and_again(pretrain_documents),
    "prolong": _again_and_again(prolong_documents),
    "shuffled": _again_and_again(shuffled_documents),
    "mixed": _again_and_again(mixed_documents),
    "one_long": lambda chunk_tokens, seed: iter(()),
}
