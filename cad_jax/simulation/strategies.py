"""Ways of spreading core attention over ranks, each as the work of one layer and nano-batch. Host only.

    cad          this project's planner, or one of one's own; transports direct and relay, or ragged, which moves only the
                 rows needed once their offsets are known
    published    the published planner, one exchange of exactly the rows needed each way, with nothing
                 before it
    home         every task at its home, keys before it fetched from other ranks
    all_gather   every document spread over all ranks head and tail, keys and values of all gathered
    ring         the same spread, keys and values passed around while attention runs

Shape letters: S ranks of the pool, T tokens of a rank, N documents, n tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from cad_jax.sharding.capacities import capacities_from_plans
from cad_jax.sharding.cost_model import CostModel
from cad_jax.sharding.plan import Plan, home_plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.planners import Planner, plan_with
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.tasks import (
    DOCUMENT,
    HOME,
    K_START,
    K_STOP,
    Q_START,
    Q_STOP,
    SERVER,
    TASK_FIELDS,
    Capacities,
    HeadShape,
)
from cad_jax.simulation.published import plan_published
from cad_jax.simulation.work import (
    AttentionWork,
    Exchange,
    Wire,
    attention_seconds,
    exact_exchanges,
    moved_rows,
    padded_exchanges,
)

Name = Literal["cad", "published", "home", "all_gather", "ring"]
Transport = Literal["direct", "relay", "ragged"]
NAMES: tuple[Name, ...] = get_args(Name)
POOLED: tuple[Name, ...] = ("cad", "published")  # plans over the ranks of all pipeline stages
GRADIENT_BYTES = 2  # of the baselines' dk and dv on the wire over those of k and v: float32


@dataclass(frozen=True)
class Pool:
    """What every strategy knows of the ranks that share a nano-batch.

    wire: its network. tokens_per_server: T. heads: of one device. max_document_tokens: the longest
    document to come, for capacities. planner, speeds, node (of planning): see `Setting`.
    """

    wire: Wire
    tokens_per_server: int
    heads: HeadShape
    max_document_tokens: int
    planner: Planner = plan_documents
    speeds: tuple[float, ...] = ()
    node: int = 1

    @property
    def servers(self) -> int:
        return self.wire.servers

    @property
    def costs(self) -> CostModel:
        return self.wire.costs

    @property
    def q_bytes(self) -> int:
        """Queries of one rank's tokens."""
        return self.tokens_per_server * self.heads.q_row_bytes(self.wire.element_bytes)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one rank's tokens."""
        return self.tokens_per_server * self.heads.kv_row_bytes(self.wire.element_bytes)


def plan(
    lengths: np.ndarray,
    pool: Pool,
    tolerance: float,
    starts: np.ndarray | None = None,
    key_ranges: int = 1,
    transport: Transport | None = None,
) -> Plan:
    """The plan of the pool's planner, with roomy capacities. key_ranges, transport: see `plan_documents`; what divided
    keys cost depends on the transport, a dense one by default. Raises ValueError where a planner of one's own
    fails: see `plan_with`."""
    heads = pool.heads
    # A planner of one's own need not know of what is not asked for.
    asked: dict[str, Any] = {"starts": starts} if starts is not None else {}
    asked |= {"key_ranges": key_ranges} if key_ranges > 1 else {}
    asked |= {"transport": transport} if transport is not None else {}
    asked |= {"speeds": np.array(pool.speeds)} if pool.speeds else {}
    asked |= {"node": pool.node} if pool.node > 1 else {}
    return plan_with(
        pool.planner,
        lengths,
        servers=pool.servers,
        tokens_per_server=pool.tokens_per_server,
        num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        tolerance=tolerance,
        max_document_tokens=pool.max_document_tokens,
        **asked,
    )


def at_home(lengths: np.ndarray, pool: Pool, starts: np.ndarray | None = None) -> Plan:
    """The plan that moves nothing."""
    plain = replace(pool, planner=plan_documents, speeds=())
    roomy = plan(np.zeros(0, np.int64), plain, 0.0).capacities
    return home_plan(
        lengths,
        servers=pool.servers,
        tokens_per_server=pool.tokens_per_server,
        heads=pool.heads,
        capacities=roomy,
        starts=starts,
    )


