"""Which collectives of a compiled program hide behind compute, and how much of them: a prediction.

The program is walked in the order in which it launches, with two clocks: the compute stream, and each stream and
link that collectives occupy. An asynchronous collective begins when it is started and its stream and link are
free; where it ends after the compute stream reaches its done, that stream waits: the wait is exposed. A
synchronous collective is exposed whole. Loop bodies are walked once, from idle links, and counted as often as
they run.

Rates are stated, not measured: matrix products at FAST_LINEAR_EFFICIENCY of the peak, everything else at its bytes
over the memory bandwidth, attention kernels as the caller says (a compiled program does not tell their cost),
collectives at the bandwidth of the slowest link they need. High rates for compute are the careful side: less
time to hide behind. Nothing is charged for launches, nor for compute that collectives slow down.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cad_jax.sharding.clusters import Topology
from cad_jax.sharding.cost_model import FAST_LINEAR_EFFICIENCY, analytic
from cad_jax.thunks import Phase, Program, Thunk, phase

METADATA_DTYPES = ("s32", "s64")  # rows travel as floats or unsigned integers


class Traffic(NamedTuple):
    """What one device sends in one collective, by the links it takes."""

    within_node_bytes: float
    between_nodes_bytes: float

    def link(self, topology: Topology) -> str:
        """The slower of the two."""
        within, between = self._seconds(topology)
        return "between nodes" if between > within else "within node"

    def seconds(self, topology: Topology) -> float:
        return max(self._seconds(topology)) + topology.device.hop_latency_s

    def _seconds(self, topology: Topology) -> tuple[float, float]:
        device = topology.device
        return (
            self.within_node_bytes / device.within_node_bytes_s,
            self.between_nodes_bytes / device.between_nodes_bytes_s,
        )


def collective_traffic(
    kind: str, buffer_bytes: int, groups: list[tuple[int, ...]], topology: Topology
) -> Traffic:
    """What the busiest device sends.

    An all-to-all sends each peer its share of the buffer, over whichever link leads there; a ragged one,
    whose blocks a program does not tell, all of it, evenly, to the others. Gathers and
    reductions go around rings: all but one part of the buffer passes every device. Where a group
    spans nodes there are as many rings as it has members on a node, and each takes its own card out
    of the node. An all-reduce is a reduce-scatter and a gather.

    buffer_bytes: the whole buffer of a device: what an all-to-all sends (a ragged one: sends or receives,
    whichever is more, at the most), a gather receives, a reduction reduces.
    """
    worst = Traffic(0.0, 0.0)
    for group in groups:
        ranks = len(group)
        on_node = Counter(topology.node(device) for device in group)
        fewest, crosses = min(on_node.values()), len(on_node) > 1
        if kind == "collective-permute":
            here = buffer_bytes if group[0] != group[-1] else 0
            traffic = Traffic(0.0, here) if crosses else Traffic(here, 0.0)
        elif kind.endswith("all-to-all"):
            share = buffer_bytes / max(1, ranks - (kind == "ragged-all-to-all"))
            traffic = Traffic(share * (max(on_node.values()) - 1), share * (ranks - fewest))
        else:
            passes = buffer_bytes * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
            leaving = passes / fewest if crosses else 0.0
            traffic = Traffic(passes - leaving, leaving)
        worst = max(worst, traffic, key=lambda t: t.seconds(topology))
    return worst


@dataclass(frozen=True)
class Collective:
    """One collective of the program; seconds and bytes are of one run of it on one device.

    between: what the compute stream runs from start to done, as "matmul:NAME", "attention:NAME",
    "copy:NAME", "kernel:NAME", "loop:NAME xN", or the kind of another, synchronous collective.
    exposed_s: for how long the compute stream stands still.
    """

    name: str
    kind: str
    where: str
    phase: Phase
    in_loop: bool
    loop: str
    asynchronous: bool
    between: tuple[str, ...]
    bytes: int
    predicted_s: float
    hidden_fraction: float
    exposed_s: float
    executions: int  # a step
    traffic: Traffic
    is_metadata: bool

    @property
    def beside_compute(self) -> bool:
        """Whether a matrix product or an attention kernel runs from start to done."""
        return any(entry.startswith(("matmul:", "attention:")) for entry in self.between)

    @property
    def is_exchange(self) -> bool:
        """Whether it carries rows of an exchange between homes and servers."""
        return not self.is_metadata and (
            "exchange" in self.where.split("/") or self.kind.endswith("all-to-all")
        )


@dataclass(frozen=True)
class Prediction:
    """All collectives in the order of the program, and the seconds of a step of this device.

    attention_s is part of compute_s; 0 where the program has no attention kernel of its own, and
    compute_s then lacks it.
    """

    collectives: list[Collective]
    compute_s: float
    exposed_s: float
    attention_s: float


@dataclass
class _Pending:
    """A collective that has been started."""

    thunk: Thunk
    end_s: float
    predicted_s: float
    between: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Place:
    """The loop whose body is walked."""

    name: str = ""
    executions: int = 1
    phase: Phase = "other"


class Timeline:
    """Walks a program.

    attention_s: seconds of a step's attention by direction ("forward", "backward"), shared equally by
    the kernel calls of that direction; where the backward pass computes the forward again, it costs
    as much again.
    """

    def __init__(
        self, program: Program, topology: Topology, attention_s: Mapping[Phase, float]
    ) -> None:
        self._program = program
        self._topology = topology
        self._costs = analytic(topology.device, linear_efficiency=FAST_LINEAR_EFFICIENCY)
        self._collectives: list[Collective] = []
        self._calls = self._attention_calls(program.thunks, _Place())
        self._attention_s = {
            key: attention_s.get(key[0], 0.0) / calls for key, calls in self._calls.items()
        }

    def predict(self) -> Prediction:
        """Seconds and collectives of one run of the program."""
        self._collectives = []
        total_s = self._walk(self._program.thunks, _Place())
        exposed_s = sum(c.exposed_s * c.executions for c in self._collectives)
        attention_s = sum(s * self._calls[key] for key, s in self._attention_s.items())
        return Prediction(self._collectives, total_s - exposed_s, exposed_s, attention_s)

    def _attention_calls(self, thunks: list[Thunk], place: _Place) -> Counter:
        calls: Counter[tuple[Phase, bool]] = Counter()
        for thunk in thunks:
            role = self._program.role(thunk)
            if role == "attention":
                calls[self._attention_key(thunk, place)] += place.executions
            elif role == "loop":
                calls += self._attention_calls(thunk.sections["body"], self._inside(thunk, place))
            elif role == "branch" or thunk.inside:
                for section in thunk.sections.values():
                    calls += self._attention_calls(section, place)
        return calls

    def _attention_key(self, thunk: Thunk, place: _Place) -> tuple[Phase, bool]:
        """Direction, and whether it is the forward computed again."""
        direction = self._program.direction(thunk)
        return direction, direction == "forward" and self._phase(thunk, place) == "backward"

    def _phase(self, thunk: Thunk, place: _Place) -> Phase:
        """Of the operation; where XLA made it and it has no name, of the loop it is in."""
        instruction = thunk.instruction
        scopes = instruction.scopes if instruction is not None else ()
        return phase(scopes) if scopes else place.phase

    def _inside(self, loop: Thunk, place: _Place) -> _Place:
        trips = (loop.instruction.trip_count if loop.instruction else None) or 1
        return _Place(self._program.name(loop), place.executions * trips, self._phase(loop, place))

    def _walk(self, thunks: list[Thunk], place: _Place) -> float:
        """Seconds from the first thunk to the last, waits included."""
        now_s = 0.0
        free_s: defaultdict[str, float] = defaultdict(float)  # streams and links
        pending: dict[int | None, _Pending] = {}
        for thunk in thunks:
            role = self._program.role(thunk)
            if role == "done":
                started = pending.pop(thunk.async_id, None)
                if started is not None:
                    wait_s = max(0.0, started.end_s - now_s)
                    now_s += wait_s
                    self._record(started, place, wait_s, asynchronous=True)
            elif role == "collective":
                traffic, seconds = self._price(thunk)
                link = traffic.link(self._topology)
                begin_s = max(now_s, free_s[link], free_s[thunk.stream] if thunk.stream else 0.0)
                started = _Pending(thunk, begin_s + seconds, seconds)
                free_s[link] = started.end_s
                if thunk.kind == "kAsyncStart":
                    free_s[thunk.stream] = started.end_s
                    pending[thunk.async_id] = started
                    continue
                self._note(
                    pending, f"{self._program.collective(thunk)}:{self._program.name(thunk)}"
                )
                self._record(started, place, started.end_s - now_s, asynchronous=False)
                now_s = started.end_s
            else:
                now_s += self._compute_s(thunk, role, place)
                self._note(pending, self._label(thunk, role))
        return now_s

    def _compute_s(self, thunk: Thunk, role: str, place: _Place) -> float:
        if role == "loop":
            inside = self._inside(thunk, place)
            return self._walk(thunk.sections["body"], inside) * inside.executions / place.executions
        if role == "branch":
            return max(self._walk(branch, place) for branch in thunk.sections.values())
        if role == "attention":
            return self._attention_s[self._attention_key(thunk, place)]
        instruction = thunk.instruction
        if instruction is None:
            return sum(
                self._compute_s(inner, self._program.role(inner), place) for inner in thunk.inside
            )
        flops = self._program.hlo.product_flops(instruction)
        moved = self._program.hlo.traffic_bytes(instruction)
        memory_s = moved / self._topology.device.memory_bytes_s
        return max(self._costs.product_s(flops, 1), memory_s)

    def _label(self, thunk: Thunk, role: str) -> str:
        name = self._program.name(thunk)
        if role == "loop" and thunk.instruction is not None:
            name += f" x{thunk.instruction.trip_count or '?'}"
        return f"{role}:{name}"

    def _note(self, pending: Mapping[int | None, _Pending], label: str) -> None:
        for started in pending.values():
            started.between.append(label)

    def _price(self, thunk: Thunk) -> tuple[Traffic, float]:
        kind, buffer_bytes, groups = self._buffer(thunk)
        traffic = collective_traffic(kind, buffer_bytes, groups, self._topology)
        return traffic, traffic.seconds(self._topology)

    def _buffer(self, thunk: Thunk) -> tuple[str, int, list[tuple[int, ...]]]:
        """Kind, bytes of the whole buffer, and groups of a collective."""
        program, kind = self._program, self._program.collective(thunk)
        assert kind is not None
        outer = next(t for t in thunk.walk() if t.instruction is not None and program.collective(t))
        instruction = outer.instruction
        assert instruction is not None
        inner = next(
            (i for i in program.hlo.called(instruction).values() if i.collective), instruction
        )
        groups = program.hlo.groups(inner, program.devices)
        arrays = program.hlo.operand_arrays(inner)
        sizes = [sum(a.bytes for a in operand) for operand in arrays]
        # A ragged one names what is sent, what is received, then sizes and offsets.
        size = max(sizes[:2]) if kind == "ragged-all-to-all" else sum(sizes)
        return kind, size * (len(groups[0]) if kind == "all-gather" else 1), groups

    def _record(self, started: _Pending, place: _Place, wait_s: float, asynchronous: bool) -> None:
        thunk, program = started.thunk, self._program
        kind, buffer_bytes, groups = self._buffer(thunk)
        outer = next(t for t in thunk.walk() if t.instruction is not None)
        instruction = outer.instruction
        assert instruction is not None
        dtypes = {a.dtype for operand in program.hlo.operand_arrays(instruction) for a in operand}
        exposed_s = min(wait_s, started.predicted_s)
        self._collectives.append(
            Collective(
                name=instruction.name,
                kind=kind,
                where=program.hlo.where(instruction),
                phase=self._phase(outer, place),
                in_loop=bool(place.name),
                loop=place.name,
                asynchronous=asynchronous,
                between=tuple(started.between),
                bytes=buffer_bytes,
                predicted_s=started.predicted_s,
                hidden_fraction=1.0 - exposed_s / started.predicted_s if asynchronous else 0.0,
                exposed_s=wait_s,
                executions=place.executions,
                traffic=collective_traffic(kind, buffer_bytes, groups, self._topology),
                is_metadata=kind == "all-to-all" and dtypes <= set(METADATA_DTYPES),
            )
        )
