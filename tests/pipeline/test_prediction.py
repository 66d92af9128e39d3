"""Predicted steps against hand arithmetic, and the dataflow against longest paths."""

from functools import cache

import numpy as np
import pytest

from cad_jax.pipeline.prediction import dataflow_seconds, first_microbatches, predict_step
from cad_jax.pipeline.schedule import IDLE, interleaved, one_f_one_b
from cad_jax.sharding.cost import DEVICES, MODELS, Device, ModelShape
from cad_jax.sharding.nano_batches import pack_halves
from tests.generators import REAL_LENGTHS_DIR

TOY_DEVICE = Device("toy", 1e12, 1e12, 1e11, 1e10, 8, 1e-5)
TOY_MODEL = ModelShape(
    "toy", 4, 16, num_q_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=32, vocab_size=64
)
RATE = 0.5 * 1e12
# Two layers a stage: (q, k, v, out: 16 x 96) + (3 x 16 x 32) weights each, two FLOPs a weight and token.
LINEAR_S = 2 * 2 * (16 * 96 + 3 * 16 * 32) * 256 / RATE
LOSS_S = 4 * 2 * 64 * 16 / 2 * 256 / RATE  # half of the head's weights, twice each way
PAIR_S = 2 * (4 * 4 * 8) / RATE  # two layers; four FLOPs a head, lane and pair
# Two ranks of 256 tokens. Pairs of the documents: 256 * 257 / 2 and 128 * 129 / 2.
LONG, SHORT = 32896, 8256
UNEVEN, EVEN = np.array([256, 128, 128]), np.array([128] * 4)


def predict(**changes):
    settings = {"tokens_per_rank": 256, "dp": 2, "tp": 1, "device": TOY_DEVICE, "efficiency": 0.5}
    return predict_step(one_f_one_b(2, 2), [[UNEVEN], [EVEN]], TOY_MODEL, **settings | changes)


def lockstep(pairs: int) -> float:
    """Three F and three B ticks whose most loaded ranks have so many pairs in each phase."""
    # A B tick: linear layers again, then two products for each; attention 2.5 times its forward.
    return 3.5 * pairs * PAIR_S + 3 * LINEAR_S + 3 * (3 * LINEAR_S + LOSS_S)


def test_a_step_by_hand():
    """F ticks run microbatches (0, -), (1, 0), (-, 1) on the two stages, B ticks (-, 0), (0, 1),
    (1, -): the uneven one counts in two of three."""
    step = predict()
    uneven_home, even = LONG, 2 * SHORT
    assert step.home.lockstep_s == pytest.approx(lockstep(2 * uneven_home + even))
    assert step.home.attention_s == pytest.approx(3.5 * (2 * uneven_home + even) * PAIR_S)
    # The first 128 queries of the long document move to the other rank: nothing else helps.
    uneven_planned = 3 * SHORT
    assert step.per_stage.lockstep_s == pytest.approx(lockstep(2 * uneven_planned + even))
    mean = 2 * (LONG + 2 * SHORT + 4 * SHORT) / 4  # every microbatch in two ticks, over four ranks
    assert step.balanced_s == pytest.approx(lockstep(mean))
    assert step.home.max_over_mean == pytest.approx((2 * uneven_home + even) / mean)
    assert step.balanced_s < step.pool.lockstep_s < step.per_stage.lockstep_s
    assert step.pool.dataflow_s == step.pool.lockstep_s
    assert step.schedule.ticks == 3 and step.plan_s > 0

    # Without a barrier. F takes a or b seconds for microbatch 0 or 1, B takes A or B.
    a, b = (LINEAR_S + pairs * PAIR_S for pairs in (uneven_home, even))
    A, B = (3 * LINEAR_S + LOSS_S + 2.5 * pairs * PAIR_S for pairs in (uneven_home, even))
    last_stage = a + a + A + b + B  # waits for F 0, then F 0, B 0, F 1, B 1
    assert step.home.dataflow_s == pytest.approx(max(2 * a + 2 * A, last_stage) + B)


def test_ways_of_planning_are_one_where_nothing_moves():
    step = predict(tolerance=1e9)
    assert step.pool.lockstep_s == step.per_stage.lockstep_s == step.home.lockstep_s


def test_tensor_parallelism_divides_all_work():
    one, two = predict(tolerance=1e9), predict(tolerance=1e9, tp=2)
    assert two.home.lockstep_s == pytest.approx(one.home.lockstep_s / 2)
    four = predict(tolerance=1e9, tp=4).home.lockstep_s  # key heads in two copies each
    assert four == pytest.approx(one.home.lockstep_s / 4)


