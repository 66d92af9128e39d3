"""Predicted overlap of small written programs against arithmetic on paper, and what collectives send against
counting it ring by ring."""

from collections import defaultdict

import pytest

from cad_jax.overlap import Timeline, collective_traffic
from cad_jax.sharding.clusters import parse_topology
from cad_jax.sharding.cost import DEVICES
from cad_jax.sharding.cost_model import FAST_LINEAR_EFFICIENCY
from cad_jax.thunks import load_program

TOPOLOGY = parse_topology("h200:2x8")
H200 = DEVICES["h200"]
LATENCY_S = H200.hop_latency_s
SIZE = 4096
MATMUL_S = 2 * SIZE**3 / (FAST_LINEAR_EFFICIENCY * H200.peak_flops)
COPY_S = 2 * 2 * SIZE**2 / H200.memory_bytes_s
SQUARE = f"bf16[{SIZE},{SIZE}]"
EVERYONE, PAIRS, NODES = "{}", "[8,2]<=[16]", "[2,8]<=[16]"


class Writer:
    """Writes a thunk sequence, its metadata and the HLO it belongs to. Steps are tuples:

    ("start", id, kind, bytes, groups)  ("done", id)  ("sync", kind, bytes, groups)
    ("ragged", sent_bytes, received_bytes, groups)
    ("matmul",)  ("copy",)  ("attention", op_name)  ("loop", trips, [steps])  ("cond", [steps], [steps])
    """

    def __init__(self, steps) -> None:
        self.sequence, self.metadata, self.computations = [], [], []
        self.number = 0
        self._computation("ENTRY %main", steps, 0)

    def program(self):
        hlo = "HloModule tiny, is_scheduled=true\n\n" + "\n".join(self.computations)
        return load_program("\n".join(self.sequence), "\n".join(self.metadata), hlo, 16)

    def _computation(self, title, steps, depth) -> None:
        start = self.number
        lines = [f"  %x.{start} = {SQUARE}{{1,0}} parameter(0)"]
        lines += [self._step(step, depth, start) for step in steps]
        self.computations.append(
            f"{title} (p: {SQUARE}) -> {SQUARE} {{\n" + "\n".join(lines) + "\n}\n"
        )

    def _thunk(self, depth, kind, text, name) -> int:
        self.number += 1
        self.sequence.append(f"{'    ' * depth}{self.number:03}: {kind} [source | sink] {text}")
        self.metadata.append(f'profile_annotation: "{name}"\n    thunk_id: {self.number}')
        return self.number

    def _step(self, step, depth, start) -> str:
        kind, *rest = step
        x, name = f"%x.{start}", f"{kind}.{self.number}"
        if kind in ("start", "sync"):
            *ident, what, size, groups = rest
            suffix, text, thunk = "", what, "kCollective"
            if ident:
                suffix, thunk = "-start", "kAsyncStart"
                text = f"stream=communication_stream[0], async_id={ident[0]}"
            self._thunk(depth, thunk, text, name)
            line = f"  %in.{name} = u8[{size}]{{0}} constant({{...}})\n"
            line += (
                f"  %{name} = u8[{size}]{{0}} {what}{suffix}(%in.{name}), replica_groups={groups}"
            )
            return line + f', metadata={{op_name="jit(f)/jvp()/exchange/{what}"}}'
        if kind == "ragged":
            sent, received, groups = rest
            self._thunk(depth, "kRaggedAllToAll", "kRaggedAllToAll", name)
            sizes = {"in": f"u8[{sent}]", "out": f"u8[{received}]", "at": "s64[8]"}
            line = "".join(
                f"  %{n}.{name} = {t}{{0}} constant({{...}})\n" for n, t in sizes.items()
            )
            operands = ", ".join(f"%{n}.{name}" for n in ("in", "out", "at", "at", "at", "at"))
            line += f"  %{name} = {sizes['out']}{{0}} ragged-all-to-all({operands})"
            return line + f", replica_groups={groups}"
        if kind == "done":
            self._thunk(depth, "kAsyncDone", f"async_id={rest[0]}", name)
            return f"  %{name} = u8[1]{{0}} constant(0)"
        if kind == "matmul":
            self._thunk(depth, "kCublasLtMatmul", "kCublasLtMatmul", name)
            line = f'  %{name} = {SQUARE}{{1,0}} custom-call({x}, {x}), custom_call_target="__cublas$lt$matmul"'
            return line + ', backend_config={"lhs_contracting_dimensions":["1"]}'
        if kind == "attention":
            self._thunk(depth, "kCustomKernel", "some_kernel grid: [1, 1, 1]", name)
            line = f'  %{name} = {SQUARE}{{1,0}} custom-call({x}), custom_call_target="__gpu$xla.gpu.triton"'
            return line + f', metadata={{op_name="{rest[0]}"}}'
        if kind == "loop":
            self._thunk(depth, "kWhile", "", name)
            self.sequence.append("condition:")
            self._thunk(depth + 1, "kCustomKernel", "compare grid: [1, 1, 1]", "none")
            self.sequence.append("    " * depth + "  body:")
            self._computation(f"%body.{name}", rest[1], depth + 1)
            line = f"  %{name} = {SQUARE}{{1,0}} while({x}), condition=%c, body=%body.{name}"
            return line + f', backend_config={{"known_trip_count":{{"n":"{rest[0]}"}}}}'
        if kind == "cond":
            self._thunk(depth, "kConditional", "", name)
            for branch, steps in zip(("false_branch", "true_branch"), rest, strict=True):
                self.sequence.append("    " * depth + f"  {branch}:")
                self._computation(f"%{branch}.{name}", steps, depth + 1)
            return f"  %{name} = {SQUARE}{{1,0}} conditional({x})"
        self._thunk(depth, "kCopy", "kCopy", name)
        return f"  %{name} = {SQUARE}{{1,0}} copy({x})"


