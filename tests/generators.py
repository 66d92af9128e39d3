"""Document lengths for tests: seeded random mixes, awkward hand-made ones, and real lists."""

from pathlib import Path

import numpy as np

REAL_LENGTHS_DIR = Path(__file__).resolve().parents[2] / "shared" / "data"
REAL_LENGTH_LISTS = ("pretrain_128k", "mixed_128k", "pretrain_512k", "mixed_512k")


def long_tailed_lengths(rng: np.random.Generator, total_tokens: int) -> np.ndarray:
    """Log-normal lengths (int64, zeros and ones included) that fill ``total_tokens`` or less."""
    lengths = []
    room = total_tokens
    while room > 0:
        length = min(int(rng.lognormal(np.log(max(total_tokens / 24, 2.0)), 1.5)), room)
        lengths.append(length)
        room -= max(length, 1)
    return np.asarray(lengths, np.int64)


def awkward_lengths(total_tokens: int) -> dict[str, np.ndarray]:
    """Named length lists at the edges of what a plan has to take."""
    half = total_tokens // 2
    return {
        "one_document": np.asarray([total_tokens]),
        "all_padding": np.asarray([], np.int64),
        "only_empty_documents": np.asarray([0, 0, 0]),
        "one_token": np.asarray([1]),
        "single_tokens": np.ones(total_tokens, np.int64),
        "long_then_empty_then_odd": np.asarray([half + 1, 0, 3, 0, 7]),
        "short_then_long": np.asarray([1, 2, 3, total_tokens - 6]),
        "equal": np.full(4, total_tokens // 4),
    }


def real_batches(name: str, total_tokens: int, count: int) -> list[np.ndarray]:
    """``count`` batches of ``total_tokens`` from a real length list, the last document cut.

    Documents are taken in file order; the next batch starts with the next document.
    """
    lengths = np.loadtxt(REAL_LENGTHS_DIR / f"{name}.txt", dtype=np.int64)
    batches, position = [], 0
    for _ in range(count):
        ends = np.cumsum(lengths[position:])
        last = int(np.searchsorted(ends, total_tokens))
        if last >= len(ends):
            break
        batch = lengths[position : position + last + 1].copy()
        batch[-1] -= ends[last] - total_tokens
        batches.append(batch)
        position += last + 1
    return batches
