"""The step against a plain float64 model: every mesh, mask, strategy and number of microbatches."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from cad_jax import model as model_module
from cad_jax.attention.strategies import STRATEGIES, make_strategy
from cad_jax.optimizer import OptimizerConfig
from cad_jax.sharding.mesh import MESH_AXES
from cad_jax.train_step import Batch, TrainStep, stack, stack_microbatches
from tests import llama_oracle
from tests.llama_cases import (
    GatherEverything,
    LeaveToPartitioner,
    jit,
    make_batch,
    mesh_of,
    random_params,
    tiny_config,
)

TOKENS = 48
LENGTHS = ([13, 1, 0, 22, 7], [40, 3], [5, 5, 5, 5, 5, 20], [48])


def make_step(shape, config, strategy=None, optimizer=None, remat="save_attention"):
    optimizer = optimizer or OptimizerConfig()
    return TrainStep(config, mesh_of(*shape), strategy or GatherEverything(), optimizer, remat)


def documents_by_rank(documents, servers):
    """Plan arrays of the tests' plain strategies: [M, S, T]."""
    return documents.reshape(documents.shape[0], servers, -1)


def in_nano_batches(tree, nano_batches=1):
    """[M N, ...] -> [M, N, ...]."""
    return jax.tree.map(
        lambda a: a.reshape(len(a) // nano_batches, nano_batches, *a.shape[1:]), tree
    )


def run(function, step, params, batch, arrays, nano_batches=1):
    """Batch [M N, R] and plan arrays [M N, S, ...] through the step."""
    batch = jax.device_put(in_nano_batches(batch, nano_batches), step.batch_sharding)
    arrays = jax.device_put(in_nano_batches(arrays, nano_batches), step.arrays_sharding)
    params = jax.device_put(params, step.state_shardings.params)
    return jax.block_until_ready(function(params, batch, arrays))


def check(result, expected, label):
    (loss, gradients), (want_loss, want) = result, expected
    assert abs(float(loss) - want_loss) <= 2e-6 * want_loss, label
    errors = llama_oracle.relative_errors(gradients, want)
    assert max(errors.values()) <= 2e-5, (label, errors)


def masked(batch, kind):
    weights, rng = batch.weights.copy(), np.random.default_rng(1)
    if kind == "random":
        weights *= rng.random(weights.shape) < 0.4
    elif kind == "one valid token":
        weights[:] = 0
        weights.flat[np.flatnonzero(batch.weights)[5]] = 1
    elif kind == "one rank empty":
        weights[:, : TOKENS // 8] = 0
    return batch._replace(weights=weights)


@pytest.mark.parametrize(
    ("shape", "microbatches", "kinds", "changes"),
    [
        # Tied table; vocabulary of 60: a shard of padding alone.
        ((1, 1, 1), 4, ("all", "one valid token"), {}),
        ((1, 8, 1), 2, ("all", "one valid token", "one rank empty", "random"), {}),
        ((1, 4, 2), 1, ("all", "one rank empty"), dict(tied_embeddings=True, vocab_size=60)),
        ((1, 2, 4), 2, ("one valid token", "random"), {}),  # one key head on two devices
        ((1, 2, 2), 1, ("one valid token", "one rank empty"), {}),
        ((1, 3, 2), 1, ("all",), {}),  # E does not divide by dp: weights whole on every rank
        ("native", 1, ("all", "one valid token"), {}),
    ],
)
def test_loss_and_gradients_equal_one_device(shape, microbatches, kinds, changes, monkeypatch):
    monkeypatch.setattr(model_module, "LOSS_CHUNK_TOKENS", 7)
    config = tiny_config(**changes)
    strategy = LeaveToPartitioner() if shape == "native" else GatherEverything()
    step = make_step((1, 4, 2) if shape == "native" else shape, config, strategy)
    params = random_params(step.description)
    batch, documents = make_batch(LENGTHS[:microbatches], TOKENS, config.vocab_size)
    arrays = documents_by_rank(documents, step.parallelism.dp)
    function = jit(step.loss_and_gradients)
    for kind in kinds:
        own = masked(batch, kind)
        expected = llama_oracle.loss_and_gradients(params, config, own, documents)
        check(run(function, step, params, own, arrays), expected, kind)


@pytest.mark.parametrize(
    ("shape", "strategy"), [((1, 4, 2), GatherEverything()), ((1, 2, 2), LeaveToPartitioner())]
)
def test_bfloat16_stays_near(shape, strategy):
    config = tiny_config(dtype="bfloat16")
    step = make_step(shape, config, strategy)
    params = random_params(step.description)
    batch, documents = make_batch(LENGTHS[:1], TOKENS, config.vocab_size)
    arrays = documents_by_rank(documents, step.parallelism.dp)
    loss, gradients = run(jit(step.loss_and_gradients), step, params, batch, arrays)
    want_loss, want = llama_oracle.loss_and_gradients(params, config, batch, documents)
    assert abs(float(loss) - want_loss) <= 5e-3 * want_loss
    assert max(llama_oracle.relative_errors(gradients, want).values()) <= 8e-2


@pytest.mark.parametrize(
    ("name", "shape", "kernel", "options"),
    [
        ("cad", (1, 8, 1), "xla", dict(transport="direct")),
        ("cad", (1, 4, 2), "reference", dict(transport="relay")),
        ("cad", (1, 2, 4), "reference", dict(transport="direct")),
        ("home", (1, 2, 4), "reference", {}),
        ("all_gather", (1, 4, 2), "reference", {}),
        ("ring", (1, 4, 1), "reference", {}),
        ("native", (1, 4, 2), "auto", {}),
        ("native_dense", (1, 2, 1), "auto", {}),
    ],
)
def test_every_strategy_gives_the_same_loss_and_gradients(name, shape, kernel, options):
    config = tiny_config()
    servers = shape[0] * shape[1]
    tokens = 640  # tasks are cut at multiples of 128 rows
    strategy = make_strategy(
        name,
        servers=servers,
        tokens_per_server=tokens // servers,
        heads=config.head_shape(shape[2]),
        kernel=kernel,
        **options,
    )
    lengths = [[400, 3, 0, 130, 60], [640]]
    batch, documents = make_batch(lengths, tokens, config.vocab_size)
    prepared = [strategy.prepare(np.asarray(n, np.int64)) for n in lengths]
    rows = [[Batch(*(field[m] for field in batch))] for m in range(2)]
    placed = stack_microbatches(rows, [[p.order] for p in prepared])
    arrays = stack([[p.arrays] for p in prepared])
    placed, arrays = jax.tree.map(lambda a: a[:, 0], (placed, arrays))
    step = make_step(shape, config, strategy)
    params = random_params(step.description)
    expected = llama_oracle.loss_and_gradients(params, config, batch, documents)
    check(run(jit(step.loss_and_gradients), step, params, placed, arrays), expected, name)


def test_the_strategies_above_are_all_there_are():
    table = test_every_strategy_gives_the_same_loss_and_gradients.pytestmark[0].args[1]
    assert {row[0] for row in table} == set(STRATEGIES)


def adamw(params, gradients, optimizer):
    """Textbook AdamW over the given sequence of gradients, with global-norm clipping, float64."""
    leaves, structure = jax.tree.flatten(params)
    is_norm = ["norm" in jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(params)]
    values = [np.asarray(p, np.float64) for p in leaves]
    m, v = [0.0] * len(values), [0.0] * len(values)
    norms = []
    for t, tree in enumerate(gradients, 1):
        g = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
        norms.append(np.sqrt(sum((x**2).sum() for x in g)))
        g = [x * min(1.0, optimizer.clip_norm / norms[-1]) for x in g]
        rate = optimizer.learning_rate * t / optimizer.warmup_steps
        for i, x in enumerate(g):
            m[i] = optimizer.beta1 * m[i] + (1 - optimizer.beta1) * x
            v[i] = optimizer.beta2 * v[i] + (1 - optimizer.beta2) * x * x
            m_hat, v_hat = m[i] / (1 - optimizer.beta1**t), v[i] / (1 - optimizer.beta2**t)
            decay = 0.0 if is_norm[i] else optimizer.weight_decay * values[i]
            values[i] = values[i] - rate * (m_hat / (np.sqrt(v_hat) + optimizer.eps) + decay)
    return jax.tree.unflatten(structure, values), norms


def test_two_updates_equal_textbook_adamw():
    config = tiny_config(num_layers=1)
    optimizer = OptimizerConfig(
        learning_rate=0.01, warmup_steps=4, total_steps=9, clip_norm=0.5, eps=1e-3
    )
    step = make_step((1, 4, 2), config, optimizer=optimizer)
    state = step.init(3)
    params = random_params(step.description)
    state = state._replace(params=jax.device_put(params, step.state_shardings.params))
    gradients, losses, metrics = [], [], []
    for seed in range(2):
        batch, documents = make_batch([LENGTHS[seed]], TOKENS, config.vocab_size, seed)
        expected, _ = adamw(params, gradients, optimizer)
        loss, gradient = llama_oracle.loss_and_gradients(expected, config, batch, documents)
        losses.append(loss)
        gradients.append(gradient)
        arrays = in_nano_batches(documents_by_rank(documents, 4))
        placed = (
            jax.device_put(in_nano_batches(batch), step.batch_sharding),
            jax.device_put(arrays, step.arrays_sharding),
        )
        before = state
        state, own = jax.block_until_ready(step.step(state, *placed))
        metrics.append(jax.tree.map(float, own))
        assert all(x.is_deleted() for x in jax.tree.leaves(before.params))  # donated
    expected, norms = adamw(params, gradients, optimizer)
    assert min(norms) > optimizer.clip_norm
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, params)
    want = jax.tree.map(lambda a, b: a - b, expected, params)
    assert max(llama_oracle.relative_errors(moved, want).values()) <= 1e-4
    assert int(state.step) == 2
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], norms, rtol=1e-5)
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [0.0025, 0.005], rtol=1e-6)
    assert step.step._cache_size() == 1  # other batches never recompile


