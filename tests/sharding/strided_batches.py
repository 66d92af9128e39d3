"""Many batches of a real length list, more than it holds one after another."""

import numpy as np

from tests.generators import REAL_LENGTHS_DIR


def strided_batches(name: str, total_tokens: int, count: int) -> list[np.ndarray]:
    """`count` batches of `total_tokens`, int64 each, whose first documents are spread evenly over the
    list: neighbours share documents where the list is short. The last document is cut."""
    lengths = np.loadtxt(REAL_LENGTHS_DIR / f"{name}.txt", dtype=np.int64)
    ends = np.cumsum(lengths)
    last_start = int(np.searchsorted(ends, ends[-1] - total_tokens, side="right"))
    batches = []
    for start in np.linspace(0, last_start, count).astype(int):
        stop = int(np.searchsorted(np.cumsum(lengths[start:]), total_tokens)) + start + 1
        batch = lengths[start:stop].copy()
        batch[-1] -= max(int(batch.sum()) - total_tokens, 0)
        batches.append(batch)
    return batches
