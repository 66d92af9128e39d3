"""Devices of a named cluster (`sharding.clusters`) to compile for where none is present.

A target is described to XLA's GPU compiler by hardware figures alone: those of `cost.DEVICES`, and below what a
compiler asks for besides. Programs for it compile on a machine without a GPU; they cannot run there.
"""

import importlib.util

import numpy as np
from jax.experimental import topologies as jax_topologies
from jax.sharding import AxisType, Mesh

from cad_jax.sharding.clusters import CHIPS, Topology
from cad_jax.sharding.cost import DEVICES
from cad_jax.sharding.mesh import MESH_AXES

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


# The same for all of them: limits of a multiprocessor and of a block, and the CUDA release to compile for.
_COMMON = """
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  collective_memory_granularity: 2097152
"""


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
            "installed: in the project's folder, in an environment of its own, run pip install -c "
            "constraints.txt -e '.[aot]', which brings the compiler and nothing that needs a GPU; or use "
            ".venv-aot/bin/cad-jax after make test-aot"
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
