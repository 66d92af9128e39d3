"""The four phases on virtual CPU devices, against buffers and sums made by brute force over tokens."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cad_jax.sharding import exchange
from cad_jax.sharding.layout import lay_out
from cad_jax.sharding.mesh import POOL_AXES, make_mesh
from cad_jax.sharding.tables import expand, expand_runs, find_copies
from cad_jax.sharding.tasks import HeadShape
from tests.sharding import ragged_double
from tests.sharding.plan_cases import expected_buffers, random_plan
from tests.sharding.ragged_double import POISON

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS = P(POOL_AXES)


def shared_capacities(plans):
    most = {}
    for name, _ in plans[0].capacities.items():
        values = np.array([getattr(p.capacities, name) for p in plans]).max(0)
        most[name] = tuple(values.tolist()) if values.ndim else int(values)
    capacities = dataclasses.replace(plans[0].capacities, **most)
    return [dataclasses.replace(p, capacities=capacities) for p in plans]


def make_phases(mesh, heads, tokens, skip_empty):
    """All four phases of one layer as one compiled program over global arrays."""

    def phases(q, k, v, lse, d_out, delta, out, out_lse, dq, dk, dv, arrays):
        arrays = jax.tree.map(lambda x: x[0], arrays)
        tables = expand(arrays, heads, tokens)
        rest = {"axis_names": POOL_AXES, "skip_empty": skip_empty}

        def run(phase, *operands):
            return exchange.complete(phase(*operands, tables, **rest))

        partials, partial_lse = run(exchange.combine_fwd, out, out_lse)
        return (
            run(exchange.dispatch_fwd, q, k, v),
            (jnp.stack(partials, axis=1), partial_lse.swapaxes(0, 1)),
            run(exchange.dispatch_bwd, q, k, v, lse, d_out, delta),
            run(exchange.combine_bwd, dq, dk, dv),
        )

    return jax.jit(jax.shard_map(phases, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False))


class Inputs:
    """Random arrays for one plan. Rows that hold no token, at home or in a server's buffers, are
    NaN. Scalars end in bit patterns that are signalling NaNs of bfloat16."""

    def __init__(self, plan, dtype, seed):
        rng = np.random.default_rng(seed)
        heads, limits = plan.heads, plan.capacities
        num_tokens = plan.servers * plan.tokens_per_server
        padding = np.arange(num_tokens) >= plan.lengths.sum()
        self.buffers = expected_buffers(plan)
        query_slack = np.ones((plan.servers, limits.query_rows), bool)
        key_slack = np.ones((plan.servers, limits.key_rows), bool)
        for server, b in enumerate(self.buffers):
            query_slack[server, : len(b.query)] = False
            key_slack[server, : len(b.key)] = False

        def rows(empty, *shape):
            x = rng.standard_normal((empty.size, *shape)).astype(np.float32)
            x[empty.ravel()] = np.nan
            return x.astype(dtype)

        def scalars(empty):
            x = rng.standard_normal((empty.size, heads.num_q_heads)).astype(np.float32)
            x = ((x.view(np.uint32) & 0xFFFF0000) | 0x7F81).view(np.float32)
            x[empty.ravel()] = np.nan
            return x

        q_heads, k_heads, head_dim = heads.num_q_heads, heads.num_kv_heads, heads.head_dim
        self.q, self.d_out = (rows(padding, q_heads, head_dim) for _ in range(2))
        self.k, self.v = (rows(padding, k_heads, head_dim) for _ in range(2))
        self.lse, self.delta = scalars(padding), scalars(padding)
        self.out, self.dq = (rows(query_slack, q_heads, head_dim) for _ in range(2))
        self.dk, self.dv = (rows(key_slack, k_heads, head_dim) for _ in range(2))
        self.out_lse = scalars(query_slack)

    def all(self):
        names = ("q", "k", "v", "lse", "d_out", "delta", "out", "out_lse", "dq", "dk", "dv")
        return [getattr(self, name) for name in names]


def assert_same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    bits = {2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
    np.testing.assert_array_equal(got.view(bits), want.view(bits))


def in_buffers(tokens_of_server, rows, source):
    """Rows of `source` by token, packed as each server holds them, zero below."""
    want = np.zeros((len(tokens_of_server), rows, *source.shape[1:]), source.dtype)
    for server, tokens in enumerate(tokens_of_server):
        want[server, : len(tokens)] = source[tokens]
    return want.reshape(-1, *source.shape[1:])


def check_dispatched(inputs, plan, dispatched):
    limits = plan.capacities
    queries, keys = [b.query for b in inputs.buffers], [b.key for b in inputs.buffers]
    sources = (inputs.q, inputs.k, inputs.v, inputs.lse, inputs.d_out, inputs.delta)
    for number, (got, source) in enumerate(zip(dispatched, sources, strict=False)):
        is_key = number in (1, 2)
        rows = limits.key_rows if is_key else limits.query_rows
        assert_same_bits(got, in_buffers(keys if is_key else queries, rows, source))


def check_combined(inputs, plan, partials, lse):
    """Partial m of a row is what the m-th of its servers, in ascending order, computed."""
    rows = plan.capacities.query_rows
    want = np.zeros(partials.shape, inputs.out.dtype)
    want_lse = np.full(lse.shape, -np.inf, np.float32)
    level = np.zeros(len(want), int)
    for server, b in enumerate(inputs.buffers):
        for row, token in enumerate(b.query):
            want[token, level[token]] = inputs.out[server * rows + row]
            want_lse[token, level[token]] = inputs.out_lse[server * rows + row]
            level[token] += 1
    assert_same_bits(partials, want)
    assert_same_bits(lse, want_lse)


def check_gradients(inputs, plan, gradients):
    """The transpose of dispatch in float64: every copy of a row adds to it."""
    limits = plan.capacities
    queries, keys = [b.query for b in inputs.buffers], [b.key for b in inputs.buffers]
    for got, copies, tokens_of_server, rows in zip(
        gradients, (inputs.dq, inputs.dk, inputs.dv), (queries, keys, keys),
        (limits.query_rows, limits.key_rows, limits.key_rows), strict=True,
    ):  # fmt: skip
        total, size = np.zeros(got.shape), np.zeros(got.shape)
        copies = copies.astype(np.float64).reshape(plan.servers, rows, *copies.shape[1:])
        for server, tokens in enumerate(tokens_of_server):
            np.add.at(total, tokens, copies[server, : len(tokens)])
            np.add.at(size, tokens, np.abs(copies[server, : len(tokens)]))
        assert got.dtype == inputs.dq.dtype
        # float32: the sum's rounding. bfloat16: one cast at home, and one at the relay before it unless
        # keys are divided.
        at_relay = plan.capacities.transport == "relay" and plan.capacities.partials == 1
        casts = 2**-7 if at_relay else 2**-8
        epsilon = 8 * 2**-24 if got.dtype == np.float32 else 1.01 * casts
        error = np.abs(np.asarray(got, np.float64) - total)
        assert np.all(error <= epsilon * size), np.max(error - epsilon * size)


@dataclasses.dataclass(frozen=True)
class Case:
    heads: HeadShape
    dtype: type
    transport: str
    mesh: tuple[int, int]  # pp, dp
    tokens: int
    key_splits: bool
    skip_empty: bool = False

    def __str__(self):
        return (
            f"{self.transport}-{self.mesh[0]}x{self.mesh[1]}-{np.dtype(self.dtype).name}"
            f"-heads{self.heads.num_q_heads}:{self.heads.num_kv_heads}"
        )


CASES = (
    Case(HeadShape(8, 2, 4), F32, "relay", (2, 4), 33, True),
    Case(HeadShape(8, 2, 4), F32, "direct", (1, 8), 33, True),
    Case(HeadShape(6, 3, 8), BF16, "relay", (1, 8), 17, False, skip_empty=True),
    Case(HeadShape(8, 1, 3), BF16, "direct", (1, 4), 40, True),
    Case(HeadShape(5, 1, 4), BF16, "relay", (1, 4), 21, True),
    Case(HeadShape(4, 4, 4), F32, "relay", (1, 2), 9, False),
    Case(HeadShape(4, 4, 4), BF16, "direct", (1, 1), 30, False, skip_empty=True),
    Case(HeadShape(8, 2, 4), F32, "ragged", (2, 4), 33, True),
    Case(HeadShape(6, 3, 8), BF16, "ragged", (1, 4), 17, True, skip_empty=True),
    Case(HeadShape(5, 1, 4), BF16, "ragged", (1, 2), 21, False),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_four_phases(case, monkeypatch):
    ragged_double.install(monkeypatch)
    servers = case.mesh[0] * case.mesh[1]
    plan = partial(random_plan, servers=servers, tokens=case.tokens, heads=case.heads,
                   transport=case.transport, key_splits=case.key_splits)  # fmt: skip
    half = np.array([case.tokens, case.tokens // 2, 0, 1], np.int64)
    plans = shared_capacities(
        [
            *(plan(seed) for seed in range(5)),
            plan(5, pieces=20, stay=0.0),
            plan(6, lengths=np.array([servers * case.tokens])),
            plan(7, lengths=half[: 2 * servers - 1], stay=0.5),  # ranks of padding only
            plan(8, lengths=np.full(servers, case.tokens), stay=1.0, key_splits=False, pieces=0),
        ]
    )
    assert not lay_out(plans[-1]).travels.any()
    mesh = make_mesh(pp=case.mesh[0], dp=case.mesh[1])
    phases = make_phases(mesh, case.heads, case.tokens, case.skip_empty)
    for seed, one in enumerate(plans):
        inputs = Inputs(one, case.dtype, seed)
        results = jax.block_until_ready(phases(*inputs.all(), lay_out(one)))
        dispatched, combined, dispatched_back, gradients = jax.tree.map(np.asarray, results)
        check_dispatched(inputs, one, dispatched)
        check_combined(inputs, one, *combined)
        check_dispatched(inputs, one, dispatched_back)
        check_gradients(inputs, one, gradients)
    assert phases._cache_size() == 1


def traced(skip_empty):
    heads = HeadShape(8, 2, 4)
    plan = random_plan(1, 8, 16, heads, "relay")
    phases = make_phases(make_mesh(dp=8), heads, 16, skip_empty)
    return phases.trace(*Inputs(plan, F32, 0).all(), lay_out(plan)).jaxpr


def is_jaxpr(x):
    return hasattr(x, "eqns")


def primitives(jaxpr, within=()):
    """Every equation's (primitive, names of the primitives around it, output dtypes)."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, within, [getattr(v.aval, "dtype", None) for v in equation.outvars]
        for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(leaf):
                yield from primitives(getattr(leaf, "jaxpr", leaf), (*within, name))


