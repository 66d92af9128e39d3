"""The model on one device: its maths, its boundaries, what it saves, how it starts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from cad_jax import model as model_module
from cad_jax.layer import Layer, project, rotate
from cad_jax.model import Llama, RopeScaling
from cad_jax.parameters import Parallelism, describe, init, shardings
from tests import llama_oracle
from tests.llama_cases import (
    jit,
    make_batch,
    mesh_of,
    one_device_attend,
    random_params,
    tiny_config,
)

SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=256
)


def merged(config, params):
    return nnx.merge(nnx.split(nnx.eval_shape(lambda: Llama(config)))[0], params)


def loss_of(config, params, batch, documents, attend=None, remat="save_attention", row=0):
    model = merged(config, params)
    ids, positions, targets, weights = (field[row] for field in batch)
    attend = attend or one_device_attend(documents[row])
    x = model.hidden(ids, positions, attend, remat)
    return model.loss(x, targets, weights) / weights.sum()


@pytest.mark.parametrize(
    "changes",
    [
        dict(rope_scaling=SCALING, rope_theta=10_000.0, head_dim=12, tied_embeddings=True),
        dict(num_kv_heads=1, num_layers=1, vocab_size=5, vocab_multiple=1),
    ],
)
def test_loss_and_gradients_equal_the_plain_model(changes, monkeypatch):
    monkeypatch.setattr(model_module, "LOSS_CHUNK_TOKENS", 7)  # 24 tokens: 4 chunks, one padded
    config = tiny_config(**changes)
    params = random_params(describe(config, Parallelism()))
    batch, documents = make_batch([[9, 1, 12]], 24, config.vocab_size)
    batch.positions[0, 10:22] += 300  # beyond the original context
    want_loss, want = llama_oracle.loss_and_gradients(params, config, batch, documents)
    loss, gradients = jit(jax.value_and_grad(lambda p: loss_of(config, p, batch, documents)))(
        params
    )
    assert abs(float(loss) - want_loss) <= 2e-6 * want_loss
    assert max(llama_oracle.relative_errors(gradients, want).values()) <= 2e-5


def test_bfloat16_stays_near_and_gradients_are_float32():
    config = tiny_config(dtype="bfloat16")
    params = random_params(describe(config, Parallelism()))
    batch, documents = make_batch([[9, 1, 12]], 24, config.vocab_size)
    want_loss, want = llama_oracle.loss_and_gradients(params, config, batch, documents)
    loss, gradients = jit(jax.value_and_grad(lambda p: loss_of(config, p, batch, documents)))(
        params
    )
    assert abs(float(loss) - want_loss) <= 2e-2 * want_loss
    errors = llama_oracle.relative_errors(gradients, want)
    assert max(errors.values()) <= 6e-2, errors
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_gradient_is_not_rounded_to_the_compute_dtype(dim):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(64, 8)), jnp.bfloat16)
    gradient = jnp.asarray(rng.normal(size=(64, 6)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(8, 6) if dim == 0 else (6, 8)), jnp.float32)
    out, pullback = jax.vjp(lambda x, w: project(x, w, dim, "bfloat16"), x, weight)
    d_x, d_weight = pullback(gradient)
    assert out.dtype == d_x.dtype == jnp.bfloat16
    x64, g64 = (np.asarray(a, np.float64) for a in (x, gradient))
    want = x64.T @ g64 if dim == 0 else g64.T @ x64
    assert np.linalg.norm(np.asarray(d_weight) - want) <= 1e-6 * np.linalg.norm(want)


def test_scores_depend_on_distance_within_the_document_alone():
    config = tiny_config(rope_scaling=SCALING, head_dim=16)
    layer = merged(config, random_params(describe(config, Parallelism()))).layers
    layer = nnx.merge(nnx.split(layer)[0], jax.tree.map(lambda w: w[0], nnx.split(layer)[1]))
    assert isinstance(layer, Layer)
    rng = np.random.default_rng(3)
    x = jnp.asarray(np.repeat(rng.normal(size=(2, 32)), 3, axis=0), jnp.float32)
    # One pair of tokens at distances 5, 5 and 6, at three places of its document.
    q, k, _ = layer.pre_attention(x, jnp.asarray([5, 905, 46, 0, 900, 40], jnp.int32))
    scores = np.einsum("nkgd,nkd->nkg", q[:3].reshape(3, 2, 2, 16), k[3:])
    np.testing.assert_allclose(scores[0], scores[1], rtol=2e-4, atol=2e-4)
    assert np.abs(scores[0] - scores[2]).max() > 1e-2


def test_a_document_does_not_see_its_neighbours():
    config = tiny_config()
    params = random_params(describe(config, Parallelism()))
    batch, documents = make_batch([[10, 13]], 32, 64)
    batch.ids[0, 10:23] += 64  # the second document's ids are its own
    first_only, second_only = (batch.weights * (documents == d) for d in (0, 1))

    @jit
    def embedding_gradient(weights):
        one = batch._replace(weights=weights)
        return jax.grad(lambda p: loss_of(config, p, one, documents))(params)["embedding"]

    of_first = np.asarray(embedding_gradient(first_only))
    of_second = np.asarray(embedding_gradient(second_only))
    assert not of_first[64:].any() and of_first[batch.ids[0, :9]].any()
    assert not of_second[1:64].any() and of_second[batch.ids[0, 10:22]].any()

    # Alone, or after another document: the same numbers.
    @jit
    def hidden(ids, positions, documents):
        return merged(config, params).hidden(ids, positions, one_device_attend(documents))

    packed = hidden(batch.ids[0], batch.positions[0], documents[0])
    alone = hidden(batch.ids[0, 10:23], batch.positions[0, 10:23], np.zeros(13, np.int32))
    np.testing.assert_allclose(packed[10:23], alone, rtol=1e-5, atol=1e-5)


def counting_attend(documents, runs):
    """Attention whose forward is counted when it really runs, with residuals named as strategies do."""
    plain = one_device_attend(documents)

    def count(_):
        runs.append(1)
        return np.float32(0.0)

    def forward(q, k, v):
        out = plain(q, k, v)
        out = out + jax.pure_callback(count, jax.ShapeDtypeStruct((), jnp.float32), out[0, 0, 0])
        return checkpoint_name(out, "attention_out")

    @jax.custom_vjp
    def attend(q, k, v):
        return forward(q, k, v)

    def backward(saved, gradient):
        q, k, v, out = saved
        # As with a real kernel, `out` is needed again: delta = rowsum(d_out * out).
        return jax.vjp(plain, q, k, v)[1](gradient + 0.0 * out)

    def forward_rule(q, k, v):
        out = forward(q, k, v)
        return out, (q, k, v, out)

    attend.defvjp(forward_rule, backward)
    return attend


def test_remat_changes_nothing_and_runs_attention_once():
    config = tiny_config()
    params = random_params(describe(config, Parallelism()))
    batch, documents = make_batch([[10, 13]], 32, config.vocab_size)
    results, counts = {}, {}
    for remat in ("none", "save_attention", "full"):
        runs: list[int] = []
        attend = counting_attend(documents[0], runs)
        results[remat] = jax.block_until_ready(
            jit(
                jax.value_and_grad(
                    lambda p, a=attend, r=remat: loss_of(config, p, batch, documents, a, r)
                )
            )(params)
        )
        counts[remat] = len(runs)
    assert counts == {"none": 2, "save_attention": 2, "full": 4}  # two layers
    for remat in ("save_attention", "full"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
            results[remat],
            results["none"],
        )
    with pytest.raises(ValueError, match="remat .*'some'.*none, save_attention, full"):
        loss_of(config, params, batch, documents, remat="some")


def test_huge_logits_stay_finite():
    config = tiny_config()
    params = random_params(describe(config, Parallelism()))
    params["final_norm"] = params["final_norm"] * 1e5
    batch, documents = make_batch([[24]], 24, config.vocab_size)
    loss, gradients = jit(jax.value_and_grad(lambda p: loss_of(config, p, batch, documents)))(
        params
    )
    assert np.isfinite(loss) and loss > 1e4
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_rotation_has_float32_phases():
    q = jnp.ones((1, 1, 8), jnp.bfloat16)
    turned = rotate(q, jnp.asarray([1001], jnp.int32), jnp.asarray([1.0, 0.1, 0.01, 0.001]))
    phases = 1001 * np.array([1.0, 0.1, 0.01, 0.001])
    want = np.concatenate([np.cos(phases) - np.sin(phases), np.cos(phases) + np.sin(phases)])
    np.testing.assert_allclose(np.asarray(turned, np.float32)[0, 0], want, atol=6e-3)


def test_initial_values_do_not_depend_on_the_mesh():
    config = tiny_config(embedding_dim=64, vocab_size=300)
    trees = []
    for shape in ((1, 1, 1), (2, 2, 2)):
        mesh = mesh_of(*shape)
        description = describe(config, Parallelism.of(mesh))
        trees.append(
            jit(lambda d=description: init(d, 7), out_shardings=shardings(description, mesh))()
        )
    for other in trees[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), trees[0], other)
    first = jax.tree.map(np.asarray, trees[0])
    assert not first["embedding"][300:].any() and not first["head"][300:].any()
    assert abs(first["embedding"][:300].std() - 0.02) < 1e-3
    assert abs(first["layers"]["ffn_down"].std() - 0.02 / 2) < 1e-3  # sqrt(2 L) with 2 layers
    assert (first["final_norm"] == 1).all()
    assert not np.array_equal(first["embedding"], first["head"])
    live = sum(p.size for p in jax.tree.leaves(first)) - 2 * 84 * 64
    assert live == config.num_parameters


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_kv_heads=3), r"num_q_heads \(=4\) .* num_kv_heads \(=3\).*use num_kv_heads=1"),
        (dict(head_dim=7), r"head_dim \(=7\) must be even.*use 8"),
        (dict(ffn_dim=0), r"ffn_dim \(=0\) must be positive"),
        (dict(dtype="float16"), "dtype .*'float16'.*bfloat16"),
        (dict(norm_eps=0.0), r"norm_eps \(=0.0\) must be positive"),
    ],
)
def test_sizes_that_break_a_rule(changes, words):
    with pytest.raises(ValueError, match=words):
        tiny_config(**changes)


@pytest.mark.parametrize(
    ("changes", "parallelism", "words"),
    [
        ({}, Parallelism(tp=8), r"num_q_heads \(=4\) .* tp \(=8\).*divides 4"),
        (
            dict(num_q_heads=12, num_kv_heads=3),
            Parallelism(tp=2),
            r"num_kv_heads \(=3\) and tp \(=2\).*tp=1",
        ),
        (dict(ffn_dim=50), Parallelism(tp=4), r"ffn_dim \(=50\) .* tp \(=4\).*ffn_dim=52"),
        (dict(num_layers=3), Parallelism(pp=2), r"num_layers \(=3\).*pp \(=2\).*num_layers=4"),
        (dict(num_layers=5), Parallelism(pp=5), r"vocabulary \(=384.*5 x 1\).*vocab_multiple=640"),
    ],
)
def test_meshes_over_which_the_model_does_not_split(changes, parallelism, words):
    with pytest.raises(ValueError, match=words):
        describe(tiny_config(**changes), parallelism)


def test_scaling_that_breaks_a_rule():
    for changes, words in (
        (dict(factor=0.5), r"factor \(=0.5\)"),
        (dict(low_freq_factor=4.0), "low_freq_factor"),
        (dict(original_context_tokens=0), "original_context_tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(SCALING, **changes)
