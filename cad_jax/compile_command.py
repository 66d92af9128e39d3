"""`cad-jax compile`: a recipe compiled for a cluster that is not here: does it overlap, does it fit?"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro

from cad_jax.attention.strategies import STRATEGIES
from cad_jax.command_line import run_command
from cad_jax.compile_report import run
from cad_jax.config import RunConfig
from cad_jax.recipe_arguments import recipe_field, recipe_registry
from cad_jax.sharding.clusters import parse_topology
from cad_jax.xla_options import parse_option

_ATTENTION = ("--attention", "--attention.strategy")


@dataclass(frozen=True)
class CompileConfig:
    """What to compile for, from which documents, and where the report goes. Needs the CUDA compiler: run
    .venv-aot/bin/cad-jax after make test-aot, or pip install -c constraints.txt -e '.[aot]' in an environment of its own."""

    topology: str
    """DEVICE:NODESxDEVICES_PER_NODE of h100, h200 or b200, such as h200:8x8; the mesh must use all."""
    lengths: Path | None = None
    """File with one document length in tokens a line; without it, the recipe's data is read."""
    json: Path | None = None
    """Write the report here; of several strategies, a list."""
    xla: tuple[str, ...] = ()
    """Options of XLA's compiler, NAME=VALUE, such as xla_gpu_enable_latency_hiding_scheduler=true."""


@dataclass(frozen=True)
class CompileArgs:
    """A report as the command line describes it."""

    config: RunConfig
    strategies: tuple[str, ...]
    compile: CompileConfig


def take_strategies(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """`--attention cad,ring` out of the arguments; without it, no strategies.

    Raises:
        ValueError: an unknown or repeated strategy.
    """
    rest, names = [], ()
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if flag not in _ATTENTION:
            rest.append(argument)
            continue
        names = tuple((value if equals else next(remaining, "")).split(","))
    for name in names:
        if name not in STRATEGIES:
            raise ValueError(
                f"--attention takes {', '.join(STRATEGIES)}, one or several with commas between, got "
                f"{name!r}"
            )
    if len(dict.fromkeys(names)) < len(names):
        raise ValueError(f"--attention must name each strategy once, got {','.join(names)}")
    return rest, names


def parse(arguments: list[str]) -> CompileArgs:
    """The arguments after `cad-jax compile`. Exits with code 2 and a message if they are wrong.

    Raises:
        ValueError: see `take_strategies`.
    """
    arguments, strategies = take_strategies(arguments)
    fields: list[Any] = [
        ("config", *recipe_field()),
        ("compile", tyro.conf.OmitArgPrefixes[CompileConfig]),
    ]
    shape = dataclasses.make_dataclass("CompileArgs", fields, frozen=True)
    parsed = tyro.cli(
        shape,
        prog="cad-jax compile",
        description="Compile a recipe's training step for GPUs that are not here, and report which "
        "collectives overlap with compute and whether it fits: `cad-jax compile llama3_8b_h200 --topology "
        "h200:2x8 --lengths FILE`. --attention takes several strategies, with commas between, and compares "
        "them. Every field of the recipe can be overridden.",
        args=arguments,
        registry=recipe_registry(),
        config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.AvoidSubcommands),
    )
    return CompileArgs(
        parsed.config, strategies or (parsed.config.attention.strategy,), parsed.compile
    )


def main(arguments: list[str]) -> int:
    """Run `cad-jax compile`; returns the exit code."""

    def work() -> None:
        args = parse(arguments)
        jax.config.update("jax_platforms", "cpu")  # the plugin would look for a driver
        run(
            args.config,
            parse_topology(args.compile.topology),
            args.strategies,
            lengths=args.compile.lengths,
            json_path=args.compile.json,
            extra_options=dict(map(parse_option, args.compile.xla)),
        )

    return run_command("compile", work)
