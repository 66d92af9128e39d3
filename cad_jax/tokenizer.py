"""Documents as UTF-8 bytes to token ids: the bytes, or any Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

BYTE_TOKENIZER = "byte"  # its name; any other is a path


class Tokenizer(Protocol):
    """`vocab_size`: every id is below it. `end_of_document_id`: closes each document that has text,
    None where documents are not closed. `fingerprint`: equal only where `encode` is."""

    vocab_size: int
    end_of_document_id: int | None
    fingerprint: str

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Token ids of each document, without its end; integers [tokens]."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a document, 257 to 263 are never produced: 264 divides over
    the 2, 4 or 8 shards of a vocabulary."""

    vocab_size = 264
    end_of_document_id: int | None = 256
    fingerprint = "byte-264-eod-256"

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, np.uint8) for document in documents]


class FileTokenizer:
    """A `tokenizer.json`. The special tokens that its own post-processor adds are added (Llama 3:
    begin-of-text); its padding and truncation are switched off; the text of a special token inside
    a document is encoded as ordinary text. Bytes that are not UTF-8 are replaced by U+FFFD.

    `end_of_document` is the text of the token that ends each document, None for no such token (the
    file does not say which one it is). Raises ValueError for a file that cannot be read as a
    tokenizer and for a token it does not have.
    """

    def __init__(self, path: str, end_of_document: str | None = None):
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ValueError(
                f"tokenizer must be 'byte' or the path of a readable tokenizer.json, got {path!r} "
                f"({error.strerror}): correct the path"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"tokenizer must be a Hugging Face tokenizer.json, {path!r} is not one ({error}): "
                "save it with tokenizer.save_pretrained or tokenizer.save"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = 1 + max(ids, default=0)
        self.end_of_document_id = None
        if end_of_document is not None:
            self.end_of_document_id = self._tokenizer.token_to_id(end_of_document)
            if self.end_of_document_id is None:
                raise ValueError(
                    f"end_of_document must be a token of {path!r}, {end_of_document!r} is not one "
                    "of them: use the token that ends a text there, such as '</s>', or None"
                )
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        self.fingerprint = f"file-{digest}-eod-{self.end_of_document_id}"

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        texts = [document.decode("utf-8", errors="replace") for document in documents]
        encodings = self._tokenizer.encode_batch_fast(texts)
        return [np.asarray(encoding.ids, np.int64) for encoding in encodings]


def open_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """ "byte" or the path of a tokenizer.json. Raises ValueError where that cannot be used."""
    if name != BYTE_TOKENIZER:
        return FileTokenizer(name, end_of_document)
    if end_of_document is not None:
        raise ValueError(
            f"end_of_document names a token of a tokenizer.json, got {end_of_document!r} with the "
            "byte tokenizer, which ends documents with its own id 256: leave it None"
        )
    return ByteTokenizer()
