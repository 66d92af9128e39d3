"""`cad-jax speeds`: how fast each server of a recipe's mesh is, into a file for --attention.speeds."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from cad_jax.command_line import check_number, check_outputs, run_command, writing
from cad_jax.config import RunConfig
from cad_jax.processes import ProcessConfig, first_process, start_devices
from cad_jax.recipe_arguments import recipe_field, recipe_registry
from cad_jax.server_speeds import ROUNDS, ServerSpeeds, measure_speeds
from cad_jax.sharding.mesh import make_mesh

MAX_ROUNDS = 1000


@dataclass(frozen=True)
class SpeedsConfig:
    """Where the speeds go, and how long they are measured."""

    out: Path = Path("speeds.txt")
    """Write one relative speed a line here, server after server: what --attention.speeds reads."""
    rounds: int = ROUNDS
    """Samples of each device, of which the median counts."""


@dataclass(frozen=True)
class SpeedsArgs:
    """A measurement as the command line describes it."""

    config: RunConfig
    speeds: SpeedsConfig
    process: ProcessConfig


def parse(arguments: list[str]) -> SpeedsArgs:
    """The arguments after `cad-jax speeds`. Exits with code 2 and a message if they are wrong."""
    fields: list[Any] = [
        ("config", *recipe_field()),
        ("speeds", tyro.conf.OmitArgPrefixes[SpeedsConfig], SpeedsConfig()),
        ("process", tyro.conf.OmitArgPrefixes[ProcessConfig], ProcessConfig()),
    ]
    shape = dataclasses.make_dataclass("SpeedsArgs", fields, frozen=True)
    parsed = tyro.cli(
        shape,
        prog="cad-jax speeds",
        description="Measure core attention on every device of a recipe's mesh, in as many processes as it will "
        "train in, and write the relative speed of each server: `cad-jax speeds llama3_8b_h200 --out "
        "speeds.txt`. Where servers are not alike, train with --attention.speeds speeds.txt.",
        args=arguments,
        registry=recipe_registry(),
        config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.AvoidSubcommands),
    )
    return SpeedsArgs(parsed.config, parsed.speeds, parsed.process)


def run(args: SpeedsArgs, console: Console) -> ServerSpeeds:
    """Measure, write on process 0, report. Collective over all processes; devices must be started.

    Raises:
        ValueError: the mesh, the kernel or the file does not fit; the message names the cure.
    """
    config, out = args.config, args.speeds.out
    check_number("--rounds", args.speeds.rounds, 1, MAX_ROUNDS, f"{ROUNDS} are enough for most")
    mesh = make_mesh(config.mesh.pp, config.mesh.dp, config.mesh.tp)
    remeasured = dataclasses.replace(config.attention, speeds=None)  # that file is to be replaced
    read = dataclasses.replace(config, attention=remeasured).input_files()
    first_process(lambda: check_outputs({"--out": out}, read))
    result = measure_speeds(config, mesh, args.speeds.rounds)

    def write() -> None:
        with writing(out) as path:
            result.save(path)

    first_process(write)
    if jax.process_index() == 0:
        console.print(table(result))
        console.print(f"wrote {out}")
        if result.alike:
            console.print("servers are alike: leave --attention.speeds out")
    return result


def table(result: ServerSpeeds) -> Table:
    """A row for each server, for people."""
    shown = Table(title="measured speed of servers")
    for name in ("server", "speed", "slowest device, ms", "fastest"):
        shown.add_column(name, justify="right")
    for server, (speed, seconds) in enumerate(zip(result.speeds, result.seconds, strict=True)):
        slow, fast = (f"{1e3 * s:.3g}" for s in (seconds.max(), seconds.min()))
        shown.add_row(f"{server}", f"{speed:.3f}", slow, fast)
    shown.caption = f"relative to the median server; {result.what}"
    return shown


def main(arguments: list[str]) -> int:
    """Run `cad-jax speeds`; returns the exit code."""
    args = parse(arguments)

    def work() -> None:
        mesh = args.config.mesh
        start_devices(args.process, mesh.devices, mesh.platform)
        run(args, Console())

    return run_command("speeds", work)
