"""The mesh: axes, pool order, and what it says when it does not fit."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from cad_jax.sharding.mesh import MESH_AXES, make_mesh, pool_size


def test_axes_and_pool_order():
    mesh = make_mesh(pp=2, dp=2, tp=2)
    assert mesh.axis_names == MESH_AXES and set(mesh.axis_types) == {AxisType.Auto}
    assert pool_size(mesh) == 4
    assert np.array_equal(mesh.devices.ravel(), jax.devices())


def test_one_process_may_use_fewer_devices():
    assert make_mesh(dp=3).devices.ravel().tolist() == jax.devices()[:3]
    assert (
        make_mesh(tp=2, devices=jax.devices()[4:6]).devices.ravel().tolist() == jax.devices()[4:6]
    )


def test_too_few_devices():
    rule = (
        r"pp 2 x dp 4 x tp 2 = 16, but there are 8.*product of at most 8.*jax_num_cpu_devices.*16"
    )
    with pytest.raises(ValueError, match=rule):
        make_mesh(pp=2, dp=4, tp=2)


def test_axes_are_positive():
    with pytest.raises(ValueError, match="mesh axis dp must be at least 1, got 0"):
        make_mesh(dp=0)
