"""`cad-jax train`: a recipe, overrides of single fields, and which process this is."""

import dataclasses
import inspect
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from cad_jax.config import RunConfig
from cad_jax.launch import launch
from cad_jax.model_config import LlamaConfig, RopeScaling
from cad_jax.processes import PlanDisagreementError, ProcessConfig, start_devices
from cad_jax.recipes import RECIPES
from cad_jax.train import NonFiniteLossError

USER_ERROR, RUN_STOPPED = 2, 1  # exit codes


@dataclass(frozen=True)
class TrainArgs:
    """A run as the command line describes it."""

    config: RunConfig
    resume: bool
    process: ProcessConfig


@dataclass(frozen=True)
class RopeScalingOptions:
    """Frequency scaling of Llama 3.1, off until a factor is given."""

    factor: float | None = None
    """Stretches wavelengths beyond the original context by so much (8 in Llama 3.1); None for no
    scaling."""
    low_freq_factor: float = RopeScaling.low_freq_factor
    """Wavelengths beyond the original context over this are stretched in full."""
    high_freq_factor: float = RopeScaling.high_freq_factor
    """Wavelengths below the original context over this are kept."""
    original_context_tokens: int = RopeScaling.original_context_tokens
    """Context length of pretraining."""


def _model_options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """LlamaConfig's fields as options. tyro makes a choice of subcommands of a part that may be
    None; here rope_scaling has an option for each of its fields, as every other part has."""
    if info.type is not LlamaConfig:
        return None
    hints: dict[str, Any] = get_type_hints(LlamaConfig, include_extras=True)
    values = {f.name: getattr(info.default, f.name) for f in dataclasses.fields(LlamaConfig)}
    hints["rope_scaling"] = RopeScalingOptions
    recipe = RopeScalingOptions(**dataclasses.asdict(values["rope_scaling"] or RopeScaling()))
    if values["rope_scaling"] is None:
        recipe = dataclasses.replace(recipe, factor=None)
    values["rope_scaling"] = recipe

    def make(rope_scaling: RopeScalingOptions, **sizes: Any) -> LlamaConfig:
        given = dataclasses.asdict(rope_scaling)
        if rope_scaling.factor is not None:
            return LlamaConfig(rope_scaling=RopeScaling(**given), **sizes)
        for name, value in given.items():
            if name != "factor" and value != getattr(recipe, name):
                raise ValueError(
                    f"model.rope_scaling.{name} (={value}) needs a factor to scale by; add "
                    "--model.rope-scaling.factor, 8 in Llama 3.1"
                )
        return LlamaConfig(rope_scaling=None, **sizes)

    make.__doc__ = LlamaConfig.__doc__  # tyro's heading over the options
    fields = tuple(StructFieldSpec(name, hints[name], value) for name, value in values.items())
    return StructConstructorSpec(make, fields)


def parse(arguments: list[str]) -> TrainArgs:
    """The arguments after `cad-jax train`. Exits with code 2 and a message if they are wrong."""
    recipes = tuple(
        Annotated[
            RunConfig,
            tyro.conf.subcommand(
                name, default=recipe(), description=inspect.getdoc(recipe), prefix_name=False
            ),
        ]
        for name, recipe in RECIPES.items()
    )
    fields: list[Any] = [
        ("config", Annotated[Union[recipes], tyro.conf.arg(name="")]),  # noqa: UP007
        ("resume", tyro.conf.FlagCreatePairsOff[bool], False),
        ("process", tyro.conf.OmitArgPrefixes[ProcessConfig], ProcessConfig()),
    ]
    registry = ConstructorRegistry()
    registry.struct_rule(_model_options)
    shape = dataclasses.make_dataclass("TrainArgs", fields, frozen=True)
    parsed = tyro.cli(
        shape,
        prog="cad-jax train",
        description="Train by a recipe: `cad-jax train debug_cpu8`. Every field of its "
        "configuration can be overridden; `cad-jax train RECIPE --help` lists them.",
        args=arguments,
        registry=registry,
        config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.AvoidSubcommands),
    )
    return TrainArgs(parsed.config, parsed.resume, parsed.process)


def main(arguments: list[str]) -> int:
    """Run `cad-jax train`; returns the exit code."""
    args = parse(arguments)
    try:
        start_devices(args.process, args.config.mesh.devices, args.config.mesh.platform)
        launch(args.config, resume=args.resume)
    except ValueError as error:
        print(f"cad-jax train: {error}", file=sys.stderr)
        return USER_ERROR
    except (NonFiniteLossError, PlanDisagreementError) as error:
        print(f"cad-jax train: {error}", file=sys.stderr)
        return RUN_STOPPED
    return 0