@pytest.mark.parametrize("skip_empty", [False, True])
def test_one_collective_a_hop_and_no_scattered_sums(skip_empty):
    found = list(primitives(traced(skip_empty).jaxpr))
    collectives = [within for name, within, _ in found if name == "all_to_all"]
    assert len(collectives) == 2 * 4  # two hops of four phases
    assert all(("cond" in within) == skip_empty for within in collectives)
    for name, _, dtypes in found:
        if name.startswith("scatter"):
            assert name == "scatter" and all(jnp.issubdtype(d, jnp.integer) for d in dtypes)


def test_the_ragged_stand_in_means_what_jax_documents(monkeypatch):
    """The example of lax.ragged_all_to_all's own documentation, and sizes that do not agree."""
    ragged_double.install(monkeypatch)
    mesh = make_mesh(dp=2)
    operand = np.array([1, 2, 2, 3, 4, 0], np.uint16)
    output = np.zeros(8, np.uint16)
    first, sizes, lands_at, arriving = (
        np.array(x, np.int32) for x in ([0, 1, 0, 1], [1, 2, 1, 1], [0, 0, 1, 2], [1, 1, 2, 1])
    )

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)
    def move(*operands):
        return jax.lax.ragged_all_to_all(*operands, axis_name="dp")

    received = move(operand, output, first, sizes, lands_at, arriving)
    assert np.asarray(received).tolist() == [1, 3, 0, 0, 2, 2, 4, 0]
    for wrong in (sizes[::-1], arriving):
        assert set(np.asarray(move(operand, output, first, sizes, lands_at, wrong[::-1]))) == {
            POISON
        }


