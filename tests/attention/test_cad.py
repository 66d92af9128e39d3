"""Core attention disaggregation as users meet it: any documents without recompiling, padding and
other documents without effect, nothing computed twice, partial outputs merged exactly."""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from strategy_cases import (
    Case,
    assert_padding_untouched,
    exact,
    in_order,
    mesh_of,
    naive_errors,
    relative_errors,
    run,
    strategy_of,
)

import cad_jax
from cad_jax.attention import cad, differentiable
from cad_jax.sharding.capacities import default_capacities
from cad_jax.sharding.mesh import POOL_AXES, make_mesh
from cad_jax.sharding.plan import Plan, home_plan
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.tables import expand
from cad_jax.sharding.tasks import (
    CAPACITY_FIELDS,
    TRANSPORT_HOPS,
    Capacities,
    HeadShape,
    sort_tasks,
)

SERVERS, TOKENS_PER_SERVER = 4, 256
TOKENS = SERVERS * TOKENS_PER_SERVER
HEADS, HEAD_DIM = (2, 1), 8


def case_of(way: str) -> Case:
    return Case(way, "xla", SERVERS, 1, HEADS, HEAD_DIM, "float32")


@cache
def strategy_and_step(way: str):
    """One compiled step for all documents: capacities follow from static arguments alone."""
    case = case_of(way)
    strategy = strategy_of(case, TOKENS_PER_SERVER, max_document_tokens=TOKENS)
    return strategy, run(strategy, mesh_of(case), *HEADS)


def attend_documents(way: str, lengths, d_out=None) -> list[np.ndarray]:
    """out, dq, dk, dv in document order, float64."""
    strategy, step = strategy_and_step(way)
    prepared = strategy.prepare(np.asarray(lengths, np.int64))
    inputs, _ = exact(tuple(lengths), TOKENS, HEADS, HEAD_DIM, "float32")
    inputs = inputs if d_out is None else inputs._replace(d_out=d_out)
    order = slice(None) if prepared.order is None else prepared.order
    result = jax.block_until_ready(step(*(x[order] for x in inputs), prepared.arrays))
    return in_order(result, prepared.order)


def check_documents(way: str, lengths) -> None:
    got = attend_documents(way, lengths)
    assert_padding_untouched(got, lengths)
    _, want = exact(tuple(lengths), TOKENS, HEADS, HEAD_DIM, "float32")
    assert relative_errors(got, want, lengths).max() <= 1e-5


@st.composite
def document_lengths(draw) -> list[int]:
    """Documents that fit the pool: mostly short, sometimes one that spans ranks, zeros included."""
    lengths, room = [], TOKENS
    for wanted in draw(
        st.lists(st.one_of(st.integers(0, 40), st.integers(0, TOKENS)), max_size=12)
    ):
        lengths.append(min(wanted, room))
        room -= lengths[-1]
    return lengths


AWKWARD = ([], [0, 0], [4, 3], [7, 1, 2, 5], [1], [TOKENS], [TOKENS - 1], [256, 256], [300, 0, 3])


