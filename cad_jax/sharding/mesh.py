"""The device mesh and the attention pool's place in it.

Axes are ("pp", "dp", "tp"): pipeline stages, data-parallel ranks, tensor-parallel ranks. All ranks
of one tensor-parallel index form one pool of attention servers; the pool rank is the row-major
index over POOL_AXES.
"""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

MESH_AXES = ("pp", "dp", "tp")
POOL_AXES = ("pp", "dp")


def make_mesh(pp: int = 1, dp: int = 1, tp: int = 1, devices: Sequence | None = None) -> Mesh:
    """A mesh of pp x dp x tp devices with axes MESH_AXES, all of type Auto.

    devices: jax devices, by default all of them; a single process may use fewer than it has.
    Raises ValueError where the mesh does not fit.
    """
    sizes = {"pp": pp, "dp": dp, "tp": tp}
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(
                f"mesh axis {axis} must be at least 1, got {size}: use 1 to leave it out"
            )
    needed = math.prod(sizes.values())
    available = list(jax.devices() if devices is None else devices)
    shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if needed > len(available):
        cure = f"choose pp, dp and tp with a product of at most {len(available)}"
        if available and available[0].platform == "cpu":
            cure += (
                f", or make virtual CPU devices before the first use of jax: "
                f'jax.config.update("jax_num_cpu_devices", {needed})'
            )
        elif jax.process_count() == 1:
            cure += ", or join the processes of other nodes first (cad-jax: --processes)"
        raise ValueError(
            f"a mesh needs pp * dp * tp devices: {shape} = {needed}, but there are "
            f"{len(available)}; {cure}"
        )
    if needed < len(available) and jax.process_count() > 1:
        raise ValueError(
            f"with several processes the mesh must use every device: {shape} = {needed}, but there "
            f"are {len(available)}; choose pp, dp and tp with that product"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=available[:needed],
    )


def pool_size(mesh: Mesh) -> int:
    """Servers of one pool: the product of POOL_AXES."""
    return math.prod(mesh.shape[axis] for axis in POOL_AXES)
