"""The whole configuration of a run: every owner's frozen dataclass, assembled, checked, as JSON.

A recipe (recipes.py) returns a RunConfig; the command line overrides single fields; the run folder
keeps it as config.json.
"""

import dataclasses
import json
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro

from cad_jax.checkpoint import CheckpointConfig
from cad_jax.data import DataConfig
from cad_jax.model import Remat
from cad_jax.model_config import LlamaConfig
from cad_jax.optimizer import OptimizerConfig
from cad_jax.sharding.tasks import Capacities

CONFIG_FILE = "config.json"
StrategyName = Literal["cad", "home", "all_gather", "ring", "native", "native_dense"]
# What decides the course of training: a resumed run must not change it. Data is checked by content,
# mesh, attention and the number of steps to run may differ.
_FIXED_ON_RESUME = ("model", "optimizer", "training.tokens_per_microbatch", "training.microbatches")


@dataclass(frozen=True)
class MeshConfig:
    """Devices as a (pp, dp, tp) mesh; pp x dp ranks share the attention work."""

    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data-parallel ranks; parameters are sharded over them."""
    tp: int = 1
    """Tensor-parallel devices of a rank; heads and ffn are split over them."""
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes what JAX finds; cpu makes as many virtual devices as the mesh needs."""

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "tp"):
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh.{axis} (={getattr(self, axis)}) must be at least 1")

    @property
    def servers(self) -> int:
        return self.pp * self.dp

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.tp


@dataclass(frozen=True)
class AttentionConfig:
    """How core attention is distributed, and the kernel under it."""

    strategy: Annotated[StrategyName, tyro.conf.arg(aliases=("--attention",))] = "cad"
    """cad: planned attention servers; home: no work moves; all_gather, ring: context parallelism;
    native, native_dense: left to XLA's partitioner, blockwise or dense masked."""
    kernel: str = "auto"
    """auto takes the fastest that runs on the platform."""
    tolerance: float = 0.05
    """The most loaded server's work may exceed the mean by this fraction."""
    transport: Literal["auto", "direct", "relay"] = "auto"
    """auto takes the one with the fewest predicted seconds."""
    capacity_plans: int = 200
    """Plans of the run's own data from which the static capacities are set."""
    capacities: tyro.conf.Suppress[Capacities | None] = None
    """Capacities instead of those."""

    def __post_init__(self) -> None:
        if self.tolerance < 0:
            raise ValueError(
                f"attention.tolerance (={self.tolerance}) must not be negative; 0.05 is a good start"
            )
        if self.capacity_plans < 1:
            raise ValueError(
                f"attention.capacity_plans (={self.capacity_plans}) must be at least 1; 200 cover "
                "the tail of most data"
            )


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and on how much at once."""

    steps: Annotated[int, tyro.conf.arg(aliases=("--steps",))] = 100
    """Optimizer steps."""
    tokens_per_microbatch: int = 2048
    """Tokens of one microbatch over all ranks, padding included: the same on every mesh."""
    microbatches: int = 1
    """Microbatches whose gradients make one step."""
    seed: int = 0
    """Of the parameters at the start."""
    remat: Remat = "save_attention"
    """What the backward pass computes again: none; all but attention and its exchanges; full."""
    max_minutes: Annotated[float | None, tyro.conf.arg(aliases=("--max-minutes",))] = None
    """Stop, with a checkpoint, after so many minutes of this process; None for no limit."""

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_microbatch", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name} (={getattr(self, name)}) must be at least 1")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ValueError(
                f"training.max_minutes (={self.max_minutes}) must be positive, or None for no limit"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"training.seed (={self.seed}) must be from 0 to 2**32 - 1")


@dataclass(frozen=True)
class RunConfig:
    """Everything a run depends on. `name` is the recipe's, `folder` receives all output."""

    name: tyro.conf.Suppress[str]
    folder: str
    model: LlamaConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    attention: AttentionConfig = AttentionConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def tokens_per_server(self) -> int:
        return self.training.tokens_per_microbatch // self.mesh.servers

    def check(self) -> None:
        """Rules between the parts; each part checks its own when it is made.

        Raises:
            ValueError: rule, values and cure.
        """
        tokens, servers = self.training.tokens_per_microbatch, self.mesh.servers
        if tokens % servers:
            raise ValueError(
                f"training.tokens_per_microbatch (={tokens}) must be divisible by mesh.pp x mesh.dp "
                f"(={servers}), each rank holds as many; use "
                f"{-(-tokens // servers) * servers}, or another mesh"
            )
        self.model.check_mesh(self.mesh.pp, self.mesh.tp)

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


def check_resume(config: RunConfig, saved: dict[str, Any]) -> None:
    """Refuse to continue a run under settings that would make it another run.

    saved: the dict form of the configuration that wrote the checkpoint.

    Raises:
        ValueError: the first field that differs, both values, the cure.
    """
    current = config.to_dict()

    def compare(name: str, old: Any, new: Any) -> None:
        if isinstance(old, dict) and isinstance(new, dict):
            for key in {**old, **new}:
                compare(f"{name}.{key}", old.get(key), new.get(key))
        elif old != new:
            raise ValueError(
                f"the checkpoint was written with {name}={old!r} and this run has {new!r}: a resumed "
                "run must train the same model the same way; set it back, or start a new run folder"
            )

    for path in _FIXED_ON_RESUME:
        old, new = saved, current
        for part in path.split("."):
            old, new = old.get(part, {}), new[part]
        compare(path, old, new)