@pytest.mark.parametrize(
    ("way", "examples"),
    [("cad/relay", 50), ("cad/direct", 12), ("home/relay", 12), ("all_gather", 12), ("ring", 12)],
)
def test_any_documents_without_recompiling(way: str, examples: int) -> None:
    seen = []

    @settings(
        max_examples=examples + 10, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(document_lengths())
    def holds(lengths: list[int]) -> None:
        seen.append(tuple(lengths))
        check_documents(way, lengths)

    for lengths in AWKWARD:
        holds = example(lengths)(holds)
    holds()
    assert len(set(seen)) >= examples
    assert strategy_and_step(way)[1]._cache_size() == 1


@pytest.mark.parametrize("way", ["cad/relay", "all_gather", "ring"])
def test_other_documents_have_no_gradient(way: str) -> None:
    lengths = [200, 500, 3, 130]
    inputs, _ = exact(tuple(lengths), TOKENS, HEADS, HEAD_DIM, "float32")
    rows = np.zeros(TOKENS, bool)
    rows[200:700] = True
    out, dq, dk, dv = attend_documents(way, lengths, inputs.d_out * rows[:, None, None])
    for gradient in (dq, dk, dv):
        assert gradient[rows].any()
        assert not gradient[~rows].any()


def test_two_models_in_one_process() -> None:
    """Heads of another model, in other units of the exchange, leave the first as it was."""
    lengths = (700, 0, 40, 1)
    first = attend_documents("cad/relay", lengths)
    other = Case("cad/relay", "xla", 4, 1, (6, 2), HEAD_DIM, "float32")
    strategy = strategy_of(other, TOKENS_PER_SERVER)
    inputs, want = exact(lengths, TOKENS, other.heads, HEAD_DIM, "float32")
    arrays = strategy.prepare(np.asarray(lengths)).arrays
    got = in_order(run(strategy, mesh_of(other), *other.heads)(*inputs, arrays), None)
    assert relative_errors(got, want, lengths).max() <= 1e-5
    for before, after in zip(first, attend_documents("cad/relay", lengths), strict=True):
        np.testing.assert_array_equal(before, after)


def test_odd_rows_on_eight_servers() -> None:
    """Tokens per server need no divisor: 131 rows each, one document of 1041 and 7 of padding."""
    case = Case("cad/relay", "xla", 8, 1, (4, 2), HEAD_DIM, "float32")
    strategy = strategy_of(case, 131, tolerance=0.0)
    prepared = strategy.prepare(np.array([1041]))
    assert prepared.figures.exchange_bytes_max > 0
    inputs, want = exact((1041,), 8 * 131, case.heads, HEAD_DIM, "float32")
    got = in_order(run(strategy, mesh_of(case), *case.heads)(*inputs, prepared.arrays), None)
    assert_padding_untouched(got, [1041])
    assert relative_errors(got, want, [1041]).max() <= 1e-5


def key_split_plan(
    parts: int, servers: int, tokens: int, length: int, heads: HeadShape, transport: str
) -> Plan:
    """One document, the keys of every home's queries cut in `parts` for as many servers."""
    tasks = []
    for home in range(-(-length // tokens)):
        first, last = home * tokens, min((home + 1) * tokens, length)
        bounds = np.linspace(0, last, parts + 1).astype(int)
        for part, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            server = (home + part) % servers
            tasks.append([0, max(first, low), last, low, high, home, server])
    hops = (1 << 20,) * TRANSPORT_HOPS[transport]
    roomy = Capacities(transport, *[1 << 20] * 2, *[hops] * 4, *[1 << 20] * 3, partials=parts)
    return Plan(
        servers, tokens, np.array([length]), sort_tasks(np.array(tasks)), 0.05, heads, roomy
    )


@pytest.mark.parametrize("transport", ["relay", "direct"])
def test_partial_outputs_merge_like_one(transport: str) -> None:
    """Keys of each query over 1 to 8 servers: bfloat16 outputs and gradients err at most 1.5 times those
    of the kernel that sees the document whole, and no more than the naive op."""
    servers, tokens, length, heads = 8, 40, 311, HeadShape(4, 2, 32)
    split = partial(key_split_plan, servers=servers, tokens=tokens, length=length, heads=heads)
    plans = [split(parts, transport=transport) for parts in (1, 2, 4, 8)]
    needs = [required_capacities(plan, transport) for plan in plans]
    most = {
        name: np.array([getattr(need, name) for need in needs]).max(axis=0).tolist()
        for name in CAPACITY_FIELDS
    }
    most = {name: tuple(x) if isinstance(x, list) else x for name, x in most.items()}
    case = Case(f"cad/{transport}", "xla", servers, 1, (4, 2), 32, "bfloat16")
    strategy = strategy_of(case, tokens, capacities=Capacities(transport, **most))
    step = run(strategy, mesh_of(case), *case.heads)
    inputs, want = exact((length,), servers * tokens, case.heads, 32, "bfloat16")
    errors = []
    for plan in plans:
        plan = Plan(servers, tokens, plan.lengths, plan.tasks, 0.05, heads, strategy.capacities)
        plan.check()
        got = in_order(step(*inputs, plan.arrays()), None)
        assert_padding_untouched(got, [length])
        errors.append(relative_errors(got, want, [length])[:, 0])
    naive = naive_errors((length,), servers * tokens, case.heads, 32, "bfloat16")[:, 0]
    assert step._cache_size() == 1
    alone = case._replace(way="home/direct", servers=1)
    whole = strategy_of(alone, servers * tokens)
    arrays = whole.prepare(np.array([length])).arrays
    got = in_order(run(whole, mesh_of(alone), *case.heads)(*inputs, arrays), None)
    unsplit = relative_errors(got, want, [length])[:, 0]
    for error in errors:
        assert (error <= 1.5 * unsplit).all() and (error <= naive).all(), (errors, unsplit, naive)


def temporary_bytes_of_merge(partials: int) -> int:
    """Of one device, to bring home and merge so many partial outputs a row."""
    heads, tokens = HeadShape(8, 2, 32), 4096
    shape = dict(servers=SERVERS, tokens_per_server=tokens, heads=heads)
    capacities = dataclasses.replace(
        default_capacities(**shape, transport="direct", partials=partials),
        query_rows=2 * tokens,
        output_units=(tokens * heads.q_units // SERVERS,),
    )
    plan = home_plan(np.array([tokens]), **shape, capacities=capacities, tolerance=0.05)

    def local(out, lse, arrays):
        tables = expand(jax.tree.map(lambda a: a[0], arrays), heads, tokens)
        return cad.combine(differentiable.Settings(POOL_AXES), out, lse, tables)

    rows = P(POOL_AXES)
    combine = jax.shard_map(
        local, mesh=make_mesh(dp=SERVERS), in_specs=rows, out_specs=rows, check_vma=False
    )
    out = jax.ShapeDtypeStruct((SERVERS * 2 * tokens, 8, 32), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct(out.shape[:2], jnp.float32)
    compiled = jax.jit(combine).lower(out, lse, plan.arrays()).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_merging_never_holds_two_partial_outputs() -> None:
    two, eight = map(temporary_bytes_of_merge, (2, 8))
    assert eight - two < 4096 * 8 * 32 * 2  # one of them, bfloat16


def exchanges_in_gradient(policy) -> int:
    """All-to-alls in the compiled gradient of two scanned, rematerialised layers, direct
    transport."""
    heads, embedding_dim = HeadShape(2, 1, 8), 16
    plan = cad_jax.plan_documents(
        [700, 40, 200], servers=SERVERS, tokens_per_server=TOKENS_PER_SERVER, num_q_heads=2,
        num_kv_heads=1, head_dim=8, transport="direct",
    )  # fmt: skip

    def local_loss(weights, x, arrays):
        tables = expand(jax.tree.map(lambda a: a[0], arrays), heads, TOKENS_PER_SERVER)
        attention = differentiable.Settings(POOL_AXES, "reference")

        @partial(jax.checkpoint, policy=policy, prevent_cse=False)
        def layer(x, weight):
            projected = (x @ weight).reshape(x.shape[0], 4, 8)
            q, k, v = jnp.split(projected, (2, 3), axis=1)
            out = differentiable.attend(cad.PLANNED, attention, q, k, v, tables)
            return x + out.reshape(x.shape), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    step = jax.shard_map(
        jax.grad(local_loss),
        mesh=make_mesh(dp=SERVERS),
        in_specs=(P(), P(POOL_AXES), P(POOL_AXES)),
        out_specs=P(),
        check_vma=False,
    )
    weights, x = jnp.ones((2, embedding_dim, 32)), jnp.ones((TOKENS, embedding_dim))
    compiled = jax.jit(step).lower(weights, x, plan.arrays()).compile()
    return len(re.findall(r" all-to-all(?:-start)?\(", compiled.as_text()))


def test_named_residuals_keep_attention_from_running_twice() -> None:
    names = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
    assert exchanges_in_gradient(names) == 4  # out and back, forward and backward
    assert exchanges_in_gradient(jax.checkpoint_policies.nothing_saveable) == 6


def test_wrapper_shards_heads_over_tp() -> None:
    """Fewer key heads than tp ranks: each rank computes with a copy."""
    lengths = (300, 17, 150)
    plan = cad_jax.plan_documents(
        lengths, servers=2, tokens_per_server=256, num_q_heads=2, num_kv_heads=1, head_dim=8
    )
    inputs, want = exact(lengths, 512, (4, 1), 8, "float32")
    q, k, v = inputs[:3]
    mesh = make_mesh(dp=2, tp=2)
    attend = jax.jit(partial(cad_jax.core_attention, mesh=mesh, kernel="reference"))
    got = in_order([attend(q, k, v, plan.arrays())], None)
    assert relative_errors(got, want[:1], lengths).max() <= 1e-5


def test_wrapper_refuses_what_does_not_fit() -> None:
    plan = cad_jax.plan_documents(
        [300], servers=2, tokens_per_server=256, num_q_heads=2, num_kv_heads=1, head_dim=8
    )
    arrays = plan.arrays()

    def attend(rows, heads, key_heads, mesh):
        q, k = jnp.zeros((rows, heads, 8)), jnp.zeros((rows, key_heads, 8))
        cad_jax.core_attention(q, k, k, arrays, mesh=mesh)

    with pytest.raises(ValueError, match=r"num_q_heads \(= 3\) must be divisible by tp \(= 2\)"):
        attend(512, 3, 1, make_mesh(dp=2, tp=2))
    with pytest.raises(ValueError, match=r"num_kv_heads \(= 3\) must divide tp"):
        attend(512, 6, 3, make_mesh(dp=2, tp=2))
    with pytest.raises(ValueError, match=r"plan with servers=4"):
        attend(512, 2, 1, make_mesh(dp=4))
    with pytest.raises(
        ValueError, match=r"plan with this tokens_per_server and with the heads of one"
    ):
        attend(512, 4, 1, make_mesh(dp=2))
    with pytest.raises(ValueError, match=r"the plan has 256 tokens per server"):
        attend(1024, 2, 1, make_mesh(dp=2))
    with pytest.raises(ValueError, match=r"pad the step"):
        attend(511, 2, 1, make_mesh(dp=2))
    with pytest.raises(ValueError, match=r"got \('data',\): make it with cad_jax.make_mesh, or"):
        attend(512, 2, 1, jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)))


def test_local_form_refuses_what_does_not_fit() -> None:
    """What gathers with clipped indices would otherwise compute with, to no error and no sense."""
    plan = cad_jax.plan_documents(
        [300], servers=2, tokens_per_server=256, num_q_heads=2, num_kv_heads=1, head_dim=8
    )
    q, k = jnp.zeros((512, 2, 8)), jnp.zeros((512, 1, 8))

    def attend(q, k, v, spec=P(POOL_AXES), axis_names=POOL_AXES, checked=False):  # noqa: B008
        jax.shard_map(
            partial(cad_jax.core_attention_local, axis_names=axis_names, kernel="reference"),
            mesh=make_mesh(dp=2),
            in_specs=(*[P(POOL_AXES)] * 3, spec),
            out_specs=P(POOL_AXES),
            check_vma=checked,
        )(q, k, v, plan.arrays())

    with pytest.raises(ValueError, match=r"vary over \['dp', 'pp'\]: pass check_vma=False to"):
        attend(q, k, k, checked=True)
    with pytest.raises(ValueError, match=r"got \('data',\) .*: name those of the pool"):
        attend(q, k, k, axis_names=("data",))
    for keys, values in ((k[:256], k[:256]), (k, jnp.zeros((512, 2, 8))), (k[..., :4], k[..., :4])):
        with pytest.raises(ValueError, match=r"k and v \[T, K, D\], with the same T and D, got"):
            attend(q, keys, values)
    with pytest.raises(ValueError, match=r"got those of 2 ranks: pass them in with the spec P"):
        attend(q, k, k, spec=P())
    with pytest.raises(ValueError, match=r"\(= 1\), but it has 2: plan with servers=1, or name"):
        attend(q, k, k, axis_names=("tp",))


def test_slips_of_the_caller_are_refused():
    mesh = make_mesh(dp=8)
    plan = cad_jax.plan_documents(
        [60], servers=8, tokens_per_server=8, num_q_heads=2, num_kv_heads=1, head_dim=4
    )
    q, k = jnp.zeros((64, 2, 4)), jnp.zeros((64, 1, 4))
    with pytest.raises(ValueError, match=r"needs plan.arrays\(\) .* got Plan and Mesh"):
        cad_jax.core_attention(q, k, k, plan, mesh=mesh)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="got PlanArrays and NoneType"):
        cad_jax.core_attention(q, k, k, plan.arrays(), mesh=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="floating point, got int32: cast them"):
        integers = (x.astype(jnp.int32) for x in (q, k, k))
        cad_jax.core_attention(*integers, plan.arrays(), mesh=mesh)


@pytest.mark.parametrize("way", ["forward over reverse", "reverse over reverse"])
def test_second_derivatives_are_refused(way: str) -> None:
    """Traced alone: rows travel as integers, through which a derivative would be zero and nobody told."""
    plan = cad_jax.plan_documents(
        [300], servers=2, tokens_per_server=256, num_q_heads=2, num_kv_heads=1, head_dim=8
    )
    q, k = jnp.zeros((512, 2, 8)), jnp.zeros((512, 1, 8))
    mesh = make_mesh(dp=2)

    def loss(q):
        return jnp.sum(cad_jax.core_attention(q, k, k, plan.arrays(), mesh=mesh) ** 2)

    def second(q):
        if way == "forward over reverse":
            return jax.jvp(jax.grad(loss), (q,), (q,))[1]
        return jax.grad(lambda q: jnp.sum(jax.grad(loss)(q) ** 2))(q)

    with pytest.raises(NotImplementedError, match="first derivatives alone"):
        jax.eval_shape(second, q)
