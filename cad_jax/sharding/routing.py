"""A plan's traffic under a transport: its routes, what they need of every capacity, and the bytes they
put on the wire.
"""

from typing import NamedTuple

import numpy as np

from cad_jax.sharding.routes import TRANSPORTS, Route
from cad_jax.sharding.tasks import Capacities, HeadShape, PlanLike
from cad_jax.sharding.traffic import (
    Partials,
    Pieces,
    RowMap,
    buffer_maps,
    cut_at_homes,
    dispatch_traffic,
    output_traffic,
    query_partials,
)


class Routing(NamedTuple):
    """Everything about a plan's traffic that layout needs and capacities limit."""

    query_map: RowMap
    key_map: RowMap
    query: Pieces
    key: Pieces
    partials: Partials
    dispatch: Route
    output: Route

    def required(self, transport: str) -> Capacities:
        """The least capacities that hold this plan."""
        dispatch, output, servers = self.dispatch, self.output, len(self.query_map.rows)

        def local_runs(pieces: Pieces) -> np.ndarray:
            mine = pieces.server[pieces.home == pieces.server]
            return np.bincount(mine, minlength=servers)

        query_local = local_runs(self.query)
        partials = self.partials
        levels = int(partials.level.max(initial=0)) + 1
        merge = np.zeros((servers, levels), np.int64)
        own = partials.home == partials.server
        np.add.at(merge, (partials.home[own], partials.level[own]), 1)
        np.add.at(merge, (output.traffic.home, output.traffic.level), output.atom_runs)
        return Capacities(
            transport=transport,
            query_rows=int(self.query_map.rows.max()),
            key_rows=int(self.key_map.rows.max()),
            dispatch_units=dispatch.required_units,
            output_units=output.required_units,
            dispatch_runs=tuple(int(runs.max()) for runs in dispatch.send_runs),
            output_runs=tuple(int(runs.max()) for runs in output.send_runs),
            assemble_runs=int((query_local + local_runs(self.key) + dispatch.arrival_runs).max()),
            output_assemble_runs=int((query_local + output.arrival_runs).max()),
            merge_runs=int(merge.max()),
            partials=levels,
        )


def route(plan: PlanLike, transport: str) -> Routing:
    """The routes of a plan under a transport of TRANSPORTS."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    kind, tokens = TRANSPORTS[transport], plan.tokens_per_server
    query_map, key_map = buffer_maps(plan)
    query, key = cut_at_homes(query_map, tokens), cut_at_homes(key_map, tokens)
    partials = query_partials(query, tokens)
    dispatch = dispatch_traffic(query, key, plan.servers, tokens, plan.heads)
    output = output_traffic(partials, plan.servers, tokens, plan.heads)
    return Routing(query_map, key_map, query, key, partials, kind(dispatch), kind(output))


class WireBytes(NamedTuple):
    """Bytes one rank hands to the collectives of one layer, padding included, all hops together.
    Each is also what it receives; of ragged, the larger of the two, of the busiest rank.
    """

    dispatch: int  # forward: q, k, v out
    combine: int  # forward: out and lse home
    dispatch_backward: int  # q, k, v, d_out, lse, delta out
    combine_backward: int  # dq, dk, dv home; float32 from relays to homes where keys are divided

    @property
    def forward(self) -> int:
        return self.dispatch + self.combine

    @property
    def backward(self) -> int:
        return self.dispatch_backward + self.combine_backward


def wire_bytes(
    capacities: Capacities, servers: int, heads: HeadShape, element_bytes: int = 2
) -> WireBytes:
    """What the exchanges of one layer put on the wire per rank under `capacities`; a plan's own
    figure is that of its `required_capacities`.

    element_bytes: of q, k, v (2 for bfloat16). A unit is unit_heads * head_dim elements, plus one
    float32 per head where lse or delta travel with it.
    """
    unit = heads.unit_heads * heads.head_dim * element_bytes
    with_scalar = unit + 4 * heads.unit_heads

    def travelling(*units: tuple[int, ...]) -> int:
        if capacities.transport == "ragged":
            return max(map(sum, zip(*units, strict=True)))
        return servers * sum(map(sum, units))

    dispatch, output = capacities.dispatch_units, capacities.output_units
    home_again = travelling(dispatch) * unit
    if capacities.transport == "relay" and capacities.partials > 1:
        # See `exchange.combine_bwd`: what the first hop sent comes back in float32.
        float32_unit = unit // element_bytes * max(element_bytes, 4)
        home_again += servers * dispatch[0] * (float32_unit - unit)
    return WireBytes(
        travelling(dispatch) * unit,
        travelling(output) * with_scalar,
        travelling(dispatch, output) * with_scalar,
        home_again,
    )
