"""Two processes of `jax.distributed` (gloo), each pinned to a core of its own, for measurements of time."""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable

import numpy as np

from cad_jax.processes import ProcessConfig, start_devices
from cad_jax.timing import processor_name

PROCESSES = 2


def hardware() -> str:
    """The processor's name and the cores used."""
    return f"{processor_name()}, {PROCESSES} processes, one core each"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` needs of a script's own command line."""
    parser.add_argument("--process-id", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--hardware", default=hardware(), help="what the CSV says of the machine")


def run(args: argparse.Namespace, worker: Callable[[argparse.Namespace], None]) -> bool:
    """Runs the calling script again in every process, which then calls `worker`; True in the caller
    once all are done, False in them.

    Exits with the processes' errors where one fails, and where there are too few cores.
    """
    if args.process_id is not None:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[args.process_id]})
        address = f"localhost:{args.port}"
        start_devices(ProcessConfig(PROCESSES, address, args.process_id), PROCESSES, "cpu")
        worker(args)
        return False
    if len(os.sched_getaffinity(0)) < PROCESSES:
        sys.exit(f"{PROCESSES} processes are pinned to a core each: this needs {PROCESSES} cores")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *sys.argv, "--port", str(port), "--process-id"]
    with tempfile.TemporaryFile("w+") as errors:
        children = [subprocess.Popen([*command, str(i)], stderr=errors) for i in range(PROCESSES)]
        if any([child.wait() for child in children]):
            errors.seek(0)
            sys.exit(errors.read())
    return True


def median_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Median with its bootstrap 95% interval."""
    picks = np.random.default_rng(seed).integers(0, len(values), (4000, len(values)))
    medians = np.median(values[picks], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)
