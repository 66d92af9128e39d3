"""`cad-jax plan`: plan a list of document lengths, print and keep the result."""

import tyro

from cad_jax.command_line import run_command
from cad_jax.plan_args import PlanArgs
from cad_jax.plan_report import run


def main(arguments: list[str]) -> int:
    """Run `cad-jax plan`; returns the exit code."""
    args = tyro.cli(PlanArgs, prog="cad-jax plan", args=arguments)
    return run_command("plan", lambda: run(args))
