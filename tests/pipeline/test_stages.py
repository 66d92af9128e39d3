"""The pipeline's executor against a plain float64 model of one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cad_jax.pipeline.schedule import IDLE, interleaved
from tests.pipeline.pipeline_cases import Case, check
from tests.sharding import ragged_double

PINGPONG = dict(nano_batches=2, pingpong=True, tokens=128)
# Meshes, microbatches, schedules and overlap are of test_step_exactness.py: here what it does not vary, the
# policies of remat, layers of a stage, nano-batches one after the other, a single stage, home.
CASES = (
    ((4, 2, 1), 4, "all_gather", dict(remat="full")),
    ((8, 1, 1), 2, "home", {}),
    ((2, 4, 1), 1, "ring", dict(layers_each=2, remat="save_stage")),
    ((2, 1, 4), 3, "cad", dict(nano_batches=2, changes=dict(tied_embeddings=True))),
    ((1, 2, 2), 2, "ring", dict(layers_each=2)),
    ((2, 2, 1), 2, "cad", dict(PINGPONG, layers_each=3, remat="save_stage")),
    ((2, 2, 1), 2, "cad", dict(PINGPONG, layers_each=3, remat="full")),
    ((2, 2, 2), 4, "all_gather", dict(virtual_stages=2, nano_batches=2)),
)


@pytest.mark.parametrize(("shape", "microbatches", "name", "others"), CASES)
def test_loss_and_gradients_equal_one_device(shape, microbatches, name, others):
    case = Case(shape, microbatches, name, **others)
    check(case, case.run())


@pytest.mark.parametrize(
    ("transport", "others"),
    [
        ("direct", dict(tolerance=0.15)),
        ("ragged", dict(nano_batches=2, pingpong=True, tolerance=0.1)),
    ],
)
def test_stages_share_keys_of_one_query(transport, others, monkeypatch):
    """Ticks whose plans divide the keys of a query among servers, beside ticks with idle stages."""
    ragged_double.install(monkeypatch)
    case = Case(
        (2, 2, 1), 2, "cad", "xla", tokens=1024, transport=transport, key_ranges=4,
        **others,
    )  # fmt: skip
    for arrays in case.arrays():  # rows of a second partial output in some tick, of none in another
        units = arrays.merge[:, :, :, 1:, :, 2].sum(axis=(2, 3, 4))
        assert units.any() and not units.all()
    check(case, case.run())


@dataclasses.dataclass(frozen=True)
class Poisoned:
    """A stage whose every result is NaN in the ticks in which its tables call it idle; where an idle
    stage was given anything but zeros, every result of all stages is."""

    stage: Any

    def forward(self, layers, xs, positions, tables):
        tables, idle = zip(*tables, strict=True)
        return self.poison(idle[0], xs, self.stage.forward(layers, xs, positions, tables))

    def backward(self, layers, xs, saved, d_xs_out, positions, tables):
        tables, idle = zip(*tables, strict=True)
        args = layers, xs, saved, d_xs_out, positions, tables
        return self.poison(idle[0], (xs, saved, d_xs_out), self.stage.backward(*args))

    @staticmethod
    def poison(idle, given, results):
        something = jnp.stack([jnp.any(a != 0) for a in jax.tree.leaves(given)]).any()
        somewhere = lax.pmax(idle & something, ("pp", "dp", "tp"))
        return jax.tree.map(lambda a: jnp.where(idle | somewhere, jnp.nan, a), results)


class PoisonedCase(Case):
    @property
    def stage(self):
        return Poisoned(super().stage)

    def arrays(self):
        tables = self.schedule.forward, self.schedule.backward
        idle = [np.repeat(t.microbatch == IDLE, self.ranks, axis=1)[:, None] for t in tables]
        return tuple(zip(super().arrays(), idle, strict=True))

    def expand(self, arrays):
        return super().expand(arrays[0]), arrays[1]


def test_idle_stages_leave_no_trace():
    # Stage 0 goes idle while slot 0, which idle stages name, holds a microbatch.
    case = PoisonedCase((2, 2, 2), 4, "cad", tokens=128, layers_each=2)
    forward, backward = case.schedule.forward, case.schedule.backward
    idle_after = forward.microbatch[-1, 0] == IDLE and forward.slot[3, 0] == 0
    assert idle_after and backward.microbatch[-1, 0] == 3
    check(case, case.run())


@pytest.mark.parametrize(
    ("remat", "phases"), [("save_attention", 2), ("save_stage", 2), ("full", 4)]
)
def test_a_b_tick_holds_exchanges_of_the_forward_only_where_attention_runs_again(remat, phases):
    case = Case((2, 2, 2), 2, "cad", tokens=128, layers_each=2, remat=remat)
    values = case.inputs()
    text = case.step(values).lower(*values).as_text()
    # Dispatch and combine of the F tick (warm-up, steady) and those of the B tick (steady, drain).
    assert text.count('"stablehlo.all_to_all"') == 2 * 2 + phases * 2


def test_the_stash_holds_what_the_policy_names():
    layers, slots = 4, 3
    bytes_of = {}
    for remat in ("save_attention", "save_stage", "full"):
        case = Case((2, 1, 1), 4, "home", tokens=256, layers_each=layers, remat=remat)
        assert case.schedule.slots == slots
        values = case.inputs()
        memory = case.step(values).lower(*values).compile().memory_analysis()
        bytes_of[remat] = memory.temp_size_in_bytes
    config, rows = case.config, case.tokens
    inputs = slots * (layers - 1) * rows * config.embedding_dim * 4
    attention = slots * layers * rows * config.num_q_heads * (config.head_dim + 1) * 4
    # What a B tick computes again exists once, whatever the number of slots.
    again = dict(inputs=inputs // slots, attention=attention // slots)
    assert bytes_of["save_attention"] - bytes_of["save_stage"] >= inputs - again["inputs"]
    assert bytes_of["save_stage"] - bytes_of["full"] >= attention - sum(again.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(schedule=interleaved(4, 2, 1)), r"as many stages \(=4\) .* devices \(=2\)"),
        (dict(schedule=interleaved(2, 4, 1)), r"as many microbatches \(=4\) as the batch \(=2\)"),
        (dict(schedule=interleaved(2, 2, 2)), r"layers \(=1\) .* virtual_stages \(=2\)"),
        (dict(tokens=18), r"tokens per rank \(=9\) must be divisible by tp \(=2\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, words):
    case = Case((2, 2, 2), 2, "all_gather", tokens=changes.pop("tokens", 48))
    values = case.inputs()
    case.schedule = changes.pop("schedule", case.schedule)
    with pytest.raises(ValueError, match=words):
        case.step(values).lower(*values)
