"""Training data: documents, tokens, a reproducible order, packed microbatches, exact resume.

    files -> documents -> token store -> pieces -> order (grain) -> window, packing -> PackedBatch

Every host runs this whole path and gets the same batches: nothing in it depends on the mesh or on
the number of processes. The order of the pieces is a pure function of (seed, epoch, index), and
packing of that order and the window; so a position in the stream is a handful of integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grain
import numpy as np

from cad_jax.packed_batch import PackedBatch, document_positions, next_token_targets
from cad_jax.sharding.nano_batches import check_nano_batches, pack_halves
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
from cad_jax.tokenizer import BYTE_TOKENIZER, open_tokenizer

_STATE_FORMAT = 1
_DEFAULT_IDENTITY = {"nano_batches": 1}  # not written: states were the same before it was a choice
# What to set back where the name of a part of the identity does not say it.
_CURES = {"nano_batches": "resume with the same --overlap (2: pingpong, 1: single_stream)"}
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
    tokenizer: str = BYTE_TOKENIZER
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

    With `nano_batches` 2, a microbatch is two nano-batches of as many tokens, each of whole pieces,
    alike in attention work (`sharding.nano_batches`); where the piece that must go next is longer
    than a nano-batch, the microbatch is undivided: `PackedBatch.nano_lengths` tells. Either way a
    piece waits for at most `window` microbatches.

    Raises ValueError, before anything else starts, for arguments that do not fit together and data
    that cannot be read, cannot be tokenised, is empty, or has documents that the policy refuses.
    """

    def __init__(
        self, config: DataConfig, tokens_per_microbatch: int, nano_batches: int = 1
    ) -> None:
        check_packing(tokens_per_microbatch, config.window)
        check_nano_batches(nano_batches, tokens_per_microbatch)
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
        self.nano_batches = nano_batches
        if limit is None:
            self.pieces: Pieces = _cut(self.store.lengths, tokens_per_microbatch, config)
        else:
            self.pieces = cut_pieces(self.store.lengths, limit)
        self._piece_lengths = self.pieces.lengths
        self._window = config.window
        self._fill = pack_step if nano_batches == 1 else pack_halves
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
        if nano_batches != _DEFAULT_IDENTITY["nano_batches"]:
            self._identity["nano_batches"] = nano_batches
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

    @property
    def tokens_per_nano_batch(self) -> int:
        """No nano-batch of a divided microbatch holds a longer piece."""
        return self.tokens_per_microbatch // self.nano_batches

    @property
    def undivided_microbatches(self) -> int:
        """Microbatches an epoch that cannot be divided into `nano_batches`: one for each piece
        longer than a nano-batch."""
        return int((self._piece_lengths > self.tokens_per_nano_batch).sum())

    def __iter__(self) -> DocumentBatches:
        return self

    def __next__(self) -> PackedBatch:
        step, self._pending, self._next_index = self._pack(self._pending, self._next_index)
        return self._gather(step)

    def sample_lengths(self, batches: int) -> list[np.ndarray]:
        """Lengths (int64 [N]) of the first microbatches of the stream, wherever it stands now and
        without moving it: the same after a resume as before."""
        return [np.concatenate(parts) for parts in self.sample_nano_lengths(batches)]

    def sample_nano_lengths(self, batches: int) -> list[tuple[np.ndarray, ...]]:
        """The same by nano-batch: one array for an undivided microbatch, two for a divided one."""
        samples, pending, next_index = [], [], 0
        for _ in range(batches):
            step, pending, next_index = self._pack(pending, next_index)
            samples.append(_nano_lengths(step))
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
        identity = _DEFAULT_IDENTITY | identity
        current = _DEFAULT_IDENTITY | self._identity
        differ = [name for name, value in current.items() if identity.get(name) != value]
        if differ:
            values = (f"{n}={identity.get(n)!r} and this run has {current[n]!r}" for n in differ)
            cures = dict.fromkeys(_CURES.get(name, "set it back") for name in differ)
            raise ValueError(
                "resuming needs the documents in the same order, but the checkpoint was written with "
                f"{', '.join(values)}: {', '.join(cures)}, or start a new run"
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

        step, pending = self._fill(pending, arrivals(), self.tokens_per_microbatch, self._window)
        return step, pending, drawn

    def _gather(self, step: PackedStep) -> PackedBatch:
        chosen = np.asarray([self._piece_at(index) for index in step.keys], np.int64)
        lengths = np.asarray(step.lengths, np.int64)
        document_ids = self.pieces.documents[chosen]
        document_starts = self.pieces.starts[chosen]
        ids = np.zeros(self.tokens_per_microbatch, np.int32)
        nano_lengths = _nano_lengths(step)
        nano_tokens = self.tokens_per_microbatch // len(nano_lengths)
        begins = iter((self.store.offsets[document_ids] + document_starts).tolist())
        rows = []
        for nano_batch, own in enumerate(nano_lengths):
            row = nano_batch * nano_tokens
            nano_ids = ids[row : row + nano_tokens]
            for end, length in zip(np.cumsum(own).tolist(), own.tolist(), strict=True):
                begin = next(begins)
                nano_ids[end - length : end] = self.store.tokens[begin : begin + length]
            positions = document_positions(own, nano_tokens)
            rows.append((positions, *next_token_targets(nano_ids, own)))
        positions, targets, weights = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        return PackedBatch(
            lengths=lengths,
            document_ids=document_ids,
            document_starts=document_starts,
            ids=ids,
            positions=positions,
            targets=targets,
            weights=weights,
            padding_tokens=step.padding_tokens,
            target_tokens=int(np.maximum(lengths - 1, 0).sum()),
            context_lost_tokens=int(lengths[document_starts > 0].sum()),
            nano_lengths=nano_lengths,
        )


def _cut(lengths: np.ndarray, tokens_per_microbatch: int, config: DataConfig) -> Pieces:
    try:
        return cut_documents(
            lengths,
            tokens_per_microbatch,
            long_documents=config.long_documents,
            max_context_loss=config.max_context_loss,
        )
    except ValueError as error:
        raise ValueError(
            f"{error} (--training.tokens-per-microbatch, --data.long-documents, --data.max-context-loss)"
        ) from error


def _nano_lengths(step: PackedStep) -> tuple[np.ndarray, ...]:
    """Lengths of a step's pieces by nano-batch, int64."""
    lengths = np.asarray(step.lengths, np.int64)
    return tuple(np.split(lengths, np.cumsum(step.nano_pieces)[:-1]))


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
