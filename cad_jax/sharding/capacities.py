"""Capacities: from static arguments alone, or measured on plans of a run's own data.

Shape letters: T tokens per server, S servers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from cad_jax.sharding.cost import DEVICES, Device, choose_transport
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.tasks import (
    CAPACITY_FIELDS,
    DENSE_TRANSPORTS,
    Capacities,
    HeadShape,
    PlanLike,
)


def home_capacities(
    servers: int,
    tokens_per_server: int,
    heads: HeadShape,
    max_document_tokens: int | None = None,
    transport: str = "direct",
) -> Capacities:
    """The floor: capacities that hold the home plan of any documents up to the longest.

    A home computes its T rows; the keys before them come from the ranks its first document began
    on, at most min(longest, (S - 1) T) of them. No output travels. Documents lie end to end, or so
    within each of several stages of whole ranks (`tasks.stage_documents`), whose tokens then bound
    the longest: more gaps within one rank would take more runs.
    """
    longest = _longest(servers, tokens_per_server, max_document_tokens)
    tokens = tokens_per_server
    spanned = min(servers, -(-longest // tokens) + 1)  # ranks one document can touch
    sent = tokens * heads.kv_units if servers > 1 else 1
    received = max(1, min(longest, (servers - 1) * tokens) * heads.kv_units)
    blocks = servers if transport == "relay" else 1  # a relayed atom is cut in S blocks
    return Capacities(
        transport=transport,
        query_rows=tokens,
        key_rows=min(longest, servers * tokens) + tokens,
        dispatch_units=_choose(
            transport,
            direct=(sent,),
            relay=(-(-sent // servers) + 1, -(-received // servers) + spanned),
            ragged=(max(1, sent * (spanned - 1)), received),
        ),
        output_units=_choose(transport, direct=(1,), relay=(1, 1), ragged=(1, 1)),
        dispatch_runs=_choose(
            transport, direct=(spanned,), relay=(servers, servers * spanned), ragged=(spanned,)
        ),
        output_runs=_choose(transport, direct=(1,), relay=(1, 1), ragged=(1,)),
        assemble_runs=spanned * blocks + 2,
        output_assemble_runs=1,
        merge_runs=1,
    )


def default_capacities(
    servers: int,
    tokens_per_server: int,
    heads: HeadShape,
    max_document_tokens: int | None = None,
    transport: str | None = None,
    device: Device = DEVICES["h200"],
    tp: int = 1,
    candidates: Sequence[str] = DENSE_TRANSPORTS,
    partials: int = 1,
    element_bytes: int = 2,
) -> Capacities:
    """Capacities from static arguments alone, roomy enough for balanced plans of real documents.

    Two T query rows, three with partial outputs; keys of two longest documents and 2 T rows besides
    (real plans were seen to need 1.7 T, 3.0 T and less than that). Sends are bounded by a rank's own rows, each once; what a server
    receives by its keys above and T query rows. Without `max_document_tokens` a document may fill
    the pool; without `transport` that one of `candidates` is taken which has the fewest predicted
    seconds on `device`s of which tp share a server's tokens, in q, k, v of element_bytes. `partials`: servers that the keys of one
    query row may be divided among. A recipe does better from plans of its own data:
    `capacities_from_plans`.
    """
    if transport is None:
        choices = {
            t: default_capacities(
                servers, tokens_per_server, heads, max_document_tokens, t, partials=partials
            )
            for t in candidates
        }
        chosen = choose_transport(choices, heads, servers, device, tp, element_bytes)
        return choices[chosen]
    floor = home_capacities(servers, tokens_per_server, heads, max_document_tokens, transport)
    longest = _longest(servers, tokens_per_server, max_document_tokens)
    tokens = tokens_per_server
    q_units, kv_units = tokens * heads.q_units, tokens * heads.kv_units
    outputs = partials * q_units  # a row goes to as many servers, and as many outputs come back
    many = servers * (servers > 1)
    keys_in = min(2 * longest + 2 * tokens, many * tokens) * heads.kv_units
    slack = 4 * servers + 16  # relay blocks of a group differ by one unit
    spanned = min(servers, -(-longest // tokens) + 1)
    runs = servers * spanned + 32 * servers + tokens // 64 + 64
    copies = min(3 * spanned, max(servers - 1, 1))  # of one key row; real plans had 21 of 27
    wanted = Capacities(
        transport=transport,
        query_rows=(2 if partials == 1 else 3) * tokens if servers > 1 else tokens,
        key_rows=min(2 * longest + 2 * tokens, servers * tokens),
        dispatch_units=_choose(
            transport,
            direct=(q_units + kv_units if servers > 1 else 1,),
            relay=(
                -(-(q_units + kv_units) // servers) + 1,
                -(-(q_units + keys_in) // servers) + slack,
            ),
            ragged=(outputs + copies * kv_units, q_units + keys_in) if servers > 1 else (1, 1),
        ),
        output_units=_choose(
            transport,
            direct=(q_units if servers > 1 else 1,),
            relay=(-(-outputs // servers) + 1, -(-outputs // servers) + slack),
            ragged=(outputs, outputs) if servers > 1 else (1, 1),
        ),
        dispatch_runs=_choose(transport, direct=(runs,), relay=(runs, runs), ragged=(runs,)),
        output_runs=_choose(transport, direct=(runs,), relay=(runs, runs), ragged=(runs,)),
        assemble_runs=2 * runs,
        output_assemble_runs=runs,
        merge_runs=runs,
        partials=partials,
    )
    return _largest([floor, wanted])


def capacities_from_plans(
    plans: Sequence[PlanLike],
    percentile: float = 99.9,
    *,
    max_document_tokens: int | None = None,
    transport: str | None = None,
    device: Device = DEVICES["h200"],
    tp: int = 1,
    candidates: Sequence[str] = DENSE_TRANSPORTS,
    element_bytes: int = 2,
) -> Capacities:
    """Capacities that hold the given percentile of `plans`, each on its own, and any home plan.

    Plan with default capacities for this. `transport`: by default that one of `candidates` with the
    fewest predicted seconds on `device`s of which tp share a server's tokens, in q, k, v of
    element_bytes. `max_document_tokens`:
    the longest document to come; without it one may fill the pool.
    """
    if not plans:
        raise ValueError("capacities_from_plans needs at least one plan, got none: plan some steps")
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile must be from 0 to 100, got {percentile}: 99.9 is usual")
    first = plans[0]
    pool = first.servers, first.tokens_per_server, first.heads
    if any((p.servers, p.tokens_per_server, p.heads) != pool for p in plans):
        raise ValueError("plans must share servers, tokens_per_server and heads: plan them alike")
    if transport is None:
        choices = {
            t: capacities_from_plans(
                plans, percentile, max_document_tokens=max_document_tokens, transport=t
            )
            for t in candidates
        }
        chosen = choose_transport(choices, first.heads, first.servers, device, tp, element_bytes)
        return choices[chosen]
    needs = [required_capacities(plan, transport) for plan in plans]

    def enough(name: str) -> Any:
        values = np.array([getattr(c, name) for c in needs])
        reached = np.percentile(values, percentile, axis=0, method="higher")
        return tuple(reached.tolist()) if reached.ndim else int(reached)

    measured = Capacities(transport, **{name: enough(name) for name in CAPACITY_FIELDS})
    return _largest([measured, home_capacities(*pool, max_document_tokens, transport)])


def signal_capacities(capacities: Capacities) -> Capacities:
    """The same buffers and kernels with exchanges of one unit a pair: they hold no plan that moves
    anything, and say what a step would cost if travel were free."""
    ones = (1,) * len(capacities.dispatch_units)
    return dataclasses.replace(capacities, dispatch_units=ones, output_units=ones)


def _longest(servers: int, tokens_per_server: int, max_document_tokens: int | None) -> int:
    room = servers * tokens_per_server
    return room if max_document_tokens is None else min(max_document_tokens, room)


def _choose(transport: str, **values: tuple[int, ...]) -> tuple[int, ...]:
    return values[transport]


def _largest(choices: Sequence[Capacities]) -> Capacities:
    def largest(name: str) -> Any:
        values = np.array([getattr(c, name) for c in choices]).max(0)
        return tuple(values.tolist()) if values.ndim else int(values)

    return Capacities(choices[0].transport, **{name: largest(name) for name in CAPACITY_FIELDS})
