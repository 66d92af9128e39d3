"""Two nano-batches alternating: exact, and every exchange beside the compute that hides it."""

import jax
import numpy as np
import pytest

from cad_jax.attention.strategies import make_strategy
from cad_jax.optimizer import OptimizerConfig
from cad_jax.train_step import Batch, TrainStep, stack
from tests import llama_oracle
from tests.llama_cases import jit, make_batch, mesh_of, random_params, tiny_config

TOKENS = 768  # of a nano-batch: tasks are cut at multiples of 128 rows
LENGTHS = [[400, 3, 0, 130, 60], [640], [5, 620], [128, 128, 1, 300]]


def make_case(
    shape,
    transport,
    microbatches=1,
    kernel="reference",
    tokens_over_tp=False,
    all_lengths=LENGTHS,
    tokens=TOKENS,
    planning=None,
    **changes,
):
    """A step for ping-pong, its inputs [M, 2, ...] placed, parameters, and the oracle's answer.

    planning: settings of the strategy; others are the model's."""
    config = tiny_config(**changes)
    strategy = make_strategy(
        "cad",
        servers=shape[1],
        tokens_per_server=tokens // shape[1],
        heads=config.head_shape(shape[2]),
        kernel=kernel,
        transport=transport,
        tp=shape[2],
        head_axis="tp" if tokens_over_tp else None,
        **(planning or {}),
    )
    step = TrainStep(
        config,
        mesh_of(*shape),
        strategy,
        OptimizerConfig(),
        nano_strategy=strategy,
        tokens_over_tp=tokens_over_tp,
    )
    lengths = all_lengths[: 2 * microbatches]
    rows, documents = make_batch(lengths, tokens, config.vocab_size)
    prepared = [strategy.prepare(np.asarray(n, np.int64)) for n in lengths]
    pairs = range(0, len(lengths), 2)
    batch = stack([[Batch(*(f[m + n] for f in rows)) for n in range(2)] for m in pairs])
    arrays = stack([[prepared[m + n].arrays for n in range(2)] for m in pairs])
    params = random_params(step.description)
    expected = llama_oracle.loss_and_gradients(params, config, rows, documents)
    placed = (
        jax.device_put(params, step.state_shardings.params),
        jax.device_put(batch, step.batch_sharding),
        jax.device_put(arrays, step.arrays_sharding),
    )
    return step, placed, expected


@pytest.mark.parametrize(
    ("shape", "transport", "microbatches", "changes"),
    [
        ((1, 1, 1), "direct", 2, dict(num_layers=1)),
        ((1, 8, 1), "relay", 1, dict(num_layers=3)),
        ((1, 2, 4), "relay", 1, dict(num_q_heads=8)),  # one key head a device, two queries
        ((1, 2, 4), "relay", 1, {}),  # one head a device: an attention has one part
        ((1, 3, 2), "direct", 1, {}),  # E does not divide by dp: weights whole on every rank
        ((1, 2, 4), "relay", 1, dict(tokens_over_tp=True, num_q_heads=16, num_kv_heads=2)),
    ],
)
def test_loss_and_gradients_equal_one_device(shape, transport, microbatches, changes):
    step, placed, expected = make_case(shape, transport, microbatches, **changes)
    check(jit(step.loss_and_gradients)(*placed), expected)


def check(result, expected):
    (loss, gradients), (want_loss, want) = jax.block_until_ready(result), expected
    assert abs(float(loss) - want_loss) <= 2e-6 * want_loss
    errors = llama_oracle.relative_errors(gradients, want)
    assert max(errors.values()) <= 2e-5, errors


def test_steps_with_and_without_divided_keys_are_one_program():
    planning = dict(key_ranges=4, tolerance=0.1)
    compiled = None
    divided, whole = [2000], [200] * 10
    for lengths in ([divided, whole], [whole, whole], [whole, divided]):
        step, placed, expected = make_case(
            (1, 4, 1), "relay", kernel="xla", all_lengths=lengths, tokens=2048, planning=planning
        )
        # Units of a second partial output, at home of any rank, of ping and of pong.
        units = np.asarray(placed[2].merge)[0, :, :, 1:, :, 2].sum(axis=(1, 2, 3))
        assert (units > 0).tolist() == [documents is divided for documents in lengths]
        compiled = compiled or jit(step.loss_and_gradients)
        check(compiled(*placed), expected)
    assert compiled is not None and compiled._cache_size() == 1
