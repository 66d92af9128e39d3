"""Core attention tasks: what one server computes of one document, in words all host modules share.

Documents lie in token order: document d holds the tokens [start[d], start[d] + length[d]), end to
end unless starts say otherwise; what no document holds is padding. Token g lives on home rank
g // T at row g % T. A task is one row of seven int64 (columns below): the queries [q_start, q_stop)
of a document against its keys [k_start, k_stop), causally, positions within the document. All
queries of a task live on one home rank. Cuts the planner adds fall on multiples of TILE_ROWS within
the document; rank boundaries fall anywhere.

Shape letters: T tokens per server, S servers, N documents, n tasks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

TILE_ROWS = 128  # query rows of a kernel tile: a shorter shard costs a whole tile
TASK_FIELDS = ("document", "q_start", "q_stop", "k_start", "k_stop", "home", "server")
NO_DOCUMENTS = np.zeros(0, np.int64)  # lengths of a stage that is idle
DOCUMENT, Q_START, Q_STOP, K_START, K_STOP, HOME, SERVER = range(len(TASK_FIELDS))
TRANSPORT_HOPS = {"direct": 1, "relay": 2, "ragged": 1}  # collectives one exchange takes
DENSE_TRANSPORTS = ("direct", "relay")  # blocks of one size, as every backend has them


@dataclass(frozen=True)
class HeadShape:
    """Heads of ONE device, after tensor parallelism.

    The exchange moves units: `unit_heads` heads of one row, so that q, k and v share a buffer.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self):
        for name in ("num_q_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(
                    f"{name} must be a whole number, at least 1, got {getattr(self, name)}: pass the heads of one "
                    "device"
                )
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, got {self.num_q_heads} and "
                f"{self.num_kv_heads}: pass the heads of one device, with key heads replicated "
                "where there are fewer of them than devices"
            )

    @property
    def unit_heads(self) -> int:
        """Heads of one exchange unit: q rows and k+v rows are both whole numbers of it."""
        return math.gcd(self.num_q_heads, 2 * self.num_kv_heads)

    @property
    def q_units(self) -> int:
        """Units of one query row."""
        return self.num_q_heads // self.unit_heads

    @property
    def kv_units(self) -> int:
        """Units of one key row (k and v together)."""
        return 2 * self.num_kv_heads // self.unit_heads

    def q_row_bytes(self, itemsize: int = 2) -> int:
        """Bytes of one query (or output) row; the default item is bfloat16."""
        return self.num_q_heads * self.head_dim * itemsize

    def kv_row_bytes(self, itemsize: int = 2) -> int:
        """Bytes of one key row, k and v together; the default item is bfloat16."""
        return 2 * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class Capacities:
    """Static sizes of all that a plan fills, so that a new batch never recompiles: hard limits.

    Tuples hold one value a hop; units of `ragged` two, what a rank sends and what it receives. Units
    are exchange units (`HeadShape.unit_heads` heads of one row); runs are rows of the (destination,
    source, units) tables.
    """

    transport: str  # "direct" (1 hop) | "relay" (2 hops) | "ragged" (1 hop)
    query_rows: int  # rows of a server's query buffer, at least T
    key_rows: int  # rows of a server's key buffer, at least min(longest document, S * T) + T
    dispatch_units: tuple[int, ...]  # units one peer sends another, q and k/v together; ragged: all
    output_units: tuple[int, ...]  # units of query-only rows (out returns, d_out goes out), alike
    dispatch_runs: tuple[int, ...]  # runs in a rank's send table
    output_runs: tuple[int, ...]
    assemble_runs: int  # runs in a server's assembly table, query and key buffer
    output_assemble_runs: int
    merge_runs: int  # runs per partial in a home's merge table
    partials: int = 1  # partial outputs per query row at home (more with key sub-ranges)

    def __post_init__(self):
        if self.transport not in TRANSPORT_HOPS:
            raise ValueError(
                f"transport must be one of {', '.join(TRANSPORT_HOPS)}, got {self.transport!r}"
            )
        for name, value in self.items():
            several = name.endswith("_units") or name in ("dispatch_runs", "output_runs")
            values = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(v, int | np.integer) and v >= 0 for v in values):
                raise ValueError(
                    f"capacity {name} must be whole numbers, not negative, got {value}: take those of "
                    "default_capacities or capacities_from_plans"
                )
            if (
                isinstance(value, tuple) != several
                or several
                and len(values) != len(self._parts(name))
            ):
                raise ValueError(
                    f"capacity {name} needs {len(self._parts(name))} values for transport "
                    f"{self.transport!r}, got {value}: take those of default_capacities or "
                    "capacities_from_plans for that transport"
                )

    def items(self) -> list[tuple[str, int | tuple[int, ...]]]:
        """Every limit as (name, value), in the order of the fields."""
        return [(name, getattr(self, name)) for name in CAPACITY_FIELDS]

    def flat(self) -> dict[str, int]:
        """Every limit as one integer; those of tuples get `_hop1`, `_hop2`, or `_sent`, `_received`."""
        flat = {}
        for name, value in self.items():
            if isinstance(value, tuple):
                parts = zip(self._parts(name), value, strict=True)
                flat.update({f"{name}_{part}": v for part, v in parts})
            else:
                flat[name] = value
        return flat

    def used(self, needed: "Capacities") -> dict[str, float]:
        """The fraction of each limit that `needed` states, by its flat name."""
        wants = needed.flat()
        return {name: wants[name] / max(limit, 1) for name, limit in self.flat().items()}

    def _parts(self, name: str) -> tuple[str, ...]:
        """What the values of the tuple `name` are of."""
        if self.transport == "ragged" and name.endswith("_units"):
            return "sent", "received"
        return tuple(f"hop{hop + 1}" for hop in range(TRANSPORT_HOPS[self.transport]))

    def holds(self, needed: "Capacities") -> bool:
        """Whether every limit is at least what `needed` states (same transport)."""
        return not self.exceeded(needed)

    def exceeded(self, needed: "Capacities") -> dict[str, tuple[int, int]]:
        """The limits that `needed` exceeds, as name -> (limit, needed)."""
        assert self.transport == needed.transport, (self.transport, needed.transport)
        wants = needed.flat()
        return {n: (c, wants[n]) for n, c in self.flat().items() if wants[n] > c}


