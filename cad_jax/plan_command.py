"""`cad-jax plan`: plan a list of document lengths, print and keep the result."""

import sys

import tyro

from cad_jax.plan_report import PlanArgs, run


def main(arguments: list[str]) -> int:
    """Run `cad-jax plan`; returns the exit code."""
    args = tyro.cli(PlanArgs, prog="cad-jax plan", args=arguments)
    try:
        run(args)
    except ValueError as error:
        print(f"cad-jax plan: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:  # what was free when the run began is not any more
        print(
            f"cad-jax plan: the memory does not hold a plan of {args.servers} servers ({error}): "
            "plan fewer servers, or on a larger machine",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        print(
            f"cad-jax plan: {error.filename} cannot be written ({error.strerror}): name another file",
            file=sys.stderr,
        )
        return 2
    return 0
