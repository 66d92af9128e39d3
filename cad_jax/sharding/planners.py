"""Planners of one's own in the place of `planner.plan_documents`: found by name, and never trusted."""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

import numpy as np

from cad_jax.sharding.plan import Plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.routing import wire_bytes
from cad_jax.sharding.tasks import HeadShape, document_starts

type Planner = Callable[..., Plan]
"""Takes the arguments of `plan_documents` and returns a plan of these documents. A pure function: every
host calls it for itself, and all must come to the same plan."""


def load_planner(name: str) -> Planner:
    """The planner "module:function". ValueError where there is none."""
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise ValueError(f"a planner must be named module:function, got {name!r}: name it so")
    try:
        module = import_module(module_name)
    except Exception as error:  # whatever its first lines do
        missing = isinstance(error, ImportError)
        what = f"{error}" if missing else f"{type(error).__name__}: {error}"
        cure = (
            "install it, or put its folder on the path (PYTHONPATH=. cad-jax ... for the current one)"
            if missing
            else "correct it"
        )
        raise ValueError(
            f"a planner's module must be importable, {module_name!r} of {name!r} is not ({what}): {cure}"
        ) from error
    planner = getattr(module, function_name, None)
    if not isinstance(planner, Callable):
        raise ValueError(
            f"a planner must be a function, module {module_name!r} has "
            f"{'none' if planner is None else type(planner).__name__} of the name "
            f"{function_name!r}: correct the name"
        )
    return planner


def plan_with(planner: Planner, lengths: np.ndarray, **arguments: Any) -> Plan:
    """The plan that `planner` makes of these arguments of `plan_documents`, int64 [N] lengths.

    A plan of any other planner is checked: for these documents, this pool and these capacities, and
    exact (`Plan.check`). ValueError says what is not so, or what it raised.
    """
    name = getattr(planner, "__qualname__", repr(planner))
    try:
        signature(planner).bind(lengths, **arguments)
    except TypeError as error:
        raise ValueError(
            f"a planner must take lengths and the keyword arguments {', '.join(arguments)}, {name} "
            f"does not ({error}): let it take **options as well"
        ) from error
    # It may write to what it is given, and gets copies.
    own: dict[str, Any] = {
        k: v.copy() if isinstance(v, np.ndarray) else v for k, v in arguments.items()
    }
    if planner is plan_documents:
        return planner(lengths.copy(), **own)
    try:
        plan = planner(lengths.copy(), **own)
    except Exception as error:
        raise ValueError(
            f"planner {name} must plan every step's documents, and raised {type(error).__name__} "
            f"({error}) for {len(lengths)} of them, the longest of {int(lengths.max(initial=0))} "
            f"tokens, over {arguments['servers']} servers: correct it, or leave it out for "
            "cad_jax.plan_documents"
        ) from error
    _check(plan, lengths, name, arguments)
    return plan


def wire_cost(planner: Planner, **arguments: Any) -> Callable[[np.ndarray], float]:
    """What plans of these arguments of `plan_documents` put on the wire of their transport, forward and
    backward, by lengths: the cost of a `placement.place` that searches."""

    def cost(lengths: np.ndarray) -> float:
        plan = plan_with(planner, lengths, **arguments)
        needed = required_capacities(plan, plan.capacities.transport)
        wire = wire_bytes(needed, plan.servers, plan.heads)
        return float(wire.forward + wire.backward)

    return cost


def _check(plan: Plan, lengths: np.ndarray, name: str, arguments: dict) -> None:
    if not isinstance(plan, Plan):
        raise ValueError(
            f"planner {name} must return a cad_jax.Plan, got {type(plan).__name__}: begin with "
            "dataclasses.replace of a home plan"
        )
    heads = HeadShape(*(arguments[n] for n in ("num_q_heads", "num_kv_heads", "head_dim")))
    starts = arguments.get("starts")
    wanted = {
        "lengths": lengths,
        "starts": document_starts(lengths) if starts is None else starts,
        "servers": arguments["servers"],
        "tokens_per_server": arguments["tokens_per_server"],
        "heads": heads,
    }
    if arguments.get("capacities") is not None:
        wanted["capacities"] = arguments["capacities"]
    for field, value in wanted.items():
        if not np.array_equal(getattr(plan, field), value):
            raise ValueError(
                f"planner {name} must plan what it is asked to: {field} is {value}, its plan has "
                f"{getattr(plan, field)}: pass it on"
            )
    try:
        plan.check()
    except ValueError as error:
        raise ValueError(f"planner {name} made a plan that cannot run: {error}") from error
