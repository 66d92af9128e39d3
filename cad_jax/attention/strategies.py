"""Ways to distribute core attention: prepare on the host, expand and attend on the devices.

`make_strategy(name, ...)` gives one of: cad (planned servers), home (the same machinery, nothing
moves), all_gather and ring (context parallelism in head-tail order), native and native_dense (left
to XLA's partitioner). The model receives `attend` and never learns which it is.

Letters: T tokens per server, S servers, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from cad_jax.attention.differentiable import Settings, Way
from cad_jax.attention.planned import PlannedStrategy, Planning
from cad_jax.attention.pool import Pool
from cad_jax.attention.prepared import Prepared, PreparedTicks
from cad_jax.attention.unplanned import HeadTailStrategy, NativeStrategy, no_stages
from cad_jax.attention.varlen import KERNEL_NAMES, load_kernel
from cad_jax.sharding.capacities import (
    capacities_from_plans,
    default_capacities,
    home_capacities,
)
from cad_jax.sharding.cost import DEVICES, Device, choose_transport
from cad_jax.sharding.mesh import POOL_AXES
from cad_jax.sharding.placement import Placement
from cad_jax.sharding.planner import AttentionCost, plan_documents
from cad_jax.sharding.planners import Planner
from cad_jax.sharding.tasks import DENSE_TRANSPORTS, Capacities, HeadShape


class Strategy(Protocol):
    """One way to distribute core attention. `expand` and `attend` run where `manual_axes` are
    manual: with the pool's axes among them, on one rank's arrays (no leading dim) and rows; else on
    global ones."""

    @property
    def name(self) -> str: ...

    @property
    def transport(self) -> str | None:
        """How planned rows travel; None where nothing is planned."""
        ...

    @property
    def manual_axes(self) -> tuple[str, ...]: ...

    @property
    def way(self) -> Way | None:
        """Forward and backward as plain functions of the devices; None where XLA derives them."""
        ...

    @property
    def settings(self) -> Settings:
        """What `way` takes first."""
        ...

    def describe(self) -> str:
        """For people: how rows travel, and what that costs."""
        ...

    def prepare(self, lengths: np.ndarray, ranks: Sequence[int] | None = None) -> Prepared:
        """Host: lengths int64 [N] of documents laid end to end, padding last."""
        ...

    def prepare_ticks(
        self,
        ticks: Sequence[Sequence[int]],
        lengths: Sequence[np.ndarray],
        ranks: Sequence[int] | None = None,
    ) -> PreparedTicks:
        """Host: ticks of a pipeline. ticks: per tick and stage, which of the microbatches the stage
        runs, -1 for none. lengths: document lengths of each microbatch, laid end to end over the
        ranks of one stage. ranks: of all stages, in pool order. Raises ValueError where ticks and
        the strategy's stages differ."""
        ...

    def expand(self, arrays: Any) -> Any:
        """Device, once per microbatch: what `attend` needs besides q, k and v."""
        ...

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array:
        """Device, in every layer: q [T, H, D], k, v [T, K, D] -> out [T, H, D], differentiable."""
        ...


STRATEGIES = ("cad", "home", "all_gather", "ring", "native", "native_dense")