def transport_of(plans: Sequence[Plan], pool: Pool) -> Transport:
    """Direct or relay, the one of fewer predicted seconds for capacities that hold these plans."""
    sums = {}
    for transport in ("direct", "relay"):
        capacities = run_capacities(plans, pool, transport)
        exchanges = padded_exchanges(capacities, pool.heads, pool.wire)
        sums[transport] = sum(float(hop[0]) for e in exchanges for hop in e.hops)
    return "direct" if sums["direct"] <= sums["relay"] else "relay"


def run_capacities(plans: Sequence[Plan], pool: Pool, transport: str) -> Capacities:
    """The capacities of a run: those that hold 99.9% of these plans, and any home plan."""
    return capacities_from_plans(
        plans, max_document_tokens=pool.max_document_tokens, transport=transport
    )


def planned_work(
    plan: Plan, pool: Pool, transport: Transport, capacities: Capacities | None = None
) -> AttentionWork:
    """A plan's work. capacities: static ones of a run, by default just what this plan needs."""
    held = required_capacities(plan, transport) if capacities is None else capacities
    forward, backward = attention_seconds(plan.tasks, pool.servers, pool.heads, pool.costs, held)
    if transport == "ragged":
        exchanges = exact_exchanges(
            moved_rows(plan),
            pool.heads,
            pool.wire,
            backward_q_rows=2,
            backward_scalars=2,
            announced=True,
        )  # fmt: skip - q and d_out, with lse and delta
    else:
        exchanges = padded_exchanges(held, pool.heads, pool.wire)
    return AttentionWork(
        forward, backward, *exchanges, pool.servers, held.query_rows, held.key_rows
    )


def published_work(
    stages: Sequence[np.ndarray],
    pool: Pool,
    tolerance: float,
    copy_byte_s: tuple[float, float] = (0.0, 0.0),
) -> AttentionWork:
    """The published planner's work. stages: documents of each pipeline stage; one without a pipeline.
    copy_byte_s: see `Setting.published_copy_byte_s`; its seconds count as attention."""
    made = plan_published(
        stages,
        servers=pool.servers,
        tokens_per_server=pool.tokens_per_server,
        heads=pool.heads,
        tolerance=tolerance,
    )
    kernels = attention_seconds(made.tasks, pool.servers, pool.heads, pool.costs)
    own_bytes = pool.q_bytes + pool.kv_bytes
    forward, backward = (
        s + own_bytes * byte_s for s, byte_s in zip(kernels, copy_byte_s, strict=True)
    )
    rows = made.moved_rows()
    exchanges = exact_exchanges(
        rows, pool.heads, pool.wire, backward_q_rows=3, backward_scalars=1, announced=False
    )  # q, out and d_out, with lse
    query_rows, key_rows = (
        pool.tokens_per_server + int(f.into(pool.servers).max()) for f in (rows.q, rows.kv)
    )
    return AttentionWork(forward, backward, *exchanges, pool.servers, query_rows, key_rows)


def head_tail_tasks(lengths: np.ndarray, servers: int) -> np.ndarray:
    """Every document in 2 S pieces of which rank r computes pieces r and 2 S - 1 - r, int64 [n, 7]."""
    lengths = np.asarray(lengths, np.int64)
    pieces = 2 * servers
    piece = np.arange(pieces + 1)
    cuts = (lengths[:, None] * piece) // pieces
    document = np.repeat(np.arange(len(lengths)), pieces)
    tasks = np.zeros((len(document), len(TASK_FIELDS)), np.int64)
    tasks[:, DOCUMENT] = document
    tasks[:, Q_START], tasks[:, Q_STOP] = cuts[:, :-1].ravel(), cuts[:, 1:].ravel()
    tasks[:, K_STOP] = tasks[:, Q_STOP]
    tasks[:, HOME] = tasks[:, SERVER] = np.tile(_owner(piece[:-1], servers), len(lengths))
    return tasks[tasks[:, Q_STOP] > tasks[:, Q_START]]


def head_tail_seconds(
    lengths: np.ndarray, servers: int, heads: HeadShape, costs: CostModel, *, backward: bool
) -> np.ndarray:
    """Attention of each rank over `head_tail_tasks`, float64 [S]. Equal documents are computed once
    where every task has tiles of its own."""
    if costs.grid(heads).tiles_of != "task":
        return costs.server_s(head_tail_tasks(lengths, servers), servers, heads, backward=backward)
    kinds, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
    tasks = head_tail_tasks(kinds, servers)
    tasks[:, SERVER] += servers * tasks[:, DOCUMENT]
    seconds = costs.server_s(tasks, servers * len(kinds), heads, backward=backward)
    return counts @ seconds.reshape(len(kinds), servers)


