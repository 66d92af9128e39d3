"""The GPU kernels compile for an H200 on a machine without one, forward and backward.

Needs jax's CUDA 12 plugin, its runtime and ptxas (and tokamax for its kernels); skipped where they
are absent.
"""

import contextlib
import importlib
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cad_jax.attention.base import KeyRanges
from cad_jax.attention.varlen import load_kernel

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0" device_interconnect_info { active_links: 18 }
  collective_memory_granularity: 2097152
}
platform_name: "CUDA" device_description_str: "NVIDIA H200"
"""
# Its custom calls, and how many of them a forward and a backward pass hold.
CALLS = {
    "xla": ("none", 0, 0),
    "triton": ("__gpu$xla.gpu.triton", 1, 2),
    "tokamax": ("mosaic_gpu_v2", 1, 2),
}

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no CUDA 12 plugin"
    ),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


@pytest.mark.parametrize(
    "kernel, dim",
    [("xla", 128), ("triton", 64), ("triton", 128), ("tokamax", 64), ("tokamax", 128)],
)
def test_compiles_for_h200(kernel, dim) -> None:
    cross_compile = contextlib.nullcontext()
    if kernel == "tokamax":
        pytest.importorskip("tokamax")
        cross_compile = importlib.import_module("tokamax").config.cross_compile(True)
    target, *calls = CALLS[kernel]
    forward, backward = load_kernel(kernel)
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("dp",)), P())

    def shaped(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rows, keys, heads, kv_heads = 4000, 8100, 8, 2  # no multiples of a tile
    q, k = shaped(rows, heads, dim), shaped(keys, kv_heads, dim)
    lse = shaped(rows, heads, dtype=jnp.float32)
    ranges = KeyRanges(*[shaped(rows, dtype=jnp.int32)] * 2)
    programs = (
        (lambda *x: forward(*x, dim**-0.5), (q, k, k, ranges), (q, lse)),
        (lambda *x: backward(*x, dim**-0.5), (q, k, k, q, lse, lse, ranges), (q, k, k)),
    )
    with cross_compile, jax.default_device(topology.devices[0]):
        for (run, operands, results), count in zip(programs, calls, strict=True):
            compiled = jax.jit(run).lower(*operands).compile()
            assert compiled.as_text().count(f'custom_call_target="{target}"') == count
            assert [(x.shape, x.dtype) for x in jax.tree.leaves(compiled.out_info)] == [
                (x.shape, x.dtype) for x in results
            ]
            # Linear memory: copies of the operands, no scores (rows x keys x heads would be 518 MB).
            assert compiled.memory_analysis().temp_size_in_bytes < 128 * 2**20
