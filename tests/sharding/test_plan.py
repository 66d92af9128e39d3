import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cad_jax.sharding.capacities import (
    capacities_from_plans,
    default_capacities,
    home_capacities,
)
from cad_jax.sharding.cost import travelling_keys
from cad_jax.sharding.plan import Plan, home_plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.tasks import (
    HOME,
    K_START,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    HeadShape,
    document_starts,
    home_tasks,
)

HEADS = HeadShape(4, 1, 8)
SERVERS, TOKENS = 4, 512
LENGTHS = [1300, 0, 1, 300, 77]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_documents(
        LENGTHS, servers=SERVERS, tokens_per_server=TOKENS, num_q_heads=4, num_kv_heads=1,
        head_dim=8,
    )  # fmt: skip


def with_tasks(plan: Plan, tasks) -> Plan:
    return dataclasses.replace(plan, tasks=np.array(tasks))


def index_of(plan: Plan, document: int, stop: int) -> int:
    return int(np.flatnonzero((plan.tasks[:, 0] == document) & (plan.tasks[:, Q_STOP] == stop))[0])


def test_a_plan_says_what_it_holds(plan):
    plan.check()
    assert plan.moves > 0 and plan.max_over_mean < plan.max_over_mean_home
    assert repr(plan).startswith("Plan(4 servers x 512 tokens, 5 documents of 1678 tokens")
    assert set(plan.capacity_used()) == set(plan.capacities.flat())
    assert max(plan.capacity_used().values()) <= 1
    with pytest.raises(ValueError, match="read-only"):
        plan.tasks[0, 0] = 1


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (HOME, 3, "must live on its home rank; task of document 0"),
        (Q_START, 1000, "must live on its home rank; task of document 0"),
        (Q_STOP, 1200, "keys must be a non-empty range that ends by q_stop"),
        (HOME, 4, "home and server must be among the 4 servers; task of document 0"),
        (SERVER, -1, "home and server must be among the 4 servers; task of document 0"),
        (
            Q_START,
            1300,
            "queries must be a non-empty range within the document; task of document 0",
        ),
        (Q_STOP, 1301, "queries must be a non-empty range within the document; task of document 0"),
        (Q_START, 1025, r"document 0, queries \[1024, 1025\): keys \[0, 1025\) missing"),
        (K_STOP, 1301, "keys must be a non-empty range that ends by q_stop"),
        (K_STOP, 1299, r"document 0, queries \[1024, 1300\): keys \[1299, 1300\) missing"),
        (K_START, 1, r"document 0, queries \[1024, 1300\): keys \[0, 1\) missing"),
        (0, 5, "tasks must name one of the 5 documents; task of document 5"),
    ],
)
def test_check_names_the_document(plan, column, value, message):
    """Corrupts the last task of document 0 in a home plan: queries [1024, 1300) on rank 2."""
    tasks = home_tasks(plan.lengths, TOKENS)
    at = np.flatnonzero(tasks[:, Q_STOP] == 1300)
    assert tasks[at].tolist() == [[0, 1024, 1300, 0, 1300, 2, 2]]
    with_tasks(plan, tasks).check()
    tasks[at, column] = value
    with pytest.raises(ValueError, match=message):
        with_tasks(plan, tasks).check()


def test_check_finds_what_is_missing_or_double(plan):
    at = index_of(plan, 3, 300)
    with pytest.raises(ValueError, match=r"document 3, queries \[\d+, 300\).* missing"):
        with_tasks(plan, np.delete(plan.tasks, at, 0)).check()
    twice = np.concatenate([plan.tasks, plan.tasks[[at]]])
    with pytest.raises(ValueError, match="must not share query rows; task of document 3"):
        with_tasks(plan, twice).check()
    twice[-1, SERVER] = (twice[-1, SERVER] + 1) % SERVERS
    with pytest.raises(ValueError, match=r"document 3, .* covered twice"):
        with_tasks(plan, twice).check()


def test_check_refuses_documents_that_do_not_fit(plan):
    with pytest.raises(ValueError, match="must fit servers .* = 2048 tokens, got 2978"):
        dataclasses.replace(plan, lengths=np.array([*LENGTHS[:-1], 1377])).check()
    with pytest.raises(ValueError, match="must not be negative, got -1 for document 4"):
        dataclasses.replace(plan, lengths=np.array([*LENGTHS[:-1], -1])).check()


