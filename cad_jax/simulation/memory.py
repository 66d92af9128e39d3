"""Bytes of memory of one device in the published systems, by what holds them. Host only; derived, nothing
here was measured. This project's own steps: `pipeline.memory`.

What a layer keeps for its backward, per token and device, bf16: the layer's input, q, k, v, out and the
log-sum-exp, and where the feed-forward is not run again its gate, its up-projection and their product.
Inputs of norms are cheap to compute again and not counted.
"""

from typing import NamedTuple

from cad_jax.sharding.cost import ModelShape
from cad_jax.sharding.cost_model import layer_weights
from cad_jax.sharding.tasks import HeadShape

BF16, FLOAT32 = 2, 4
OPTIMIZER_BYTES = 18  # a weight: bf16 itself, float32 gradient, master copy and two moments
FFN_TENSORS = 3  # gate, up and their product


class Memory(NamedTuple):
    """Bytes of one device."""

    weights: float  # with gradients and optimizer
    attention_rows: float  # q, k, v, out, lse and layer inputs kept for the backward
    ffn_rows: float  # inputs of the feed-forward's products, where they are kept
    gathered_keys: float  # of other ranks, kept for the backward
    buffers: float  # a server's query and key buffers, of the nano-batches in flight

    @property
    def total(self) -> float:
        return float(sum(self))


def weights_bytes(model: ModelShape, tp: int, pp: int, shards: int = 1) -> float:
    """Weights, gradients and optimizer of one device; shards: ranks that divide them further."""
    layers = -(-model.num_layers // pp) * layer_weights(model)
    tables = 2 * model.vocab_size * model.embedding_dim / pp
    return OPTIMIZER_BYTES * (layers + tables) / (tp * shards)


def memory(
    model: ModelShape,
    heads: HeadShape,
    *,
    tp: int,
    pp: int,
    tokens_in_flight: float,
    keeps_ffn: bool,
    weight_shards: int = 1,
    gathered_tokens: float = 0.0,
    query_rows: int = 0,
    key_rows: int = 0,
) -> Memory:
    """One device's memory at its fullest.

    tokens_in_flight: of a rank, between their forward and their backward, over all layers of the stage.
    keeps_ffn: the backward does not run the feed-forward again.
    weight_shards: ranks over which weights, gradients and optimizer are divided besides tp and pp.
    gathered_tokens: of other ranks whose keys stay until the backward, in every layer.
    query_rows, key_rows: a server's buffers of one layer, ping's and pong's.
    """
    layers = -(-model.num_layers // pp)
    kept = tokens_in_flight * layers
    rows = (
        BF16 * (2 * heads.num_q_heads + 2 * heads.num_kv_heads) * heads.head_dim
        + FLOAT32 * heads.num_q_heads
        + BF16 * model.embedding_dim / tp
    )
    ffn = BF16 * FFN_TENSORS * model.ffn_dim / tp * keeps_ffn
    buffers = 2 * (2 * query_rows * heads.q_row_bytes() + 2 * key_rows * heads.kv_row_bytes())
    return Memory(
        weights=weights_bytes(model, tp, pp, weight_shards),
        attention_rows=kept * rows,
        ffn_rows=kept * ffn,
        gathered_keys=gathered_tokens * layers * heads.kv_row_bytes(),
        buffers=float(buffers),
    )
