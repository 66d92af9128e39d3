import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cad_jax.sharding.tasks import (
    HOME,
    K_START,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    Capacities,
    HeadShape,
    causal_pairs,
    document_starts,
    home_tasks,
)


def capacities(**changed) -> Capacities:
    values = dict(
        transport="relay", query_rows=8, key_rows=16, dispatch_units=(4, 5), output_units=(6, 7),
        dispatch_runs=(8, 9), output_runs=(1, 2), assemble_runs=3, output_assemble_runs=4,
        merge_runs=5,
    )  # fmt: skip
    return Capacities(**(values | changed))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 24), min_size=4, max_size=4))
def test_causal_pairs_counts_pairs(bounds):
    (q_start, q_stop), (k_start, k_stop) = sorted(bounds[:2]), sorted(bounds[2:])
    query, key = np.mgrid[q_start:q_stop, k_start:k_stop]
    assert causal_pairs(q_start, q_stop, k_start, k_stop) == np.count_nonzero(key <= query)


def test_causal_pairs_of_long_documents_are_exact():
    length = 2**30
    assert int(causal_pairs(0, length, 0, length)) == length * (length + 1) // 2
    assert causal_pairs([0, 1], [1, 3], [0, 0], [1, 3]).tolist() == [1, 5]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 17))
def test_home_tasks_hold_every_token_once_at_its_home(lengths, tokens):
    seen = []
    starts = document_starts(np.array(lengths, np.int64))
    tasks = home_tasks(np.array(lengths, np.int64), tokens)
    for task in tasks.tolist():
        first, stop = starts[task[0]] + task[Q_START], starts[task[0]] + task[Q_STOP]
        assert stop > first and {first // tokens, (stop - 1) // tokens} == {task[HOME]}
        assert task[SERVER] == task[HOME]
        assert (task[K_START], task[K_STOP]) == (0, task[Q_STOP])
        seen += [(task[0], x) for x in range(task[Q_START], task[Q_STOP])]
    assert seen == [(d, x) for d, length in enumerate(lengths) for x in range(length)]


@pytest.mark.parametrize(
    ("heads", "unit", "q", "kv"),
    [((32, 8, 128), 16, 2, 1), ((4, 4, 8), 4, 1, 2), ((6, 1, 8), 2, 3, 1), ((5, 5, 8), 5, 1, 2)],
)
def test_units_are_whole_rows_of_queries_and_of_keys(heads, unit, q, kv):
    shape = HeadShape(*heads)
    assert (shape.unit_heads, shape.q_units, shape.kv_units) == (unit, q, kv)
    assert shape.q_row_bytes() == heads[0] * heads[2] * 2
    assert shape.kv_row_bytes(4) == 2 * heads[1] * heads[2] * 4


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of num_kv_heads, got 6 and 4"):
        HeadShape(6, 4, 8)
    with pytest.raises(ValueError, match="head_dim must be a whole number, at least 1, got 0"):
        HeadShape(4, 4, 0)


def test_capacities_name_what_is_exceeded():
    needed = capacities(query_rows=9, dispatch_units=(4, 6))
    limits = capacities()
    assert limits.holds(limits) and not limits.holds(needed) and needed.holds(limits)
    assert limits.exceeded(needed) == {"query_rows": (8, 9), "dispatch_units_hop2": (5, 6)}


def test_malformed_capacities_are_refused():
    with pytest.raises(
        ValueError, match="transport must be one of direct, relay, ragged, got 'mail'"
    ):
        capacities(transport="mail")
    with pytest.raises(ValueError, match="output_runs needs 2 values for transport 'relay'"):
        capacities(output_runs=(1,))
    with pytest.raises(
        ValueError, match="key_rows must be whole numbers, not negative, got -1: take"
    ):
        capacities(key_rows=-1)
