"""The command line: `cad-jax {train, plan, simulate, lengths, advise, compile, profile, speeds}`."""

import os
import sys
from collections.abc import Callable
from importlib import import_module

USAGE = """\
usage: cad-jax COMMAND ...

Train language models on long, uneven documents: every rank keeps its own tokens, and core attention
is planned over all ranks so that each has the same work.

commands:
  train     train by a recipe            cad-jax train debug_cpu8
                                         cad-jax train text_folder --data.paths 'folder/**/*.txt'
                                         cad-jax train debug_cpu8 --attention ring --steps 10
                                         cad-jax train debug_cpu8 --resume
  plan      plan a list of lengths       cad-jax plan --lengths FILE --servers 8 --tokens-per-server 65536
  simulate  a step, event by event       cad-jax simulate --ranks 8 --tokens-per-rank 65536 --workload pretrain
  lengths   token lengths of your data   cad-jax lengths text_folder --data.paths 'folder/**/*.txt' --out FILE
  advise    for or against CAD           cad-jax advise --lengths FILE --topology h200:8x8 --model llama3-8b
  compile   compile for GPUs not here    cad-jax compile llama3_8b_h200 --topology h200:2x8 --lengths FILE
  profile   measure this device          cad-jax profile --quick --out FILE
  speeds    compare a mesh's servers     cad-jax speeds llama3_8b_h200 --out FILE

`cad-jax COMMAND --help` explains every option. Exit codes: 0 done, 1 stopped by an error of the run,
2 the arguments or the data are wrong (the message says what, and what helps), 130 interrupted.
"""

INTERRUPTED = 130  # exit code, that of a shell
# Modules load on use: planning runs where jax is not installed.
COMMANDS = {
    "train": "cad_jax.train_command",
    "plan": "cad_jax.plan_command",
    "simulate": "cad_jax.simulate_command",
    "lengths": "cad_jax.lengths_command",
    "advise": "cad_jax.advise_command",
    "compile": "cad_jax.compile_command",
    "profile": "cad_jax.profile_command",
    "speeds": "cad_jax.speeds_command",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(
            f"cad-jax: the command must be one of {', '.join(COMMANDS)}, got {arguments[0]!r}; "
            "cad-jax --help explains them",
            file=sys.stderr,
        )
        return 2
    try:
        run: Callable[[list[str]], int] = import_module(COMMANDS[arguments[0]]).main
        return run(arguments[1:])
    except KeyboardInterrupt:
        print(f"cad-jax {arguments[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has enough; nothing is left to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