CAPACITY_FIELDS = tuple(n for n in Capacities.__dataclass_fields__ if n != "transport")


class PlanLike(Protocol):
    """What routing and layout read of a plan."""

    @property
    def servers(self) -> int: ...
    @property
    def tokens_per_server(self) -> int: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def starts(self) -> np.ndarray: ...
    @property
    def tasks(self) -> np.ndarray: ...
    @property
    def heads(self) -> HeadShape: ...
    @property
    def capacities(self) -> Capacities: ...


def causal_pairs(q_start, q_stop, k_start, k_stop):
    """(query, key) pairs with query in [q_start, q_stop), key in [k_start, k_stop), key <= query.

    Vectorised, int64. Below a key x the queries [a, b) see sum_q min(q + 1, x): a ramp up to row
    m = clip(x, a, b), then x each. Over the whole causal prefix: (b(b+1) - a(a+1)) / 2.
    """
    a, b = np.asarray(q_start, np.int64), np.asarray(q_stop, np.int64)

    def below(x):
        m = np.minimum(np.maximum(x, a), b)
        return (m * (m + 1) - a * (a + 1)) // 2 + (b - m) * x

    return below(np.asarray(k_stop, np.int64)) - below(np.asarray(k_start, np.int64))


def document_starts(lengths: np.ndarray) -> np.ndarray:
    """Global token index of the first token of each of the documents laid end to end, int64 [N]."""
    lengths = np.asarray(lengths, np.int64)
    return np.cumsum(lengths) - lengths


def stage_lengths(tick: Sequence[int], lengths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Document lengths of each stage of a pipeline in a tick that names its microbatches, -1: none."""
    return [lengths[microbatch] if microbatch >= 0 else NO_DOCUMENTS for microbatch in tick]


def stage_documents(
    lengths_of_stages: Sequence[np.ndarray], stage_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Documents of a pool whose stages of `stage_tokens` tokens each hold documents of their own,
    end to end from the stage's first token: (lengths, starts), int64 [N] each.

    ValueError where a stage's documents do not fit it.
    """
    per_stage = [np.asarray(lengths, np.int64) for lengths in lengths_of_stages]
    for stage, lengths in enumerate(per_stage):
        if lengths.sum() > stage_tokens:
            raise ValueError(
                f"documents of a stage must fit its {stage_tokens} tokens, got {lengths.sum()} for "
                f"stage {stage}: pack fewer documents, or raise the tokens of each rank"
            )
    starts = [s * stage_tokens + document_starts(lengths) for s, lengths in enumerate(per_stage)]
    return np.concatenate(per_stage), np.concatenate(starts)


def home_tasks(
    lengths: np.ndarray, tokens_per_server: int, starts: np.ndarray | None = None
) -> np.ndarray:
    """Tasks of the home plan, int64 [n, 7], in token order: cuts at rank boundaries alone.

    starts: int64 [N], the documents' first tokens; end to end by default.
    """
    lengths = np.asarray(lengths, np.int64)
    starts = document_starts(lengths) if starts is None else np.asarray(starts, np.int64)
    first = starts // tokens_per_server
    pieces = np.where(lengths > 0, (starts + lengths - 1) // tokens_per_server - first + 1, 0)
    document = np.repeat(np.arange(len(lengths)), pieces)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    home = first[document] + nth
    start = starts[document]
    tasks = np.zeros((len(document), len(TASK_FIELDS)), np.int64)
    tasks[:, DOCUMENT] = document
    tasks[:, Q_START] = np.maximum(home * tokens_per_server - start, 0)
    tasks[:, Q_STOP] = np.minimum((home + 1) * tokens_per_server - start, lengths[document])
    tasks[:, K_STOP] = tasks[:, Q_STOP]
    tasks[:, HOME] = tasks[:, SERVER] = home
    return tasks


def sort_tasks(tasks: np.ndarray) -> np.ndarray:
    """Tasks in the one order every host agrees on: server, document, q_start, k_start."""
    keys = (tasks[:, K_START], tasks[:, Q_START], tasks[:, DOCUMENT], tasks[:, SERVER])
    return np.ascontiguousarray(tasks[np.lexsort(keys)])
