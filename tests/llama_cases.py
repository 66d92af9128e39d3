"""Batches and a plain attention strategy for tests of the model and the step."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from cad_jax.model import LlamaConfig
from cad_jax.sharding.mesh import MESH_AXES
from cad_jax.train_step import Batch

POOL = ("pp", "dp")


def jit(function, **options):
    """jax.jit that compiles in half the time, for experiments too: the arithmetic is the same, only slower."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)


def mesh_of(pp, dp, tp):
    axis_types = (AxisType.Auto,) * 3
    devices = jax.devices()[: pp * dp * tp]
    return jax.make_mesh((pp, dp, tp), MESH_AXES, axis_types=axis_types, devices=devices)


def tiny_config(**changes):
    sizes = dict(
        vocab_size=257,
        embedding_dim=32,
        num_layers=2,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_dim=48,
        dtype="float32",
    )
    return LlamaConfig(**(sizes | changes))


def random_params(description, seed=0):
    """Values with nothing at its special starting point: norms not one, branches not small."""
    rng = np.random.default_rng(seed)

    def value(p):
        x = rng.normal(size=p.shape).astype(np.float32)
        x = 1 + 0.2 * x if not p.decays else 0.3 * x
        if p.live_rows is not None:
            x[p.live_rows :] = 0
        return x

    return jax.tree.map(value, description)


def documents_of(lengths, tokens):
    """Document of each token, -1 for padding, and positions within it."""
    document, position = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
    start = 0
    for d, n in enumerate(lengths):
        document[start : start + n] = d
        position[start : start + n] = np.arange(n)
        start += n
    return document, position


def make_batch(lengths_of_microbatch, tokens, vocab_size, seed=0):
    """A Batch [M, tokens] (targets are each document's next tokens) and documents int32 [M, tokens]."""
    rng = np.random.default_rng(seed)
    rows = []
    for lengths in lengths_of_microbatch:
        document, position = documents_of(lengths, tokens)
        ids = rng.integers(0, vocab_size, tokens).astype(np.int32) * (document >= 0)
        following = np.append(document[1:], -1)
        weight = ((document >= 0) & (following == document)).astype(np.float32)
        rows.append((ids, position, np.append(ids[1:], 0), weight, document))
    ids, positions, targets, weights, documents = (
        np.stack(field) for field in zip(*rows, strict=True)
    )
    return Batch(ids, positions, targets.astype(np.int32), weights), documents


def attend_dense(q, k, v, own, documents, first):
    """Rows `first`.. of all tokens against every token, masked by document; plain float32 maths."""
    order = jnp.arange(k.shape[0], dtype=jnp.int32)
    rows = first + jnp.arange(q.shape[0], dtype=jnp.int32)
    mask = (own[:, None] == documents[None, :]) & (rows[:, None] >= order[None, :])
    mask = (mask & (own >= 0)[:, None])[None]
    group = q.shape[1] // k.shape[1]
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1), 0.0)
    return jnp.einsum("hqk,khd->qhd", weights, v)


@dataclass(frozen=True)
class GatherEverything:
    """The plainest strategy: all keys to every rank. Its arrays are each token's document."""

    manual_axes: ClassVar[tuple[str, ...]] = ("pp", "dp", "tp")
    transport: ClassVar[None] = None
    way: ClassVar[None] = None
    settings: ClassVar[None] = None

    def expand(self, arrays):
        return arrays, lax.all_gather(arrays, POOL, tiled=True)

    def attend(self, q, k, v, tables):
        own, documents = tables
        k, v = (lax.all_gather(a, POOL, tiled=True) for a in (k, v))
        first = lax.axis_index(POOL) * q.shape[0]
        out = attend_dense(q, k, v, own, documents, first).astype(q.dtype)
        return checkpoint_name(out, "attention_out")


@dataclass(frozen=True)
class LeaveToPartitioner:
    """The same for a step whose pp and dp belong to XLA's partitioner."""

    manual_axes: ClassVar[tuple[str, ...]] = ("tp",)
    transport: ClassVar[None] = None
    way: ClassVar[None] = None
    settings: ClassVar[None] = None

    def expand(self, arrays):
        return arrays.reshape(-1)

    def attend(self, q, k, v, tables):
        out = attend_dense(q, k, v, tables, tables, 0).astype(q.dtype)
        return checkpoint_name(out, "attention_out")


def one_device_attend(documents):
    documents = jnp.asarray(documents)
    return lambda q, k, v: attend_dense(q, k, v, documents, documents, 0).astype(q.dtype)
