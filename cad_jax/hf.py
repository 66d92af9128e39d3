"""Hugging Face Llama checkpoints: config.json and safetensors, in and out.

Reading: each process reads only the slices that its devices hold. Writing: every process takes part in fetching, process 0 writes, into
a folder beside the target that is renamed at the end. Projections are stored transposed there ([out, in]) where ours are [E, X].
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh
from safetensors import safe_open
from safetensors.numpy import save_file

from cad_jax.model_config import LlamaConfig, RopeScaling
from cad_jax.parameters import Parallelism, Parameter, describe, shardings

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TABLE_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
# Our name of a layer's parameter: (theirs, whether theirs is its transpose).
LAYER_NAMES = {
    "attention_norm": ("input_layernorm", False),
    "query": ("self_attn.q_proj", True),
    "key": ("self_attn.k_proj", True),
    "value": ("self_attn.v_proj", True),
    "attention_output": ("self_attn.o_proj", False),
    "ffn_norm": ("post_attention_layernorm", False),
    "ffn_gate": ("mlp.gate_proj", True),
    "ffn_up": ("mlp.up_proj", True),
    "ffn_down": ("mlp.down_proj", False),
}
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a derived buffer that old checkpoints hold
# What a Llama of ours cannot be: key of config.json, the one value it may have, in words.
FIXED_KEYS = (
    ("model_type", "llama", "the architecture"),
    ("hidden_act", "silu", "the activation of the feed-forward part"),
    ("attention_bias", False, "biases of the attention projections"),
    ("mlp_bias", False, "biases of the feed-forward part"),
    ("quantization_config", None, "quantised weights"),
)
REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)


def read_config(
    directory: str | Path, dtype: Literal["bfloat16", "float32"] = "bfloat16"
) -> LlamaConfig:
    """The LlamaConfig of a checkpoint folder, to be computed in `dtype`.

    Raises:
        ValueError: no config.json that can be read, or an architecture other than Llama 2/3.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"no config.json in {directory}: give the folder of a checkpoint")
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): bring back an intact copy") from error
    missing = [key for key in REQUIRED_KEYS if key not in values]
    if missing:
        raise ValueError(
            f"{path} must state {', '.join(REQUIRED_KEYS)}, and lacks {', '.join(missing)}: "
            "complete it, or use a Llama 2 or Llama 3 checkpoint"
        )
    for key, allowed, words in FIXED_KEYS:
        if values.get(key, allowed) != allowed:
            raise ValueError(
                f"{path}: {key} ({words}) is {values[key]!r}, only {allowed!r} can be read: "
                "use a Llama 2 or Llama 3 checkpoint"
            )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    num_q_heads, embedding_dim = values["num_attention_heads"], values["hidden_size"]
    return LlamaConfig(
        vocab_size=values["vocab_size"],
        embedding_dim=embedding_dim,
        num_layers=values["num_hidden_layers"],
        num_q_heads=num_q_heads,
        num_kv_heads=values.get("num_key_value_heads") or num_q_heads,
        head_dim=values.get("head_dim") or embedding_dim // num_q_heads,
        ffn_dim=values["intermediate_size"],
        rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10_000.0),
        rope_scaling=_read_rope_scaling(path, rope),
        norm_eps=values.get("rms_norm_eps", 1e-6),
        tied_embeddings=values.get("tie_word_embeddings", False),
        dtype=dtype,
    )


def _read_rope_scaling(path: Path, rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(
            f"{path}: rope scaling of type {kind!r} cannot be read, only 'default' and 'llama3': "
            "use a Llama 2 or Llama 3 checkpoint"
        )
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context_tokens=rope["original_max_position_embeddings"],
    )


def config_json(config: LlamaConfig, context_tokens: int, dtype: str = "float32") -> dict[str, Any]:
    """What config.json says of a model, in the words of transformers 4 and 5 both."""
    scaling = None
    if config.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_context_tokens,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embedding_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": (scaling or {"rope_type": "default"})
        | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


class _TensorFiles:
    """Tensors of a checkpoint folder by name, read slice by slice."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / INDEX_FILE
        if index.is_file():
            self._file_of_name = json.loads(index.read_text())["weight_map"]
        elif (directory / SINGLE_FILE).is_file():
            with safe_open(directory / SINGLE_FILE, "numpy") as file:
                self._file_of_name = dict.fromkeys(file.keys(), SINGLE_FILE)
        else:
            raise ValueError(
                f"neither {INDEX_FILE} nor {SINGLE_FILE} in {directory}: give the folder of a "
                "checkpoint in safetensors form"
            )
        missing = sorted({f for f in self._file_of_name.values() if not (directory / f).is_file()})
        if missing:
            raise ValueError(
                f"{index} names {missing[0]} (and {len(missing) - 1} more), which are not there: "
                "complete the checkpoint"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        names_of_file: dict[str, list[str]] = {}
        for name, file_name in self._file_of_name.items():
            names_of_file.setdefault(file_name, []).append(name)
        result = {}
        for file_name, names in names_of_file.items():
            with safe_open(self.directory / file_name, "numpy") as file:
                result |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
        return result

    def read(self, name: str, at: tuple[slice, ...]) -> np.ndarray:
        """The given part of a tensor, float32."""
        with safe_open(self.directory / self._file_of_name[name], "numpy") as file:
            return np.asarray(file.get_slice(name)[at], np.float32)


def _expected(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the checkpoint, in the model's order."""
    tree = describe(config, Parallelism())
    e, v = config.embedding_dim, config.vocab_size
    yield TABLE_NAMES["embedding"], (v, e)
    for layer in range(config.num_layers):
        for ours in LAYER_NAMES:
            shape = tree["layers"][ours].shape[1:]
            yield _layer_tensor(layer, ours), shape[::-1] if LAYER_NAMES[ours][1] else shape
    yield TABLE_NAMES["final_norm"], (e,)
    if not config.tied_embeddings:
        yield TABLE_NAMES["head"], (v, e)