def test_learning_rate_rises_then_follows_half_a_cosine():
    schedule = OptimizerConfig(
        learning_rate=2.0, warmup_steps=4, total_steps=12, final_fraction=0.25
    ).learning_rate_at
    rates = [float(schedule(step)) for step in (0, 3, 4, 8, 12, 50)]
    np.testing.assert_allclose(rates, [0.5, 2.0, 2.0, 0.5 + 1.5 / 2, 0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(learning_rate=0.0), r"learning_rate \(=0.0\) must be positive"),
        (dict(beta2=1.0), r"beta2 \(=1.0\) must lie in"),
        (
            dict(warmup_steps=9, total_steps=9),
            r"warmup_steps \(=9\) must be below total_steps \(=9\)",
        ),
        (dict(final_fraction=2.0), r"final_fraction \(=2.0\)"),
        (dict(weight_decay=-1.0), r"weight_decay \(=-1.0\)"),
    ],
)
def test_optimizer_settings_that_break_a_rule(changes, words):
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(**changes)


def test_a_mesh_with_other_axes_is_refused():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match="'data', 'model'.*make_mesh"):
        TrainStep(tiny_config(), mesh, GatherEverything(), OptimizerConfig())


def test_weights_travel_in_bfloat16_and_gradients_in_float32():
    config = tiny_config(dtype="bfloat16", num_layers=1)
    step = make_step((1, 8, 1), config)
    lowered = step.trace(1, TOKENS, np.zeros((1, 1, 8, TOKENS // 8), np.int32)).lower()
    text = lowered.as_text()
    shapes = r"\(tensor<(\d+x\d+x[bf]+\d+)>\) -> tensor<\d+x\d+x[bf]+\d+>"
    gathered = re.findall(r"stablehlo\.all_gather[^\n]*: " + shapes, text)
    scattered = re.findall(
        r"stablehlo\.reduce_scatter(?:(?!stablehlo\.reduce_scatter).)*?\}\) : " + shapes,
        text,
        re.DOTALL,
    )
    # Embedding and head once; a layer's two halves in the forward pass and again in the backward.
    halves = ["4x64xbf16", "4x176xbf16"]
    assert sorted(gathered) == sorted(["384x4xbf16"] * 2 + halves * 2)
    assert sorted(scattered) == sorted(["384x32xf32"] * 2 + ["32x64xf32", "32x176xf32"])
    memory = lowered.compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes > 0


def test_a_mesh_that_is_not_here_can_be_traced():
    config = dataclasses.replace(
        tiny_config(),
        vocab_size=128_256,
        embedding_dim=4096,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=14_336,
        dtype="bfloat16",
    )
    mesh = AbstractMesh((1, 16, 8), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    step = TrainStep(config, mesh, GatherEverything(), OptimizerConfig())
    traced = step.trace(2, 16 * 1024, np.zeros((2, 1, 16, 1024), np.int32))
    state, metrics = traced.out_info
    assert metrics["loss"].shape == () and metrics["loss"].dtype == np.float32
    assert config.num_parameters == 8_030_261_248
    shards = jax.tree.map(
        lambda s: np.prod(s.sharding.shard_shape(s.shape)), step.abstract_state().params
    )
    # Norms alone are whole on every device.
    norms = config.embedding_dim * (2 * config.num_layers + 1)
    assert sum(jax.tree.leaves(shards)) == (config.num_parameters - norms) / 128 + norms
    assert state.params["layers"]["ffn_up"].shape == (32, 4096, 14_336)


@pytest.mark.parametrize(("remat", "exchanges"), [("save_attention", 4), ("full", 6)])
def test_the_backward_pass_repeats_no_exchange_unless_asked(remat, exchanges):
    config = tiny_config()
    tokens = np.zeros(2, np.int64) + 64
    strategy = make_strategy(
        "cad",
        servers=8,
        tokens_per_server=16,
        heads=config.head_shape(),
        transport="direct",
        kernel="reference",
    )
    step = make_step((1, 8, 1), config, strategy, remat=remat)
    arrays = jax.tree.map(lambda a: a[None, None], strategy.prepare(tokens).arrays)
    text = step.trace(1, 128, arrays).lower().as_text()
    # Dispatch and combine, forward and backward, in the one body of the loop over layers.
    assert text.count('"stablehlo.all_to_all"') == exchanges
