"""`cad-jax advise`: the fastest way of training on documents of these lengths, on this cluster."""

import tyro

from cad_jax.advise_report import AdviseArgs, run
from cad_jax.command_line import run_command


def main(arguments: list[str]) -> int:
    """Run `cad-jax advise`; returns the exit code."""
    args = tyro.cli(AdviseArgs, prog="cad-jax advise", args=arguments)
    return run_command("advise", lambda: run(args))
