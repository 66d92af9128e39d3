"""`cad-jax train`: a recipe, overrides of single fields, and which process this is."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from cad_jax.command_line import run_command
from cad_jax.config import RunConfig
from cad_jax.launch import launch
from cad_jax.processes import PlanDisagreementError, ProcessConfig, start_devices
from cad_jax.recipe_arguments import recipe_field, recipe_registry
from cad_jax.train import NonFiniteLossError

RUN_STOPPED = 1  # exit code
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

    def work() -> None:
        start_devices(args.process, args.config.mesh.devices, args.config.mesh.platform)
        launch(args.config, resume=args.resume)

    stops = {NonFiniteLossError: RUN_STOPPED, PlanDisagreementError: RUN_STOPPED}
    return run_command("train", work, stops)
