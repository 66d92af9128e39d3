"""What one layer asks of every rank for one nano-batch: seconds of compute and of every exchange.

A strategy turns documents into `AttentionWork`; the executor runs any of them alike. Host only.

Shape letters: S ranks of a pool, T tokens of a rank, n tasks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cad_jax.sharding.cost import Flows, ModelShape, travelling_keys, travelling_queries
from cad_jax.sharding.cost_model import CostModel, layer_weights
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.tasks import Capacities, HeadShape

LSE_BYTES = 4  # float32, of each row and head
FLOAT32_BYTES = 4


class Exchange(NamedTuple):
    """hops: seconds of each collective, float64 [S]. bytes: on the busier side of each rank, all
    hops together, float64 [S]."""

    hops: tuple[np.ndarray, ...]
    bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class AttentionWork:
    """Core attention of one layer and nano-batch over a pool.

    forward_s, backward_s: float64 [S], of each rank's kernels. dispatch, combine: exchanges before
    and after them, forward; dispatch_backward, combine_backward: of the backward pass. group_ranks:
    ranks of each collective. forward_steps, backward_steps: of a ring, seconds of attention in each
    step, [S] each; all but the last lie beside a hop of the dispatch, which otherwise comes before
    attention. query_rows, key_rows: most rows any rank holds of each. keeps_gathered: keys gathered
    from the group stay until the backward, in every layer.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    dispatch: Exchange
    combine: Exchange
    dispatch_backward: Exchange
    combine_backward: Exchange
    group_ranks: int
    query_rows: int
    key_rows: int
    forward_steps: tuple[np.ndarray, ...] = ()
    backward_steps: tuple[np.ndarray, ...] = ()
    keeps_gathered: bool = False


class LinearWork(NamedTuple):
    """Linear layers of one nano-batch and layer, forward, float64 [S] each: what lies before
    attention (its input projections) and after it. backward: its seconds over the forward's. again:
    share of the forward that the backward pass runs once more.
    """

    before_s: np.ndarray
    after_s: np.ndarray
    backward: float
    again: float

    @property
    def block_s(self) -> np.ndarray:
        return self.before_s + self.after_s


def linear_work(
    model: ModelShape, costs: CostModel, tokens, tp: int, *, again: float = 0.0
) -> LinearWork:
    """tokens: int [S], of each rank in a nano-batch."""
    tokens = np.asarray(tokens)
    kinds, of = np.unique(tokens, return_inverse=True)
    forward, backward = (
        np.array([costs.linear_s(model, t, tp, backward=b) for t in kinds.tolist()])
        for b in (False, True)
    )
    before = (
        model.embedding_dim
        * (model.num_q_heads + 2 * model.num_kv_heads)
        * model.head_dim
        / layer_weights(model)
    )
    ratio = float(backward.sum() / forward.sum()) if forward.sum() else 2.0
    seconds = forward[of].reshape(tokens.shape)
    return LinearWork(before * seconds, (1 - before) * seconds, ratio, again)


