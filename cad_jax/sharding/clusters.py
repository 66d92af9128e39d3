"""Clusters by name, "h200:8x8" (8 nodes of 8 devices). Host only."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cad_jax.sharding.cost import DEVICES, Device

USABLE_MEMORY = 0.8  # of a device: the rest is the CUDA context, NCCL's buffers, fragmentation


@dataclass(frozen=True)
class Chip:
    """What a compiler wants to know of a GPU beyond its speed."""

    memory_bytes: int  # as its driver reports them
    compute_capability: int  # major
    multiprocessors: int
    l2_cache_bytes: int
    clock_ghz: float
    nvlinks: int


# Vendor data sheets and what drivers report: H100 SXM5 80 GB, H200 SXM 141 GB, HGX B200 180 GB.
CHIPS: Mapping[str, Chip] = {
    "h100": Chip(84_942_979_072, 9, 132, 52_428_800, 1.98, 18),
    "h200": Chip(151_397_597_184, 9, 132, 52_428_800, 1.98, 18),
    "b200": Chip(191_514_411_008, 10, 148, 132_644_864, 1.965, 18),
}


@dataclass(frozen=True)
class Topology:
    """Nodes of one kind of device."""

    device: Device
    nodes: int
    devices_per_node: int

    @property
    def name(self) -> str:
        return f"{self.device.name}:{self.nodes}x{self.devices_per_node}"

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def chip(self) -> Chip:
        return CHIPS[self.device.name]

    @property
    def usable_bytes(self) -> float:
        """Of a device's memory, for a step."""
        return USABLE_MEMORY * self.chip.memory_bytes

    def node(self, device: int) -> int:
        """The node of a device; consecutive devices share one."""
        return device // self.devices_per_node


def parse_topology(text: str) -> Topology:
    """ "h200:8x8" -> 8 nodes of 8 H200.

    Raises:
        ValueError: another form, an unknown device, or more devices than a node holds.
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*)x([1-9]\d*)", text.strip().lower())
    if match is None:
        raise ValueError(
            f"a topology is DEVICE:NODESxDEVICES_PER_NODE, such as h200:8x8, got {text!r}: write it "
            "like that"
        )
    name, nodes, devices_per_node = match[1], int(match[2]), int(match[3])
    if name not in CHIPS:
        raise ValueError(
            f"a topology's device must be one of {', '.join(CHIPS)}, got {name!r}: choose the "
            "nearest of these"
        )
    device = DEVICES[name]
    if devices_per_node > device.devices_per_node:
        raise ValueError(
            f"a node of {name} holds at most {device.devices_per_node} devices, got "
            f"{devices_per_node} in {text!r}: use more nodes"
        )
    return Topology(device, nodes, devices_per_node)
