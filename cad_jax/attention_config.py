"""How a run distributes core attention: its settings, and the rules among them."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from cad_jax.sharding.placement import Placement, check_placement
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.planners import Planner, load_planner
from cad_jax.sharding.speeds import check_speeds
from cad_jax.sharding.tasks import Capacities

StrategyName = Literal["cad", "home", "all_gather", "ring", "native", "native_dense"]
PLANNED_STRATEGIES = ("cad", "home")  # those with capacities to set
OF_CAD = ("key_ranges", "planner", "speeds", "server_speeds", "node", "profile")  # alone, if set
UNSIMULATED = ("planner", "speeds", "server_speeds", "placement")  # for a tolerance


@dataclass(frozen=True)
class AttentionConfig:
    """How core attention is distributed, and the kernel under it."""

    strategy: Annotated[StrategyName, tyro.conf.arg(aliases=("--attention",))] = "cad"
    """cad: planned attention servers; home: no work moves; all_gather, ring: context parallelism;
    native, native_dense: left to XLA's partitioner, blockwise or dense masked."""
    kernel: str = "auto"
    """auto takes the fastest that runs on the platform."""
    tolerance: float | None = 0.05
    """The most loaded server's work may exceed the mean by this fraction; None takes the one of fewest
    predicted seconds when a run begins."""
    key_ranges: int = 1
    """Servers among which the keys of one query may be divided; their partial outputs merge at home."""
    planner: str | None = None
    """module:function in the place of cad_jax.plan_documents.
    It takes the same arguments and returns a plan, the same in every process; every plan is checked."""
    speeds: str | None = None
    """File with one relative speed a line for each server (pp x dp, in rank order): `cad-jax speeds` writes it.
    A slow server gets less work. Process 0 reads the file for all."""
    server_speeds: tyro.conf.Suppress[tuple[float, ...] | None] = None
    """Those speeds, [pp x dp]: what the file held, or instead of one."""
    node: int = 1
    """Servers of a node, neighbours in rank order, within which bytes count as cheap.
    Of use with direct and ragged exchanges; relays pass rows on over all servers."""
    profile: str | None = None
    """CSV that `cad-jax profile` measured on such devices: plans are then compared by predicted seconds, not by bytes.
    Or the name of one that ships, or "analytic", as `cad-jax plan --profile` takes them. Every process reads it, and all
    must find the same. A tolerance of None is chosen with it."""
    profile_digest: tyro.conf.Suppress[str | None] = None
    """Of what that file held when the run began or went on."""
    placement: Placement = "sequential"
    """Which rank gets which documents of a step, whose documents stay the same.
    sequential: in the order of packing; aligned: long ones begin on ranks, others even out the ranks;
    searched: of several orders the one whose plan sends the fewest bytes."""
    transport: Literal["auto", "direct", "relay", "ragged"] = "auto"
    """auto takes the one with the fewest predicted seconds when a run begins, or goes on with another mesh or other plans;
    ragged needs GPUs, and passes a test at the start of a run or is not used."""
    capacity_plans: int = 200
    """Plans of the run's own data from which the static capacities are set."""
    capacities: tyro.conf.Suppress[Capacities | None] = None
    """Capacities instead of those."""

    @property
    def asked_transport(self) -> str:
        """What capacities are for, where they are given; else the transport's name or auto."""
        return self.transport if self.capacities is None else self.capacities.transport

    def load_planner(self) -> Planner:
        """What plans. Raises ValueError where the planner's name names none."""
        return plan_documents if self.planner is None else load_planner(self.planner)

    def __post_init__(self) -> None:
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise ValueError(
                f"attention.tolerance (={self.tolerance}) must be finite and not negative; "
                "use 0.05, a good start, or None to have it chosen"
            )
        for name, cure in (
            ("key_ranges", "use 1 to keep the keys of a query on one server"),
            ("node", "use 1 where nodes play no part"),
            ("capacity_plans", "use 200, which cover the tail of most data"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"attention.{name} (={getattr(self, name)}) must be at least 1; {cure}"
                )
        for name in OF_CAD:
            value = getattr(self, name)
            if value != getattr(AttentionConfig, name) and self.strategy != "cad":
                raise ValueError(
                    f"attention.{name} (={value}) needs attention.strategy cad, which plans who "
                    f"computes what, got {self.strategy}; leave it out"
                )
        for name in UNSIMULATED:
            value = getattr(self, name)
            needed = self.strategy == "cad" and self.tolerance is None
            if needed and value != getattr(AttentionConfig, name):
                raise ValueError(
                    f"attention.{name} (={value}) needs an attention.tolerance, since None has it chosen "
                    "from simulated plans of cad_jax.plan_documents for servers that are alike and "
                    "documents in sequence; give one, such as 0.05"
                )
        if self.server_speeds is not None:
            check_speeds(self.server_speeds, len(self.server_speeds), "attention.server_speeds")
        self._check_placement()

    def _check_placement(self) -> None:
        check_placement(self.placement)
        if self.placement != "sequential" and self.strategy not in PLANNED_STRATEGIES:
            raise ValueError(
                f"attention.placement (={self.placement}) needs attention.strategy cad or home, whose "
                f"ranks hold documents in order, got {self.strategy}; use sequential"
            )
        if self.placement == "searched" and self.strategy == "home":
            raise ValueError(
                "attention.placement (=searched) compares what plans send and needs "
                "attention.strategy cad, got home; use aligned or sequential"
            )
