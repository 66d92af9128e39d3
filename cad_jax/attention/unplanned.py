"""The strategies without a plan: every key reaches every rank. Head-tail context parallelism, and what
XLA's partitioner makes of global arrays.

Letters: T tokens per server, S servers, H query heads, K key/value heads, D head dim.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from cad_jax.attention import all_gather, differentiable, native, ring
from cad_jax.attention.all_gather import HeadTailArrays
from cad_jax.attention.base import KeyRanges
from cad_jax.attention.differentiable import Settings, Way
from cad_jax.attention.head_tail import causal_ranges, head_tail, rank_pairs
from cad_jax.attention.pool import Pool
from cad_jax.attention.prepared import Prepared, PreparedTicks, StepFigures
from cad_jax.sharding.cost import max_over_mean
from cad_jax.sharding.mesh import MESH_AXES
from cad_jax.sharding.tasks import NO_DOCUMENTS


def _unplanned(pool: Pool, name: str, lengths, order, arrays, start: float) -> Prepared:
    """Prepared for strategies that send every key everywhere: no plan, no capacities."""
    plan_s = time.perf_counter() - start
    home = rank_pairs(lengths, np.arange(pool.tokens), pool.servers)
    pairs = home if order is None else rank_pairs(lengths, order, pool.servers)
    gathered = float(pool.gather_bytes())
    figures = StepFigures(
        plan_s, max_over_mean(home), max_over_mean(pairs), gathered, gathered,
        gathered + pool.head_hop_bytes(), {}, 0,
    )  # fmt: skip
    return Prepared(order, arrays, figures, pool.digest(name, lengths), home, pairs)


def _rank_rows(pool: Pool, values: np.ndarray, ranks: Sequence[int] | None) -> np.ndarray:
    """int64 [S * T] -> int32 [S, T], or the rows of `ranks`."""
    rows = values.astype(np.int32).reshape(pool.servers, pool.tokens_per_server)
    return rows if ranks is None else rows[list(ranks)]


@dataclass(frozen=True)
class HeadTailStrategy:
    """all_gather and ring: head-tail order, every rank sees every key."""

    name: str
    pool: Pool

    @property
    def transport(self) -> None:
        return None

    @property
    def manual_axes(self) -> tuple[str, ...]:
        return MESH_AXES

    @property
    def way(self) -> Way:
        return self.pool.way(all_gather.ALL_GATHER if self.name == "all_gather" else ring.RING)

    @property
    def settings(self) -> Settings:
        return self.pool.settings

    def describe(self) -> str:
        return self.pool.describe_gather()

    def prepare(self, lengths: np.ndarray, ranks: Sequence[int] | None = None) -> Prepared:
        start = time.perf_counter()
        placed = head_tail(lengths, self.pool.servers, self.pool.tokens_per_server)
        arrays = HeadTailArrays(*(_rank_rows(self.pool, x, ranks) for x in placed))
        return _unplanned(self.pool, self.name, lengths, placed.order, arrays, start)

    def prepare_ticks(self, ticks, lengths, ranks=None) -> PreparedTicks:
        self.pool.check_stages(ticks)
        microbatches = [self.prepare(documents) for documents in (*lengths, NO_DOCUMENTS)]
        prepared = [self._side_by_side([microbatches[m] for m in tick], ranks) for tick in ticks]
        return PreparedTicks(prepared, [microbatch.order for microbatch in microbatches[:-1]])

    def _side_by_side(
        self, microbatches: Sequence[Prepared], ranks: Sequence[int] | None
    ) -> Prepared:
        """One microbatch per stage, over the ranks of all stages."""
        start, servers = time.perf_counter(), self.pool.servers
        chosen = range(len(microbatches) * servers) if ranks is None else ranks
        at = [(rank // servers, rank % servers) for rank in chosen]
        arrays = jax.tree.map(
            lambda *of_stage: np.stack([of_stage[stage][row] for stage, row in at]),
            *(m.arrays for m in microbatches),
        )
        home = np.concatenate([m.home_pairs for m in microbatches])
        pairs = np.concatenate([m.pairs for m in microbatches])
        figures = microbatches[0].figures._replace(
            plan_s=time.perf_counter() - start,
            max_over_mean_home=max_over_mean(home),
            max_over_mean=max_over_mean(pairs),
        )
        digest = hashlib.sha256("".join(m.digest for m in microbatches).encode()).hexdigest()
        return Prepared(None, arrays, figures, digest, home, pairs)

    def expand(self, arrays: Any) -> Any:
        module = all_gather if self.name == "all_gather" else ring
        return module.expand(arrays, self.pool.axis_names)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        return differentiable.attend(self.way, self.pool.settings, q, k, v, tables)


@dataclass(frozen=True)
class NativeStrategy:
    """native and native_dense: global arrays, document order, collectives by XLA's partitioner."""

    name: str
    pool: Pool

    @property
    def transport(self) -> None:
        return None

    @property
    def manual_axes(self) -> tuple[str, ...]:
        return MESH_AXES[-1:]

    @property
    def way(self) -> None:
        return None

    @property
    def settings(self) -> Settings:
        return self.pool.settings

    def describe(self) -> str:
        return self.pool.describe_gather()

    def prepare(self, lengths: np.ndarray, ranks: Sequence[int] | None = None) -> Prepared:
        start = time.perf_counter()
        ranges = causal_ranges(lengths, self.pool.tokens)
        arrays = tuple(_rank_rows(self.pool, x, ranks) for x in ranges)
        return _unplanned(self.pool, self.name, lengths, None, arrays, start)

    def prepare_ticks(self, ticks, lengths, ranks=None) -> PreparedTicks:
        raise ValueError(no_stages(self.name, len(ticks[0])))

    def expand(self, arrays: tuple[jax.Array, jax.Array]) -> KeyRanges:
        return KeyRanges(*arrays)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: KeyRanges) -> jax.Array:
        if self.name == "native":
            return native.blockwise_attention(self.pool.axis_names, q, k, v, tables)
        return native.dense_attention(self.pool.axis_names, q, k, v, tables)


def no_stages(name: str, stages: int) -> str:
    """Why a native strategy cannot run in stages."""
    return (
        f"strategy {name} leaves the ranks to XLA's partitioner and cannot run in pipeline stages "
        f"(pp = {stages}): use cad, home, all_gather or ring, or pp = 1"
    )
