"""`cad-jax simulate`: one training step under each strategy, event by event."""

import sys

import tyro

from cad_jax.simulate_report import SimulateArgs, run


def main(arguments: list[str]) -> int:
    """Run `cad-jax simulate`; returns the exit code."""
    args = tyro.cli(SimulateArgs, prog="cad-jax simulate", args=arguments)
    try:
        run(args)
    except ValueError as error:
        print(f"cad-jax simulate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"cad-jax simulate: {error.filename} cannot be written ({error.strerror}): name another "
            "file",
            file=sys.stderr,
        )
        return 2
    return 0