def test_ragged_is_direct_to_the_bit(monkeypatch):
    """Outward and back, gradients included: the same blocks in the same order."""
    ragged_double.install(monkeypatch)
    heads, mesh, documents = HeadShape(8, 2, 4), make_mesh(pp=2, dp=4), [[184], None, [23, 11, 1]]
    plans = {
        transport: shared_capacities([
            random_plan(
                seed, 8, 23, heads, transport, key_splits=seed > 2, stay=0.1,
                lengths=(lengths := documents[seed % 3]) and np.array(lengths),
            )
            for seed in range(6)
        ])
        for transport in ("direct", "ragged")
    }  # fmt: skip
    phases = make_phases(mesh, heads, 23, skip_empty=False)
    for seed, pair in enumerate(zip(*plans.values(), strict=True)):
        results = [phases(*Inputs(plan, BF16, seed).all(), lay_out(plan)) for plan in pair]
        for got, want in zip(*map(jax.tree.leaves, results), strict=True):
            assert_same_bits(got, want)


def test_a_ragged_exchange_is_one_collective_a_phase(monkeypatch):
    """No other collective beside it: every rank's host knows sizes and offsets."""
    calls = []

    def counted(operand, output, *vectors, axis_name):
        calls.append((operand.shape, output.shape, {v.shape for v in vectors}, axis_name))
        return output

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", counted)
    heads = HeadShape(8, 2, 4)  # units of 4 heads, 16 lanes; 4 lanes more with a scalar a head
    plan = random_plan(4, 8, 16, heads, "ragged")
    phases = make_phases(make_mesh(dp=8), heads, 16, skip_empty=False)
    traced = phases.trace(*Inputs(plan, F32, 0).all(), lay_out(plan)).jaxpr
    assert "all_to_all" not in {name for name, _, _ in primitives(traced.jaxpr)}
    (sent, arrives), (out, returned) = plan.capacities.dispatch_units, plan.capacities.output_units
    assert sent != arrives and out != returned
    one, two = {(8,)}, {(16,)}  # slices: one a peer, two where d_out travels with q, k and v
    assert calls == [
        ((returned, 20), (out, 20), one, POOL_AXES),
        ((sent, 16), (arrives, 16), one, POOL_AXES),
        ((sent + out, 20), (arrives + returned, 20), two, POOL_AXES),
        ((arrives, 16), (sent, 16), one, POOL_AXES),
    ]


