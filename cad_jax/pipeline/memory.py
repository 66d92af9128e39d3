"""Estimated bytes of one device in a training step, by what holds them. Host only, derived.

The arithmetic of what the step keeps by construction, and a fifth more for XLA's copies and the loss: of
ten compiled steps of an 8B model (experiments/results/pipeline_memory.csv) it finds all within 15%.
`cad-jax compile` gives the compiled figure.

Letters: T tokens of a rank in a microbatch, R rows of a device, Lp layers of a virtual stage, E
embedding, H query heads, D head dim, F ffn, W weights of a layer.
"""

from typing import NamedTuple

from cad_jax.pipeline.schedule import Schedule
from cad_jax.sharding.cost import ModelShape
from cad_jax.sharding.cost_model import layer_weights
from cad_jax.sharding.tasks import Capacities, HeadShape

FLOAT32, BF16 = 4, 2
MOMENTS = 2  # AdamW's
COPIES = 0.2  # fitted to those steps


class StepMemory(NamedTuple):
    """Bytes of one device."""

    state: float  # float32 parameters and moments
    gradients: float  # float32: of all microbatches so far, and of the one in work
    stash: float  # what waits for its B tick
    stage: float  # what the backward of one microbatch reads
    weights: float  # whole weights of the block in work and the next, their float32 gradients
    block: float  # rows inside a block's backward, both nano-batches
    buffers: float  # of servers, queries and keys with their gradients, both nano-batches
    copies: float  # COPIES of the others

    @property
    def total(self) -> float:
        """All of them at once."""
        return float(sum(self))


def estimate_memory(
    model: ModelShape,
    heads: HeadShape,
    capacities: Capacities,
    schedule: Schedule | None,
    *,
    tokens_per_rank: int,
    dp: int,
    tp: int,
    tokens_over_tp: bool,
    remat: str = "save_attention",
) -> StepMemory:
    """A bfloat16 ping-pong step's memory at its fullest, in the backward of a stage.

    Args:
        model: the whole model.
        heads: of one device inside attention.
        capacities: of one nano-batch's plans.
        schedule: None without a pipeline.
        tokens_per_rank: T.
        dp, tp: ranks of a stage, devices of a rank.
        tokens_over_tp: whether tp splits tokens, or weights, outside attention.
        remat: `pipeline.remat.Remat`, but for "none".
    """
    stages = schedule.stages if schedule else 1
    chunks = schedule.virtual_stages if schedule else 1
    layers = model.num_layers // (stages * chunks)
    rows = tokens_per_rank // tp if tokens_over_tp else tokens_per_rank
    split = 1 if tokens_over_tp else tp
    embedding = BF16 * model.embedding_dim
    all_weights = model.num_layers * layer_weights(model)
    all_weights += 2 * model.vocab_size * model.embedding_dim
    own = all_weights / (stages * dp * tp)

    inputs = (layers - 1) * rows * embedding
    returned = BF16 * model.num_q_heads // split * model.head_dim
    attention = layers * (rows * returned + FLOAT32 * tokens_per_rank * heads.num_q_heads)
    slices = 1 if tokens_over_tp else tp  # a stage's own input is stashed in slices
    slot = rows / slices * embedding
    slot += {"save_attention": inputs + attention, "save_stage": attention, "full": 0}[remat]
    ffn = model.ffn_dim / split
    # Of a row: x, its norm and their cotangents; gate and up in both dtypes, their product, cotangents.
    per_row = 6 * embedding + (4 * BF16 + 2 * FLOAT32) * ffn
    whole = layer_weights(model) / split
    parts = dict(
        state=(1 + MOMENTS) * FLOAT32 * own,
        gradients=2 * FLOAT32 * own,
        stash=schedule.slots * slot if schedule else 0.0,
        stage=rows * embedding + inputs + attention,
        weights=(2 * BF16 + 3 * FLOAT32) * whole,
        block=rows * per_row,
        buffers=4.0
        * (
            capacities.query_rows * heads.q_row_bytes() + capacities.key_rows * heads.kv_row_bytes()
        ),
    )
    return StepMemory(**parts, copies=COPIES * sum(parts.values()))
