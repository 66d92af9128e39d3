"""A step's estimated memory: parts in closed form, the total against compiled steps."""

import csv
from pathlib import Path

import pytest

from cad_jax.pipeline.memory import estimate_memory
from cad_jax.pipeline.schedule import interleaved
from cad_jax.sharding.cost import model_shape
from cad_jax.sharding.tasks import Capacities, HeadShape

COMPILED = Path(__file__).parents[2] / "experiments/results/pipeline_memory.csv"
HEADS = HeadShape(4, 1, 128)
# What plans of 64 Ki tokens a server took, rounded: the runs of exchange tables are no memory to speak of.
CAPACITIES = Capacities("relay", 85_000, 262_144, (0, 0), (0, 0), (0, 0), (0, 0), 0, 0, 0)


def estimate(stages, microbatches, virtual_stages=1, remat="save_attention", tokens_over_tp=True):
    schedule = interleaved(stages, microbatches, virtual_stages) if stages > 1 else None
    return estimate_memory(
        model_shape("llama3-8b"),
        HEADS,
        CAPACITIES,
        schedule,
        tokens_per_rank=131_072,
        dp=8 // stages,
        tp=8,
        tokens_over_tp=tokens_over_tp,
        remat=remat,
    )


def test_every_compiled_step_is_near():
    with COMPILED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    for row in rows:
        stages, microbatches, chunks = (
            int(row[name]) for name in ("stages", "microbatches", "virtual_stages")
        )
        total = estimate(stages, microbatches, chunks, row["remat"]).total / 2**30
        assert total == pytest.approx(float(row["peak_gib"]), rel=0.15), row


def test_the_stash_by_hand():
    """Rows of a device 16 Ki, E 4096 in bfloat16: 128 MiB a layer for its input and as much for out."""
    mib = 2**20
    lse = 4 * 131_072 * 4  # float32, of the rank's rows, this device's four heads
    of_stage = 128 * mib
    for remat, of_layer, extra in (
        ("save_attention", 256 * mib + lse, -128 * mib),  # the first layer's input is the stage's
        ("save_stage", 128 * mib + lse, 0),
        ("full", 0, 0),
    ):
        slot = of_stage + 8 * of_layer + extra
        assert estimate(4, 8, 1, remat).stash == 7 * slot  # min(M, 2 P - 1) slots
        assert estimate(4, 2, 1, remat).stash == 2 * slot
    assert estimate(1, 4).stash == 0


def test_splitting_weights_keeps_every_row_on_every_device():
    whole, split = estimate(2, 4), estimate(2, 4, tokens_over_tp=False)
    assert split.weights == pytest.approx(whole.weights / 8)
    assert split.stage > 4 * whole.stage
    assert split.state == whole.state
