"""Documents that do not lie end to end: padding before, between and after them."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cad_jax.sharding.capacities import home_capacities
from cad_jax.sharding.plan import Plan, home_plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.tasks import (
    HOME,
    Q_START,
    Q_STOP,
    SERVER,
    HeadShape,
    document_starts,
    home_tasks,
    stage_documents,
    stage_lengths,
)
from tests.sharding.plan_cases import expected_buffers, most_pairs

HEADS = HeadShape(4, 1, 8)


@st.composite
def gapped_documents(draw, servers: int, tokens: int):
    """Lengths and starts within a pool, some documents empty, gaps of any size."""
    lengths, starts, free = [], [], 0
    for _ in range(draw(st.integers(0, 8))):
        free += draw(st.sampled_from([0, 0, 1, tokens // 2, tokens]))
        length = draw(st.integers(0, 2 * tokens))
        if free + length > servers * tokens:
            break
        starts.append(free)
        lengths.append(length)
        free += length
    return np.array(lengths, np.int64), np.array(starts, np.int64)


def plan_of(lengths, starts, servers, tokens, **options) -> Plan:
    return plan_documents(
        lengths, starts=starts, servers=servers, tokens_per_server=tokens, num_q_heads=4,
        num_kv_heads=1, head_dim=8, **options,
    )  # fmt: skip


def covered_pairs(plan: Plan) -> list[tuple[int, int]]:
    """Every (query, key) token pair that any server computes, as its buffers hold them."""
    return sorted(
        (query, key)
        for buffers in expected_buffers(plan)
        for query, keys in zip(buffers.query, buffers.attends, strict=True)
        for key in keys
    )


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.sampled_from([1, 7, 40, 128, 150]))
def test_plans_cover_exactly_the_pairs_there_are(data, servers, tokens):
    lengths, starts = data.draw(gapped_documents(servers, tokens))
    plan = plan_of(lengths, starts, servers, tokens)
    plan.check()
    assert plan.starts.tolist() == starts.tolist()
    tokens_of = [range(s, s + n) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    want = sorted((q, k) for mine in tokens_of for q in mine for k in range(mine.start, q + 1))
    assert covered_pairs(plan) == want
    for document, q_start, q_stop, *_, home, _ in plan.tasks.tolist():
        first, last = starts[document] + q_start, starts[document] + q_stop - 1
        assert first // tokens == last // tokens == home
    home = np.zeros(servers, int)
    for query, _ in want:
        home[query // tokens] += 1
    assert plan.home_loads().tolist() == home.tolist()
    assert plan.loads().sum() == len(want)
    assert plan.loads().max(initial=0) <= most_pairs(lengths, servers, plan.tolerance)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data())
def test_home_tasks_hold_every_token_once_at_its_home(data):
    tokens = data.draw(st.integers(1, 17))
    lengths, starts = data.draw(gapped_documents(6, tokens))
    seen = []
    for task in home_tasks(lengths, tokens, starts).tolist():
        rows = range(starts[task[0]] + task[Q_START], starts[task[0]] + task[Q_STOP])
        assert {row // tokens for row in rows} == {task[HOME]} == {task[SERVER]}
        seen += rows
    assert seen == [s + x for s, n in zip(starts, lengths, strict=True) for x in range(n)]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data(), st.randoms(use_true_random=False))
def test_travelling_rows_equal_a_count_of_rows(data, random):
    servers, tokens = 6, 64
    lengths, starts = data.draw(gapped_documents(servers, tokens))
    plan = plan_of(lengths, starts, servers, tokens)
    tasks = plan.tasks.copy()
    tasks[:, SERVER] = [random.randrange(servers) for _ in tasks]
    query_in, key_in, key_out = np.zeros((3, servers), int)
    for _, q_start, q_stop, _, _, home, server in tasks.tolist():
        query_in[[server, home]] += (q_stop - q_start) * (home != server)
    moved = dataclasses.replace(plan, tasks=tasks)
    for server, buffers in enumerate(expected_buffers(moved)):
        for token in buffers.key:
            key_in[server] += token // tokens != server
            key_out[token // tokens] += token // tokens != server
    counted = moved.travelling_rows()
    for ours, theirs in zip(counted, (query_in, query_in, key_in, key_out), strict=True):
        assert ours.tolist() == theirs.tolist()


def test_a_later_start_is_another_plan(tmp_path):
    lengths = np.array([700, 0, 300])
    without, same, gapped = (
        plan_of(lengths, starts, 4, 512) for starts in (None, [0, 700, 700], [512, 1212, 1500])
    )
    assert without == same and without.starts.tolist() == [0, 700, 700]
    assert gapped != without and gapped.digest() != without.digest()
    for plan in (without, gapped):
        path = tmp_path / "plan.json"
        plan.save(path)
        loaded = Plan.load(path)
        assert loaded == plan and loaded.starts.tolist() == plan.starts.tolist()
    with pytest.raises(ValueError, match="read-only"):
        gapped.starts[0] = 1


def test_files_without_starts_hold_documents_end_to_end(tmp_path):
    """As plans were saved before documents could begin anywhere."""
    plan, path = plan_of([700, 300], None, 4, 512), tmp_path / "plan.json"
    saved = plan.to_json()
    del saved["starts"]
    path.write_text(json.dumps(saved))
    assert Plan.load(path) == plan
    path.write_text(json.dumps(saved | {"starts": [1]}))
    with pytest.raises(ValueError, match="one start per document, got 1 starts for 2 documents"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (
            [0, 699, 1500],
            r"must not overlap .* got document 1 from token 699 where document 0 ends",
        ),
        ([0, 1500, 1400], "got document 2 from token 1400 where document 1 ends at token 1500"),
        ([-1, 700, 1500], "got document 0 from token -1 where the pool begins at token 0"),
        ([0, 700, 1800], r"within the pool's 2048 tokens, got document 2 in tokens \[1800, 2100\)"),
        ([0, 700], "one start per document, got 2 starts for 3 documents"),
        ([0.0, 700.0, 1500.0], "starts must be one row of whole numbers, got float64"),
    ],
)
def test_starts_that_make_no_sense_are_refused(starts, message):
    with pytest.raises(ValueError, match=message):
        plan_of([700, 0, 300], starts, 4, 512)
    if np.asarray(starts).dtype == np.int64:
        good = plan_of([700, 0, 300], None, 4, 512)
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(good, starts=np.array(starts)).check()


def test_a_home_that_ignores_the_start_is_refused():
    plan = plan_of([700, 300], [0, 1600], 4, 512)
    with pytest.raises(ValueError, match="must live on its home rank; task of document 1"):
        dataclasses.replace(plan, tasks=home_tasks(plan.lengths, 512)).check()


def test_documents_of_stages_begin_at_their_stage():
    microbatches = [np.array([5, 2]), np.array([], np.int64), np.array([0, 8])]
    assert [x.tolist() for x in stage_lengths([2, -1, 0], microbatches)] == [[0, 8], [], [5, 2]]
    lengths, starts = stage_documents(stage_lengths([2, -1, 0], microbatches), 8)
    assert lengths.tolist() == [0, 8, 5, 2] and starts.tolist() == [0, 0, 16, 21]
    with pytest.raises(ValueError, match="must fit its 6 tokens, got 7 for stage 2: pack fewer"):
        stage_documents(stage_lengths([-1, 1, 0], microbatches), 6)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 40),
    st.sampled_from([(4, 1), (4, 4), (6, 3)]), st.data(),
)  # fmt: skip
def test_home_plans_of_stages_never_exceed_the_floor(stages, ranks, tokens, heads, data):
    """The floor for documents as long as a stage holds home plans of all stages at once."""
    room = ranks * tokens
    longest = data.draw(st.integers(1, room))
    of_stage = []
    for _ in range(stages):
        lengths, left = [], room
        while left and data.draw(st.integers(0, 5)):
            lengths.append(min(data.draw(st.integers(0, longest)), left))
            left -= lengths[-1]
        of_stage.append(np.array(lengths, np.int64))
    lengths, starts = stage_documents(of_stage, room)
    shape, servers = HeadShape(*heads, 8), stages * ranks
    for transport in ("direct", "relay", "ragged"):
        floor = home_capacities(servers, tokens, shape, longest, transport)
        plan = home_plan(
            lengths, servers=servers, tokens_per_server=tokens, heads=shape, capacities=floor,
            starts=starts,
        )  # fmt: skip
        plan.check()
        assert floor.exceeded(required_capacities(plan, transport)) == {}


def test_starts_end_to_end_are_the_default():
    lengths = [900, 3, 0, 400]
    given = plan_of(lengths, document_starts(np.array(lengths)), 4, 512)
    assert given.digest() == plan_of(lengths, None, 4, 512).digest()