def predict(*steps, attention_s=None):
    return Timeline(Writer(steps).program(), TOPOLOGY, attention_s or {}).predict()


def between_nodes_s(size: int) -> float:
    """An all-to-all over all 16: 8 of 16 parts go to the other node."""
    return size * 8 / 16 / H200.between_nodes_bytes_s + LATENCY_S


def within_node_s(size: int) -> float:
    """An all-to-all over pairs of neighbours: half stays."""
    return size / 2 / H200.within_node_bytes_s + LATENCY_S


def test_hidden_whole() -> None:
    size = 2**20
    result = predict(
        ("start", 1, "all-to-all", size, EVERYONE), ("matmul",), ("copy",), ("done", 1)
    )
    (exchange,) = result.collectives
    assert exchange.asynchronous and exchange.bytes == size and exchange.is_exchange
    assert exchange.between == ("matmul:matmul.1", "copy:copy.2")
    assert (
        exchange.predicted_s == pytest.approx(between_nodes_s(size))
        and exchange.predicted_s < MATMUL_S
    )
    assert exchange.hidden_fraction == 1.0 and result.exposed_s == 0.0
    assert result.compute_s == pytest.approx(MATMUL_S + COPY_S)
    assert (exchange.phase, exchange.in_loop, exchange.executions) == ("forward", False, 1)


def test_hidden_in_part() -> None:
    size = 2**28
    result = predict(("start", 1, "all-to-all", size, EVERYONE), ("matmul",), ("done", 1))
    needed = between_nodes_s(size)
    assert result.collectives[0].hidden_fraction == pytest.approx(MATMUL_S / needed)
    assert result.exposed_s == pytest.approx(needed - MATMUL_S)


def test_nothing_between() -> None:
    result = predict(("start", 1, "all-to-all", 2**20, EVERYONE), ("done", 1), ("matmul",))
    assert result.collectives[0].asynchronous and result.collectives[0].between == ()
    assert result.collectives[0].hidden_fraction == 0.0


def test_synchronous() -> None:
    result = predict(("matmul",), ("sync", "all-to-all", 2**20, EVERYONE))
    (exchange,) = result.collectives
    assert not exchange.asynchronous and exchange.hidden_fraction == 0.0
    assert result.exposed_s == pytest.approx(between_nodes_s(2**20))


def test_two_on_one_link_take_turns() -> None:
    """What hides the first cannot hide the second as well."""
    size = 2**23
    needed = between_nodes_s(size)
    assert needed < MATMUL_S < 2 * needed
    result = predict(
        ("start", 1, "all-to-all", size, EVERYONE),
        ("start", 2, "all-to-all", size, EVERYONE),
        ("matmul",),
        ("done", 1),
        ("done", 2),
    )
    first, second = result.collectives
    assert first.hidden_fraction == 1.0
    assert second.hidden_fraction == pytest.approx(1 - (2 * needed - MATMUL_S) / needed)
    assert first.between == second.between == ("matmul:matmul.2",)