def ring_steps(
    lengths: np.ndarray, servers: int, heads: HeadShape, costs: CostModel, *, backward: bool
) -> np.ndarray:
    """Seconds of attention, float64 [S steps, S], of a ring over the same pieces: in step j a rank
    computes its queries with the keys of the rank j before it. Every kernel call of a step takes two
    pieces of queries and two of keys, however short.
    """
    kinds, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
    total = np.zeros(servers * servers)
    piece = np.arange(2 * servers)
    query, key = (x.ravel() for x in np.meshgrid(piece, piece, indexing="ij"))
    query, key = query[key <= query], key[key <= query]
    step = (_owner(query, servers) - _owner(key, servers)) % servers
    tasks = np.zeros((len(query), len(TASK_FIELDS)), np.int64)
    tasks[:, SERVER] = step * servers + _owner(query, servers)
    for length, number in zip(kinds.tolist(), counts.tolist(), strict=True):
        cuts = length * np.arange(2 * servers + 1) // (2 * servers)
        tasks[:, Q_START], tasks[:, Q_STOP] = cuts[query], cuts[query + 1]
        tasks[:, K_START], tasks[:, K_STOP] = cuts[key], cuts[key + 1]
        seconds = costs.server_s(tasks, servers * servers, heads, backward=backward)
        total += number * seconds
    return total.reshape(servers, servers)


def _owner(piece: np.ndarray, servers: int) -> np.ndarray:
    return np.minimum(piece, 2 * servers - 1 - piece)


def gathered_work(
    lengths: np.ndarray, pool: Pool, *, gather_again: bool, gradient_bytes: float = GRADIENT_BYTES
) -> AttentionWork:
    """Per-document context parallelism: keys and values of all ranks gathered before attention, their
    gradients reduced and scattered after it.

    gather_again: the backward gathers them once more instead of keeping them. gradient_bytes: of
    dk and dv, over those of k and v.
    """
    forward, backward = (
        head_tail_seconds(lengths, pool.servers, pool.heads, pool.costs, backward=b)
        for b in (False, True)
    )
    shard = pool.kv_bytes
    gather = _collective(pool.wire, shard)
    scatter = _collective(pool.wire, shard * gradient_bytes)
    nothing = Exchange((), np.zeros(pool.servers))
    keys = pool.servers * pool.tokens_per_server
    return AttentionWork(
        forward, backward, gather, nothing, gather if gather_again else nothing, scatter,
        pool.servers, pool.tokens_per_server, keys, keeps_gathered=not gather_again,
    )  # fmt: skip


def ring_work(
    lengths: np.ndarray, pool: Pool, *, gradient_bytes: float = GRADIENT_BYTES
) -> AttentionWork:
    """The same spread as `gathered_work`, keys and values passed on S - 1 times beside attention, in
    the backward with their gradients, which come home in one hop more."""
    shard, steps = pool.kv_bytes, pool.servers - 1
    within = pool.wire.node_ranks >= pool.servers

    def passed(shard_bytes: float, hops: int) -> Exchange:
        seconds = pool.costs.transfer_s(shard_bytes, within_node=within, hops=1)
        return Exchange(
            (np.full(pool.servers, seconds),) * hops, np.full(pool.servers, hops * shard_bytes)
        )

    forward, backward = (
        ring_steps(lengths, pool.servers, pool.heads, pool.costs, backward=b) for b in (False, True)
    )
    nothing = Exchange((), np.zeros(pool.servers))
    return AttentionWork(
        forward.sum(0), backward.sum(0), passed(shard, steps), nothing,
        passed(shard * (1 + gradient_bytes), steps), passed(shard * gradient_bytes, min(steps, 1)),
        pool.servers, pool.tokens_per_server, 2 * pool.tokens_per_server,
        tuple(forward), tuple(backward),
    )  # fmt: skip


def _collective(wire: Wire, shard_bytes: float) -> Exchange:
    seconds = np.full(wire.servers, wire.gather_s(shard_bytes))
    return Exchange((seconds,), np.full(wire.servers, shard_bytes * (wire.servers - 1)))
