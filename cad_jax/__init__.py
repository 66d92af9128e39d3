"""Core attention disaggregation for JAX: plan on the host, attend on a pool of servers.

Public names load on first use, so that importing cad_jax starts no backend and planning works
where jax is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cad_jax.attention.cad import core_attention as core_attention
    from cad_jax.attention.cad import core_attention_local as core_attention_local
    from cad_jax.sharding.capacities import capacities_from_plans as capacities_from_plans
    from cad_jax.sharding.capacities import default_capacities as default_capacities
    from cad_jax.sharding.layout import PlanArrays as PlanArrays
    from cad_jax.sharding.mesh import make_mesh as make_mesh
    from cad_jax.sharding.plan import Plan as Plan
    from cad_jax.sharding.planner import plan_documents as plan_documents
    from cad_jax.sharding.tasks import Capacities as Capacities
    from cad_jax.sharding.tasks import HeadShape as HeadShape

_MODULE_OF_NAME = {
    "Capacities": "cad_jax.sharding.tasks",
    "HeadShape": "cad_jax.sharding.tasks",
    "Plan": "cad_jax.sharding.plan",
    "PlanArrays": "cad_jax.sharding.layout",
    "capacities_from_plans": "cad_jax.sharding.capacities",
    "core_attention": "cad_jax.attention.cad",
    "core_attention_local": "cad_jax.attention.cad",
    "default_capacities": "cad_jax.sharding.capacities",
    "make_mesh": "cad_jax.sharding.mesh",
    "plan_documents": "cad_jax.sharding.planner",
}

__all__ = [
    "Capacities",
    "HeadShape",
    "Plan",
    "PlanArrays",
    "capacities_from_plans",
    "core_attention",
    "core_attention_local",
    "default_capacities",
    "make_mesh",
    "plan_documents",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'cad_jax' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name]), name)


def __dir__() -> list[str]:
    return __all__
