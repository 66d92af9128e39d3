"""The file in which the profiler and the cost model meet: what one device's work takes, as CSV.

Comment lines `# name: value` come first and say how the figures were had; then one table whose column
`part` says what a row is: attention of a task, linear layers of so many tokens, one exchange. Cells that
a part does not have are empty. The header counts the rows: a file cut short is refused.
"""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from cad_jax.sharding.text_lines import numbered_lines

LABELS = ("measured", "derived")
TILES_OF = ("task", "buffer")
LINKS = ("within_node", "between_nodes")
MAX_LINES = 2**18  # no grid has so many points
LEAST, MOST = 1e-15, 1e15  # of any number: products of a few of them stay finite
CURE = "write the file with cad-jax profile, or correct it"


@dataclass(frozen=True)
class ProfileHeader:
    """How a profile was had.

    label: "measured" | "derived". devices: names of `cost.DEVICES` that it is for, with spaces between.
    hardware: in words. date: of the measurement. jax: version, or "none". kernel: of attention.
    tile_rows: query rows of a kernel's tile. tiles_of: "task", every task begins a tile of its own;
    "buffer", tiles cut the whole buffer. notes: sources of derived figures, circumstances of measured ones.
    """

    label: str
    devices: str
    hardware: str
    date: str
    jax: str
    kernel: str
    dtype: str
    tile_rows: int
    tiles_of: str
    notes: tuple[str, ...] = ()


class AttentionRow(NamedTuple):
    """One causal task, among others that fill the device: its last query sees `key_rows` keys."""

    q_heads: int
    kv_heads: int
    head_dim: int
    query_rows: int
    key_rows: int
    forward_s: float
    backward_s: float


class SlackRow(NamedTuple):
    """A call whose buffers hold so many rows and no query that attends anything."""

    q_heads: int
    kv_heads: int
    head_dim: int
    query_rows: int
    key_rows: int
    forward_s: float
    backward_s: float


class LinearRow(NamedTuple):
    """Matrix products of `weights` weights with so many tokens."""

    weights: int
    tokens: int
    forward_s: float
    backward_s: float


class TransferRow(NamedTuple):
    """One exchange of `ranks` ranks in `hops` collectives; wire_bytes: of one rank, padding included."""

    transport: str
    link: str
    ranks: int
    hops: int
    wire_bytes: int
    transfer_s: float


Row = AttentionRow | SlackRow | LinearRow | TransferRow
_PARTS: dict[str, type[Row]] = {
    "attention": AttentionRow,
    "slack": SlackRow,
    "linear": LinearRow,
    "transfer": TransferRow,
}
COLUMNS = ("part", *dict.fromkeys(f for row in _PARTS.values() for f in row._fields))


@dataclass(frozen=True)
class Profile:
    """A header and its rows."""

    header: ProfileHeader
    rows: tuple[Row, ...]

    def of[T: Row](self, part: type[T]) -> list[T]:
        """Rows of one part, in the order of the file."""
        return [row for row in self.rows if isinstance(row, part)]

    def save(self, path: str | Path) -> None:
        """OSError where the file cannot be written."""
        header = self.header
        lines = [f"# {n}: {getattr(header, n)}\n" for n in _HEADER_NAMES]
        lines.append(f"# rows: {len(self.rows)}\n")
        lines += [f"# note: {' '.join(note.split())}\n" for note in header.notes]
        with Path(path).open("w", newline="") as file:
            file.writelines(lines)
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for row in self.rows:
                part = next(name for name, kind in _PARTS.items() if isinstance(row, kind))
                writer.writerow({"part": part, **_cells(row)})


_HEADER_NAMES = tuple(n for n in ProfileHeader.__dataclass_fields__ if n != "notes")


def _cells(row: Row) -> dict[str, str]:
    return {
        name: f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in row._asdict().items()
    }


def load(path: str | Path) -> Profile:
    """The profile in a file.

    Raises:
        ValueError: the file cannot be read or is damaged; the message names the line.
    """
    lines = list(numbered_lines(path, "a profile", CURE, MAX_LINES))
    header, count = _header(path, [text for _, text in lines if text.startswith("#")])
    table = [(n, next(csv.reader([text]))) for n, text in lines if not text.startswith("#")]
    columns = table[0][1] if table else []
    if tuple(columns) != COLUMNS:
        raise ValueError(
            f"{path} must have the columns {','.join(COLUMNS)}, got {','.join(columns) or 'none'}: {CURE}"
        )
    parsed = [_row(f"{path}, line {n}", cells) for n, cells in table[1:]]
    if len(parsed) != count:
        raise ValueError(
            f"{path} must have the {count} rows that its header counts, got {len(parsed)}: {CURE}"
        )
    return Profile(header, tuple(parsed))


def _header(path: str | Path, comments: Iterable[str]) -> tuple[ProfileHeader, int]:
    """The header and the number of rows."""
    found: dict[str, str] = {}
    notes = []
    for line in comments:
        name, _, value = line.lstrip("# ").partition(":")
        if name.strip() == "note":
            notes.append(value.strip())
        else:
            found[name.strip()] = value.strip()
    for name in (*_HEADER_NAMES, "rows"):
        if not found.get(name):
            raise ValueError(f"{path} must have a line '# {name}: ...', got none: {CURE}")
    for name, choices in (("label", LABELS), ("tiles_of", TILES_OF)):
        if found[name] not in choices:
            raise ValueError(
                f"{path}: {name} must be one of {', '.join(choices)}, got {found[name]!r}: {CURE}"
            )
    values = {n: found[n] for n in _HEADER_NAMES if n != "tile_rows"}
    tile_rows, rows = (int(_number(f"{path}: {n}", found[n], int)) for n in ("tile_rows", "rows"))
    return ProfileHeader(**values, tile_rows=tile_rows, notes=tuple(notes)), rows


def _row(where: str, cells: list[str]) -> Row:
    if len(cells) != len(COLUMNS):
        raise ValueError(f"{where}: a row must have {len(COLUMNS)} cells, got {len(cells)}: {CURE}")
    named = dict(zip(COLUMNS, cells, strict=True))
    kind = _PARTS.get(named["part"])
    if kind is None:
        raise ValueError(
            f"{where}: part must be one of {', '.join(_PARTS)}, got {named['part']!r}: {CURE}"
        )
    types = get_type_hints(kind)
    values: dict[str, Any] = {
        name: named[name]
        if types[name] is str
        else _number(f"{where}: {name}", named[name], types[name])
        for name in kind._fields
    }
    if "link" in values and values["link"] not in LINKS:
        raise ValueError(
            f"{where}: link must be one of {', '.join(LINKS)}, got {values['link']!r}: {CURE}"
        )
    return kind(**values)


def _number(where: str, text: str, kind: type) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not value > 0:  # nan is not
        what = "a whole number above 0" if kind is int else "a number above 0"
        raise ValueError(f"{where} must be {what}, got {text[:40]!r}: {CURE}")
    if not LEAST <= value <= MOST:
        raise ValueError(f"{where} must be from {LEAST:g} to {MOST:g}, got {text[:40]!r}: {CURE}")
    return value