def test_a_synchronous_one_on_another_link_hides() -> None:
    """The all-reduce of tensor parallelism stays in the node while an exchange leaves it."""
    size, small = 2**26, 2**22
    needed, reduce_s = between_nodes_s(size), 2 * within_node_s(small) - LATENCY_S
    for groups, hidden in ((PAIRS, reduce_s), (EVERYONE, 0.0)):
        result = predict(
            ("start", 1, "all-to-all", size, EVERYONE),
            ("sync", "all-reduce", small, groups),
            ("done", 1),
        )
        reduction, exchange = result.collectives
        assert exchange.between == ("all-reduce:sync.1",)
        if hidden:
            assert reduction.exposed_s == pytest.approx(reduce_s)
            assert exchange.hidden_fraction == pytest.approx(hidden / needed)
            assert result.exposed_s == pytest.approx(needed)
        else:  # it waits for the exchange, which it stands behind
            assert reduction.exposed_s > needed and exchange.hidden_fraction == 1.0


def test_loops_count_as_often_as_they_run() -> None:
    size = 2**28
    needed = between_nodes_s(size)
    body = [("start", 1, "all-to-all", size, EVERYONE), ("matmul",), ("done", 1)]
    result = predict(("loop", 3, [("copy",), ("loop", 4, body)]))
    (exchange,) = result.collectives
    assert exchange.in_loop and exchange.executions == 12
    assert result.exposed_s == pytest.approx(12 * (needed - MATMUL_S))
    assert result.compute_s == pytest.approx(12 * MATMUL_S + 3 * COPY_S)


def test_a_loop_hides_by_all_its_runs() -> None:
    size = 2**28
    result = predict(
        ("start", 1, "all-to-all", size, EVERYONE), ("loop", 5, [("matmul",)]), ("done", 1)
    )
    (exchange,) = result.collectives
    assert exchange.hidden_fraction == pytest.approx(min(1, 5 * MATMUL_S / between_nodes_s(size)))
    assert exchange.between == ("loop:loop.1 x5",)


def test_the_longer_branch_counts() -> None:
    result = predict(("cond", [("matmul",)], [("copy",), ("matmul",)]))
    assert result.compute_s == pytest.approx(MATMUL_S + COPY_S)


def test_attention_is_shared_by_its_calls() -> None:
    forward = ("attention", "jit(f)/jvp()/while/body/forward_kernel/pallas_call")
    again = ("attention", "jit(f)/transpose(jvp())/rematted_computation/forward_kernel/pallas_call")
    backward = [
        ("attention", f"jit(f)/transpose(jvp())/{name}_kernel/pallas_call")
        for name in ("dq", "dkv")
    ]
    size = 2**30
    needed = between_nodes_s(size)
    result = predict(
        ("loop", 2, [("start", 1, "all-to-all", size, EVERYONE), forward, ("done", 1), forward]),
        ("loop", 4, [again, ("start", 2, "all-to-all", size, EVERYONE), *backward, ("done", 2)]),
        attention_s={"forward": 8e-3, "backward": 24e-3},
    )
    first, second = result.collectives
    assert first.hidden_fraction == pytest.approx(8e-3 / 4 / needed)
    assert second.hidden_fraction == pytest.approx(24e-3 / 4 / needed)
    assert second.between == ("attention:some_kernel",) * 2
    assert result.attention_s == pytest.approx(8e-3 + 8e-3 + 24e-3)  # the forward ran twice
    assert result.compute_s == pytest.approx(result.attention_s)


def test_attention_outside_any_phase_shares_with_the_forward() -> None:
    """As in a pipeline whose ticks are no transformation of JAX's."""
    calls = [("attention", f"jit(f)/{outer}forward_kernel/pallas_call") for outer in ("", "jvp()/")]
    assert predict(*calls, attention_s={"forward": 6e-3}).compute_s == pytest.approx(6e-3)


def test_metadata_is_no_exchange() -> None:
    writer = Writer([("sync", "all-to-all", 64, EVERYONE)])
    writer.computations = [text.replace("u8[64]", "s32[16]") for text in writer.computations]
    (offsets,) = Timeline(writer.program(), TOPOLOGY, {}).predict().collectives
    assert offsets.is_metadata and not offsets.is_exchange and offsets.bytes == 64


