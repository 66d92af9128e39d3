"""Documents into steps of a fixed number of tokens, on the host, in numpy alone.

Two stages. `cut_documents` turns documents into pieces that fit a step; a document that fits is
never cut, longer ones follow a stated policy. `pack_step` then fills one step by next-fit from a
window of pieces:

- the oldest piece in the window always goes first, so no piece waits longer than `window` steps;
- the others follow in the order of their arrival, each if it fits into the room that is left;
- the room into which nothing in the window fits is padding, at the end of the step, and counted.

A packer's whole state is the list of pieces it has seen and not yet placed, at most `window`.

A piece of a cut document is a document of its own to everything downstream: attention does not look
across the cut, and its positions start at 0 again (rotary phases depend on differences only, so
nothing but the lost context changes, and positions stay below the step's tokens). Every token of a
piece that does not begin its document therefore loses context as a target (the piece's first token
is no target any more); that count is `context_lost_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

LongDocuments = Literal["split", "truncate", "refuse"]


@dataclass(frozen=True, eq=False)
class Pieces:
    """What there is to pack once documents are cut; int64 arrays [pieces], in document order.

    `document_tokens` = sum of `lengths` + `truncated_tokens`. `target_tokens` counts the targets of
    the whole documents, one less than each non-empty document's tokens; `context_lost_tokens` is a
    part of it.
    """

    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    document_tokens: int
    target_tokens: int
    truncated_tokens: int
    context_lost_tokens: int

    @property
    def lengths(self) -> np.ndarray:
        return self.stops - self.starts

    @property
    def context_loss(self) -> float:
        """The fraction of all target tokens that lose context, 0 where there are no targets."""
        return self.context_lost_tokens / max(self.target_tokens, 1)


class PackedStep(NamedTuple):
    """Keys and lengths (tokens) of a step's pieces as they are laid, and the padding after them.

    The first `nano_pieces[0]` pieces make up the first nano-batch, and so on; an undivided step is
    one nano-batch. Each nano-batch has as many tokens as any other, its padding at its own end.
    """

    keys: list[int]
    lengths: list[int]
    padding_tokens: int  # of all nano-batches
    nano_pieces: tuple[int, ...]


def document_lengths(lengths: Iterable[int] | np.ndarray) -> np.ndarray:
    """Lengths as int64 [documents]. Raises ValueError for anything but whole numbers from 0 up."""
    values = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths))
    if values.size == 0:
        return np.zeros(0, np.int64)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"document lengths must be one list of whole numbers, got {values.dtype} of shape "
            f"{values.shape}: pass tokens per document, in order"
        )
    if values.min() < 0:
        at = int(values.argmin())
        raise ValueError(
            f"document lengths must not be negative, document {at} has {values[at]}: correct it"
        )
    return values.astype(np.int64)


def cut_pieces(lengths: Iterable[int] | np.ndarray, max_piece_tokens: int) -> Pieces:
    """Every document in pieces of `max_piece_tokens` tokens and a shorter rest; an empty document
    is one empty piece. Raises ValueError for bad arguments."""
    if max_piece_tokens < 1:
        raise ValueError(
            f"max_piece_tokens must be at least 1, got {max_piece_tokens}: give a larger one"
        )
    lengths = document_lengths(lengths)
    counts = np.maximum(1, -(-lengths // max_piece_tokens))
    documents = np.repeat(np.arange(lengths.size), counts)
    within = np.arange(documents.size) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = within * max_piece_tokens
    return Pieces(
        documents=documents,
        starts=starts,
        stops=np.minimum(starts + max_piece_tokens, lengths[documents]),
        document_tokens=int(lengths.sum()),
        target_tokens=int(np.maximum(lengths - 1, 0).sum()),
        truncated_tokens=0,
        context_lost_tokens=int(np.maximum(lengths - max_piece_tokens, 0).sum()),
    )


def cut_documents(
    lengths: Iterable[int] | np.ndarray,
    tokens_per_step: int,
    *,
    long_documents: LongDocuments = "split",
    max_context_loss: float = 0.01,
) -> Pieces:
    """Pieces of at most `tokens_per_step` tokens; only documents longer than a step are touched.

    `long_documents`: "split" cuts them into full steps and a rest, "truncate" keeps their first
    step and counts what it drops, "refuse" raises. A split that takes context from more than the
    fraction `max_context_loss` of all target tokens raises as well. All errors are ValueErrors.
    """
    if tokens_per_step < 1:
        raise ValueError(
            f"tokens_per_step must be at least 1, got {tokens_per_step}: give a larger one"
        )
    if long_documents not in get_args(LongDocuments):
        raise ValueError(
            f"long_documents must be one of {', '.join(get_args(LongDocuments))}, "
            f"got {long_documents!r}"
        )
    lengths = document_lengths(lengths)
    long = np.flatnonzero(lengths > tokens_per_step)
    if long_documents == "truncate":
        dropped_tokens = int((lengths[long] - tokens_per_step).sum())
        kept = cut_pieces(np.minimum(lengths, tokens_per_step), tokens_per_step)
        return replace(
            kept,
            document_tokens=kept.document_tokens + dropped_tokens,
            target_tokens=kept.target_tokens + dropped_tokens,
            truncated_tokens=dropped_tokens,
        )
    pieces = cut_pieces(lengths, tokens_per_step)
    if long.size == 0:
        return pieces
    longest = int(lengths.argmax())
    found = (
        f"{long.size} of {lengths.size} documents are longer than a step of {tokens_per_step} "
        f"tokens (the longest, document {longest}, has {lengths[longest]})"
    )
    if long_documents == "refuse":
        raise ValueError(
            f"long_documents='refuse' allows no document longer than a step, but {found}: "
            "use more tokens per step, or long_documents='split' or 'truncate'"
        )
    if pieces.context_loss > max_context_loss:
        raise ValueError(
            f"long_documents='split' may take context from at most max_context_loss="
            f"{max_context_loss:.2%} of the target tokens, but {found}, so "
            f"{pieces.context_lost_tokens} of {pieces.target_tokens} target tokens "
            f"({pieces.context_loss:.2%}) would lose context: use more tokens per step, "
            "long_documents='truncate', or a larger max_context_loss (1.0 allows any)"
        )
    return pieces


def pack_step(
    pending: Sequence[tuple[int, int]],
    arrivals: Iterator[tuple[int, int]],
    tokens_per_step: int,
    window: int,
) -> tuple[PackedStep, list[tuple[int, int]]]:
    """Fills one step; returns it and the pieces that stay in the window.

    `pending`: the window as the last step left it, (key, tokens) in order of arrival. `arrivals` is
    advanced by the pieces that enter the window and no further. Every placed piece makes room for
    one arrival, so the window holds at most `window` pieces at any time. A step without pieces
    means that both are exhausted. Raises ValueError if a piece is longer than a step.
    """
    keys: list[int] = []
    lengths: list[int] = []
    kept: list[tuple[int, int]] = []
    room = tokens_per_step
    waiting = iter(pending)
    held = len(pending)
    # Room only shrinks within a step: what was passed over once cannot fit later. One pass does.
    while room > 0:
        piece = next(waiting, None)
        if piece is None and held < window:
            piece = next(arrivals, None)
            held += piece is not None
        if piece is None:
            break
        key, tokens = piece
        if tokens > tokens_per_step:
            raise ValueError(
                f"a piece must fit a step of {tokens_per_step} tokens, piece {key} has {tokens}: "
                "cut the documents first (cut_documents)"
            )
        if tokens <= room:
            keys.append(key)
            lengths.append(tokens)
            room -= tokens
            held -= 1
        else:
            kept.append(piece)
    kept.extend(waiting)
    return PackedStep(keys, lengths, room, (len(keys),)), kept


FillStep = Callable[
    [Sequence[tuple[int, int]], Iterator[tuple[int, int]], int, int],
    tuple[PackedStep, list[tuple[int, int]]],
]
"""Packs one step, as `pack_step` does."""


def pack(
    lengths: Iterable[int] | np.ndarray,
    tokens_per_step: int,
    *,
    window: int = 64,
    fill: FillStep = pack_step,
) -> Iterator[PackedStep]:
    """Packs a finite list of lengths, each at most `tokens_per_step`; keys are indices into it.

    Every one is placed exactly once, the last steps from a window that drains. `fill` packs one
    step: `pack_step`, or `nano_batches.pack_halves`. Raises ValueError for bad arguments or a
    length above `tokens_per_step`.
    """
    lengths = document_lengths(lengths)
    check_packing(tokens_per_step, window)
    arrivals = iter(enumerate(lengths.tolist()))
    pending: list[tuple[int, int]] = []
    while True:
        step, pending = fill(pending, arrivals, tokens_per_step, window)
        if not step.keys:
            return
        yield step


def check_packing(tokens_per_step: int, window: int) -> None:
    """Raises ValueError unless both are positive."""
    if tokens_per_step < 1:
        raise ValueError(
            f"tokens_per_step must be at least 1, got {tokens_per_step}: give a larger one"
        )
    if window < 1:
        raise ValueError(f"window must hold at least 1 document, got {window}: the default is 64")
