"""The whole configuration of a run: every owner's frozen dataclass, assembled, checked, as JSON.

A recipe (recipes.py) returns a RunConfig; the command line overrides single fields; the run folder
keeps it as config.json.
"""

import contextlib
import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro

from cad_jax.attention_config import AttentionConfig
from cad_jax.checkpoint import CheckpointConfig
from cad_jax.data import DataConfig
from cad_jax.model_config import LlamaConfig
from cad_jax.optimizer import OptimizerConfig
from cad_jax.pipeline.remat import Remat, check_remat
from cad_jax.pipeline.schedule import Schedule, interleaved
from cad_jax.pool_limits import MAX_POOL_TOKENS
from cad_jax.sharding.speeds import check_speeds
from cad_jax.simulation.named_costs import profile_file
from cad_jax.sources import Source
from cad_jax.tokenizer import BYTE_TOKENIZER

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class MeshConfig:
    """Devices as a (pp, dp, tp) mesh; pp x dp ranks share the attention work."""

    pp: int = 1
    """Pipeline stages; each holds a part of the layers."""
    dp: int = 1
    """Data-parallel ranks; parameters are sharded over them."""
    tp: int = 1
    """Devices of a rank that share its tokens: attention's heads are split over them."""
    tp_splits: Literal["weights", "tokens"] = "weights"
    """What tp splits outside attention. weights: tensor-parallel products, two sums over tp a layer;
    tokens: each device has its own, weights are gathered a layer ahead."""
    virtual_stages: int = 1
    """Parts of the model per pipeline stage; above 1 the schedule is interleaved."""
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes what JAX finds; cpu makes as many virtual devices as the mesh needs."""

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "tp", "virtual_stages"):
            if getattr(self, axis) < 1:
                raise ValueError(
                    f"mesh.{axis} (={getattr(self, axis)}) must be at least 1; use 1 to leave the "
                    "axis out"
                )

    @property
    def servers(self) -> int:
        return self.pp * self.dp

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.tp


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and on how much at once."""

    steps: Annotated[int, tyro.conf.arg(aliases=("--steps",))] = 100
    """Optimizer steps."""
    tokens_per_microbatch: int = 2048
    """Tokens of one microbatch over all ranks, padding included: the same on every mesh."""
    microbatches: int = 1
    """Microbatches whose gradients make one step; those a pipeline has in flight."""
    overlap: Annotated[
        Literal["pingpong", "single_stream", "signal"], tyro.conf.arg(aliases=("--overlap",))
    ] = "single_stream"
    """pingpong: a microbatch is two nano-batches, one travels while the other is computed (cad and
    home); single_stream: exchanges wait for compute and compute for them; signal: ping-pong with
    exchanges of one row, the lower bound, for `cad-jax compile` alone."""
    seed: int = 0
    """Of the parameters at the start."""
    remat: Remat = "save_attention"
    """What the backward pass computes again. none: nothing. save_attention: all but attention, its
    exchanges, and the inputs of layers. save_stage (pipelines): those inputs as well, of which it
    keeps a stage's alone. full: attention too."""
    max_minutes: Annotated[float | None, tyro.conf.arg(aliases=("--max-minutes",))] = None
    """Stop, with a checkpoint, after so many minutes of this process; None for no limit."""

    def __post_init__(self) -> None:
        cures = {
            "steps": "give the number of optimizer steps to train",
            "tokens_per_microbatch": "give a multiple of mesh.dp, twice that with ping-pong",
            "microbatches": "use 1 to take each step on one microbatch",
        }
        for name, cure in cures.items():
            if getattr(self, name) < 1:
                raise ValueError(
                    f"training.{name} (={getattr(self, name)}) must be at least 1; {cure}"
                )
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ValueError(
                f"training.max_minutes (={self.max_minutes}) must be positive; give more, or None "
                "for no limit"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(
                f"training.seed (={self.seed}) must be from 0 to 2**32 - 1; use 0, "
                "unless you compare runs"
            )


@dataclass(frozen=True)
class RunConfig:
    """Everything a run depends on. `name` is the recipe's."""

    name: tyro.conf.Suppress[str]
    folder: str
    """Receives all output: configuration, metrics, checkpoints, plots. One that holds a run is never
    overwritten: go on with --resume, or name another."""
    model: LlamaConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    attention: AttentionConfig = AttentionConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def nano_batches(self) -> int:
        """Into which a microbatch is divided where its documents allow it."""
        return 1 if self.training.overlap == "single_stream" else 2

    @property
    def tokens_per_server(self) -> int:
        """Tokens of a microbatch on each rank."""
        return self.training.tokens_per_microbatch // self.mesh.dp

    @property
    def head_axis(self) -> str | None:
        """The mesh axis that splits tokens outside attention and heads inside it."""
        return "tp" if self.mesh.tp_splits == "tokens" and self.mesh.tp > 1 else None

    def check(self) -> None:
        """Rules between the parts; each part checks its own when it is made.

        Raises:
            ValueError: rule, values and cure.
        """
        for name, value in _numbers(self):
            if not math.isfinite(value):
                raise ValueError(
                    f"{name} (={value}) must be a finite number; leave it out, or give one"
                )
        training, mesh = self.training, self.mesh
        tokens, strategy = training.tokens_per_microbatch, self.attention.strategy
        sliced = mesh.tp if mesh.pp > 1 or self.head_axis else 1
        parts = mesh.dp * self.nano_batches * sliced
        if tokens % parts:
            raise ValueError(
                f"training.tokens_per_microbatch (={tokens}) must be divisible by mesh.dp x "
                f"nano-batches x devices that slice their rows (={mesh.dp} x {self.nano_batches} x "
                f"{sliced}), each holds as many; use {-(-tokens // parts) * parts}, or another mesh"
            )
        if tokens > MAX_POOL_TOKENS:
            raise ValueError(
                f"training.tokens_per_microbatch (={tokens}) must be at most {MAX_POOL_TOKENS}, so that pairs of "
                "tokens are counted in 64 bits; use more microbatches"
            )
        if self.nano_batches == 2 and strategy not in ("cad", "home"):
            raise ValueError(
                f"training.overlap (={training.overlap}) needs attention.strategy cad or home, whose "
                f"exchanges are placed by hand, got {strategy}; use --overlap single_stream"
            )
        check_remat(training.remat, mesh.pp, self.nano_batches)
        if strategy in ("native", "native_dense") and (mesh.pp > 1 or self.head_axis):
            raise ValueError(
                f"attention.strategy (={strategy}) leaves the mesh to XLA's partitioner and needs "
                f"mesh.pp 1 (={mesh.pp}) and mesh.tp_splits weights (={mesh.tp_splits}); set those, "
                "or use another strategy"
            )
        self._check_plans()
        if mesh.virtual_stages > 1 and mesh.pp == 1:
            raise ValueError(
                f"mesh.virtual_stages (={mesh.virtual_stages}) above 1 needs a pipeline, mesh.pp is "
                "1; use 1, or more stages"
            )
        self.model.check_mesh(mesh.pp, mesh.tp, mesh.tp_splits == "tokens")
        parts = mesh.pp * mesh.virtual_stages
        if self.model.num_layers % parts:
            raise ValueError(
                f"model.num_layers (={self.model.num_layers}) must be divisible by mesh.pp x "
                f"mesh.virtual_stages (={mesh.pp} x {mesh.virtual_stages}), each virtual stage holds "
                "as many; use fewer virtual stages, or another number of layers"
            )
        self.schedule()

    def _check_plans(self) -> None:
        """Rules of whoever plans, and for which servers."""
        attention, mesh = self.attention, self.mesh
        attention.load_planner()
        if attention.server_speeds is not None:
            source = attention.speeds or "attention.server_speeds"
            check_speeds(attention.server_speeds, mesh.servers, source)
        if mesh.servers % attention.node:
            raise ValueError(
                f"attention.node (={attention.node}) must divide the mesh's {mesh.servers} servers (pp x dp), since "
                "nodes are alike; use 1 where nodes play no part"
            )
        if attention.placement == "searched" and mesh.pp > 1:
            raise ValueError(
                f"attention.placement (=searched) compares plans of one microbatch and needs mesh.pp 1 "
                f"(={mesh.pp}), where a plan is of several at once; use aligned"
            )

    def schedule(self) -> Schedule | None:
        """The pipeline's ticks, None without one. Raises ValueError where its numbers do not fit."""
        if self.mesh.pp == 1:
            return None
        return interleaved(self.mesh.pp, self.training.microbatches, self.mesh.virtual_stages)

    def input_files(self) -> Iterator[Path]:
        """Files that the run reads: documents that are there now, tokenizer, profile, speeds."""
        data, attention = self.data, self.attention
        patterns = [()] if data.source == "stdlib" else [(pattern,) for pattern in data.paths]
        for paths in patterns:
            with contextlib.suppress(ValueError):  # it matches nothing
                yield from Source(data.source, paths).files()
        if data.tokenizer != BYTE_TOKENIZER:
            yield Path(data.tokenizer).expanduser()
        profile = profile_file(attention.profile)
        if profile is not None:
            yield profile
        if attention.speeds is not None:
            yield Path(attention.speeds)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def save(self, folder: Path) -> None:
        """Write config.json, whole or not at all."""
        written = folder / f"{CONFIG_FILE}.tmp"
        written.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        os.replace(written, folder / CONFIG_FILE)


def config_from_dict(values: dict[str, Any]) -> RunConfig:
    """The inverse of RunConfig.to_dict.

    Raises:
        ValueError: a field is unknown, missing, or breaks a rule.
    """
    return _from_json(RunConfig, values, "")


def load_config(folder: Path) -> RunConfig:
    """The configuration a run folder was made with.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    path = folder / CONFIG_FILE
    try:
        values = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} must be the JSON a run writes at its start; it cannot be read ({error}); "
            "restore it, or start a new run folder"
        ) from error
    return config_from_dict(values)


def _numbers(part: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Every number with a fraction among the fields of a dataclass and its parts, with its name."""
    for field in dataclasses.fields(part):
        name, value = f"{where}{field.name}", getattr(part, field.name)
        if isinstance(value, float):
            yield name, value
        elif dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{name}.")


def _from_json(kind: Any, value: Any, where: str) -> Any:
    if typing.get_origin(kind) in (Union, types.UnionType):
        if value is None:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        known = {f.name for f in dataclasses.fields(kind)}
        for name in value:
            if name not in known:
                raise ValueError(
                    f"configuration field {where}{name} is unknown to this version; remove it, or "
                    "use the version that wrote the file"
                )
        try:
            return kind(**{n: _from_json(hints[n], v, f"{where}{n}.") for n, v in value.items()})
        except TypeError as error:
            raise ValueError(
                f"configuration {where or 'file'} is incomplete ({error}); restore the file"
            ) from error
    if typing.get_origin(kind) is tuple:
        return tuple(value)
    return value
