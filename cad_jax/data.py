"""Training data: documents, tokens, a reproducible order, packed microbatches, exact resume.

    files -> documents -> token store -> pieces -> order (grain) -> window, next-fit -> PackedBatch

Every host runs this whole path and gets the same batches: nothing in it depends on the mesh or on
the number of processes. The order of the pieces is a pure function of (seed, epoch, index), and
packing of that order and the window; so a position in the stream is a handful of integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import grain
import numpy as np

from cad_jax.sharding.packing import (
    LongDocuments,
    PackedStep,
    Pieces,
    check_packing,
    cut_documents,
    cut_pieces,
    pack_step,
)
from cad_jax.sources import Source, SourceKind
from cad_jax.token_store import TokenStore, open_store
from cad_jax.tokenizer import open_tokenizer

_STATE_FORMAT = 1
_MAX_BIGRAM_VOCABULARY = 4096
_ENTROPY_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class DataConfig:
    """What to train on and in which order."""

    source: SourceKind = "stdlib"
    """stdlib: the source files of the running Python's standard library; text: one document a file;
    jsonl: one document a line."""
    paths: tuple[str, ...] = ()
    """Globs of the files of text and jsonl, such as 'folder/**/*.txt'."""
    jsonl_field: str = "text"
    """The field of a JSON line that holds the document's text."""
    tokenizer: str = "byte"
    """byte (264 ids: 256 bytes, 256 ends a document, 7 unused), or a path to a tokenizer.json."""
    end_of_document: str | None = None
    """The token of a tokenizer.json that closes each document; None closes them with nothing."""
    max_piece_tokens: int | None = None
    """Cut every document into pieces of at most so many tokens, shuffled apart, so that a step
    mixes documents. What the pieces lose of their context is counted, and not limited."""
    long_documents: LongDocuments = "split"
    """Documents longer than a microbatch: split, truncate or refuse."""
    max_context_loss: float = 0.01
    """Split is refused where more than this fraction of target tokens would lose context."""
    window: int = 64
    """Documents from which packing chooses; the oldest always goes first."""
    seed: int = 0
    """Of the order of the documents."""
    cache_dir: str = "~/.cache/cad_jax"
    """Folder that keeps the documents as tokens, for this and for later runs."""

    def __post_init__(self) -> None:
        check_packing(1, self.window)
        if not 0 <= self.seed < 2**32:
            raise ValueError(
                f"seed must be from 0 to 2**32 - 1, got {self.seed}: choose one in that range"
            )
        if not 0.0 <= self.max_context_loss <= 1.0:
            raise ValueError(
                f"max_context_loss is a fraction from 0 to 1, got {self.max_context_loss}: "
                "1% is 0.01"
            )
        if self.max_piece_tokens is not None and self.max_piece_tokens < 2:
            raise ValueError(
                f"max_piece_tokens must be at least 2 (one token predicts nothing), got "
                f"{self.max_piece_tokens}: give a larger one, or None for whole documents"
            )


class PackedBatch(NamedTuple):
    """One microbatch: N pieces end to end, then padding, `tokens` = S * T rows in all.

    A piece is a whole document unless the document was cut. Targets are the next token of the same
    piece: its last token has none (a document's last token ends it, so nothing is left to predict).
    Rows without a target, padding among them, have weight 0, target 0; padding has id 0 and
    position 0. `context_lost_tokens` counts the tokens of pieces that do not begin their document.
    """

    lengths: np.ndarray  # int64 [N], in order of placement
    document_ids: np.ndarray  # int64 [N], index of the document in the data
    document_starts: np.ndarray  # int64 [N], where in its document the piece begins
    ids: np.ndarray  # int32 [tokens]
    positions: np.ndarray  # int32 [tokens], from 0 in every piece
    targets: np.ndarray  # int32 [tokens]
    weights: np.ndarray  # float32 [tokens], 1 where there is a target, else 0
    padding_tokens: int
    target_tokens: int
    context_lost_tokens: int


@dataclass(frozen=True)
class DocumentStatistics:
    """The data as a table's rows; lengths in tokens, the end-of-document token included.

    `target_tokens` are those of whole documents; `context_lost_tokens` of them lose context to a
    cut, `truncated_tokens` are dropped. `pieces` is what an epoch packs.
    """

    documents: int
    zero_length_documents: int
    tokens: int
    min_tokens: int
    median_tokens: float
    p90_tokens: float
    max_tokens: int
    pieces: int
    target_tokens: int
    context_lost_tokens: int
    truncated_tokens: int


@dataclass(frozen=True)
class ReferenceEntropies:
    """Cross-entropy of the data under its own token frequencies, nats per target token (per byte
    with the byte tokenizer): what predicting without context, and from one token, reaches.
    `bigram_nats` is None for vocabularies above 4096, where it would only measure the sample."""

    unigram_nats: float
    bigram_nats: float | None


