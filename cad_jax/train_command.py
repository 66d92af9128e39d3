"""`cad-jax train`: a recipe, overrides of single fields, and which process this is."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from cad_jax.config import RunConfig
from cad_jax.launch import launch
from cad_jax.processes import PlanDisagreementError, ProcessConfig, start_devices
from cad_jax.recipe_arguments import recipe_field, recipe_registry
from cad_jax.train import NonFiniteLossError

USER_ERROR, RUN_STOPPED = 2, 1  # exit codes
RESUME = (
    "Go on from the newest checkpoint of --folder. Model, data, optimizer, batch and placement must be as they "
    "were; mesh, attention and --steps may differ."
)


@dataclass(frozen=True)
class TrainArgs:
    """A run as the command line describes it."""

    config: RunConfig
    resume: bool
    process: ProcessConfig


def parse(arguments: list[str]) -> TrainArgs:
    """The arguments after `cad-jax train`. Exits with code 2 and a message if they are wrong."""
    fields: list[Any] = [
        ("config", *recipe_field()),
        (
            "resume",
            Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help=RESUME)],
            False,
        ),
        ("process", tyro.conf.OmitArgPrefixes[ProcessConfig], ProcessConfig()),
    ]
    shape = dataclasses.make_dataclass("TrainArgs", fields, frozen=True)
    parsed = tyro.cli(
        shape,
        prog="cad-jax train",
        description="Train by a recipe: `cad-jax train debug_cpu8`. Every field of its "
        "configuration can be overridden; `cad-jax train RECIPE --help` lists them.",
        args=arguments,
        registry=recipe_registry(),
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
