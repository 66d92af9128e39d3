"""`cad-jax advise`: the fastest way of training on documents of these lengths, on this cluster."""

import sys

import tyro

from cad_jax.advise_report import AdviseArgs, run


def main(arguments: list[str]) -> int:
    """Run `cad-jax advise`; returns the exit code."""
    args = tyro.cli(AdviseArgs, prog="cad-jax advise", args=arguments)
    try:
        run(args)
    except ValueError as error:
        print(f"cad-jax advise: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"cad-jax advise: {error.filename} cannot be written ({error.strerror}): name another "
            "file",
            file=sys.stderr,
        )
        return 2
    return 0
