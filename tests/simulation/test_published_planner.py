"""The published planner: by hand, as properties, and against its own published figures."""

import numpy as np
import pytest

from cad_jax.sharding.coverage import check_coverage
from cad_jax.sharding.tasks import HeadShape
from cad_jax.simulation.published import plan_published
from tests.generators import REAL_LENGTHS_DIR, long_tailed_lengths

HEADS = HeadShape(32, 8, 128)
T = 65_536
# The released planner on 32 servers of 65,536 tokens, mean of 6 batches: file, tolerance: max over mean, MiB in
# per server (q and out, keys, worst server), worst MiB out.
MEASURED = {
    ("pretrain_128k", 0.05): (1.048, 185, 318, 987, 1777),
    ("pretrain_128k", 0.10): (1.108, 179, 299, 873, 1692),
    ("mixed_128k", 0.05): (1.094, 181, 454, 1444, 1318),
    ("pretrain_512k", 0.05): (1.048, 188, 1179, 2247, 5787),
    ("mixed_512k", 0.10): (1.052, 186, 1530, 3310, 4749),
}


def test_two_servers_by_hand() -> None:
    """One document against two halves: the first server gives away the inner tokens of its pair."""
    plan = plan_published(
        [np.array([1024, 512, 512])], servers=2, tokens_per_server=1024, heads=HEADS, tolerance=0.0
    )
    surplus = 1024 * 1025 // 2 - 512 * 513
    taken = surplus // 2 // 1025  # rows of each half: a pair of rows costs 1025
    assert plan.loads().tolist() == [1024 * 1025 // 2 - taken * 1025, 512 * 513 + taken * 1025]
    moved = plan.tasks[plan.tasks[:, 5] != plan.tasks[:, 6]]
    assert moved[:, 1:3].tolist() == [[512 - taken, 512 + taken]], "adjacent to the middle"
    rows = plan.moved_rows()
    for flows, moved_rows in ((rows.q, 2 * taken), (rows.kv, 512 + taken)):
        assert flows.into(2).tolist() == [0, moved_rows]
        assert flows.out_of(2).tolist() == [moved_rows, 0]


def test_rows_travel_from_their_homes_as_a_count_says() -> None:
    """Of every pair of ranks: all queries of a task, and keys of each server's longest prefix."""
    rng = np.random.default_rng(1)
    lengths = long_tailed_lengths(rng, 8 * 512)
    lengths[-1] = max(lengths[-1] - 16, 0)
    plan = plan_published([lengths], servers=8, tokens_per_server=512, heads=HEADS, tolerance=0.0)
    homes, prefixes = {}, {}
    queries, keys = np.zeros((2, 8, 8), int)
    for document, low, high, _, _, home, server in plan.tasks.tolist():
        homes |= {(document, row): home for row in range(low, high)}
        at = document, server
        prefixes[at] = max(prefixes.get(at, 0), high)
        queries[home, server] += high - low
    for (document, server), stop in prefixes.items():
        for row in range(stop):
            keys[homes[document, row], server] += 1
    for flows, counted in zip(plan.moved_rows(), (queries, keys), strict=True):
        pairs = np.zeros((8, 8), int)
        np.add.at(pairs, (flows.home, flows.server), flows.rows)
        np.fill_diagonal(counted, 0)
        assert pairs.sum() > 0
        assert pairs.tolist() == counted.tolist()


def test_every_pair_once_and_deficits_within_tolerance() -> None:
    rng = np.random.default_rng(4)
    for _ in range(10):
        lengths = long_tailed_lengths(rng, 8 * 2048)
        lengths[-1] = max(lengths[-1] - 16, 0)  # room to round odd lengths up
        plan = plan_published(
            [lengths], servers=8, tokens_per_server=2048, heads=HEADS, tolerance=0.1
        )
        check_coverage(plan.lengths, plan.tasks)
        mean = plan.loads().mean()
        pair = plan.lengths.max() + 1  # what one row of a pair costs at most
        assert plan.loads().min() >= 0.9 * mean - pair


def test_stages_keep_their_documents_to_their_own_servers() -> None:
    stages = [np.array([3000, 96]), np.zeros(0, np.int64), np.array([1000] * 4)]
    plan = plan_published(stages, servers=6, tokens_per_server=2048, heads=HEADS, tolerance=0.0)
    check_coverage(plan.lengths, plan.tasks)
    stage_of = np.array([0, 0, 2, 2, 2, 2])
    assert (plan.tasks[:, 5] // 2 == stage_of[plan.tasks[:, 0]]).all()
    assert (plan.loads() > 0).all(), "servers of the idle stage work for the others"


@pytest.mark.parametrize(("name", "tolerance"), MEASURED)
def test_it_moves_what_the_released_code_moves(name: str, tolerance: float) -> None:
    path = REAL_LENGTHS_DIR / f"{name}.txt"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    lengths, figures = iter(np.loadtxt(path, dtype=np.int64).tolist()), []
    for _ in range(6):
        batch, room = [], 32 * T
        while room:
            batch.append(min(next(lengths), room))
            room -= batch[-1]
        plan = plan_published(
            [np.array(batch)], servers=32, tokens_per_server=T, heads=HEADS, tolerance=tolerance
        )
        rows, loads = plan.moved_rows(), plan.loads()
        q = (rows.q.into(32) + rows.q.out_of(32)) * HEADS.q_row_bytes() / 2**20
        key_in, key_out = (
            x * HEADS.kv_row_bytes() / 2**20 for x in (rows.kv.into(32), rows.kv.out_of(32))
        )
        figures.append(
            (
                loads.max() / loads.mean(),
                q.mean(),
                key_in.mean(),
                (q + key_in).max(),
                (q + key_out).max(),
            )
        )
    assert np.mean(figures, axis=0) == pytest.approx(MEASURED[name, tolerance], rel=0.005)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_server": 1023}, "must be even"),
        ({"tokens_per_server": 512}, "must fit its 2 x 512 tokens"),
        ({"tolerance": -0.1}, "tolerance must be at least 0"),
    ],
)
def test_bad_input_is_refused(changes: dict, message: str) -> None:
    arguments = {"servers": 2, "tokens_per_server": 1024, "heads": HEADS, "tolerance": 0.1}
    with pytest.raises(ValueError, match=message):
        plan_published([np.array([2048])], **(arguments | changes))
