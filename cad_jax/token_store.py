"""Documents tokenised once, kept in a folder as one memory-mapped array of tokens.

The folder's name is the digest of the documents' bytes and of the tokenizer, so it is found again
only where it is right, and needs no invalidation. It is built beside its place and renamed into it:
whoever is killed midway leaves nothing under the final name, and of two processes that build at
once one's result is kept, the other's (the same) dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cad_jax.sources import Source
from cad_jax.tokenizer import Tokenizer

_FORMAT = 1
_BATCH_BYTES = 4 << 20
_ABANDONED_S = 24 * 3600.0
_BUILDING = ".building-"


@dataclass(frozen=True, eq=False)
class TokenStore:
    """`tokens` [all tokens], unsigned, on disk; document d is tokens[offsets[d]:offsets[d + 1]],
    `offsets` int64 [documents + 1]. Documents with text end with the tokenizer's end-of-document
    token where it has one; empty documents stay empty."""

    tokens: np.ndarray
    offsets: np.ndarray
    digest: str
    vocab_size: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 [documents]."""
        return np.diff(self.offsets)


def open_store(source: Source, tokenizer: Tokenizer, cache_dir: str | Path) -> TokenStore:
    """Opens the store of these documents, building it first where it is missing.

    Reads every file once (for the digest) even if the store exists. Raises ValueError for data that
    cannot be read or holds no token, and for a store on disk that is damaged.
    """
    content = source.content_digest()
    identity = f"{_FORMAT} {content} {tokenizer.fingerprint}"
    digest = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    root = Path(cache_dir).expanduser()
    folder = root / digest
    if not folder.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(root)
            building = root / f"{_BUILDING}{digest}-{secrets.token_hex(8)}"
            building.mkdir()
        except OSError as error:
            raise ValueError(
                f"cache_dir must be a folder that can be written, {str(root)!r} is not "
                f"({error.strerror}): name another one"
            ) from error
        try:
            _write(building, source.documents(content), tokenizer)
            _publish(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return _open(folder, digest, tokenizer.vocab_size)


def _write(folder: Path, documents: Iterable[bytes], tokenizer: Tokenizer) -> None:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    end = tokenizer.end_of_document_id
    ending = np.zeros(0, dtype) if end is None else np.array([end], dtype)
    offsets = array("q", [0])
    with (folder / "tokens.bin").open("wb") as file:
        for batch in _batches(documents):
            for text, ids in zip(batch, tokenizer.encode(batch), strict=True):
                if text:
                    file.write(ids.astype(dtype).tobytes())
                    file.write(ending.tobytes())
                    offsets.append(offsets[-1] + ids.size + ending.size)
                else:
                    offsets.append(offsets[-1])
        _flush(file)
    if offsets[-1] == 0:
        raise ValueError(
            f"data must hold at least one token, {len(offsets) - 1} documents were read and all "
            "are empty: point the paths at files with text"
        )
    with (folder / "offsets.npy").open("wb") as file:
        np.save(file, np.frombuffer(offsets, np.int64))
        _flush(file)
    meta = {"format": _FORMAT, "dtype": dtype.name, "documents": len(offsets) - 1}
    with (folder / "meta.json").open("w") as file:
        json.dump(meta | {"tokens": offsets[-1]}, file)
        _flush(file)


def _batches(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document) + 64  # empty documents must not grow a batch without end
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _publish(building: Path, folder: Path) -> None:
    try:
        os.rename(building, folder)
    except OSError:
        # A folder with files in it cannot be replaced: another process was first, with the same.
        if not folder.exists():
            raise
        return
    descriptor = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(root: Path) -> None:
    """Drops what killed builds left behind: folders in which nothing was written for a day."""
    for folder in root.glob(f"{_BUILDING}*"):
        try:
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        except OSError:
            continue  # its owner has just finished
        if time.time() - newest > _ABANDONED_S:
            shutil.rmtree(folder, ignore_errors=True)


def _open(folder: Path, digest: str, vocab_size: int) -> TokenStore:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        offsets = np.load(folder / "offsets.npy")
        tokens = np.memmap(folder / "tokens.bin", dtype=np.dtype(meta["dtype"]), mode="r")
        if (tokens.size, offsets[-1]) != (meta["tokens"], meta["tokens"]):
            raise ValueError(f"{tokens.size} tokens on disk, {meta['tokens']} written")
        if offsets.size != meta["documents"] + 1:
            raise ValueError(f"{offsets.size - 1} documents on disk, {meta['documents']} written")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"a token store must be complete, {str(folder)!r} is damaged ({error}): "
            "delete the folder, it is built again from the documents"
        ) from error
    offsets.setflags(write=False)
    return TokenStore(tokens, offsets, digest, vocab_size)
