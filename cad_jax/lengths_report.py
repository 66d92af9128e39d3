"""Statistics of document lengths, and the file that other commands read. Works without jax."""

from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.table import Table

from cad_jax.sharding.text_lines import numbered_lines

LONG_TOKENS = 65_536  # documents beyond it are counted apart
MAX_DOCUMENT_TOKENS = 2**31 - 1
CURE = "pass a text file with one number a line, or a part of it"


class LengthStatistics(NamedTuple):
    """Lengths in tokens. The work of a document's attention grows as the square of its length."""

    documents: int
    tokens: int
    mean_tokens: float
    p50_tokens: float
    p90_tokens: float
    p99_tokens: float
    max_tokens: int
    long_token_share: float  # of the tokens, in documents longer than LONG_TOKENS
    long_square_share: float  # of the sum of squares


def length_statistics(lengths: np.ndarray) -> LengthStatistics:
    """Of whole numbers [N]; shares of nothing are 0. Raises ValueError where N is 0."""
    lengths = np.asarray(lengths, np.int64)
    if lengths.size == 0:
        raise ValueError("statistics need at least one document length, got none: give some")
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99)).tolist()
    squares = lengths.astype(np.float64) ** 2
    long = lengths > LONG_TOKENS
    return LengthStatistics(
        documents=int(lengths.size),
        tokens=int(lengths.sum()),
        mean_tokens=float(lengths.mean()),
        p50_tokens=p50,
        p90_tokens=p90,
        p99_tokens=p99,
        max_tokens=int(lengths.max()),
        long_token_share=float(lengths[long].sum() / max(int(lengths.sum()), 1)),
        long_square_share=float(squares[long].sum() / max(squares.sum(), 1.0)),
    )


def statistics_table(statistics: LengthStatistics, title: str) -> Table:
    """The figures for people."""
    table = Table(title=title, show_header=False)
    s = statistics
    for name, value in (
        ("documents", f"{s.documents:,}"),
        ("tokens", f"{s.tokens:,}"),
        ("mean", f"{s.mean_tokens:,.1f}"),
        ("50%", f"{s.p50_tokens:,.0f}"),
        ("90%", f"{s.p90_tokens:,.0f}"),
        ("99%", f"{s.p99_tokens:,.0f}"),
        ("longest", f"{s.max_tokens:,}"),
        (f"tokens in documents longer than {LONG_TOKENS:,}", f"{s.long_token_share:.1%}"),
        ("their share of the sum of squared lengths", f"{s.long_square_share:.1%}"),
    ):
        table.add_row(name, value)
    return table


def read_lengths(path: str | Path) -> np.ndarray:
    """Document lengths, int64 [N], of a file with one whole number a line.

    ValueError names file and line where a line is anything else, or the file has no lengths, or too many.
    """
    lengths = array("q")
    for number, text in numbered_lines(path, "document lengths", CURE):
        lengths.append(_length(text, f"{path}, line {number}"))
    if not lengths:
        raise ValueError(
            f"{path} holds no document lengths: put one whole number of tokens on each line"
        )
    return np.array(lengths, np.int64)


def shortage(
    path: str | Path, lengths: np.ndarray, tokens: int, of: str, consequence: str
) -> str | None:
    """What a command says of a file of lengths with fewer tokens than it works on; None where there are as many.

    tokens, of: how many that is, and of what. consequence: where the others come from.
    """
    held = int(lengths.sum())
    if held >= tokens:
        return None
    return f"{path} holds {held:,} tokens of documents, fewer than the {tokens:,} of {of}: {consequence}"


def _length(text: str, where: str) -> int:
    whole = text.isascii() and text.isdigit() and len(text) < 20
    if not whole or int(text) > MAX_DOCUMENT_TOKENS:
        raise ValueError(
            f"{where}: a document length is a whole number of tokens from 0 to "
            f"{MAX_DOCUMENT_TOKENS}, got {text[:40]!r}: correct or remove the line"
        )
    return int(text)


def write_lengths(lengths: np.ndarray, path: Path) -> None:
    """One length a line, which `plan`, `simulate`, `compile` and `advise` read."""
    path.write_text("".join(f"{length}\n" for length in lengths.tolist()))
