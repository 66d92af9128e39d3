"""Plans of a step by tick, against counts by brute force, and on devices against exact attention."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cad_jax.attention.prepared import StepFigures, combine_figures
from cad_jax.attention.strategies import STRATEGIES, make_strategy
from cad_jax.pipeline.schedule import interleaved, one_f_one_b
from cad_jax.pipeline.ticks import plan_step, sample_ticks
from cad_jax.sharding.mesh import make_mesh
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.tasks import HeadShape
from tests import oracles
from tests.generators import REAL_LENGTHS_DIR, real_batches
from tests.sharding.plan_cases import most_pairs
from tests.strategy_cases import in_order, make_inputs, relative_errors, run

HEADS = HeadShape(4, 1, 8)
STAGED = ("cad", "home", "all_gather", "ring")
TICK_SHAPES = [(1, 3, 1), (2, 1, 1), (3, 2, 1), (2, 5, 1), (2, 2, 2), (2, 4, 3)]


def strategy_of(name, stages, ranks, tokens, heads=HEADS, **options):
    return make_strategy(
        name, servers=stages * ranks, tokens_per_server=tokens, heads=heads, stages=stages,
        **options,
    )  # fmt: skip


def rows_of(schedule):
    """Microbatch of each stage, F ticks and then B ticks."""
    return np.concatenate([schedule.forward.microbatch, schedule.backward.microbatch]).tolist()


def documents(rng, tokens: int) -> np.ndarray:
    """Some documents of very different length within a nano-batch, sometimes none."""
    cuts = np.unique(rng.integers(0, tokens + 1, rng.integers(0, 5)))
    return np.diff(cuts).astype(np.int64)


def pairs_at_home(lengths, ranks: int, tokens: int) -> list[int]:
    """Query by query: its position in its document, on the rank it lives on."""
    count, token = [0] * ranks, 0
    for length in lengths:
        for position in range(length):
            count[token // tokens] += position + 1
            token += 1
    return count


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.sampled_from(TICK_SHAPES), st.integers(1, 2), st.sampled_from([64, 200]),
    st.sampled_from(STAGED), st.integers(0, 10**6), st.integers(1, 3),
)  # fmt: skip
def test_every_tick_holds_the_work_of_its_microbatches(shape, nanos, tokens, name, seed, ranks):
    schedule, rng = interleaved(*shape), np.random.default_rng(seed)
    stages, microbatches, _ = shape
    lengths = [[documents(rng, ranks * tokens) for _ in range(nanos)] for _ in range(microbatches)]
    plans = plan_step(schedule, strategy_of(name, stages, ranks, tokens), lengths)
    assert plans.pairs.shape == (2 * schedule.ticks, nanos, stages * ranks)
    for tick, row in enumerate(rows_of(schedule)):
        for nano in range(nanos):
            mine = [lengths[m][nano] if m >= 0 else [] for m in row]
            home = [n for docs in mine for n in pairs_at_home(docs, ranks, tokens)]
            assert plans.home_pairs[tick, nano].tolist() == home
            got = plans.pairs[tick, nano]
            assert got.sum() == sum(home)
            worst = got.max() / np.mean(home) if sum(home) else 1.0
            assert plans.max_over_mean[tick, nano] == pytest.approx(worst)
            if name == "cad":
                bound = most_pairs(np.concatenate([[0], *mine]), len(home), 0.05)
                assert got.max() <= bound
            if name == "home":
                assert got.tolist() == home
    for arrays in (plans.forward, plans.backward):
        for leaf in jax.tree.leaves(arrays):
            assert leaf.shape[:3] == (schedule.ticks, nanos, stages * ranks)
    shape_of_orders = [[o is None for o in orders] for orders in plans.orders]
    assert shape_of_orders == [[name in ("cad", "home")] * nanos] * microbatches


@pytest.mark.parametrize("name", STAGED)
def test_a_tick_is_prepared_as_if_alone(name):
    """Each tick's arrays: one plan over the pool, or each microbatch by itself on its own ranks."""
    ranks, tokens, schedule, rng = 2, 200, interleaved(2, 4, 2), np.random.default_rng(1)
    lengths = [[documents(rng, ranks * tokens) for _ in range(2)] for _ in range(4)]
    strategy = strategy_of(name, 2, ranks, tokens)
    plans = plan_step(schedule, strategy, lengths)
    alone = make_strategy(
        name, servers=ranks, tokens_per_server=tokens, heads=HEADS, axis_names=("dp",)
    )
    for tick, row in enumerate(rows_of(schedule)):
        phase, at = divmod(tick, schedule.ticks)
        for nano in range(2):
            arrays = jax.tree.map(lambda a: a[at, nano], (plans.forward, plans.backward)[phase])  # noqa: B023
            mine = [lengths[m][nano] if m >= 0 else np.array([], np.int64) for m in row]
            if name in ("cad", "home"):
                starts = [np.cumsum(x) - x + s * ranks * tokens for s, x in enumerate(mine)]
                plan = plan_documents(
                    np.concatenate(mine), starts=np.concatenate(starts), servers=2 * ranks,
                    tokens_per_server=tokens, num_q_heads=4, num_kv_heads=1, head_dim=8,
                    capacities=strategy.capacities, tolerance=0.05 if name == "cad" else 1e9,
                )  # fmt: skip
                want = plan.arrays()
            else:
                each = [alone.prepare(x) for x in mine]
                want = jax.tree.map(lambda *a: np.concatenate(a), *(p.arrays for p in each))
                for m, part in zip(row, each, strict=True):
                    if m >= 0:
                        np.testing.assert_array_equal(plans.orders[m][nano], part.order)
            for ours, theirs in zip(jax.tree.leaves(arrays), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", STAGED)
def test_a_host_may_build_its_own_ranks_alone(name):
    schedule, rng = one_f_one_b(2, 3), np.random.default_rng(3)
    lengths = [[documents(rng, 400)] for _ in range(3)]
    strategy = strategy_of(name, 2, 2, 200)
    whole, part = (plan_step(schedule, strategy, lengths, ranks) for ranks in (None, [1, 2]))
    for ours, theirs in zip(
        jax.tree.leaves((part.forward, part.backward)),
        jax.tree.leaves((whole.forward, whole.backward)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs[:, :, [1, 2]])
    assert part.digests == whole.digests and part.pairs.tolist() == whole.pairs.tolist()
    other = plan_step(schedule, strategy, lengths[::-1])
    assert other.digests != whole.digests


def test_ticks_of_the_same_microbatches_share_a_plan():
    """Interleaved: the chunks of a group run the same microbatches, P different rotations of them."""
    schedule, rng = interleaved(2, 4, 3), np.random.default_rng(0)
    lengths = [[documents(rng, 400)] for _ in range(4)]
    plans = plan_step(schedule, strategy_of("cad", 2, 2, 200), lengths)
    rows = {tuple(row) for row in rows_of(schedule)}
    # F: 0-, 10, 01, 21, 32, 23, -3; B besides: -0, 12, 3-.
    assert len(plans.digests) == len(rows) == 10 and schedule.ticks == 13
    samples = sample_ticks(schedule, lengths)
    assert len(samples) == len(rows)
    want = {tuple(tuple(lengths[m][0].tolist()) if m >= 0 else () for m in row) for row in rows}
    assert {tuple(tuple(x.tolist()) for x in sample) for sample in samples} == want


def test_capacities_of_sample_ticks_hold_them():
    schedule, rng = one_f_one_b(3, 4), np.random.default_rng(5)
    steps = [[[documents(rng, 512) for _ in range(2)] for _ in range(4)] for _ in range(3)]
    samples = [tick for step in steps for tick in sample_ticks(schedule, step)]
    options = {"transport": "direct", "max_document_tokens": 10**6}  # a stage holds 512 at most
    roomy = strategy_of("cad", 3, 2, 256, **options)
    measured = strategy_of("cad", 3, 2, 256, sample_lengths=samples, **options)
    assert roomy.planning.max_document_tokens == measured.planning.max_document_tokens == 512
    wire = []
    for strategy in (roomy, measured):
        plans = [plan_step(schedule, strategy, step) for step in steps]
        assert not any(p.figures.fallback_tasks for p in plans)
        assert max(max(p.figures.capacity_used.values()) for p in plans) <= 1
        wire.append(plans[0].figures.wire_bytes)
    assert wire[1] < wire[0]
    home = [strategy_of(n, 3, 2, 256).capacities.key_rows for n in ("home", "cad")]
    assert home == [512 + 256, 2 * 512 + 2 * 256]


def test_figures_add_up_over_ticks():
    figures = [
        StepFigures(1.0, 3.0, 1.5, 10.0, 20.0, 30.0, {"a": 0.5, "b": 0.1}, 2),
        StepFigures(2.0, 1.0, 1.0, 20.0, 25.0, 30.0, {"a": 0.25, "b": 0.2}, 1),
    ]
    combined = combine_figures(figures, [300, 100])
    assert combined == StepFigures(3.0, 2.5, 1.375, 15.0, 25.0, 30.0, {"a": 0.5, "b": 0.2}, 3)
    assert combine_figures(figures, [0, 0]).max_over_mean == 1.25


def test_a_steps_figures_weigh_its_ticks_by_pairs():
    schedule, rng = one_f_one_b(3, 2), np.random.default_rng(7)
    lengths = [[documents(rng, 512) for _ in range(2)] for _ in range(2)]
    plans = plan_step(schedule, strategy_of("cad", 3, 2, 256), lengths)
    for pairs, figure in (
        (plans.pairs, plans.figures.max_over_mean),
        (plans.home_pairs, plans.figures.max_over_mean_home),
    ):
        assert figure == pytest.approx(pairs.max(2).sum() / pairs.mean(2).sum())
    assert plans.figures.plan_s > 0 and plans.figures.max_over_mean_home > 2


@pytest.mark.parametrize("name", STAGED)
def test_ticks_compute_exact_attention(name):
    """Two stages of two ranks on devices: ticks with both at work, and with the other one idle.

    Rows of padding and of idle stages hold NaN: their results are zero, and nothing else sees them.
    """
    stages, ranks, tokens, heads, head_dim = 2, 2, 48, (4, 2), 16
    lengths = [np.array([70, 3, 20]), np.array([96]), np.array([0, 1, 40])]
    schedule = one_f_one_b(stages, len(lengths))
    strategy = strategy_of(
        name, stages, ranks, tokens, HeadShape(*heads, head_dim), kernel="reference", tolerance=0.0
    )
    plans = plan_step(schedule, strategy, [[x] for x in lengths])
    mesh = make_mesh(pp=stages, dp=ranks, tp=1)
    step, room = run(strategy, mesh, *heads), ranks * tokens
    inputs = [
        make_inputs(x, room, heads, head_dim, "float32", seed=i) for i, x in enumerate(lengths)
    ]
    idle = make_inputs([], room, heads, head_dim, "float32")
    seen = set()
    for tick, row in enumerate(rows_of(schedule)):
        phase, at = divmod(tick, schedule.ticks)
        if tuple(row) in seen:
            continue
        seen.add(tuple(row))
        arrays = jax.tree.map(lambda a: a[at, 0], (plans.forward, plans.backward)[phase])  # noqa: B023
        orders = [plans.orders[m][0] if m >= 0 else None for m in row]
        of_stage = [inputs[m] if m >= 0 else idle for m in row]
        placed = [
            [x if o is None else x[o] for x in values]
            for values, o in zip(of_stage, orders, strict=True)
        ]
        result = jax.block_until_ready(
            step(*(np.concatenate(parts) for parts in zip(*placed, strict=True)), arrays)
        )
        for stage, (m, order) in enumerate(zip(row, orders, strict=True)):
            mine = [np.asarray(x)[stage * room : (stage + 1) * room] for x in result]
            if m < 0:
                assert not any(x.any() for x in mine)
                continue
            got = in_order(mine, order)
            want = oracles.causal_documents(*inputs[m][:3], lengths[m], inputs[m].d_out)
            errors = relative_errors(got, [want.out, want.dq, want.dk, want.dv], lengths[m])
            assert errors.max() <= 1e-5
            assert not any(x[lengths[m].sum() :].any() for x in got)
    assert {(0, -1), (-1, 2), (1, 0)} <= seen


def test_what_does_not_fit_is_refused():
    lengths = [[np.array([100])] for _ in range(3)]
    with pytest.raises(ValueError, match="the schedule's 4 microbatches, got 3: make"):
        plan_step(one_f_one_b(2, 4), strategy_of("cad", 2, 2, 64), lengths)
    for name in STAGED:
        with pytest.raises(ValueError, match=r"strategy's 2 stages, got 3 in tick 0"):
            plan_step(one_f_one_b(3, 3), strategy_of(name, 2, 2, 64), lengths)
    uneven = [*lengths[:2], [np.array([3]), np.array([4])]]
    with pytest.raises(ValueError, match=r"as many nano-batches, at least one, got \[1, 1, 2\]"):
        plan_step(one_f_one_b(2, 3), strategy_of("cad", 2, 2, 64), uneven)
    with pytest.raises(ValueError, match="at least one"):
        plan_step(one_f_one_b(2, 1), strategy_of("cad", 2, 2, 64), [[]])
    with pytest.raises(ValueError, match=r"a stage must fit its 128 tokens, got 129 for stage \d"):
        plan_step(one_f_one_b(2, 1), strategy_of("cad", 2, 2, 64), [[np.array([129])]])
    for name in set(STRATEGIES) - set(STAGED):
        with pytest.raises(ValueError, match=rf"{name} .* stages \(pp = 2\): use cad, home"):
            strategy_of(name, 2, 2, 64)
        with pytest.raises(ValueError, match="cannot run in pipeline stages"):
            plan_step(one_f_one_b(1, 1), strategy_of(name, 1, 4, 64), [[np.array([9])]])
    with pytest.raises(ValueError, match=r"servers \(= 4\) must be divisible by stages \(= 3\)"):
        make_strategy("cad", servers=4, tokens_per_server=64, heads=HEADS, stages=3)


@pytest.mark.skipif(not REAL_LENGTHS_DIR.is_dir(), reason="no real length lists here")
def test_real_documents_are_balanced_in_every_tick():
    """P = 4, M = 8, dp 8, 64K tokens a rank in two nano-batches; capacities from sample steps."""
    stages, microbatches, ranks, tokens, nanos = 4, 8, 8, 65536, 2
    batches = real_batches("pretrain_128k", ranks * tokens // nanos, 3 * microbatches * nanos)
    flat = [batches[i : i + nanos] for i in range(0, len(batches), nanos)]
    steps = [flat[i : i + microbatches] for i in range(0, len(flat), microbatches)]
    schedule = one_f_one_b(stages, microbatches)
    samples = [tick for step in steps for tick in sample_ticks(schedule, step)]
    strategy = strategy_of(
        "cad", stages, ranks, tokens // nanos, HeadShape(32, 8, 128), max_document_tokens=131072,
        sample_lengths=samples,
    )  # fmt: skip
    for step in steps:
        plans = plan_step(schedule, strategy, step, ranks=range(ranks))
        assert plans.figures.fallback_tasks == 0
        for tick, row in enumerate(rows_of(schedule)):
            for nano in range(nanos):
                mine = np.concatenate([step[m][nano] for m in row if m >= 0])
                bound = most_pairs(mine, len(plans.home_pairs[tick, nano]), 0.05)
                assert plans.pairs[tick, nano].max() <= bound
        assert plans.max_over_mean.max() <= 1.0501
        assert plans.figures.max_over_mean_home > 3
