"""Hugging Face checkpoints: logits of transformers, slices on a mesh, refusals."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from cad_jax import hf
from cad_jax.model import Llama
from tests.llama_cases import mesh_of, one_device_attend

GOLDEN = Path(__file__).resolve().parent / "golden"
NAMES = ("llama2_tiny", "llama31_tiny")


def logits_of(config, params, ids):
    model = nnx.merge(nnx.split(nnx.eval_shape(lambda: Llama(config)))[0], params)
    positions = np.arange(len(ids), dtype=np.int32)
    attend = one_device_attend(np.zeros(len(ids), np.int32))
    return model.logits(model.hidden(ids, positions, attend))


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name):
    config = hf.read_config(GOLDEN / name, dtype="float32")
    assert (config.rope_scaling is not None) == (name == "llama31_tiny")
    params = hf.read_params(GOLDEN / name, config, mesh_of(1, 1, 1))
    golden = np.load(GOLDEN / name / "golden.npz")
    logits = jax.jit(logits_of, static_argnums=0)(config, params, golden["ids"].astype(np.int32))
    assert np.abs(np.asarray(logits) - golden["logits"]).max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama2_tiny", (1, 2, 4)),
        ("llama2_tiny", (2, 2, 2)),
        ("llama31_tiny", (1, 2, 4)),
        ("llama31_tiny", (1, 4, 2)),  # three layers: no two stages
    ],
)
def test_each_device_reads_its_slice_alone(name, shape, monkeypatch):
    config = hf.read_config(GOLDEN / name)
    whole = hf.read_params(GOLDEN / name, config, mesh_of(1, 1, 1))
    read_elements = []
    plain_read = hf._TensorFiles.read

    def counted(self, tensor_name, at):
        values = plain_read(self, tensor_name, at)
        read_elements.append((tensor_name, values.size))
        return values

    monkeypatch.setattr(hf._TensorFiles, "read", counted)
    parts = hf.read_params(GOLDEN / name, config, mesh_of(*shape))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), parts, whole
    )
    shards = np.prod(shape)
    query = [
        n for tensor, n in read_elements if tensor.endswith("layers.0.self_attn.q_proj.weight")
    ]
    full = config.embedding_dim * config.num_q_heads * config.head_dim
    assert set(query) == {full // (shape[1] * shape[2])} and len(query) <= shards


def test_written_checkpoint_reads_back(tmp_path):
    source = GOLDEN / "llama31_tiny"
    config = hf.read_config(source)
    params = hf.read_params(source, config, mesh_of(1, 4, 2))
    hf.write_checkpoint(
        tmp_path / "out",
        config,
        params,
        context_tokens=2048,
        dtype="float32",
        max_file_bytes=50_000,
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert hf.read_config(tmp_path / "out") == config
    again = hf.read_params(tmp_path / "out", config, mesh_of(1, 1, 1))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), again, params
    )
    theirs = {}
    for file in source.glob("*.safetensors"):
        theirs |= load_file(file)
    for file in (tmp_path / "out").glob("*.safetensors"):
        for tensor_name, value in load_file(file).items():
            np.testing.assert_array_equal(value, theirs.pop(tensor_name))
    assert not theirs
    with pytest.raises(ValueError, match="exists already"):
        hf.write_checkpoint(tmp_path / "out", config, params, context_tokens=2048)


def test_bfloat16_in_and_out(tmp_path):
    config = hf.read_config(GOLDEN / "llama2_tiny")
    params = hf.read_params(GOLDEN / "llama2_tiny", config, mesh_of(1, 1, 1))
    hf.write_checkpoint(tmp_path / "half", config, params, context_tokens=256)
    with safe_open(tmp_path / "half" / hf.SINGLE_FILE, "numpy") as file:
        assert {file.get_slice(n).get_dtype() for n in file.keys()} == {"BF16"}  # noqa: SIM118
    again = hf.read_params(tmp_path / "half", config, mesh_of(1, 8, 1))
    for wanted, got in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        rounded = np.asarray(wanted).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(got), rounded)


def test_older_config_json(tmp_path):
    values = json.loads((GOLDEN / "llama31_tiny" / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert hf.read_config(tmp_path) == hf.read_config(GOLDEN / "llama31_tiny")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, "model_type .* 'mistral'.*use a Llama"),
        ({"hidden_act": "gelu"}, "hidden_act .* 'gelu'"),
        ({"attention_bias": True}, "attention_bias .* True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_other_architectures_are_refused(tmp_path, changes, words):
    values = json.loads((GOLDEN / "llama31_tiny" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ValueError, match=words):
        hf.read_config(tmp_path)


def test_incomplete_configs_are_refused(tmp_path):
    path = tmp_path / "config.json"
    values = json.loads((GOLDEN / "llama2_tiny" / "config.json").read_text())
    del values["intermediate_size"]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="and lacks intermediate_size: complete it"):
        hf.read_config(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="config.json cannot be read .*bring back an intact"):
        hf.read_config(tmp_path)


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    source, mesh = GOLDEN / "llama2_tiny", mesh_of(1, 1, 1)
    config = hf.read_config(source)
    for change, words in (
        ({"ffn_dim": 64}, r"mlp.* has shape \(.*\), the model's config asks for"),
        ({"num_layers": 3}, "lacks 9 tensors, the first being model.layers.2"),
        ({"num_layers": 1}, "beyond the model's, 9 tensors"),
        ({"tied_embeddings": True, "num_layers": 1}, "beyond the model's, 9 tensors"),
    ):
        with pytest.raises(ValueError, match=words):
            hf.read_params(source, dataclasses.replace(config, **change), mesh)
    with pytest.raises(ValueError, match="neither"):
        hf.read_params(tmp_path, config, mesh)
    with pytest.raises(ValueError, match=r"no config\.json"):
        hf.read_config(tmp_path)
    shutil.copytree(GOLDEN / "llama31_tiny", tmp_path / "cut")
    (tmp_path / "cut" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors"):
        hf.read_params(tmp_path / "cut", hf.read_config(tmp_path / "cut"), mesh)


def test_derived_buffers_of_old_checkpoints_are_ignored(tmp_path):
    source = GOLDEN / "llama2_tiny"
    shutil.copytree(source, tmp_path / "old")
    tensors = load_file(source / hf.SINGLE_FILE)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "old" / hf.SINGLE_FILE)
    hf.read_params(tmp_path / "old", hf.read_config(source), mesh_of(1, 1, 1))