def _layer_tensor(layer: int, ours: str) -> str:
    return f"model.layers.{layer}.{LAYER_NAMES[ours][0]}.weight"


def _check_tensors(directory: Path, found: Mapping[str, Any], config: LlamaConfig) -> None:
    expected = dict(_expected(config))
    extra = {
        name
        for name in found
        if name not in expected
        and not name.endswith(IGNORED_SUFFIX)
        and not (config.tied_embeddings and name == TABLE_NAMES["head"])
    }
    for words, names in (
        ("lacks", set(expected) - set(found)),
        ("holds, beyond the model's,", extra),
    ):
        if names:
            raise ValueError(
                f"the checkpoint {directory} {words} {len(names)} tensors, the first being "
                f"{min(names)}: read it with the config that its own config.json describes"
            )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{name} in {directory} has shape {found[name]}, the model's config asks for "
                f"{shape}: read it with the config that its own config.json describes"
            )


def read_params(
    directory: str | Path, config: LlamaConfig, mesh: Mesh | AbstractMesh
) -> dict[str, Any]:
    """The checkpoint's parameters as global float32 arrays, placed as the train step wants them.

    Raises:
        ValueError: tensors missing, unknown, or of another shape than `config` says.
    """
    files = _TensorFiles(Path(directory))
    _check_tensors(files.directory, files.shapes(), config)
    description = describe(config, Parallelism.of(mesh))

    def table(name: str, parameter: Parameter) -> Callable[[Any], np.ndarray]:
        def read(at: tuple[slice, ...]) -> np.ndarray:
            first, stop, _ = at[0].indices(parameter.shape[0])
            live = parameter.shape[0] if parameter.live_rows is None else parameter.live_rows
            rows = files.read(name, (slice(min(first, live), min(stop, live)), *at[1:]))
            return np.pad(rows, [(0, stop - first - len(rows))] + [(0, 0)] * (rows.ndim - 1))

        return read

    def stack(ours: str, parameter: Parameter) -> Callable[[Any], np.ndarray]:
        def read(at: tuple[slice, ...]) -> np.ndarray:
            layers = range(*at[0].indices(parameter.shape[0]))
            part = at[1:][::-1] if LAYER_NAMES[ours][1] else at[1:]
            values = [files.read(_layer_tensor(layer, ours), part) for layer in layers]
            return np.stack([v.T for v in values] if LAYER_NAMES[ours][1] else values)

        return read

    readers: dict[str, Any] = {
        name: table(TABLE_NAMES[name], parameter)
        for name, parameter in description.items()
        if name != "layers"
    }
    readers["layers"] = {n: stack(n, p) for n, p in description["layers"].items()}
    return jax.tree.map(
        lambda parameter, sharding, read: jax.make_array_from_callback(
            parameter.shape, sharding, read
        ),
        description,
        shardings(description, mesh),
        readers,
    )


def write_checkpoint(
    directory: str | Path,
    config: LlamaConfig,
    params: Mapping[str, Any],
    *,
    context_tokens: int,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write config.json and safetensors that transformers reads. To be called on every process.

    Args:
        directory: must not exist yet.
        params: the train state's parameters.
        context_tokens: longest document the model is meant for (max_position_embeddings).
        dtype: of the written tensors.
        max_file_bytes: a new file begins where the next tensor would exceed it.

    Raises:
        ValueError: the directory exists.
    """
    target = Path(directory)
    if target.exists():
        raise ValueError(f"{target} exists already: a checkpoint is written to a new folder")
    partial = target.with_name(target.name + ".partial")
    writes = jax.process_index() == 0
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    groups = _group(config, kind.itemsize, max_file_bytes)
    file_names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    if len(groups) == 1:
        file_names = [SINGLE_FILE]
    for file_name, names in zip(file_names, groups, strict=True):
        tensors = {name: _fetch(params, name, config).astype(kind) for name in names}
        if writes:
            save_file(tensors, partial / file_name, metadata={"format": "pt"})
    if not writes:
        return
    if len(groups) > 1:
        weight_map = {n: f for f, names in zip(file_names, groups, strict=True) for n in names}
        total = sum(int(np.prod(shape)) for _, shape in _expected(config)) * kind.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / INDEX_FILE).write_text(json.dumps(index, indent=2))
    text = json.dumps(config_json(config, context_tokens, dtype), indent=2)
    (partial / "config.json").write_text(text + "\n")
    partial.rename(target)


def _group(config: LlamaConfig, itemsize: int, max_file_bytes: int) -> list[list[str]]:
    """Tensor names per file, in order."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in _expected(config):
        size = int(np.prod(shape)) * itemsize
        if groups[-1] and used + size > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _fetch(params: Mapping[str, Any], name: str, config: LlamaConfig) -> np.ndarray:
    """One tensor of the checkpoint on the host, in its form there."""
    for ours, theirs in TABLE_NAMES.items():
        if name == theirs:
            whole = _to_host(params[ours])
            return whole if ours == "final_norm" else whole[: config.vocab_size]
    _, _, layer, rest = name.split(".", 3)
    ours, transposed = next(
        (ours, transposed)
        for ours, (theirs, transposed) in LAYER_NAMES.items()
        if rest == f"{theirs}.weight"
    )
    value = _to_host(params["layers"][ours][int(layer)])
    return np.ascontiguousarray(value.T) if transposed else value


def _to_host(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
