"""Where documents come from: text files, JSON lines, the Python standard library's source files.

A source lists its files and streams their documents as bytes. It feeds the same raw bytes to a
hash, so that the content's digest names the token store and a change between two readings shows.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

SourceKind = Literal["stdlib", "text", "jsonl"]
_CHUNK_BYTES = 1 << 20
# How files of other formats begin, and what makes text of them.
_OTHER_FORMATS = {
    b"PAR1": "parquet: write its text column as JSON lines, for source 'jsonl'",
    b"\x1f\x8b": "compressed with gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstandard: unpack it",
}


@dataclass(frozen=True)
class Source:
    """The documents of one kind of data; a text file or a JSON line is one document.

    `paths` are globs (`~` and `**` allowed), unused for "stdlib": the *.py files below the running
    interpreter's standard library, site-packages left out. Files come in the order of the globs,
    sorted within each, once each. Text and JSON lines must be UTF-8; the standard library's files
    may be anything (a few are in other encodings on purpose).
    """

    kind: SourceKind
    paths: tuple[str, ...] = ()
    jsonl_field: str = "text"

    def __post_init__(self) -> None:
        if self.kind not in get_args(SourceKind):
            raise ValueError(
                f"a data source must be one of {', '.join(get_args(SourceKind))}, got {self.kind!r}"
            )
        if (self.kind == "stdlib") == bool(self.paths):
            rule = "takes no paths" if self.kind == "stdlib" else "needs at least one path"
            raise ValueError(
                f"source {self.kind!r} {rule}, got paths={self.paths!r}: give globs such as "
                "'folder/**/*.txt' to 'text' or 'jsonl' (--data.paths)"
            )

    def files(self) -> list[Path]:
        """Raises ValueError where there are none or a path names a folder."""
        if self.kind == "stdlib":
            return _standard_library_files()
        found: dict[Path, None] = {}
        for pattern in self.paths:
            names = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
            matches = [path for path in map(Path, names) if not path.is_dir()]
            if not matches:
                cure = f"; it is a folder: write {pattern.rstrip('/') + '/**/*'!r}" if names else ""
                raise ValueError(
                    f"every data path must match at least one file, {pattern!r} matches none: "
                    f"correct the path or the glob{cure}"
                )
            found.update(dict.fromkeys(matches))
        return list(found)

    def content_digest(self) -> str:
        """Hash of the raw bytes of every file, in order (about 1 s per GB), names left out.

        Raises ValueError for a file that cannot be read.
        """
        hasher = self._hasher()
        for path in self.files():
            size = 0
            for chunk in _read_chunks(path):
                hasher.update(chunk)
                size += len(chunk)
            hasher.update(size.to_bytes(8, "little"))
        return hasher.hexdigest()

    def documents(self, expected_digest: str) -> Iterator[bytes]:
        """Streams every document. Raises ValueError, with file and line, for what cannot be read,
        and at the end if the files no longer are what `expected_digest` was taken of."""
        hasher = self._hasher()
        for path in self.files():
            size = 0
            if self.kind == "jsonl":
                for number, line in enumerate(_read_lines(path), 1):
                    hasher.update(line)
                    size += len(line)
                    if number == 1:
                        _check_format(line, path)
                    if line.strip():
                        yield _json_text(line, f"{path}:{number}", self.jsonl_field)
            else:
                content = b"".join(_read_chunks(path))
                hasher.update(content)
                size = len(content)
                if self.kind == "text":
                    _check_utf8(content, path)
                yield content
            hasher.update(size.to_bytes(8, "little"))
        if hasher.hexdigest() != expected_digest:
            raise ValueError(
                "data files must not change while they are read, but at least one of "
                f"{self.paths or 'the standard library'} did: start again once they are complete"
            )

    def _hasher(self):
        field = self.jsonl_field if self.kind == "jsonl" else ""
        return hashlib.blake2b(f"{self.kind} {field}\n".encode(), digest_size=16)


def _standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(root) for path in root.rglob("*.py") if not path.is_dir())
    skipped = {"site-packages", "dist-packages"}
    kept = sorted(path.as_posix() for path in relative if skipped.isdisjoint(path.parts))
    if not kept:
        raise ValueError(
            f"source 'stdlib' needs the standard library as source files, {str(root)!r} has none: "
            "use an interpreter that ships them, or your own files with source 'text'"
        )
    return [root / name for name in kept]


def _read_chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"every data file must be readable, {str(path)!r} is not ({error.strerror}): "
        "correct its permissions or leave it out of the paths"
    )


def _check_utf8(content: bytes, path: Path) -> None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        _check_format(content, path)
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"text must be UTF-8, {path}:{line} has byte 0x{content[error.start]:02x} at offset "
            f"{error.start} ({error.reason}): convert the file or leave it out of the paths"
        ) from error


def _check_format(content: bytes, path: Path) -> None:
    for magic, advice in _OTHER_FORMATS.items():
        if content.startswith(magic):
            raise ValueError(f"data files must be plain text or JSON lines, {path} is {advice}")


def _json_text(line: bytes, place: str, field: str) -> bytes:
    try:
        record = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except ValueError as error:
        raise ValueError(
            f"every line must be one JSON object in UTF-8, {place} is not ({error}): "
            "correct or remove the line"
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"every JSON line must hold its text as a string in field {field!r}, {place} does not "
            f"(it has {found}): name the right one (--data.jsonl-field) or correct the line"
        )
    try:
        return record[field].encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text must be encodable as UTF-8, {place} is not ({error.reason}): "
            "remove the lone surrogate escapes from the line"
        ) from error