def test_check_refuses_a_plan_beyond_its_capacities(plan):
    needed = required_capacities(plan, plan.capacities.transport)
    dataclasses.replace(plan, capacities=needed).check()
    for name, value in needed.items():
        less = tuple(v - 1 for v in value) if isinstance(value, tuple) else value - 1
        if np.min(less) < 0:
            continue
        tight = dataclasses.replace(plan, capacities=dataclasses.replace(needed, **{name: less}))
        with pytest.raises(ValueError, match=f"exceeds its capacities: {name}.* Raise them"):
            tight.check()


def test_key_ranges_of_one_row_may_lie_on_several_servers():
    home = home_plan(
        np.array([400]), servers=2, tokens_per_server=400, heads=HEADS,
        capacities=dataclasses.replace(default_capacities(2, 400, HEADS), partials=2),
    )  # fmt: skip
    split = [[0, 0, 256, 0, 256, 0, 0], [0, 256, 400, 0, 128, 0, 1], [0, 256, 400, 128, 400, 0, 0]]
    with_tasks(home, split).check()
    split[2][K_START] = 100
    with pytest.raises(
        ValueError, match=r"document 0, queries \[256, 400\): keys \[100, 128\) cov"
    ):
        with_tasks(home, split).check()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data())
def test_check_agrees_with_a_dense_count(data):
    """Random tasks, mostly wrong: check accepts exactly those whose dense count is the mask."""
    length, tokens = 12, 6
    rows = []
    for home in (0, 1):
        cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=2))})
        for low, high in zip(cuts, cuts[1:], strict=False):
            low, high = low + home * tokens, high + home * tokens
            key = data.draw(st.integers(0, high))
            pieces = [(0, key), (key, high)]
            if data.draw(st.integers(0, 3)) == 0:
                pieces[1] = (data.draw(st.integers(0, high)), high)
            rows += [
                [0, low, high, a, b, home, server] for server, (a, b) in enumerate(pieces) if a < b
            ]
    count = np.zeros((length, length), int)
    for _, low, high, a, b, _, _ in rows:
        count[low:high, a:b] += 1
    count *= np.tri(length, dtype=int)
    exact = np.array_equal(count, np.tri(length, dtype=int))
    capacities = dataclasses.replace(default_capacities(2, tokens, HEADS), partials=2)
    plan = Plan(2, tokens, np.array([length]), np.array(rows), 0.05, HEADS, capacities)
    if exact:
        plan.check()
    else:
        with pytest.raises(ValueError, match="covered exactly once; document 0"):
            plan.check()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=6), st.randoms(use_true_random=False))