def test_expand_runs():
    first = np.array([[1, 7, 2], [4, 0, 1], [6, 0, 0], [6, 0, 0]], np.int32)
    none = np.zeros((0, 3), np.int32)
    last = np.array([[0, 3, 2], [2, 9, 1]], np.int32)
    full, empty, end, nothing = expand_runs([first, none, last, none], [6, 2, 3, 0])
    assert full.tolist() == [-1, 7, 8, -1, 0, -1]
    assert empty.tolist() == [-1, -1] and nothing.tolist() == []
    assert end.tolist() == [3, 4, 9]


@pytest.mark.parametrize("peers", [1, 2, 3, 8, 13])
def test_sum_of_copies(peers):
    """Any unit may have any number of copies, up to one a peer; the order is that of the peers."""
    rng = np.random.default_rng(peers)
    units, slots = 40, 30
    send = np.full((peers, slots), -1, np.int32)
    for peer in range(max(peers - 1, 1)):
        held = rng.choice(units // 2, int(rng.integers(0, units // 2)), replace=False)
        send[peer, rng.permutation(slots)[: len(held)]] = held
    grads = rng.standard_normal((peers * slots, 3)).astype(np.float32)
    want = np.zeros((units, 3), np.float32)
    for slot, unit in enumerate(send.ravel()):
        if unit >= 0:
            want[unit] += grads[slot]
    copies = jax.jit(find_copies, static_argnums=(1, 2))(send.ravel(), peers, units)
    assert_same_bits(exchange.sum_back(jnp.asarray(grads), copies), want)
    assert sum(level.size for level in copies.levels) <= peers * slots * (1 + np.log2(peers))


def test_wrong_rows_or_heads_are_refused():
    plan = random_plan(1, 2, 16, HeadShape(8, 2, 4), "direct")
    arrays = jax.tree.map(lambda x: x[0], lay_out(plan))
    for heads, tokens in ((HeadShape(8, 2, 4), 8), (HeadShape(8, 1, 4), 16)):
        with pytest.raises(
            ValueError, match="the rows and heads their plan was made for.*plan with"
        ):
            expand(arrays, heads, tokens)


def test_wrong_dtypes_are_refused():
    q, k = np.zeros((4, 8, 4), np.float32), np.zeros((4, 2, 4), np.float32)
    with pytest.raises(ValueError, match="share one dtype, got float32, float32 and bfloat16"):
        exchange.complete(exchange.dispatch_fwd(q, k, k.astype(BF16), None, POOL_AXES))
    q, k = q.astype(np.int8), k.astype(np.int8)
    with pytest.raises(ValueError, match="got int8: cast them to bfloat16"):
        exchange.complete(exchange.dispatch_fwd(q, k, k, None, POOL_AXES))
