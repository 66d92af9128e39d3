"""Lists of document lengths by name, from quantile tables that ship with the project. Host only.

A table (CSV: quantile, length_tokens) keeps 199 quantiles up to 0.99 and 120 above, spaced evenly in
the logarithm of what lies beyond, because few long documents make most of the work. A list of n
lengths is the inverse of the distribution at (i + 1/2) / n, interpolated linearly and shuffled: the
published lists show no order either.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

# Documents of the published lists: lengths digitised from WLB-LLM (arXiv 2503.17924), and of ProLong
# (arXiv 2410.02660), as released with DistCA (arXiv 2510.18121).
LIST_DOCUMENTS: Mapping[str, int] = {"wlb_llm": 99_519, "prolong": 77_932}


def quantile_table(name: str) -> np.ndarray:
    """float64 [n, 2]: quantile in [0, 1], length in tokens. ValueError lists the names there are."""
    if name not in LIST_DOCUMENTS:
        raise ValueError(f"length list must be one of {', '.join(LIST_DOCUMENTS)}, got {name!r}")
    path = Path(__file__).with_name(f"lengths_{name}.csv")
    return np.loadtxt(path, delimiter=",", skiprows=1)


def length_list(name: str, seed: int, documents: int | None = None) -> np.ndarray:
    """Document lengths in random order, int64 [documents], by default as many as were published.

    Raises ValueError for an unknown name or fewer than one document.
    """
    table = quantile_table(name)
    documents = LIST_DOCUMENTS[name] if documents is None else documents
    if documents < 1:
        raise ValueError(f"documents must be at least 1, got {documents}: leave it out for all")
    at = (np.arange(documents) + 0.5) / documents
    lengths = np.rint(np.interp(at, table[:, 0], table[:, 1])).astype(np.int64)
    return np.random.default_rng(seed).permutation(lengths)