def test_travelling_rows_equal_a_count_of_rows(lengths, random):
    tokens, servers = 64, 6
    capacities = default_capacities(servers, tokens, HEADS)
    plan = home_plan(
        np.array(lengths, np.int64), servers=servers, tokens_per_server=tokens, heads=HEADS,
        capacities=capacities,
    )  # fmt: skip
    tasks = plan.tasks.copy()
    for task in tasks:
        task[SERVER] = random.randrange(servers)
        task[K_START] = random.randrange(int(task[K_STOP]))
    starts = document_starts(plan.lengths)
    query_in, query_out, key_in, key_out = np.zeros((4, servers), int)
    sent, keys = set(), np.zeros((servers, servers), int)
    for d, q_start, q_stop, k_start, k_stop, home, server in tasks.tolist():
        if home != server:
            query_in[[server, home]] += q_stop - q_start
            query_out[[server, home]] += q_stop - q_start
        sent |= {(server, starts[d] + k) for k in range(k_start, k_stop)}
    for server, token in sent:
        if token // tokens != server:
            key_in[server] += 1
            key_out[token // tokens] += 1
            keys[token // tokens, server] += 1
    changed = with_tasks(plan, tasks.reshape(-1, 7))
    counted, flows = changed.travelling_rows(), travelling_keys(plan.lengths, changed.tasks, tokens)
    pairs = np.zeros_like(keys)
    np.add.at(pairs, (flows.home, flows.server), flows.rows)
    assert pairs.tolist() == keys.tolist()
    for ours, theirs in zip(counted, (query_in, query_out, key_in, key_out), strict=True):
        assert ours.tolist() == theirs.tolist()


def test_bytes_count_queries_outputs_keys_and_values(plan):
    rows = plan.travelling_rows()
    expected = rows.query_rows_in * 4 * 8 * 2 + rows.key_rows_in * 2 * 1 * 8 * 2
    assert plan.bytes_in().tolist() == expected.tolist()
    assert plan.bytes_in(4).tolist() == (2 * expected).tolist()
    assert plan.bytes_in().sum() == plan.bytes_out().sum()
    wire = plan.wire_bytes()
    assert set(wire) == {"direct", "relay", "ragged"}
    assert min(wire.values()) >= plan.bytes_in().mean()
    assert wire["direct"] >= wire["ragged"] >= max(*plan.bytes_in(), *plan.bytes_out())


def test_plans_are_values(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan and hash(loaded) == hash(plan) and loaded.digest() == plan.digest()
    shuffled = with_tasks(plan, plan.tasks[::-1])
    assert shuffled == plan
    other = dataclasses.replace(plan, tolerance=0.1)
    assert other != plan and other.digest() != plan.digest()
    moved = plan.tasks.copy()
    moved[0, SERVER] += 1
    assert with_tasks(plan, moved) != plan
    assert plan != "a plan"
    assert dataclasses.replace(plan, servers=np.int64(plan.servers)).digest() == plan.digest()
    saved = json.loads(path.read_text())
    assert saved["documents"] == LENGTHS and saved["moves"] == plan.moves


def test_damaged_files_are_refused(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="is not a saved plan"):
        Plan.load(path)
    saved = plan.to_json()
    for change, message in (
        ({"version": 99}, "has plan format 99, this program reads 1"),
        ({"tasks": saved["tasks"][1:]}, "missing"),
        ({"heads": {}}, "is not a saved plan"),
        ({"tasks": [[1, 2]]}, "is not a saved plan"),
    ):
        path.write_text(json.dumps(saved | change))
        with pytest.raises(ValueError, match=message):
            Plan.load(path)


@settings(derandomize=True, max_examples=120, deadline=None)
@given(
    st.integers(1, 7), st.integers(1, 70), st.sampled_from([(4, 1), (4, 4), (6, 3)]), st.data()
)  # fmt: skip
def test_home_plans_never_exceed_the_floor(servers, tokens, heads, data):
    longest = data.draw(st.integers(1, servers * tokens))
    lengths, room = [], servers * tokens
    while room and data.draw(st.integers(0, 9)):
        lengths.append(min(data.draw(st.integers(0, longest)), room))
        room -= lengths[-1]
    shape = HeadShape(*heads, 8)
    for transport in ("direct", "relay", "ragged"):
        floor = home_capacities(servers, tokens, shape, longest, transport)
        plan = home_plan(
            np.array(lengths, np.int64), servers=servers, tokens_per_server=tokens, heads=shape,
            capacities=floor,
        )  # fmt: skip
        assert floor.exceeded(required_capacities(plan, transport)) == {}
        assert default_capacities(servers, tokens, shape, longest, transport).holds(floor)


def test_capacities_from_plans_hold_the_plans(plan):
    moved = plan_documents(
        [2000], servers=SERVERS, tokens_per_server=TOKENS, num_q_heads=4, num_kv_heads=1, head_dim=8
    )
    plans = [plan] * 199 + [moved]
    for transport in ("direct", "relay", "ragged"):
        all_of_them = capacities_from_plans(plans, 100, transport=transport)
        most = capacities_from_plans(plans, 50, max_document_tokens=1300, transport=transport)
        assert all_of_them.holds(required_capacities(moved, transport))
        assert most.holds(required_capacities(plan, transport))
        assert all_of_them.holds(most) and not most.holds(all_of_them)
        assert most.holds(home_capacities(SERVERS, TOKENS, HEADS, 1300, transport))
    assert capacities_from_plans(plans).transport in ("direct", "relay")
    with pytest.raises(ValueError, match="at least one plan"):
        capacities_from_plans([])
    with pytest.raises(ValueError, match="percentile must be from 0 to 100, got 101"):
        capacities_from_plans(plans, 101)
    with pytest.raises(ValueError, match="must share servers"):
        capacities_from_plans([plan, dataclasses.replace(plan, servers=5)])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("servers",), 4.0),
        (("servers",), 0),
        (("servers",), 2**70),
        (("tokens_per_server",), "256"),
        (("tolerance",), math.nan),
        (("fallback_tasks",), None),
        (("documents", 0), 2**70),
        (("heads", "head_dim"), 8.0),
        (("capacities",), []),
        (("capacities", "query_rows"), 700.5),
        (("capacities", "dispatch_units"), 7),
        (("capacities", "query_rows"), [7]),
    ],
)
def test_a_file_edited_by_hand_is_refused_as_such(place, value, tmp_path) -> None:
    """Not by whatever stumbles over it first."""
    path = tmp_path / "plan.json"
    plan_documents(
        [300], servers=4, tokens_per_server=256, num_q_heads=4, num_kv_heads=1, head_dim=8
    ).save(path)
    saved = json.loads(path.read_text())
    inner = saved
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=rf"{path} is not a saved plan"):
        Plan.load(path)
