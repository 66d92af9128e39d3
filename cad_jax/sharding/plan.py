"""The plan: which server computes which core attention task. A value: frozen, hashable, checkable,
saved as JSON.

Shape letters: T tokens per server, S servers, N documents, n tasks.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cad_jax.sharding.cost import (
    TravellingRows,
    max_over_mean,
    server_loads,
    travelling_rows,
)
from cad_jax.sharding.coverage import check_coverage, check_lengths, check_tasks
from cad_jax.sharding.layout import PlanArrays, lay_out
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.routing import wire_bytes
from cad_jax.sharding.tasks import (
    HOME,
    SERVER,
    TASK_FIELDS,
    TRANSPORT_HOPS,
    Capacities,
    HeadShape,
    document_starts,
    home_tasks,
    sort_tasks,
)

FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Tasks of one microbatch over the pool.

    lengths: int64 [N] document lengths. tasks: int64 [n, 7], rows of `tasks.TASK_FIELDS`, kept
    sorted by (server, document, q_start, k_start). starts: int64 [N], each document's first token
    in the pool, ascending; end to end by default, and what lies between documents is padding. All
    are read-only. Plans are equal, and hash alike, when their contents are.
    """

    servers: int
    tokens_per_server: int
    lengths: np.ndarray
    tasks: np.ndarray
    tolerance: float
    heads: HeadShape
    capacities: Capacities
    fallback_tasks: int = 0  # tasks kept at home because a capacity would not hold them elsewhere
    starts: np.ndarray = None  # pyright: ignore[reportAssignmentType] # end to end

    def __post_init__(self):
        self._check_scalars()
        lengths = np.array(self.lengths, np.int64)
        tasks = sort_tasks(np.array(self.tasks, np.int64).reshape(-1, len(TASK_FIELDS)))
        starts = document_starts(lengths) if self.starts is None else self.starts
        starts = np.array(starts, np.int64)
        for name, array in (("lengths", lengths), ("tasks", tasks), ("starts", starts)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def _check_scalars(self) -> None:
        """Plans come from files and from planners of people's own."""
        kinds = {"heads": HeadShape, "capacities": Capacities}
        counts = {"servers": 1, "tokens_per_server": 1, "fallback_tasks": 0}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ValueError(
                    f"{name} of a plan must be a cad_jax.{kind.__name__}, got {value!r}: pass one"
                )
        for name, least in counts.items():
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or not least <= value < 2**31:
                raise ValueError(
                    f"{name} of a plan must be a whole number from {least} to {2**31 - 1}, got {value!r}: give it as "
                    "plan_documents does"
                )
        if not (
            isinstance(self.tolerance, int | float | np.number) and 0 <= self.tolerance < math.inf
        ):
            raise ValueError(
                f"tolerance of a plan must be a finite number, at least 0, got {self.tolerance!r}: 0.05 is usual"
            )

    # Figures.

    def loads(self) -> np.ndarray:
        """(query, key) pairs of each server, int64 [S]."""
        return server_loads(self.tasks, self.servers)

    def home_loads(self) -> np.ndarray:
        """Pairs of each server were nothing moved, int64 [S]."""
        tasks = home_tasks(self.lengths, self.tokens_per_server, self.starts)
        return server_loads(tasks, self.servers)

    @property
    def max_over_mean(self) -> float:
        """Pairs of the most loaded server over the mean; 1.0 where there is no work."""
        return max_over_mean(self.loads())

    @property
    def max_over_mean_home(self) -> float:
        """`max_over_mean` were nothing moved."""
        return max_over_mean(self.home_loads())

    @property
    def moves(self) -> int:
        """Tasks computed away from home."""
        return int(np.count_nonzero(self.tasks[:, HOME] != self.tasks[:, SERVER]))

    def travelling_rows(self) -> TravellingRows:
        """Rows in and out of each server."""
        return travelling_rows(
            self.lengths, self.tasks, self.servers, self.tokens_per_server, self.starts
        )

    def bytes_in(self, itemsize: int = 2) -> np.ndarray:
        """Bytes each server takes in during one forward of one layer, int64 [S]: q, k, v, out."""
        return self.travelling_rows().units_in(self.heads) * self._unit_bytes(itemsize)

    def bytes_out(self, itemsize: int = 2) -> np.ndarray:
        """Bytes each server gives out during one forward of one layer, int64 [S]: q, k, v, out."""
        return self.travelling_rows().units_out(self.heads) * self._unit_bytes(itemsize)

    def wire_bytes(self, itemsize: int = 2) -> dict[str, int]:
        """Bytes a rank puts on the wire in one forward of one layer, by transport.

        Padding included, with pairs just large enough for this plan.
        """
        needs = {t: required_capacities(self, t) for t in TRANSPORT_HOPS}
        return {
            transport: wire_bytes(needed, self.servers, self.heads, itemsize).forward
            for transport, needed in needs.items()
        }

    def capacity_used(self) -> dict[str, float]:
        """Fraction of each capacity this plan needs, by its flat name."""
        needed = required_capacities(self, self.capacities.transport).flat()
        limits = self.capacities.flat()
        return {name: needed[name] / max(limit, 1) for name, limit in limits.items()}

    def _unit_bytes(self, itemsize: int) -> int:
        return self.heads.unit_heads * self.heads.head_dim * itemsize

    # The device's view.

    def arrays(self, ranks: Sequence[int] | None = None) -> PlanArrays:
        """The plan as int32 arrays of static shapes; `ranks` limits it to those ranks' part."""
        return lay_out(self, ranks)

    # Identity.

    def digest(self) -> str:
        """SHA-256 of the contents, hexadecimal: the same on every host that holds the same plan."""
        scalars = [FORMAT_VERSION, *self._scalars().values()]
        header = json.dumps(scalars, sort_keys=True, default=int)  # numpy's integers are integers
        digest = hashlib.sha256(header.encode())
        gaps = not np.array_equal(self.starts, document_starts(self.lengths))
        for array in (self.lengths, self.tasks, *([self.starts] if gaps else [])):
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.digest() == other.digest()

    def __hash__(self) -> int:
        return int(self.digest()[:15], 16)

    def __repr__(self) -> str:
        text = (
            f"Plan({self.servers} servers x {self.tokens_per_server} tokens, "
            f"{len(self.lengths)} documents of {int(self.lengths.sum())} tokens, "
            f"{len(self.tasks)} tasks, {self.moves} moved, max/mean "
            f"{self.max_over_mean_home:.3f} -> {self.max_over_mean:.3f}, "
            f"{self.capacities.transport}"
        )
        return text + (f", {self.fallback_tasks} fell back)" if self.fallback_tasks else ")")

    def _scalars(self) -> dict[str, Any]:
        return {
            "servers": self.servers,
            "tokens_per_server": self.tokens_per_server,
            "tolerance": float(self.tolerance),
            "heads": dataclasses.asdict(self.heads),
            "capacities": dataclasses.asdict(self.capacities),
            "fallback_tasks": self.fallback_tasks,
        }

    # Files.

    def to_json(self) -> dict[str, Any]:
        """Plain values: the contents, `max_over_mean`, `max_over_mean_home` and `moves`."""
        return {
            "version": FORMAT_VERSION,
            **self._scalars(),
            "documents": self.lengths.tolist(),
            "starts": self.starts.tolist(),
            "tasks": self.tasks.tolist(),
            "max_over_mean": self.max_over_mean,
            "max_over_mean_home": self.max_over_mean_home,
            "moves": self.moves,
        }

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), default=int))

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a saved plan and checks it; ValueError names what is wrong with the file."""
        try:
            saved = json.loads(Path(path).read_text())
            if (version := saved["version"]) != FORMAT_VERSION:
                raise ValueError(
                    f"it has plan format {version}, this program reads {FORMAT_VERSION}"
                )
            capacities: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in saved["capacities"].items()
            }
            plan = cls(
                servers=saved["servers"],
                tokens_per_server=saved["tokens_per_server"],
                lengths=np.array(saved["documents"], np.int64),
                tasks=np.array(saved["tasks"], np.int64),
                tolerance=saved["tolerance"],
                heads=HeadShape(**saved["heads"]),
                capacities=Capacities(**capacities),
                fallback_tasks=saved["fallback_tasks"],
                starts=saved.get("starts"),  # plans of documents end to end may lack it
            )
        except (
            ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError,
        ) as error:  # fmt: skip # whatever a file that was edited by hand may hold
            raise ValueError(
                f"{path} is not a saved plan ({type(error).__name__}: {error}): plan again and "
                "write it with Plan.save"
            ) from error
        plan.check()
        return plan

    # Rules.

    def check(self) -> None:
        """Raises ValueError unless the plan is exact and within every capacity.

        Every (query, key) pair that causality allows within a document is covered exactly once;
        homes are right; on one server no two tasks share query rows, so that each row has one
        contiguous key range. The error names the document, or the capacity.
        """
        pool = self.servers, self.tokens_per_server, self.starts
        check_lengths(self.lengths, *pool)
        check_tasks(self.lengths, self.tasks, *pool)
        check_coverage(self.lengths, self.tasks)
        exceeded = self.capacities.exceeded(required_capacities(self, self.capacities.transport))
        if exceeded:
            raise ValueError(
                f"the plan exceeds its capacities: {describe_exceeded(exceeded)}. Raise them (see "
                "capacities_from_plans), or plan again with these"
            )


def describe_exceeded(exceeded: dict[str, tuple[int, int]]) -> str:
    """`Capacities.exceeded` in words."""
    return ", ".join(f"{name} {need} of {limit}" for name, (limit, need) in exceeded.items())


def home_plan(
    lengths: np.ndarray,
    *,
    servers: int,
    tokens_per_server: int,
    heads: HeadShape,
    capacities: Capacities,
    tolerance: float = 0.05,
    starts: np.ndarray | None = None,
) -> Plan:
    """The plan that moves nothing: every task at its home. starts: end to end by default."""
    starts = document_starts(lengths) if starts is None else starts
    return Plan(
        servers=servers,
        tokens_per_server=tokens_per_server,
        lengths=lengths,
        tasks=home_tasks(lengths, tokens_per_server, starts),
        tolerance=tolerance,
        heads=heads,
        capacities=capacities,
        starts=starts,
    )