def test_the_whole_buffer_counts() -> None:
    """A gather is written with the part a device gives, a reduce-scatter with all it reduces."""
    result = predict(("sync", "all-gather", 2**20, NODES), ("sync", "reduce-scatter", 2**20, NODES))
    assert [c.bytes for c in result.collectives] == [8 * 2**20, 2**20]
    gathered_s = 7 * 2**20 / H200.within_node_bytes_s + LATENCY_S
    assert result.collectives[0].predicted_s == pytest.approx(gathered_s)


GROUPS = {
    "one node": [tuple(range(8)), tuple(range(8, 16))],
    "both nodes": [tuple(range(16))],
    "one of each node": [(i, i + 8) for i in range(8)],
    "two of each node": [(i, i + 1, i + 8, i + 9) for i in range(0, 8, 2)],
}


def ring_bytes(buffer_bytes: int, group: tuple[int, ...]) -> tuple[float, float]:
    """(within, between) of the busiest member, from as many rings as members share a node; in each ring another
    member is last on its node."""
    nodes = defaultdict(list)
    for device in group:
        nodes[device // 8].append(device)
    members = len(next(iter(nodes.values())))
    sent = defaultdict(lambda: [0.0, 0.0])
    for ring in range(members):
        order = [d for node in nodes.values() for d in node[ring:] + node[:ring]]
        for here, there in zip(order, order[1:] + order[:1], strict=True):
            for _ in range(len(group) - 1):  # each part but one's own passes on
                sent[here][here // 8 != there // 8] += buffer_bytes / members / len(group)
    assert len({tuple(s) for s in sent.values()}) == 1
    within, between = next(iter(sent.values()))
    return within, between


@pytest.mark.parametrize("where", GROUPS)
def test_what_rings_send(where) -> None:
    groups, size = GROUPS[where], 960
    within, between = ring_bytes(size, groups[0])
    for kind, passes in (("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)):
        traffic = collective_traffic(kind, size, groups, TOPOLOGY)
        assert tuple(traffic) == pytest.approx((passes * within, passes * between)), kind


@pytest.mark.parametrize("where", GROUPS)
def test_what_an_all_to_all_sends(where) -> None:
    groups, size = GROUPS[where], 960
    sent = [0.0, 0.0]
    for peer in groups[0][1:]:
        sent[groups[0][0] // 8 != peer // 8] += size / len(groups[0])
    assert tuple(collective_traffic("all-to-all", size, groups, TOPOLOGY)) == pytest.approx(sent)


@pytest.mark.parametrize("where", GROUPS)
def test_what_a_ragged_all_to_all_sends(where) -> None:
    """All of the buffer, since nothing is sent to oneself."""
    group, size = GROUPS[where][0], 960
    sent = [0.0, 0.0]
    for peer in group[1:]:
        sent[group[0] // 8 != peer // 8] += size / (len(group) - 1)
    traffic = collective_traffic("ragged-all-to-all", size, GROUPS[where], TOPOLOGY)
    assert tuple(traffic) == pytest.approx(sent) and sum(traffic) == pytest.approx(size)


def test_a_ragged_buffer_is_the_larger_of_both() -> None:
    """On the way home few rows that many servers send may be much at one home."""
    steps = [("ragged", 2**20, 2**22, NODES), ("ragged", 2**23, 2**22, NODES)]
    home, out = predict(*steps).collectives
    assert (home.bytes, out.bytes) == (2**22, 2**23)
    assert out.predicted_s == pytest.approx(2**23 / H200.within_node_bytes_s + LATENCY_S)
    assert home.is_exchange and not home.is_metadata


def test_what_a_permute_sends() -> None:
    assert collective_traffic("collective-permute", 10, [(0, 1), (1, 0)], TOPOLOGY) == (10, 0)
    # The pair that leaves the node is the slow one.
    assert collective_traffic("collective-permute", 10, [(0, 1), (7, 8)], TOPOLOGY) == (0, 10)
    assert collective_traffic("collective-permute", 10, [(3, 3)], TOPOLOGY) == (0, 0)


def test_the_slower_link_decides() -> None:
    traffic = collective_traffic("all-to-all", 2**30, GROUPS["both nodes"], TOPOLOGY)
    assert traffic.link(TOPOLOGY) == "between nodes"
    assert traffic.seconds(TOPOLOGY) == pytest.approx(2**30 / 2 / 50e9 + LATENCY_S)
    traffic = collective_traffic("all-to-all", 2**30, GROUPS["one node"], TOPOLOGY)
    assert traffic.link(TOPOLOGY) == "within node"
    assert traffic.seconds(TOPOLOGY) == pytest.approx(2**30 * 7 / 8 / 450e9 + LATENCY_S)
