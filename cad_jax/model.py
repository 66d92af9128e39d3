"""Llama 2/3 in Flax NNX: two halves per layer around an `attend` that the caller brings.

    x = embed(ids);  for each layer:  q, k, v = pre_attention(x, positions)
                                      x = post_attention(x, attend(q, k, v));   loss(x, targets)

The model never learns how `attend` is computed: `(q [T, H, D], k [T, K, D], v [T, K, D]) -> out [T, H, D]`, compute dtype. Sizes are
those of ONE device: T tokens at home, H and K heads after tensor parallelism. Column- and row-parallel products over tp,
embedding and head spread over (pp, tp), weights over dp (cad_jax.parameters). Without `Parallelism` all of it is one device.

Shape letters: T tokens, E embedding, H query heads, K key/value heads, D head dim, F ffn, V vocabulary, L layers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from cad_jax.model_config import LlamaConfig as LlamaConfig
from cad_jax.model_config import RopeScaling as RopeScaling
from cad_jax.parameters import Gather, Parallelism, describe, init
from cad_jax.sharding.mesh import POOL_AXES

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Remat = Literal["none", "save_attention", "full"]

SAVED_NAMES = ("attention_out", "attention_lse")  # as every strategy names its residuals
ONE_DEVICE = Parallelism()
LOSS_CHUNK_TOKENS = 2048  # tokens whose logits are alive at once


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def project(x: jax.Array, weight: jax.Array, dim: int, out_dtype: str) -> jax.Array:
    """x [T, N] times weight, summed over weight's `dim` (of size N), in x's dtype -> [T, M] in `out_dtype`.

    Sums are float32, and the gradient of the weight stays float32: it is never rounded.
    """
    return _product(x, weight.astype(x.dtype), 1, dim, out_dtype)


def _product(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int, dtype: DTypeLike) -> jax.Array:
    """Matrix product summed over the given dims; the other dims of a and b remain, in this order."""
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _project_fwd(
    x: jax.Array, weight: jax.Array, dim: int, out_dtype: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    weight = weight.astype(x.dtype)
    return _product(x, weight, 1, dim, out_dtype), (x, weight)


def _project_bwd(
    dim: int, out_dtype: str, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    gradient = gradient.astype(x.dtype)
    pair = (x, gradient) if dim == 0 else (gradient, x)
    return _product(gradient, weight, 1, 1 - dim, x.dtype), _product(*pair, 0, 0, jnp.float32)


project.defvjp(_project_fwd, _project_bwd)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [T, E] over its root mean square, times weight [E]; float32 inside, x's dtype out."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight[None, :]).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotary embedding of x [T, H, D]: lane i of the first half turns with lane i of the second.

    Phases are float32: positions int32 [T] (they restart with each document) times [D/2].
    """
    phases = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(phases)[:, None, :], jnp.sin(phases)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)


