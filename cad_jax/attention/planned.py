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
from cad_jax.sharding.cost import exchange_s
from cad_jax.sharding.mesh import MESH_AXES
from cad_jax.sharding.plan import Plan, home_plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.planners import Planner, plan_with
from cad_jax.sharding.routing import required_capacities, wire_bytes
from cad_jax.sharding.tables import Tables, expand
from cad_jax.sharding.tasks import Capacities, stage_documents, stage_lengths


@dataclass(frozen=True)
class PlannedStrategy:
    """cad and home: servers compute the tasks of a plan."""

    name: str
    pool: Pool
    capacities: Capacities
    tolerance: float
    max_document_tokens: int | None
    key_ranges: int = 1
    planner: Planner = plan_documents

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
        seconds = exchange_s(self.capacities, heads, pool.servers, pool.device, pool.tp)
        most = "at most " if self.transport == "ragged" else ""
        text = (
            f"{self.transport} transport: {most}{wire / 2**20:,.1f} MiB on the wire per rank and layer "
            f"forward, {1e3 * seconds:,.2f} ms predicted on {pool.device.name} in bfloat16"
        )
        if pool.head_axis is not None:
            text += f"; tokens to heads and back: {pool.head_hop_bytes() / 2**20:,.1f} MiB over tp"
        return text

    def plan(self, lengths: np.ndarray, starts: np.ndarray | None = None) -> Plan:
        """The plan of documents end to end, or from `starts`: see `plan_with`. Raises
        ValueError where documents or capacities do not fit."""
        pool = self.pool
        if self.name == "home":
            return home_plan(
                lengths,
                servers=pool.servers,
                tokens_per_server=pool.tokens_per_server,
                heads=pool.heads,
                capacities=self.capacities,
                tolerance=self.tolerance,
                starts=starts,
            )
        return plan_with(
            self.planner,
            lengths,
            servers=pool.servers,
            tokens_per_server=pool.tokens_per_server,
            num_q_heads=pool.heads.num_q_heads,
            num_kv_heads=pool.heads.num_kv_heads,
            head_dim=pool.heads.head_dim,
            tolerance=self.tolerance,
            max_document_tokens=self.max_document_tokens,
            capacities=self.capacities,
            starts=starts,
            key_ranges=self.key_ranges,
        )

    def plan_sample(self, sample: np.ndarray | Sequence[np.ndarray]) -> Plan:
        """The plan of a microbatch's lengths, or of a tick's: a sequence of one array per stage."""
        if isinstance(sample, np.ndarray):
            return self.plan(sample)
        return self.plan(*stage_documents(sample, self.pool.stage_tokens))

    def prepare(
        self,
        lengths: np.ndarray,
        ranks: Sequence[int] | None = None,
        starts: np.ndarray | None = None,
    ) -> Prepared:
        start = time.perf_counter()
        plan = self.plan(lengths, starts)
        arrays = plan.arrays(ranks)
        plan_s = time.perf_counter() - start
        item = self.pool.element_bytes
        bytes_in, bytes_out = plan.bytes_in(item), plan.bytes_out(item)
        needed = required_capacities(plan, self.transport)
        # Dense collectives send the capacity whatever the plan needs, a ragged one what it needs.
        sent = needed if self.transport == "ragged" else self.capacities
        wire = wire_bytes(sent, plan.servers, plan.heads, item)
        figures = StepFigures(
            plan_s=plan_s,
            max_over_mean_home=plan.max_over_mean_home,
            max_over_mean=plan.max_over_mean,
            exchange_bytes_mean=float(bytes_in.mean()),
            exchange_bytes_max=float(max(bytes_in.max(), bytes_out.max())),
            wire_bytes=float(wire.forward + self.pool.head_hop_bytes()),
            capacity_used=self.capacities.used(needed),
            fallback_tasks=plan.fallback_tasks,
        )
        return Prepared(None, arrays, figures, plan.digest(), plan.home_loads(), plan.loads())

    def prepare_ticks(self, ticks, lengths, ranks=None) -> PreparedTicks:
        self.pool.check_stages(ticks)
        prepared = []
        for tick in ticks:
            of_stage = stage_lengths(tick, lengths)
            documents, starts = stage_documents(of_stage, self.pool.stage_tokens)
            prepared.append(self.prepare(documents, ranks, starts))
        return PreparedTicks(prepared, [None] * len(lengths))

    def expand(self, arrays: Any) -> Tables:
        return expand(arrays, self.pool.heads, self.pool.tokens_per_server)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        return differentiable.attend(self.way, self.pool.settings, q, k, v, tables)
