"""Exactness of the training step: the full product of meshes, microbatches, virtual stages, what tp splits,
overlap, strategies and dtypes against a float64 model of one device, on 8 virtual CPU devices.

    .venv/bin/python experiments/pipeline_exactness.py

A line a case goes to results/pipeline_exactness.csv: the relative error of the loss, the largest
relative error (Frobenius norm) of a parameter's gradient in any layer, whose it is, and the largest
error as a fraction of what is allowed (float32: 2e-5; bfloat16: twice that of the model on one
device). An interrupted run goes on where it stopped. Ends with an error if any case exceeds its
allowance.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402
from case_table import Texts, fill  # noqa: E402

from tests.pipeline.step_cases import FACTORS, Case, Measured, measure, product  # noqa: E402

COLUMNS = (*FACTORS, *Measured._fields)


def key_of(case: Case) -> Texts:
    """A case as its columns of the table; the mesh as pp x dp x tp."""
    values = ("x".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in case)
    return tuple(values)


def start_worker() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def measured_of(case: Case) -> Texts:
    measured = measure(case)
    jax.clear_caches()
    return tuple(x if isinstance(x, str) else f"{x:.3g}" for x in measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    results = ROOT / "experiments/results/pipeline_exactness.csv"
    parser.add_argument("--out", type=Path, default=results)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    cases = {key_of(case): case for case in product()}
    lines = fill(arguments.out, COLUMNS, cases, measured_of, start_worker, arguments.processes)
    for dtype in FACTORS["dtype"]:
        own = [line for line in lines if dtype in line]
        worst = own[np.argmax([float(line[-1]) for line in own])]
        errors = ", ".join(f"{n} {x}" for n, x in zip(Measured._fields, worst[-4:], strict=True))
        print(f"{dtype}, {len(own)} cases, the least exact: {' '.join(worst[:-4])}: {errors}")
    if not all(float(line[-1]) <= 1 for line in lines):
        sys.exit("a case is less exact than allowed")


if __name__ == "__main__":
    main()