def make_strategy(
    name: str,
    *,
    servers: int,
    tokens_per_server: int,
    heads: HeadShape,
    tolerance: float = 0.05,
    key_ranges: int = 1,
    planner: Planner = plan_documents,
    speeds: Sequence[float] | None = None,
    node: int = 1,
    cost_model: AttentionCost | None = None,
    placement: Placement = "sequential",
    capacities: Capacities | None = None,
    transport: str = "auto",
    candidates: Sequence[str] = DENSE_TRANSPORTS,
    sample_lengths: Sequence[np.ndarray | Sequence[np.ndarray]] = (),
    kernel: str = "auto",
    axis_names: tuple[str, ...] = POOL_AXES,
    max_document_tokens: int | None = None,
    element_bytes: int = 2,
    device: Device = DEVICES["h200"],
    tp: int = 1,
    stages: int = 1,
    head_axis: str | None = None,
) -> Strategy:
    """The strategy of that name.

    Args:
      name: one of STRATEGIES.
      servers: S, the product of the axes in axis_names.
      tokens_per_server: T.
      heads: of one device, key heads replicated where there are fewer of them than tp devices.
      tolerance: cad's bound on the most loaded server's work over the mean, less one.
      key_ranges: of cad, servers among which the keys of one query may be divided where that is
        cheaper on the wire; their partial outputs merge at home.
      planner: of cad, what plans: see `planners.plan_with`.
      speeds, node, cost_model: of cad, relative speed of each server, [S], servers of a node, and
        what predicts seconds of plans: see `planner.plan_documents`.
      placement: of cad and home, the order in which documents are laid: see `placement.place`.
        searched is of cad without stages.
      capacities: of cad and home. Without them they hold all but one in a thousand of the plans
        for `sample_lengths`, and any home plan; without these too, they follow from the other
        arguments.
      transport: "auto" (that of `candidates` with the fewest predicted seconds) | "direct" | "relay"
        | "ragged" (GPUs only), where capacities are not given.
      candidates: what "auto" chooses from.
      sample_lengths: document lengths of some microbatches to come, or of a pipeline's ticks, each
        a sequence of one array per stage.
      kernel: see `varlen_attention`; native runs "xla" only, native_dense has none.
      axis_names: mesh axes of the ranks, in rank order; with stages that of the stages is first,
        and strategies that share nothing between stages leave it out.
      max_document_tokens: the longest document to come; by default the whole microbatch.
      element_bytes: of q, k and v, for the figures.
      device, tp: what the ranks are, and how many of them share a server's tokens: transport
        "auto" predicts seconds from both.
      stages: P, pipeline stages among which the servers are divided; each runs a microbatch of its
        own in a tick.
      head_axis: the mesh axis of the tp devices where those hold different tokens outside
        attention, and split heads inside it alone.

    Raises:
      ValueError: an unknown name, a kernel the strategy cannot run or whose package is missing,
        key_ranges, a planner, speeds, nodes, costs or a placement that it does not have, sample
        lengths that do not fit.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {name!r}")
    if kernel not in KERNEL_NAMES:
        raise ValueError(f"kernel must be one of {', '.join(KERNEL_NAMES)}, got {kernel!r}")
    if kernel != "auto":
        try:
            load_kernel(kernel)
        except ImportError as error:
            raise ValueError(str(error)) from error
    if stages < 1 or servers % stages:
        raise ValueError(
            f"servers (= {servers}) must be divisible by stages (= {stages}): every stage has as "
            "many ranks; use servers = pp x dp"
        )
    if key_ranges < 1 or (key_ranges > 1 and name != "cad"):
        raise ValueError(
            f"key_ranges (= {key_ranges}) must be 1, or more for strategy cad alone, got it for {name}: "
            "leave it out"
        )
    own = planner is not plan_documents or speeds is not None or node > 1 or cost_model is not None
    if own and name != "cad":
        raise ValueError(
            f"a planner of one's own, speeds, nodes and a cost model are of strategy cad, which plans, got "
            f"one for {name}: leave it out"
        )
    _check_placement(name, placement, stages)
    planned = name in ("cad", "home")
    if stages > 1 and not planned:
        servers, axis_names = servers // stages, axis_names[1:]
    pool = Pool(
        servers,
        tokens_per_server,
        heads,
        axis_names,
        kernel,
        element_bytes,
        device,
        tp,
        stages,
        head_axis,
    )
    if planned:
        if stages > 1:  # a document lies within one stage
            stage_tokens = pool.stage_tokens
            max_document_tokens = min(max_document_tokens or stage_tokens, stage_tokens)
        given = None if speeds is None else tuple(speeds)
        planning = Planning(
            tolerance,
            max_document_tokens,
            key_ranges,
            planner,
            given,
            node,
            placement,
            cost_model,
        )
        if capacities is None:
            allowed = candidates if transport == "auto" else (transport,)
            # Plans that look at the transport are made for each by itself; else one set of plans tells which.
            of_transport = (
                key_ranges > 1
                or placement == "searched"
                or planner is not plan_documents
                or cost_model is not None
            )
            alike = [(t,) for t in allowed] if of_transport else [allowed]
            found = [_capacities(name, pool, group, sample_lengths, planning) for group in alike]
            choices = {each.transport: each for each in found}
            capacities = choices[
                choose_transport(choices, heads, servers, device, tp, element_bytes)
            ]
        return PlannedStrategy(name, pool, capacities, planning)
    if name in ("all_gather", "ring"):
        return HeadTailStrategy(name, pool)
    if stages > 1:
        raise ValueError(no_stages(name, stages))
    if head_axis is not None:
        raise ValueError(
            f"strategy {name} must leave tokens to XLA's partitioner and cannot split them over "
            f"mesh axis {head_axis!r} by hand; let tp split weights, or use another strategy"
        )
    own_kernel = "xla" if name == "native" else "auto"
    if kernel not in ("auto", own_kernel):
        raise ValueError(
            f"strategy {name} must leave splitting to XLA's partitioner, which kernel {kernel!r} "
            f"does not allow; use kernel {own_kernel!r}"
        )
    return NativeStrategy(name, pool)


def _check_placement(name: str, placement: Placement, stages: int) -> None:
    if placement != "sequential" and name not in ("cad", "home"):
        raise ValueError(
            f"placement must be sequential for {name}, whose ranks do not hold documents in order, got "
            f"{placement!r}: leave it out"
        )
    if placement == "searched" and (name != "cad" or stages > 1):
        raise ValueError(
            "placement searched compares plans of one microbatch: it needs strategy cad and one stage, "
            f"got {name} and {stages}; use aligned"
        )


def _capacities(
    name: str,
    pool: Pool,
    candidates: Sequence[str],
    sample_lengths: Sequence[np.ndarray | Sequence[np.ndarray]],
    planning: Planning,
) -> Capacities:
    """From plans of the samples; without any, from static arguments alone."""
    longest = planning.max_document_tokens
    first = _first_capacities(name, pool, candidates, longest, planning.key_ranges)
    strategy = PlannedStrategy(name, pool, first, planning)
    plans = [strategy.plan_sample(sample) for sample in sample_lengths]
    if not plans:
        return first
    found = capacities_from_plans(
        plans,
        max_document_tokens=longest,
        device=pool.device,
        tp=pool.tp,
        candidates=candidates,
        element_bytes=pool.element_bytes,
    )
    if found.transport == first.transport:
        return found
    # Where two plans are nearly alike the transport decides: of its own, as a resumed run makes them, which keeps it.
    return _capacities(name, pool, (found.transport,), sample_lengths, planning)


def _first_capacities(
    name: str,
    pool: Pool,
    candidates: Sequence[str],
    max_document_tokens: int | None,
    key_ranges: int,
) -> Capacities:
    """From static arguments alone: roomy for cad, just enough for home."""
    shape = pool.servers, pool.tokens_per_server, pool.heads, max_document_tokens
    if name == "cad":
        partials = min(key_ranges, pool.servers)
        return default_capacities(
            *shape,
            None,
            pool.device,
            pool.tp,
            candidates,
            partials,
            element_bytes=pool.element_bytes,
        )
    choices = {t: home_capacities(*shape, t) for t in candidates}
    chosen = choose_transport(
        choices, pool.heads, pool.servers, pool.device, pool.tp, pool.element_bytes
    )
    return choices[chosen]
