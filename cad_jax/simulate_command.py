"""`cad-jax simulate`: one training step under each strategy, event by event."""

import tyro

from cad_jax.command_line import run_command
from cad_jax.simulate_args import SimulateArgs
from cad_jax.simulate_report import run


def main(arguments: list[str]) -> int:
    """Run `cad-jax simulate`; returns the exit code."""
    args = tyro.cli(SimulateArgs, prog="cad-jax simulate", args=arguments)
    return run_command("simulate", lambda: run(args))