class Wire(NamedTuple):
    """How bytes turn into seconds for a pool whose ranks are tp devices each.

    all_remote: peers in a rank's own node count as if they were in another. gather_share: of the
    network's bandwidth that all-gathers and reduce-scatters reach. element_bytes: of q, k and v.
    """

    costs: CostModel
    servers: int
    tp: int
    all_remote: bool = False
    gather_share: float = 1.0
    element_bytes: int = 2

    @property
    def node_ranks(self) -> int:
        """Ranks of this pool within one node."""
        if self.all_remote:
            return 1
        return min(self.servers, max(self.costs.device.devices_per_node // self.tp, 1))

    def dense_s(self, pair_bytes: float) -> float:
        """A padded all-to-all of pair_bytes from every rank to every other."""
        return self._seconds(
            pair_bytes * (self.servers - self.node_ranks), pair_bytes * (self.node_ranks - 1)
        )

    def exact_s(self, sent: np.ndarray, received: np.ndarray) -> np.ndarray:
        """An all-to-all of exactly the rows needed, bytes [2, S] that leave a node and that stay within
        it -> [S]: the busier side of each rank."""
        most = np.maximum(sent, received).T.tolist()
        return np.array([self._seconds(far, near) for far, near in most])

    def gather_s(self, shard_bytes: float) -> float:
        """All-gather, or reduce-scatter, of shard_bytes of every rank: what another node holds comes in
        once a node, over the cards of all its ranks."""
        shard, near = shard_bytes / self.gather_share, self.node_ranks
        return self._seconds(shard * (self.servers - near) / near, shard * (self.servers - 1))

    def _seconds(self, remote_bytes: float, near_bytes: float) -> float:
        if self.servers == 1:
            return 0.0
        near = self.costs.transfer_s(near_bytes, within_node=True, hops=1)
        if self.node_ranks == self.servers:
            return near
        far = self.costs.transfer_s(remote_bytes, within_node=False, hops=1)
        return far if self.node_ranks == 1 else max(far, near)


def padded_exchanges(
    capacities: Capacities, heads: HeadShape, wire: Wire
) -> tuple[Exchange, Exchange, Exchange, Exchange]:
    """Dispatch, combine and those of the backward as the trainer's transports run them: every pair
    as large as its capacity, whatever the plan needs."""
    unit = heads.unit_heads * heads.head_dim * wire.element_bytes
    wide = unit + LSE_BYTES * heads.unit_heads

    def exchange(pairs: Sequence[int]) -> Exchange:
        hops = tuple(np.full(wire.servers, wire.dense_s(p)) for p in pairs)
        return Exchange(hops, np.full(wire.servers, float(sum(pairs) * (wire.servers - 1))))

    out, home = capacities.dispatch_units, tuple(reversed(capacities.output_units))
    both = tuple(a + b for a, b in zip(out, capacities.output_units, strict=True))
    gradients = [units * unit for units in reversed(out)]
    # Sums of relays come home in float32: see `routing.wire_bytes`.
    if capacities.transport == "relay" and capacities.partials > 1:
        wider = max(FLOAT32_BYTES / wire.element_bytes, 1)
        gradients[-1] = int(gradients[-1] * wider)
    return (
        exchange([units * unit for units in out]),
        exchange([units * wide for units in home]),
        exchange([units * wide for units in both]),
        exchange(gradients),
    )


class MovedRows(NamedTuple):
    """Rows that go to servers in one dispatch; key rows once a server and document."""

    q: Flows
    kv: Flows


def exact_exchanges(
    rows: MovedRows,
    heads: HeadShape,
    wire: Wire,
    *,
    backward_q_rows: int,
    backward_scalars: int,
    announced: bool,
) -> tuple[Exchange, Exchange, Exchange, Exchange]:
    """The four exchanges where every rank sends exactly the rows needed, in one hop.

    backward_q_rows, backward_scalars: what a query takes along in the backward's dispatch, rows of its
    size and float32 a head. announced: a collective of nothing but offsets goes before each.
    """
    q, kv = heads.q_row_bytes(wire.element_bytes), heads.kv_row_bytes(wire.element_bytes)
    scalar = LSE_BYTES * heads.num_q_heads
    (q_in, q_out), (kv_in, kv_out) = (
        (_ends(f.server, f, wire), _ends(f.home, f, wire)) for f in (rows.q, rows.kv)
    )

    def exchange(q_bytes: float, kv_bytes: float, *, home: bool) -> Exchange:
        to_server = q_in * q_bytes + kv_in * kv_bytes
        from_home = q_out * q_bytes + kv_out * kv_bytes
        sent, received = (to_server, from_home) if home else (from_home, to_server)
        hop = wire.exact_s(sent, received) + announced * wire.dense_s(0.0)
        return Exchange((hop,), np.maximum(sent.sum(axis=0), received.sum(axis=0)))

    return (
        exchange(q, kv, home=False),
        exchange(q + scalar, 0, home=True),
        exchange(backward_q_rows * q + backward_scalars * scalar, kv, home=False),
        exchange(q, kv, home=True),
    )


def _ends(rank: np.ndarray, flows: Flows, wire: Wire) -> np.ndarray:
    """Rows of flows by the rank at one end, float64 [2, S]: those that leave a node, those within one."""
    near = flows.home // wire.node_ranks == flows.server // wire.node_ranks
    at = rank + wire.servers * near
    return np.bincount(at, flows.rows, 2 * wire.servers).reshape(2, wire.servers)


def moved_rows(plan: Plan) -> MovedRows:
    """Rows of a plan whose documents lie end to end, or with gaps."""
    keys = travelling_keys(plan.lengths, plan.tasks, plan.tokens_per_server, plan.starts)
    return MovedRows(travelling_queries(plan.tasks), keys)


def attention_seconds(
    tasks: np.ndarray,
    servers: int,
    heads: HeadShape,
    costs: CostModel,
    capacities: Capacities | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward seconds of each server, float64 [S]. capacities: see `CostModel.server_s`."""
    forward, backward = (
        costs.server_s(tasks, servers, heads, backward=b, capacities=capacities)
        for b in (False, True)
    )
    return forward, backward


def signal(work: AttentionWork, wire: Wire) -> AttentionWork:
    """The same work with exchanges of no bytes: a collective's latency each."""

    def empty(exchange: Exchange) -> Exchange:
        hops = tuple(np.full(len(h), wire.dense_s(0.0)) for h in exchange.hops)
        return Exchange(hops, np.zeros(len(exchange.bytes)))

    names = ("dispatch", "combine", "dispatch_backward", "combine_backward")
    return replace(work, **{name: empty(getattr(work, name)) for name in names})