def test_nano_batches_add_up_and_the_fullest_stage_counts():
    """Nano-batches of 128 tokens a rank; five layers over two stages: three on the fuller one."""
    nanos = [[np.array([256]), np.array([128, 128])]] * 2
    model = ModelShape(
        "toy", 5, 16, num_q_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=32, vocab_size=64
    )
    step = predict_step(
        one_f_one_b(2, 2), nanos, model, tokens_per_rank=256, dp=2, tp=1, device=TOY_DEVICE,
        efficiency=0.5,
    )  # fmt: skip
    pairs = (LONG - SHORT) + SHORT  # of the rank that has the second half of the long document
    assert step.home.attention_s == pytest.approx(3.5 * 3 * pairs * PAIR_S * 3 / 2)
    assert step.seconds.linear_s == pytest.approx(LINEAR_S * 3 / 2)


@pytest.mark.parametrize("shape", [(1, 3, 1), (3, 2, 1), (4, 8, 1), (2, 4, 2), (3, 6, 3)])
def test_dataflow_is_the_longest_path(shape):
    schedule = interleaved(*shape)
    stages, _, chunks = shape
    durations = np.random.default_rng(0).uniform(0.1, 2.0, (2 * schedule.ticks, stages))
    of_stage = [[] for _ in range(stages)]  # units in the order of execution, with their seconds
    for phase, tick in schedule.order:
        table, row = (schedule.forward, 0) if phase == "F" else (schedule.backward, schedule.ticks)
        for stage in range(stages):
            m, chunk = int(table.microbatch[tick, stage]), int(table.chunk[tick, stage])
            if m != IDLE:
                of_stage[stage].append(
                    (phase, chunk * stages + stage, m, durations[row + tick, stage])
                )

    @cache
    def end(phase, depth, microbatch):
        mine = of_stage[depth % stages]
        at = next(i for i, unit in enumerate(mine) if unit[:3] == (phase, depth, microbatch))
        waits = [end(*mine[at - 1][:3])] if at else []
        source = depth - 1 if phase == "F" else depth + 1
        if 0 <= source < stages * chunks:
            waits.append(end(phase, source, microbatch))
        return max(waits, default=0.0) + mine[at][3]

    want = max(end(*unit[:3]) for units in of_stage for unit in units)
    assert dataflow_seconds(schedule, durations) == pytest.approx(want)
    assert want <= durations.max(axis=1).sum() + 1e-9


def test_microbatches_of_whole_documents():
    lengths = np.array([30, 50, 10, 64, 5, 70, 20, 31])
    packed = first_microbatches(lengths, 3, 96)
    assert [len(nanos) for nanos in packed] == [1, 1, 1]
    assert all(nanos[0].sum() <= 96 for nanos in packed)
    halves = first_microbatches(np.array([30, 30, 10, 40, 5, 40, 20, 31]), 2, 96, fill=pack_halves)
    assert all(len(nanos) == 2 and max(n.sum() for n in nanos) <= 48 for nanos in halves)
    # A document longer than half leaves its microbatch undivided, and so the whole step.
    mixed = first_microbatches(
        np.array([30, 30, 10, 70, 40, 5, 40, 20, 31]), 3, 96, fill=pack_halves
    )
    assert [len(nanos) for nanos in mixed] == [1, 1, 1]
    with pytest.raises(
        ValueError, match="needs 9 microbatches of 96 tokens, the documents make up"
    ):
        first_microbatches(lengths, 9, 96)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": DEVICES["cpu"]}, "device cpu has no published peak"),
        ({"efficiency": 0.0}, "efficiency must be above 0 and at most 1, got 0.0"),
        ({"tp": 3}, "tp must divide the 4 query heads, .* got 3"),
        ({"tokens_per_rank": 128}, "documents must fit servers"),
    ],
)
def test_what_cannot_be_predicted_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        predict(**changes)
    with pytest.raises(
        ValueError, match="divisible by the 2 nano-batches of a microbatch, got 255"
    ):
        predict_step(
            one_f_one_b(1, 1), [[EVEN, EVEN]], TOY_MODEL, tokens_per_rank=255, dp=4, tp=1,
            device=TOY_DEVICE,
        )  # fmt: skip


@pytest.mark.skipif(not REAL_LENGTHS_DIR.is_dir(), reason="no real length lists here")
@pytest.mark.parametrize("name", ["pretrain_128k", "mixed_128k"])
def test_sharing_across_stages_pays_on_real_documents(name):
    """P = 4, M = 8, dp 8, 64K tokens a rank: near balance in the pool, far from it in a stage."""
    lengths = np.loadtxt(REAL_LENGTHS_DIR / f"{name}.txt", dtype=np.int64)
    step = predict_step(
        one_f_one_b(4, 8), first_microbatches(lengths, 8, 8 * 65536, fill=pack_halves),
        MODELS["llama3-8b"], tokens_per_rank=65536, dp=8, tp=1, device=DEVICES["h200"],
        max_document_tokens=131072,
    )  # fmt: skip
    assert step.pool.max_over_mean <= 1.0501
    assert step.pool.lockstep_s <= 1.05 * step.balanced_s
    assert 1.1 * step.pool.lockstep_s < step.per_stage.dataflow_s < step.home.dataflow_s
    assert step.per_stage.dataflow_s < step.per_stage.lockstep_s < step.home.lockstep_s
