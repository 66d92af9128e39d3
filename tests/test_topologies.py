"""Named clusters: what their names mean, what is refused, and meshes to compile for."""

import importlib.util

import jax
import numpy as np
import pytest

from cad_jax.sharding.clusters import CHIPS, parse_topology
from cad_jax.sharding.cost import DEVICES
from cad_jax.sharding.mesh import MESH_AXES
from cad_jax.topologies import PLUGINS, compile_only_mesh, target_config

needs_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(p) for p in PLUGINS), reason="no CUDA plugin"
)


def test_parse() -> None:
    topology = parse_topology(" H200:3x4 ")
    assert (topology.name, topology.devices) == ("h200:3x4", 12)
    assert topology.device is DEVICES["h200"]
    assert [topology.node(d) for d in (0, 3, 4, 11)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("h200", "DEVICE:NODESxDEVICES_PER_NODE, such as h200:8x8, got 'h200'"),
        ("h200:8", "got 'h200:8'"),
        ("h200:0x8", "got 'h200:0x8'"),
        ("h200:2x8x1", "got 'h200:2x8x1'"),
        ("tpu:2x4", "one of h100, h200, b200, got 'tpu': choose"),
        ("a100:2x8", "one of h100, h200, b200, got 'a100'"),
        ("h200:1x16", "holds at most 8 devices, got 16 in 'h200:1x16': use more nodes"),
    ],
)
def test_refused_names(text, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_topology(text)


@pytest.mark.parametrize("name", CHIPS)
def test_descriptions_state_the_figures_of_the_cost_model(name) -> None:
    text = target_config(name)
    assert text.count("{") == text.count("}")
    assert f"memory_bandwidth: {int(DEVICES[name].memory_bytes_s)} " in text
    # Marketing gigabytes are decimal; drivers report between nine tenths of them and a little more.
    gigabytes = {"h100": 80, "h200": 141, "b200": 180}[name]
    assert 0.9 < CHIPS[name].memory_bytes / (gigabytes * 1e9) < 1.08


def test_the_mesh_must_use_every_device() -> None:
    with pytest.raises(
        ValueError, match="pp 1 x dp 4 x tp 8 are 32, h200:2x8 has 16; .* or use h200:4x8"
    ):
        compile_only_mesh(parse_topology("h200:2x8"), 1, 4, 8)


def test_a_missing_compiler_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"jax_cuda12_plugin .*pip install -c constraints.txt -e '\.\[aot\]'"
    ):
        compile_only_mesh(parse_topology("h200:2x8"), 1, 16, 1)


@needs_compiler
@pytest.mark.parametrize("name", CHIPS)
def test_mesh(name) -> None:
    mesh = compile_only_mesh(parse_topology(f"{name}:4x2"), pp=2, dp=2, tp=2)
    assert mesh.axis_names == MESH_AXES
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert ids.tolist() == np.arange(8).reshape(2, 2, 2).tolist()
    assert {d.device_kind for d in mesh.devices.flat} == {f"NVIDIA {name.upper()}"}
    assert jax.devices()[0].platform == "cpu"
