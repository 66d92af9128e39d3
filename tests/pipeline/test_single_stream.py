"""A stage of several layers against the same layers of a plain float64 model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cad_jax.attention.differentiable import Way
from cad_jax.attention.strategies import make_strategy
from cad_jax.parameters import Parallelism, describe
from cad_jax.pipeline.single_stream import SingleStream
from tests import llama_oracle
from tests.llama_cases import documents_of, jit, mesh_of, random_params, tiny_config

LENGTHS = ([20, 1, 30, 9], [47, 13])  # of two nano-batches
TOKENS = 64


def refuse(*_):
    raise AssertionError("attention's forward in a backward pass")


def oracle(params, config, x, weights, lengths):
    """Normed output of the layers for inputs x, gradients in x and the layers of its weighted sum."""
    documents, positions = documents_of(lengths, TOKENS)
    with jax.enable_x64(True):
        layers = jax.tree.map(lambda a: np.asarray(a, np.float64), params["layers"])
        norm = np.ones(config.embedding_dim)

        def value(x, layers):
            whole = dict(embedding=x, layers=layers, final_norm=norm)  # ids of consecutive rows
            ids = np.arange(TOKENS)
            y = llama_oracle.hidden(whole, config, ids, positions, documents)
            return (y * weights).sum(), y

        gradient = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)
        (_, y), gradients = jit(gradient)(np.asarray(x, np.float64), layers)
        return jax.tree.map(np.asarray, (y, *gradients))


@pytest.mark.parametrize(
    ("name", "shape", "layers", "remat"),
    [("all_gather", (1, 2, 2), 3, "save_stage"), ("cad", (2, 2, 2), 2, "save_attention")],
)
def test_forward_and_backward_equal_plain_layers(name, shape, layers, remat):
    _, _, tp = shape
    config = tiny_config(num_layers=layers)
    parallelism = Parallelism(1, shape[0] * shape[1], tp)
    mesh = mesh_of(1, parallelism.dp, tp)
    description = describe(config, parallelism)
    params = random_params(description)
    strategy = make_strategy(
        name,
        servers=parallelism.dp,
        tokens_per_server=TOKENS // parallelism.dp,
        heads=config.head_shape(tp),
        axis_names=("pp", "dp"),
        kernel="reference",
        tolerance=0.0,
    )
    stage = SingleStream(config, parallelism, strategy.way, strategy.pool.settings, remat)
    # Whatever attention's forward would give, the backward has it from `saved`.
    backward_stage = dataclasses.replace(stage, way=Way(refuse, strategy.way.backward))

    def local(layers, xs, weights, positions, arrays):
        tables = tuple(strategy.expand(jax.tree.map(lambda a: a[0], own)) for own in arrays)
        outs, saved = stage.forward(layers, xs, positions, tables)
        norm = jnp.ones(config.embedding_dim)
        ys, pull = jax.vjp(
            lambda outs: tuple(llama_oracle.norm(x, norm, config.norm_eps) for x in outs), outs
        )
        (d_outs,) = pull(weights)
        # Every tp device holds another share of the cotangent.
        share = jnp.arange(1, tp + 1, dtype=jnp.float32)[lax.axis_index("tp")] * 2 / tp / (tp + 1)
        d_outs = tuple(d * share for d in d_outs)
        d_xs, d_layers = backward_stage.backward(layers, xs, saved, d_outs, positions, tables)
        d_layers = jax.tree.map(
            lambda p, g: lax.psum(g, p.replicated_axes) if p.replicated_axes else g,
            description["layers"],
            d_layers,
        )
        return ys, lax.psum(d_xs, "tp"), d_layers

    rng = np.random.default_rng(3)
    shapes = (len(LENGTHS), TOKENS, config.embedding_dim)
    xs, weights = rng.normal(size=(2, *shapes)).astype(np.float32)
    prepared = [strategy.prepare(np.array(lengths)) for lengths in LENGTHS]
    orders = [np.arange(TOKENS) if p.order is None else p.order for p in prepared]
    for rows, lengths in zip(weights, LENGTHS, strict=True):
        rows[sum(lengths) :] = 0
    positions = [documents_of(lengths, TOKENS)[1] for lengths in LENGTHS]

    def placed(fields):
        return tuple(f[order] for f, order in zip(fields, orders, strict=True))

    rows = P(("pp", "dp"))
    of_layers = jax.tree.map(lambda p: p.spec, description["layers"])
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(of_layers, rows, rows, rows, rows),
        out_specs=(rows, rows, of_layers),
        check_vma=False,
    )
    arrays = tuple(p.arrays for p in prepared)
    ys, d_xs, d_layers = jit(run)(
        params["layers"], placed(xs), placed(weights), placed(positions), arrays
    )
    want_layers = 0.0
    for n, lengths in enumerate(LENGTHS):
        y, d_x, d_own = oracle(params, config, xs[n], weights[n], lengths)
        live = orders[n] < sum(lengths)
        got = dict(y=np.asarray(ys[n])[live], d_x=np.asarray(d_xs[n])[live])
        want = dict(y=y[orders[n]][live], d_x=d_x[orders[n]][live])
        errors = llama_oracle.relative_errors(got, want)
        assert all(error <= 1e-5 for error in errors.values()), errors
        want_layers = d_own if n == 0 else jax.tree.map(np.add, want_layers, d_own)
    errors = llama_oracle.relative_errors(d_layers, want_layers)
    assert all(error <= 2e-5 for error in errors.values()), errors
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(d_layers))