class DocumentBatches:
    """The endless stream of packed microbatches; an iterator for one thread at a time. Whoever
    draws ahead keeps `state()` as it was after each batch together with that batch.

    Raises ValueError, before anything else starts, for data that cannot be read, cannot be
    tokenised, is empty, or has documents that the policy refuses.
    """

    def __init__(self, config: DataConfig, tokens_per_microbatch: int) -> None:
        check_packing(tokens_per_microbatch, config.window)
        limit = config.max_piece_tokens
        if limit is not None and limit > tokens_per_microbatch:
            raise ValueError(
                f"max_piece_tokens must not exceed a microbatch of {tokens_per_microbatch} tokens, "
                f"got {limit}: give a smaller one, or None for whole documents"
            )
        tokenizer = open_tokenizer(config.tokenizer, config.end_of_document)
        source = Source(config.source, config.paths, config.jsonl_field)
        self.store: TokenStore = open_store(source, tokenizer, config.cache_dir)
        self.tokens_per_microbatch = tokens_per_microbatch
        if limit is None:
            self.pieces: Pieces = cut_documents(
                self.store.lengths,
                tokens_per_microbatch,
                long_documents=config.long_documents,
                max_context_loss=config.max_context_loss,
            )
        else:
            self.pieces = cut_pieces(self.store.lengths, limit)
        self._piece_lengths = self.pieces.lengths
        self._window = config.window
        order = piece_order(len(self._piece_lengths), config.seed)
        # Looked up on arrival, to fill the batch, and by a sample before that: 40 us each time.
        self._piece_at = lru_cache(maxsize=1 << 16)(lambda index: int(order[index]))
        self._identity = {
            "data": self.store.digest,
            "seed": config.seed,
            "window": config.window,
            "tokens_per_microbatch": tokens_per_microbatch,
            "max_piece_tokens": limit,
            "long_documents": config.long_documents if limit is None else None,
        }
        self._next_index = 0
        self._pending: list[tuple[int, int]] = []

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return self.store.vocab_size

    @property
    def max_document_tokens(self) -> int:
        """Tokens of the longest piece: no batch holds a longer one."""
        return int(self._piece_lengths.max())

    def __iter__(self) -> DocumentBatches:
        return self

    def __next__(self) -> PackedBatch:
        step, self._pending, self._next_index = self._pack(self._pending, self._next_index)
        return self._gather(step)

    def sample_lengths(self, batches: int) -> list[np.ndarray]:
        """Lengths (int64 [N]) of the first microbatches of the stream, wherever it stands now and
        without moving it: the same after a resume as before."""
        samples, pending, next_index = [], [], 0
        for _ in range(batches):
            step, pending, next_index = self._pack(pending, next_index)
            samples.append(np.asarray(step.lengths, np.int64))
        return samples

    def state(self) -> dict[str, Any]:
        """The position in the stream, to be saved with a checkpoint: JSON values, a few kB.

        `next_index` counts pieces drawn in all epochs, `window` holds the indices of those drawn
        and not yet in a batch. It says nothing of hosts or mesh.
        """
        return {
            "format": _STATE_FORMAT,
            "epoch": self._next_index // len(self._piece_lengths),
            "next_index": self._next_index,
            "window": [index for index, _ in self._pending],
            "identity": dict(self._identity),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state` was taken. Raises ValueError, leaving the stream where it
        was, if the state is malformed or belongs to other data or another order."""
        try:
            written, identity = state["format"], dict(state["identity"])
            next_index = int(state["next_index"])
            window = [int(index) for index in state["window"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"a data state needs format, identity, next_index and window, this one is "
                f"malformed ({error!r}): restore another checkpoint"
            ) from error
        if written != _STATE_FORMAT:
            raise ValueError(
                f"a data state must have format {_STATE_FORMAT}, this one has {written}: "
                "resume with the version of cad_jax that wrote it"
            )
        for name, value in self._identity.items():
            if identity.get(name) != value:
                raise ValueError(
                    f"resuming needs the documents in the same order, but the checkpoint was "
                    f"written with {name}={identity.get(name)!r} and this run has {value!r}: "
                    "set it back, or start a new run"
                )
        inside = len(window) <= self._window and len(set(window)) == len(window)
        if not inside or not all(0 <= index < next_index for index in window):
            raise ValueError(
                f"a data state's window must hold at most {self._window} different indices below "
                f"next_index={next_index}, got {window}: restore another checkpoint"
            )
        self._next_index = next_index
        self._pending = [(index, self._length_at(index)) for index in window]

    def statistics(self) -> DocumentStatistics:
        """Figures of the documents and of what cutting does to them, over one epoch."""
        return document_statistics(self.store.lengths, self.pieces)

    def _length_at(self, index: int) -> int:
        return int(self._piece_lengths[self._piece_at(index)])

    def _pack(
        self, pending: list[tuple[int, int]], next_index: int
    ) -> tuple[PackedStep, list[tuple[int, int]], int]:
        drawn = next_index

        def arrivals() -> Iterator[tuple[int, int]]:
            nonlocal drawn
            while True:
                drawn += 1
                yield drawn - 1, self._length_at(drawn - 1)

        step, pending = pack_step(pending, arrivals(), self.tokens_per_microbatch, self._window)
        return step, pending, drawn

    def _gather(self, step: PackedStep) -> PackedBatch:
        chosen = np.asarray([self._piece_at(index) for index in step.keys], np.int64)
        lengths = np.asarray(step.lengths, np.int64)
        document_ids = self.pieces.documents[chosen]
        document_starts = self.pieces.starts[chosen]
        ids = np.zeros(self.tokens_per_microbatch, np.int32)
        row = 0
        for begin, length in zip(
            (self.store.offsets[document_ids] + document_starts).tolist(),
            step.lengths,
            strict=True,
        ):
            ids[row : row + length] = self.store.tokens[begin : begin + length]
            row += length
        targets, weights = next_token_targets(ids, lengths)
        return PackedBatch(
            lengths=lengths,
            document_ids=document_ids,
            document_starts=document_starts,
            ids=ids,
            positions=document_positions(lengths, self.tokens_per_microbatch),
            targets=targets,
            weights=weights,
            padding_tokens=step.padding_tokens,
            target_tokens=int(np.maximum(lengths - 1, 0).sum()),
            context_lost_tokens=int(lengths[document_starts > 0].sum()),
        )


class _PieceIndices:
    """The numbers 0 to pieces - 1 as a grain source."""

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return self._pieces

    def __getitem__(self, index: int) -> int:
        return int(index)


def piece_order(pieces: int, seed: int) -> grain.MapDataset:
    """order[index] is the piece at a place of the endless stream: index // pieces is the epoch, and
    each epoch is a permutation of its own. Nothing but (seed, epoch, index) decides."""
    return grain.MapDataset.source(_PieceIndices(pieces)).seed(seed).shuffle().repeat()


def next_token_targets(ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Targets int32 [tokens] and weights float32 [tokens] of documents of `lengths` laid end to end
    in `ids` [tokens], padding behind them: the next token, except at each document's last token and
    in the padding, where both are 0."""
    weights = np.zeros(ids.size, np.float32)
    ends = np.cumsum(lengths)
    weights[: int(lengths.sum())] = 1.0
    weights[ends[lengths > 0] - 1] = 0.0
    targets = np.zeros(ids.size, np.int32)
    targets[:-1] = ids[1:]
    targets[weights == 0.0] = 0
    return targets, weights


def document_positions(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """Position of each row within its document, int32 [tokens]; 0 in the padding."""
    used = int(lengths.sum())
    positions = np.zeros(tokens, np.int32)
    positions[:used] = np.arange(used) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return positions


def document_statistics(lengths: np.ndarray, pieces: Pieces) -> DocumentStatistics:
    """Figures of documents of `lengths` (int64 [documents], at least one) and their pieces."""
    return DocumentStatistics(
        documents=int(lengths.size),
        zero_length_documents=int((lengths == 0).sum()),
        tokens=int(lengths.sum()),
        min_tokens=int(lengths.min()),
        median_tokens=float(np.median(lengths)),
        p90_tokens=float(np.percentile(lengths, 90)),
        max_tokens=int(lengths.max()),
        pieces=int(pieces.documents.size),
        target_tokens=pieces.target_tokens,
        context_lost_tokens=pieces.context_lost_tokens,
        truncated_tokens=pieces.truncated_tokens,
    )


def reference_entropies(store: TokenStore, max_tokens: int = 1 << 28) -> ReferenceEntropies:
    """Unigram and bigram entropies over the targets of whole documents, from at most the first
    `max_tokens` tokens (the demo's 32 M take about half a second)."""
    vocab = store.vocab_size
    total = min(store.tokens.size, max_tokens)
    bigrams = vocab <= _MAX_BIGRAM_VOCABULARY
    counts = np.zeros(vocab * vocab if bigrams else vocab, np.int64)

    def keys(at: np.ndarray | slice) -> np.ndarray:
        """What is counted for the targets at these tokens: (token before, token) or token."""
        tokens = store.tokens[at].astype(np.int64)
        before = slice(at.start - 1, at.stop - 1) if isinstance(at, slice) else at - 1
        return store.tokens[before].astype(np.int64) * vocab + tokens if bigrams else tokens

    for start in range(1, total, _ENTROPY_CHUNK_TOKENS):
        part = keys(slice(start, min(start + _ENTROPY_CHUNK_TOKENS, total)))
        counts += np.bincount(part, minlength=counts.size)
    begins = np.unique(store.offsets)
    begins = begins[(begins > 0) & (begins < total)]
    counts -= np.bincount(keys(begins), minlength=counts.size)
    if not bigrams:
        return ReferenceEntropies(_entropy_nats(counts), None)
    pairs = counts.reshape(vocab, vocab)
    conditional = _entropy_nats(counts) - _entropy_nats(pairs.sum(axis=1))
    return ReferenceEntropies(_entropy_nats(pairs.sum(axis=0)), conditional)


def _entropy_nats(counts: np.ndarray) -> float:
    """Entropy of the distribution counts / sum(counts), 0 where there are none."""
    used = counts[counts > 0].astype(np.float64)
    if used.size == 0:
        return 0.0
    return float(np.log(used.sum()) - (used * np.log(used)).sum() / used.sum())
