"""What a simulated step runs on, and what comes out of it. Host only.

Shape letters: R ranks, r ranks of an event, T tokens of a rank in a nano-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cad_jax.pipeline.memory import StepMemory, estimate_memory
from cad_jax.pipeline.prediction import device_heads
from cad_jax.pipeline.schedule import Schedule, one_f_one_b
from cad_jax.pipeline.ticks import MicrobatchLengths
from cad_jax.sharding.cost import ModelShape, attention_flops
from cad_jax.sharding.cost_model import CostModel, layer_weights
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.planners import Planner
from cad_jax.sharding.speeds import check_speeds
from cad_jax.sharding.tasks import Capacities, HeadShape, causal_pairs
from cad_jax.simulation import strategies
from cad_jax.simulation.memory import Memory
from cad_jax.simulation.strategies import Pool
from cad_jax.simulation.timeline import Accounts, Timeline
from cad_jax.simulation.work import AttentionWork, Wire


@dataclass(frozen=True)
class Setting:
    """What a step runs on.

    ranks: of all stages, each of tp devices of `costs.device`. pp: stages among which they are
    divided. again: share of the linear layers that a backward runs again. all_remote: peers within a
    node count as if they were in another. head: whether head and loss take time.
    gradient_bytes: of a baseline's dk and dv on the wire, over those of k and v; gather_again: whether
    its backward gathers keys once more; gather_share: of the network's bandwidth that its collectives
    reach. keeps_ffn: the backward does not run the feed-forward again, and its rows stay in memory.
    tokens_over_tp: whether tp splits tokens, or weights, outside attention, for the memory.
    planner, speeds: of cad's plans, see `plan_documents`; speeds (one a rank, none where they are alike) are relative
    to their mean and count for everything that a rank computes, under every strategy.
    node: servers of a node as cad's planner knows them, 1 where it takes all for remote, as training does
    unless told (`attention.node`); exchanges take what they take all the same.
    element_bytes: of q, k and v on the wire. published_copy_byte_s: seconds of compute, forward and backward, a
    byte of a rank's own q, k and v, that copies around the published planner's exchanges take.
    """

    model: ModelShape
    costs: CostModel
    ranks: int
    tp: int = 8
    pp: int = 1
    again: float = 0.0
    all_remote: bool = False
    head: bool = False
    gradient_bytes: float = strategies.GRADIENT_BYTES
    gather_again: bool = True
    gather_share: float = 1.0
    keeps_ffn: bool = False
    tokens_over_tp: bool = True
    element_bytes: int = 2
    published_copy_byte_s: tuple[float, float] = (0.0, 0.0)
    planner: Planner = plan_documents
    speeds: tuple[float, ...] = ()
    node: int = 1

    def __post_init__(self):
        if self.ranks < 1 or self.pp < 1 or self.ranks % self.pp:
            raise ValueError(
                f"ranks (={self.ranks}) must be a positive multiple of pp (={self.pp}): every stage "
                "has as many"
            )
        if self.speeds:
            check_speeds(self.speeds, self.ranks, "speeds")

    @property
    def heads(self) -> HeadShape:
        """Of one device."""
        return device_heads(self.model, self.tp)

    @property
    def layers(self) -> int:
        """Of one stage, the fullest one's where they do not divide."""
        return -(-self.model.num_layers // self.pp)

    @property
    def dp(self) -> int:
        """Ranks of one stage."""
        return self.ranks // self.pp

    @property
    def slowdown(self) -> np.ndarray:
        """Seconds of a rank's compute over those of one of mean speed, float64 [R]."""
        speeds = np.array(self.speeds or (1.0,) * self.ranks)
        return speeds.mean() / speeds

    def wire(self, ranks: int) -> Wire:
        return Wire(
            self.costs, ranks, self.tp, self.all_remote, self.gather_share, self.element_bytes
        )


class StepResult(NamedTuple):
    """A simulated step.

    wire_bytes: float64 [R], of a device of each rank on its busier side, all layers, both passes.
    mfu: nan for a device without a published peak. bubble: of the schedule, the share of ticks in which a
    stage has no microbatch, whether it waits for them or not. attention_max_over_mean: seconds of the
    ranks' attention over the whole step.
    """

    strategy: str
    step_s: float
    mfu: float
    bubble: float
    accounts: Accounts
    wire_bytes: np.ndarray
    memory: Memory | StepMemory
    attention_max_over_mean: float
    timeline: Timeline

    def figures(self) -> dict[str, float]:
        """Shares of rank-seconds and means over ranks, as plain values."""
        total = self.step_s * len(self.wire_bytes)

        def share(seconds: np.ndarray) -> float:
            return float(seconds.sum() / total)

        accounts = self.accounts
        return {
            "step_s": self.step_s,
            "mfu": self.mfu,
            "linear_s_mean": float(accounts.linear_s.mean()),
            "head_s_mean": float(accounts.head_s.mean()),
            "attention_s_mean": float(accounts.attention_s.mean()),
            "exposed_communication": share(accounts.exposed_s),
            "bubble": self.bubble,
            "masked": share(accounts.masked_s),
            "waiting": share(accounts.waiting_s),
            "idle": share(accounts.idle_s),
            "attention_max_over_mean": self.attention_max_over_mean,
            "wire_bytes_mean": float(self.wire_bytes.mean()),
            "wire_bytes_max": float(self.wire_bytes.max()),
            "memory_bytes": self.memory.total,
        }


def model_flops(setting: Setting, lengths: MicrobatchLengths) -> float:
    """Causal FLOPs of a step, forward and backward: products three times their forward, attention
    three and a half; nothing that runs again counts.
    """
    documents = np.concatenate([nano for microbatch in lengths for nano in microbatch])
    zero = np.zeros_like(documents)
    pairs = int(causal_pairs(zero, documents, zero, documents).sum())
    model, tokens = setting.model, int(documents.sum())
    heads = HeadShape(model.num_q_heads, model.num_kv_heads, model.head_dim)
    head = 6 * model.vocab_size * model.embedding_dim * tokens if setting.head else 0
    layer = 6 * layer_weights(model) * tokens + 3.5 * attention_flops(heads, pairs)
    return float(model.num_layers * layer + head)


def pool_of(setting: Setting, ranks: int, tokens: int, longest: int | None = None) -> Pool:
    """tokens: T. longest: the longest document to come, by default a stage's nano-batch."""
    longest = longest or tokens * setting.dp
    pool = Pool(setting.wire(ranks), tokens, setting.heads, longest, node=setting.node)
    # Only plans over all ranks are made by it: those of a single stage stay at home.
    every = ranks == setting.ranks
    return replace(pool, planner=setting.planner, speeds=setting.speeds) if every else pool


def head_seconds(setting: Setting, tokens: np.ndarray) -> np.ndarray:
    """Head and loss of a microbatch, forward and backward, [r]; all stages share them alike."""
    if not setting.head:
        return np.zeros(len(tokens))
    model = setting.model
    flops = 2 * model.vocab_size * model.embedding_dim / (setting.tp * setting.pp)
    forward, backward = (
        np.array([setting.costs.product_s(flops * t, t, backward=b) for t in tokens.tolist()])
        for b in (False, True)
    )
    return forward + backward


def boundary_s(setting: Setting, tokens):
    """Rows of a microbatch to the next stage, a tp-th a device, float64 like `tokens`."""
    row = 2 * setting.model.embedding_dim / setting.tp
    link = setting.costs.between_nodes
    return np.asarray(tokens) * row / link.bytes_s + link.latency_s


def sent_bytes(works: Sequence[Sequence[AttentionWork]], layers: int, forward: int) -> np.ndarray:
    """All layers and both passes; the first `forward` works run forward, the others (or, if there are
    no others, the same) backward.
    """
    back = works[forward:] or works
    out = sum(w.dispatch.bytes + w.combine.bytes for nanos in works[:forward] for w in nanos)
    home = sum(
        w.dispatch_backward.bytes + w.combine_backward.bytes for nanos in back for w in nanos
    )
    return np.asarray(layers * (out + home), np.float64)


def own_memory(
    setting: Setting,
    query_rows: int,
    key_rows: int,
    *,
    rank_tokens: int,
    nano_batches: int,
    microbatches: int,
) -> StepMemory:
    """A device's memory as this project's trainer uses it.

    query_rows, key_rows: a server's buffers for one nano-batch. rank_tokens: N T, of a rank in a
    microbatch.
    """
    # The estimate counts the buffers of two nano-batches, and of capacities only these.
    queries, keys = (rows * nano_batches // 2 for rows in (query_rows, key_rows))
    none = (0,)
    held = Capacities("direct", queries, keys, none, none, none, none, 0, 0, 0)
    return estimate_memory(
        setting.model, setting.heads, held,
        one_f_one_b(setting.pp, microbatches) if setting.pp > 1 else None,
        tokens_per_rank=rank_tokens, dp=setting.dp, tp=setting.tp,
        tokens_over_tp=setting.tokens_over_tp and setting.tp > 1,
    )  # fmt: skip


def result_of(
    name: str,
    setting: Setting,
    schedule: Schedule,
    lengths: MicrobatchLengths,
    timeline: Timeline,
    attention_s: np.ndarray,
    wire_bytes: np.ndarray,
    memory: Memory | StepMemory,
) -> StepResult:
    peak = setting.costs.device.peak_flops or np.nan
    step_s = timeline.makespan_s
    attention_s = attention_s * setting.slowdown
    mean = attention_s.mean()
    return StepResult(
        strategy=name,
        step_s=step_s,
        mfu=model_flops(setting, lengths) / (peak * setting.ranks * setting.tp * step_s),
        bubble=schedule.bubble,
        accounts=timeline.accounts(),
        wire_bytes=wire_bytes,
        memory=memory,
        attention_max_over_mean=float(attention_s.max() / mean) if mean else 1.0,
        timeline=timeline,
    )