class Layer(nnx.Module):
    """One layer, in two halves. Weights of this device: [E/dp, X/tp]; stacked [L, ...] in `Llama`."""

    def __init__(
        self, config: LlamaConfig, parallelism: Parallelism, values: Mapping[str, jax.Array]
    ) -> None:
        self.config = config
        self.parallelism = parallelism
        self.gather = Gather.of(config, parallelism)
        self.attention_norm = nnx.Param(values["attention_norm"])
        self.query = nnx.Param(values["query"])
        self.key = nnx.Param(values["key"])
        self.value = nnx.Param(values["value"])
        self.attention_output = nnx.Param(values["attention_output"])
        self.ffn_norm = nnx.Param(values["ffn_norm"])
        self.ffn_gate = nnx.Param(values["ffn_gate"])
        self.ffn_up = nnx.Param(values["ffn_up"])
        self.ffn_down = nnx.Param(values["ffn_down"])

    def _own_key_head(self, weight: jax.Array) -> jax.Array:
        """This device's columns of a key or value weight that is replicated because K < tp."""
        config, tp = self.config, self.parallelism.tp
        if config.num_kv_heads % tp == 0:
            return weight
        head = lax.axis_index("tp") * config.num_kv_heads // tp
        return lax.dynamic_slice_in_dim(weight, head * config.head_dim, config.head_dim, axis=1)

    def pre_attention(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [T, E], positions int32 [T] -> q [T, H, D], k [T, K, D], v [T, K, D] of this device."""
        config = self.config
        heads = config.head_shape(self.parallelism.tp)
        key, value = self._own_key_head(self.key[...]), self._own_key_head(self.value[...])
        (weight,) = self.gather.side_by_side((self.query[...], key, value))
        rows = rms_norm(x, self.attention_norm[...], config.norm_eps)
        qkv = project(rows, weight, 0, config.dtype).reshape(x.shape[0], -1, heads.head_dim)
        first_key = heads.num_q_heads
        q, k, v = jnp.split(qkv, (first_key, first_key + heads.num_kv_heads), axis=1)
        frequencies = jnp.asarray(config.rope_frequencies())
        return rotate(q, positions, frequencies), rotate(k, positions, frequencies), v

    def post_attention(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """x [T, E] and attention's out [T, H, D] -> the next layer's x [T, E]."""
        config, parallelism = self.config, self.parallelism
        out_weight, in_weight, down_weight = self.gather.side_by_side(
            (self.attention_output[...],),
            (self.ffn_gate[...], self.ffn_up[...]),
            (self.ffn_down[...],),
        )
        out = out.reshape(x.shape[0], -1)
        x = x + parallelism.psum(project(out, out_weight, 1, config.dtype), "tp")
        rows = rms_norm(x, self.ffn_norm[...], config.norm_eps)
        gate, up = jnp.split(project(rows, in_weight, 0, config.dtype), 2, axis=1)
        hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return x + parallelism.psum(
            project(hidden.astype(x.dtype), down_weight, 1, config.dtype), "tp"
        )


class Llama(nnx.Module):
    """The whole model. Parameters are those of `describe(config, parallelism)`, under the same names.

    Args:
        config: sizes.
        parallelism: mesh axes the methods run under (a shard_map of the caller).
        seed: of the initial values, which do not depend on the mesh; global shapes.
    """

    def __init__(
        self, config: LlamaConfig, parallelism: Parallelism = ONE_DEVICE, seed: int = 0
    ) -> None:
        values = init(describe(config, parallelism), seed)
        self.config = config
        self.parallelism = parallelism
        self.gather = Gather.of(config, parallelism)
        self.embedding = nnx.Param(values["embedding"])
        self.layers = Layer(config, parallelism, values["layers"])
        self.final_norm = nnx.Param(values["final_norm"])
        if not config.tied_embeddings:
            self.head = nnx.Param(values["head"])

    @property
    def _head_table(self) -> jax.Array:
        return self.embedding[...] if self.config.tied_embeddings else self.head[...]

    def _first_vocab_row(self, table: jax.Array) -> jax.Array:
        axes = self.parallelism.manual("pp", "tp")
        return self.parallelism.index(axes) * table.shape[0]

    def _tokens_over_pool(self, x: jax.Array) -> jax.Array:
        """Where the partitioner owns pp and dp: keep tokens spread over them."""
        if not self.parallelism.automatic_pool:
            return x
        return lax.with_sharding_constraint(x, P(POOL_AXES, None))

    def embed(self, ids: jax.Array) -> jax.Array:
        """ids int32 [T] -> x [T, E]. Each vocabulary shard gives its rows, zeros elsewhere."""
        pp = self.parallelism.manual("pp")
        table = self.gather.table(self.embedding[...])
        if pp:
            ids = lax.all_gather(ids, pp, tiled=True)
        rows = ids - self._first_vocab_row(table)
        mine = (rows >= 0) & (rows < table.shape[0])
        found = _lookup(table, jnp.where(mine, rows, 0), self.config.dtype, table.shape[0])
        x = jnp.where(mine[:, None], found, 0)
        x = self.parallelism.psum(x, "tp")
        if pp:
            x = lax.psum_scatter(x, pp, scatter_dimension=0, tiled=True)
        return self._tokens_over_pool(x)

    def hidden(
        self,
        ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        remat: Remat = "save_attention",
    ) -> jax.Array:
        """ids, positions int32 [T] -> x [T, E] after the last layer and its norm.

        remat: "none" keeps every intermediate; "save_attention" keeps each layer's input and
        attention's named residuals (out, lse), so that attention and its exchanges never run
        twice; "full" keeps each layer's input alone, and runs attention again.
        """
        x = self.embed(ids)
        definition, weights = nnx.split(self.layers)

        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            one = nnx.merge(definition, weights)
            out = attend(*one.pre_attention(x, positions))
            return self._tokens_over_pool(one.post_attention(x, out)), None

        x, _ = lax.scan(rematerialise(layer, remat), x, weights)
        return rms_norm(x, self.final_norm[...], self.config.norm_eps)

    def logits(self, x: jax.Array) -> jax.Array:
        """x [T, E] -> float32 [T, V] on one device (for inference and comparison; training uses `loss`)."""
        assert self.parallelism.vocab_shards == 1, "logits are whole on one vocabulary shard only"
        table = self.gather.table(self._head_table)
        return project(x, table, 1, "float32")[:, : self.config.vocab_size]

    def loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        """Summed cross-entropy (nats) of targets int32 [T] where weights [T] are not zero, float32.

        x [T, E] is gathered over pp, so that every device of (pp, tp) scores its part of the
        vocabulary for the same tokens and all of them return the same sum. Logits exist for
        LOSS_CHUNK_TOKENS tokens at a time and are computed again in the backward pass.
        """
        pp, vocab_axes = self.parallelism.manual("pp"), self.parallelism.manual("pp", "tp")
        if pp:
            x, targets, weights = (lax.all_gather(a, pp, tiled=True) for a in (x, targets, weights))
        table = self.gather.table(self._head_table)
        first = self._first_vocab_row(table)
        columns = lax.broadcasted_iota(jnp.int32, (1, table.shape[0]), 1)
        live = columns + first < self.config.vocab_size

        def chunk(total: jax.Array, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            x, targets, weights = rows
            scores = jnp.where(live, project(x, table, 1, "float32"), -jnp.inf)
            # A shard may hold padding alone: its -inf is no maximum of the whole row.
            peak = lax.stop_gradient(scores.max(axis=1))
            peak = lax.pmax(peak, vocab_axes) if vocab_axes else peak
            exponentials = jnp.exp(scores - peak[:, None]).sum(axis=1)
            hit = columns == (targets - first)[:, None]
            target_score = jnp.where(hit, scores, 0.0).sum(axis=1)
            sums = self.parallelism.psum(jnp.stack((exponentials, target_score)), "pp", "tp")
            exponentials, target_score = sums
            nats = jnp.log(exponentials) + peak - target_score
            return total + jnp.where(weights != 0, nats * weights, 0.0).sum(), None

        pool = self.parallelism.pool if self.parallelism.automatic_pool else 1
        rows = tuple(_in_chunks(a, pool) for a in (x, targets, weights.astype(jnp.float32)))
        return lax.scan(rematerialise(chunk, "full"), jnp.float32(0.0), rows)[0]


def rematerialise(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A scan body under a remat policy (see `Llama.hidden`)."""
    if remat == "none":
        return body
    if remat == "full":
        return jax.checkpoint(body, prevent_cse=False)
    if remat == "save_attention":
        policy = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
        return jax.checkpoint(body, prevent_cse=False, policy=policy)
    raise ValueError(f"remat (={remat!r}) must be one of none, save_attention, full")


def _in_chunks(rows: jax.Array, pool: int) -> jax.Array:
    """[pool * T, ...] -> [chunks, pool * C, ...] with C <= LOSS_CHUNK_TOKENS, zero rows at the end of each T."""
    tokens = rows.shape[0] // pool
    chunks = -(-tokens // LOSS_CHUNK_TOKENS)
    size = -(-tokens // chunks)
    rows = rows.reshape(pool, tokens, *rows.shape[1:])
    padding = [(0, 0), (0, chunks * size - tokens)] + [(0, 0)] * (rows.ndim - 2)
    rows = jnp.pad(rows, padding).reshape(pool, chunks, size, *rows.shape[2:])
    return rows.swapaxes(0, 1).reshape(chunks, pool * size, *rows.shape[3:])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: jax.Array, rows: jax.Array, dtype: str, table_rows: int) -> jax.Array:
    """Rows of table [V', E] in `dtype`; gradients are summed in float32, in the order XLA's scatter takes."""
    return table.astype(dtype)[rows]


def _lookup_fwd(
    table: jax.Array, rows: jax.Array, dtype: str, table_rows: int
) -> tuple[jax.Array, jax.Array]:
    return _lookup(table, rows, dtype, table_rows), rows


def _lookup_bwd(
    dtype: str, table_rows: int, rows: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None]:
    total = jnp.zeros((table_rows, gradient.shape[1]), jnp.float32)
    return total.at[rows].add(gradient.astype(jnp.float32)), None


_lookup.defvjp(_lookup_fwd, _lookup_bwd)
