"""Llama 2/3 in Flax NNX: two halves per layer around an `attend` that the caller brings.

    x = embed(ids);  for each layer:  q, k, v = pre_attention(x, positions)
                                      x = post_attention(x, attend(q, k, v));   loss(x, targets)

The model never learns how `attend` is computed: `(q [T, H, D], k [T, K, D], v [T, K, D]) -> out [T, H, D]`, compute dtype. Sizes are
those of ONE device: T tokens at home, H and K heads after tensor parallelism. Column- and row-parallel products over tp,
embedding and head spread over (pp, tp), weights over dp (cad_jax.parameters). Without `Parallelism` all of it is one device.

Shape letters: T tokens, E embedding, H query heads, K key/value heads, D head dim, F ffn, V vocabulary, L layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from cad_jax.layer import Layer, project, rms_norm
from cad_jax.model_config import LlamaConfig as LlamaConfig
from cad_jax.model_config import RopeScaling as RopeScaling
from cad_jax.parameters import Gather, Parallelism, describe, init
from cad_jax.pipeline.remat import Remat
from cad_jax.sharding.mesh import POOL_AXES

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

SAVED_NAMES = ("attention_out", "attention_lse")  # as every strategy names its residuals
ONE_DEVICE = Parallelism()
LOSS_CHUNK_TOKENS = 2048  # tokens whose logits are alive at once


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
        self.gather = Gather.of_tables(config, parallelism)
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

    @property
    def _split_tokens(self) -> bool:
        return self.parallelism.tokens_over_tp and self.parallelism.tp > 1

    def _tokens_over_pool(self, x: jax.Array) -> jax.Array:
        """Where the partitioner owns pp and dp: keep tokens spread over them."""
        if not self.parallelism.automatic_pool:
            return x
        return lax.with_sharding_constraint(x, P(POOL_AXES, None))

    def embed(self, ids: jax.Array) -> jax.Array:
        """ids int32 [T] -> x [T, E], the same on every device of (pp, tp).

        Where tp splits tokens, T are this device's.
        """
        return self._tokens_over_pool(self.parallelism.psum(self.embed_share(ids), "pp"))

    def embed_share(self, ids: jax.Array) -> jax.Array:
        """`embed` but for the sum over pp: each vocabulary shard gives its rows, zeros elsewhere.

        Where tp splits tokens, the shards answer for those of all tp devices.
        """
        table = self.gather.table(self.embedding[...])
        if self._split_tokens:
            ids = lax.all_gather(ids, "tp", tiled=True)
        rows = ids - self._first_vocab_row(table)
        mine = (rows >= 0) & (rows < table.shape[0])
        found = _lookup(table, jnp.where(mine, rows, 0), self.config.dtype, table.shape[0])
        x = jnp.where(mine[:, None], found, 0)
        if self._split_tokens:
            return lax.psum_scatter(x, "tp", scatter_dimension=0, tiled=True)
        return self.parallelism.psum(x, "tp")

    def hidden(
        self,
        ids: jax.Array,
        positions: jax.Array,
        attend: Attend,
        remat: Remat = "save_attention",
    ) -> jax.Array:
        """ids, positions int32 [T] -> x [T, E] after the last layer and its norm."""
        return self.normed(self.run_layers(self.embed(ids), positions, attend, remat))

    def run_layers(
        self,
        x: jax.Array,
        positions: jax.Array,
        attend: Attend,
        remat: Remat = "save_attention",
    ) -> jax.Array:
        """x [T, E] and positions int32 [T] -> x after the last layer.

        remat: "none" keeps every intermediate; "save_attention" keeps each layer's input and
        attention's named residuals (out, lse), so that attention and its exchanges never run
        twice; "full" keeps each layer's input alone, and runs attention again ("save_stage" is
        of pipelines).
        """
        definition, weights = nnx.split(self.layers)

        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            one = nnx.merge(definition, weights)
            out = attend(*one.pre_attention(x, positions))
            return self._tokens_over_pool(one.post_attention(x, out)), None

        return lax.scan(rematerialise(layer, remat), x, weights)[0]

    def normed(self, x: jax.Array) -> jax.Array:
        """x [T, E] after the last layer -> what `logits` and `loss` take."""
        return rms_norm(x, self.final_norm[...], self.config.norm_eps)

    def logits(self, x: jax.Array) -> jax.Array:
        """x [T, E] -> float32 [T, V] on one device (for inference and comparison; training uses `loss`)."""
        assert self.parallelism.vocab_shards == 1, "logits are whole on one vocabulary shard only"
        table = self.gather.table(self._head_table)
        return project(x, table, 1, "float32")[:, : self.config.vocab_size]

    def loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        """Summed cross-entropy (nats) of targets int32 [T] where weights [T] are not zero, float32.

        x [T, E] is the same on every device of (pp, tp), or gathered over tp where that splits
        tokens: each scores its part of the vocabulary and all of them return the same sum. Logits exist for LOSS_CHUNK_TOKENS tokens at a time and
        are computed again in the backward pass.
        """
        vocab_axes = self.parallelism.manual("pp", "tp")
        if self._split_tokens:
            x, targets, weights = (
                lax.all_gather(a, "tp", tiled=True) for a in (x, targets, weights)
            )
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

        pool = self.parallelism.dp if self.parallelism.automatic_pool else 1
        rows = tuple(_in_chunks(a, pool) for a in (x, targets, weights.astype(jnp.float32)))
        return lax.scan(rematerialise(chunk, "full"), jnp.float32(0.0), rows)[0]


def rematerialise(body: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A scan body under a remat policy (see `Llama.run_layers`)."""
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
