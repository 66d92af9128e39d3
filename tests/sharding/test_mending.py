"""Mending: never worse, within every limit, and near the best plans there are."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cad_jax.sharding.balance import balance_once
from cad_jax.sharding.coverage import check_coverage
from cad_jax.sharding.fares import equal_weights
from cad_jax.sharding.mending import mend
from cad_jax.sharding.pieces import Pool, restart, start_state
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.prefixes import PoolDocuments, load_bounds
from cad_jax.sharding.tasks import (
    HOME,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    TILE_ROWS,
    HeadShape,
    document_starts,
    home_tasks,
)
from tests.sharding.exact_plans import best_units, least_worst


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6000), min_size=1, max_size=12),
    rows=st.sampled_from([1.0, 1.5, 3.0]),
    node=st.sampled_from([1, 2]),
)
def test_mending_lowers_what_travels_and_keeps_every_limit(lengths, rows, node):
    """From one round of the greedy: never more units in, of the mean server and the worst."""
    servers, tokens, heads = 6, 4096, HeadShape(4, 1, 8)
    lengths = np.array(lengths, np.int64)
    lengths[np.cumsum(lengths) > servers * tokens] = 0
    starts, limits = document_starts(lengths), np.full(servers, int(rows * tokens))
    documents = PoolDocuments(lengths, starts, tokens, heads, np.full(servers, 1), node)
    bound = load_bounds(documents.pairs, documents.speeds, 0.05)
    pool = Pool(
        starts, starts + lengths, tokens, heads.q_units, heads.kv_units, limits, 20000, node, bound
    )
    home = home_tasks(lengths, tokens)
    pieces = home[:, [0, Q_START, Q_STOP, HOME, SERVER]].copy()
    if not len(pieces):
        return
    unswept, weights = np.int64(0), equal_weights(servers)
    pieces, moves = balance_once(pool, pieces, 500, bound, weights, np.int64(2**62), unswept)
    spare = np.zeros((500, 5), np.int64)
    state = start_state(pool, spare, 0)
    restart(pool, state, pieces)
    over = np.maximum(state.load - bound, 0).max()
    mended = mend(pool, state, pieces, np.stack([bound, bound]), bound, 12, np.int64(2))
    tasks = np.zeros((len(mended), 7), np.int64)
    tasks[:, [0, Q_START, Q_STOP, HOME, SERVER]] = mended
    tasks[:, K_STOP] = tasks[:, Q_STOP]
    check_coverage(lengths, tasks)
    restart(pool, state, mended)
    assert np.maximum(state.load - bound, 0).max() <= over
    assert moves or len(mended) == len(pieces)
    assert (state.rows <= limits).all() and state.keys.max() <= 20000


def judged_units(plan: Plan) -> int:
    units = plan.travelling_rows().units_in(plan.heads)
    return int(units.sum() + plan.servers * units.max())


def test_plans_are_near_the_best_there_is():
    """Against exact solutions of small cases of whole tiles, at the same greatest load: within 12%, but
    for one where several exchanges are needed at once (1.46)."""
    ratios, heads = [], HeadShape(4, 1, 8)
    for seed in range(16):
        rng = np.random.default_rng(seed)
        servers, tokens = int(rng.choice([2, 3, 4])), int(rng.choice([512, 768]))
        lengths, room = [], servers * tokens // TILE_ROWS
        while room:
            long = int(rng.integers(1, room + 1)) if rng.random() < 0.6 else int(rng.integers(1, 4))
            lengths.append(min(long, room) * TILE_ROWS)
            room -= lengths[-1] // TILE_ROWS
        plan = plan_documents(
            lengths, servers=servers, tokens_per_server=tokens, num_q_heads=4, num_kv_heads=1,
            head_dim=8, tolerance=0.1,
        )  # fmt: skip
        if not plan.moves:
            continue
        loads = plan.loads()
        bound = max(int(loads.max()), int(1.1 * loads.mean()))
        exact = best_units(np.array(lengths), servers, tokens, heads, bound, 120.0)
        assert exact.best <= exact.least * 1.001  # solved
        assert exact.best <= judged_units(plan) * 1.0001
        ratios.append(judged_units(plan) / exact.best)
    ratios.sort()
    assert len(ratios) >= 12 and np.median(ratios) <= 1.01 and ratios[-2] <= 1.12


def test_no_plan_is_below_the_bound_of_its_worst_server():
    """Nor is an exact one; and where one document fills the pool the bound says much."""
    heads, servers, tokens = HeadShape(4, 1, 8), 4, 768
    for lengths, says in (([3072], 0.7), ([1000, 2000, 50], 0.5), ([256] * 12, 0.0)):
        plan = plan_documents(
            lengths, servers=servers, tokens_per_server=tokens, num_q_heads=4, num_kv_heads=1,
            head_dim=8, tolerance=0.1,
        )  # fmt: skip
        bound = max(int(plan.loads().max()), int(1.1 * plan.loads().mean()))
        least = least_worst(np.array(lengths), servers, tokens, heads, bound, 256, 60.0)
        worst = plan.travelling_rows().units_in(heads).max()
        assert says * worst <= least <= worst
