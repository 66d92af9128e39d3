"""The least capacities that hold a plan, or tasks in its place. Host only."""

import numpy as np

from cad_jax.sharding import needs
from cad_jax.sharding.compiled import count_needs
from cad_jax.sharding.coverage import check_tasks
from cad_jax.sharding.tasks import TRANSPORT_HOPS, Capacities, PlanLike

KINDS = {"direct": needs.DIRECT, "relay": needs.RELAY, "ragged": needs.RAGGED}


def required_capacities(plan: PlanLike, transport: str) -> Capacities:
    """The least capacities that hold a plan under a transport of TRANSPORT_HOPS.

    Raises ValueError for another transport, and for tasks of no such pool.
    """
    # Compiled code would read and write beside its arrays.
    check_tasks(plan.lengths, plan.tasks, plan.servers, plan.tokens_per_server, plan.starts)
    return required_by_tasks(plan, plan.tasks, transport)


def required_by_tasks(plan: PlanLike, tasks: np.ndarray, transport: str) -> Capacities:
    """The same of sorted tasks, int64 [n, 7], in the place of the plan's own, unchecked."""
    if transport not in KINDS:
        raise ValueError(f"transport must be one of {', '.join(KINDS)}, got {transport!r}")
    # Copies: the count would be compiled again for read-only arrays.
    counted = count_needs(
        tasks.copy(), plan.starts.copy(), plan.servers, plan.tokens_per_server, plan.heads.q_units,
        plan.heads.kv_units, KINDS[transport],
    )  # fmt: skip
    values = [int(value) for value in counted]
    query_rows, key_rows, *pairs = values[:10]
    hops, ways = TRANSPORT_HOPS[transport], 2 if transport in ("relay", "ragged") else 1
    dispatch_units, output_units, dispatch_runs, output_runs = zip(
        pairs[::2], pairs[1::2], strict=True
    )
    return Capacities(
        transport, query_rows, key_rows, dispatch_units[:ways], output_units[:ways],
        dispatch_runs[:hops], output_runs[:hops], *values[10:],
    )  # fmt: skip
