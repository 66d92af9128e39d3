"""Whole steps with the ragged exchange, bit for bit those with the direct one: ping-pong halves, heads over tp,
pipeline stages. (A stand-in takes the collective's place: CPU has none.)
"""

import dataclasses

import jax
import numpy as np
import pytest

from tests import llama_oracle
from tests.llama_cases import jit
from tests.pipeline.pipeline_cases import Case
from tests.pipeline.test_pingpong import make_case
from tests.sharding import ragged_double


def assert_same_bits(got, want) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(
    ("shape", "changes"),
    [((1, 4, 2), {}), ((1, 4, 2), dict(tokens_over_tp=True, tied_embeddings=True))],
)
def test_ping_pong_steps(shape, changes, monkeypatch) -> None:
    ragged_double.install(monkeypatch)
    results = []
    for transport in ("direct", "ragged"):
        step, placed, (want_loss, want) = make_case(shape, transport, **changes)
        assert step.strategy.transport == transport
        results.append(jax.block_until_ready(jit(step.loss_and_gradients)(*placed)))
    loss, gradients = results[-1]
    assert abs(float(loss) - want_loss) <= 2e-6 * want_loss
    assert max(llama_oracle.relative_errors(gradients, want).values()) <= 2e-5
    assert_same_bits(*results)


def test_pipelined_steps(monkeypatch) -> None:
    ragged_double.install(monkeypatch)
    case = Case((2, 2, 1), 2, "cad", nano_batches=2, pingpong=True, tokens=256, transport="ragged")
    assert case.plans.forward.dispatch[0].blocks.send_sizes.any()
    assert_same_bits(case.run(), dataclasses.replace(case, transport="direct").run())
