"""Clusters by name, "h200:8x8" (8 nodes of 8 devices), and their devices to compile for where none is present.

A target is described to XLA's GPU compiler by hardware figures alone: those of `cost.DEVICES`, and below what a
compiler asks for besides. Programs for it compile on a machine without a GPU; they cannot run there.
"""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.experimental import topologies as jax_topologies
from jax.sharding import AxisType, Mesh

from cad_jax.sharding.cost import DEVICES, Device
from cad_jax.sharding.mesh import MESH_AXES

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


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

# The same for all of them: limits of a multiprocessor and of a block, and the CUDA release to compile for.
_COMMON = """
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  collective_memory_granularity: 2097152
"""


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


def target_config(name: str) -> str:
    """The device as XLA's GpuTargetConfig, in protobuf text form."""
    device, chip = DEVICES[name], CHIPS[name]
    return f"""gpu_device_info {{{_COMMON}
  core_count: {chip.multiprocessors} clock_rate_ghz: {chip.clock_ghz}
  memory_bandwidth: {int(device.memory_bytes_s)} device_memory_size: {chip.memory_bytes}
  l2_cache_size: {chip.l2_cache_bytes} device_interconnect_info {{ active_links: {chip.nvlinks} }}
  cuda_compute_capability {{
    major: {chip.compute_capability} feature_extension: ACCELERATED_FEATURES
  }}
}}
platform_name: "CUDA" device_description_str: "NVIDIA {name.upper()}"
"""


def check_compiler() -> None:
    """Refuse to go on without the GPU compiler.

    Raises:
        ValueError: no CUDA plugin of JAX is installed.
    """
    if not any(importlib.util.find_spec(plugin) for plugin in PLUGINS):
        raise ValueError(
            f"compiling for GPUs needs JAX's CUDA plugin ({' or '.join(PLUGINS)}), and none is "
            "installed: pip install 'cad-jax[aot]', which brings the compiler and nothing that "
            "needs a GPU"
        )


def compile_only_mesh(topology: Topology, pp: int = 1, dp: int = 1, tp: int = 1) -> Mesh:
    """A mesh with axes MESH_AXES over all devices of a topology, row-major: neighbours on tp share a node.

    Arrays cannot be put on its devices; `jit(...).trace(...).lower().compile()` takes shapes placed on it.

    Raises:
        ValueError: the mesh does not use every device, or there is no compiler for them.
    """
    if pp * dp * tp != topology.devices:
        nodes = -(-(pp * dp * tp) // topology.devices_per_node)
        raise ValueError(
            f"the mesh must use every device of the topology: pp {pp} x dp {dp} x tp {tp} are "
            f"{pp * dp * tp}, {topology.name} has {topology.devices}; change mesh.pp, mesh.dp or "
            f"mesh.tp, or use {topology.device.name}:{nodes}x{topology.devices_per_node}"
        )
    check_compiler()
    description = jax_topologies.get_topology_desc(
        platform="cuda",
        target_config=target_config(topology.device.name),
        topology=f"{topology.nodes}x1x{topology.devices_per_node}",
    )
    devices = np.array(description.devices).reshape(pp, dp, tp)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
