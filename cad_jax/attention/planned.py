"""The planned strategies: servers compute the tasks of a plan, wherever their rows live.

Letters: T tokens per server, S servers, H query heads, K key/value heads, D head dim.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from cad_jax.attention import cad, differentiable
from cad_jax.attention.differentiable import Settings, Way
from cad_jax.attention.pool import Pool
from cad_jax.attention.prepared import Prepared, PreparedTicks, StepFigures
from cad_jax.sharding.cost import exchange_s, max_over_mean
from cad_jax.sharding.mesh import MESH_AXES
from cad_jax.sharding.placement import Placement, place, token_order
from cad_jax.sharding.plan import Plan, home_plan
from cad_jax.sharding.planner import AttentionCost, plan_documents
from cad_jax.sharding.planners import Planner, plan_with, wire_cost
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.routing import wire_bytes
from cad_jax.sharding.tables import Tables, expand
from cad_jax.sharding.tasks import Capacities, stage_documents, stage_lengths


@dataclass(frozen=True)
class Planning:
    """How plans are made: see `planner.plan_documents`, and `placement.place`.

    speeds: [S], where servers are not alike. planner: any but this project's own is checked, and what
    it raises is a ValueError.
    """

    tolerance: float
    max_document_tokens: int | None
    key_ranges: int = 1
    planner: Planner = plan_documents
    speeds: tuple[float, ...] | None = None
    node: int = 1
    placement: Placement = "sequential"
    cost_model: AttentionCost | None = None


@dataclass(frozen=True)
class PlannedStrategy:
    """cad and home: servers compute the tasks of a plan."""

    name: str
    pool: Pool
    capacities: Capacities
    planning: Planning

    @property
    def transport(self) -> str:
        return self.capacities.transport

    @property
    def manual_axes(self) -> tuple[str, ...]:
        return MESH_AXES

    @property
    def way(self) -> Way:
        return self.pool.way(cad.PLANNED)

    @property
    def settings(self) -> Settings:
        return self.pool.settings

    def describe(self) -> str:
        pool, heads = self.pool, self.pool.heads
        wire = wire_bytes(self.capacities, pool.servers, heads, pool.element_bytes).forward
        seconds = exchange_s(
            self.capacities, heads, pool.servers, pool.device, pool.tp, pool.element_bytes
        )
        most = "at most " if self.transport == "ragged" else ""
        text = (
            f"{self.transport} transport: {most}{wire / 2**20:,.1f} MiB on the wire per rank and layer "
            f"forward, {1e3 * seconds:,.2f} ms predicted on {pool.device.name}"
        )
        if pool.head_axis is not None:
            text += f"; tokens to heads and back: {pool.head_hop_bytes() / 2**20:,.1f} MiB over tp"
        return text

    def plan(self, lengths: np.ndarray, starts: np.ndarray | None = None) -> Plan:
        """The plan of documents end to end, or from `starts`: see `plan_with`. Raises
        ValueError where documents or capacities do not fit, or the planner fails."""
        pool = self.pool
        if self.name == "home":
            return home_plan(
                lengths,
                servers=pool.servers,
                tokens_per_server=pool.tokens_per_server,
                heads=pool.heads,
                capacities=self.capacities,
                tolerance=self.planning.tolerance,
                starts=starts,
            )
        return plan_with(self.planning.planner, lengths, **self._arguments(starts))

    def _arguments(self, starts: np.ndarray | None = None) -> dict[str, Any]:
        """Of `plan_documents`. What few runs set is left out elsewhere: planners need not know it."""
        pool, planning = self.pool, self.planning
        arguments: dict[str, Any] = dict(
            servers=pool.servers,
            tokens_per_server=pool.tokens_per_server,
            num_q_heads=pool.heads.num_q_heads,
            num_kv_heads=pool.heads.num_kv_heads,
            head_dim=pool.heads.head_dim,
            tolerance=planning.tolerance,
            max_document_tokens=planning.max_document_tokens,
            capacities=self.capacities,
            starts=starts,
            key_ranges=min(planning.key_ranges, self.capacities.partials),
        )
        if planning.speeds is not None:
            arguments["speeds"] = np.array(planning.speeds)
        if planning.node > 1:
            arguments["node"] = planning.node
        if planning.cost_model is not None:
            arguments["cost_model"] = planning.cost_model
        return arguments

    def _order(self, lengths: np.ndarray) -> np.ndarray | None:
        """The order in which a stage's documents are laid; None where they stay as they are."""
        placement, pool = self.planning.placement, self.pool
        if placement == "sequential":
            return None
        cost = None
        if placement == "searched":
            cost = wire_cost(self.planning.planner, **self._arguments())
        servers = pool.servers // pool.stages
        return place(lengths, placement, servers, pool.tokens_per_server, cost)

    def _laid(self, lengths: np.ndarray) -> np.ndarray:
        order = self._order(lengths)
        return lengths if order is None else lengths[order]

    def plan_sample(self, sample: np.ndarray | Sequence[np.ndarray]) -> Plan:
        """The plan of a microbatch's lengths, or of a tick's: a sequence of one array per stage. As
        they are laid in a run."""
        if isinstance(sample, np.ndarray):
            return self.plan(self._laid(sample))
        return self.plan(*stage_documents([self._laid(s) for s in sample], self.pool.stage_tokens))

    def prepare(self, lengths: np.ndarray, ranks: Sequence[int] | None = None) -> Prepared:
        start = time.perf_counter()
        order = self._order(lengths)
        if order is None:
            return self._prepared(start, lengths, ranks)
        prepared = self._prepared(start, lengths[order], ranks)
        return prepared._replace(order=token_order(lengths, order, self.pool.tokens))

    def _prepared(
        self,
        start: float,
        lengths: np.ndarray,
        ranks: Sequence[int] | None,
        starts: np.ndarray | None = None,
    ) -> Prepared:
        """Of documents as they are laid. start: when `time.perf_counter` began to count."""
        plan = self.plan(lengths, starts)
        arrays = plan.arrays(ranks)
        plan_s = time.perf_counter() - start
        item = self.pool.element_bytes
        bytes_in, bytes_out = plan.bytes_in(item), plan.bytes_out(item)
        needed = required_capacities(plan, self.transport)
        # Dense collectives send the capacity whatever the plan needs, a ragged one what it needs.
        sent = needed if self.transport == "ragged" else self.capacities
        wire = wire_bytes(sent, plan.servers, plan.heads, item)
        home_pairs, pairs = plan.home_loads(), plan.loads()
        figures = StepFigures(
            plan_s=plan_s,
            max_over_mean_home=max_over_mean(home_pairs, self.planning.speeds),
            max_over_mean=max_over_mean(pairs, self.planning.speeds),
            exchange_bytes_mean=float(bytes_in.mean()),
            exchange_bytes_max=float(max(bytes_in.max(), bytes_out.max())),
            wire_bytes=float(wire.forward + self.pool.head_hop_bytes()),
            capacity_used=self.capacities.used(needed),
            fallback_tasks=plan.fallback_tasks,
        )
        return Prepared(None, arrays, figures, plan.digest(), home_pairs, pairs)

    def prepare_ticks(self, ticks, lengths, ranks=None) -> PreparedTicks:
        self.pool.check_stages(ticks)
        orders = [self._order(documents) for documents in lengths]
        laid = [x if o is None else x[o] for x, o in zip(lengths, orders, strict=True)]
        prepared = []
        for tick in ticks:
            start = time.perf_counter()
            documents, starts = stage_documents(stage_lengths(tick, laid), self.pool.stage_tokens)
            prepared.append(self._prepared(start, documents, ranks, starts))
        tokens = self.pool.stage_tokens
        return PreparedTicks(
            prepared,
            [
                None if o is None else token_order(x, o, tokens)
                for x, o in zip(lengths, orders, strict=True)
            ],
        )

    def expand(self, arrays: Any) -> Tables:
        return expand(arrays, self.pool.heads, self.pool.tokens_per_server)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        return differentiable.attend(self.way, self.pool.settings, q, k, v, tables)
