"""Exactness of every strategy: the full product of strategies, transports, kernels, servers, tensor
parallelism, heads, head dims and dtypes against a float64 oracle, on virtual CPU devices.

    .venv/bin/python experiments/exactness.py

A line a case goes to results/exactness.csv: the largest relative error (Frobenius norm; over the
whole tensor and over each document) of out, dq, dk and dv, and the largest error as a fraction of
what is allowed (float32: 1e-5; bfloat16: twice the naive op's, and where keys are divided 1.5 times
that of the kernel that sees documents whole). Every input carries NaN in its
padding. An interrupted run goes on where it stopped. Ends with an error if any case exceeds its
allowance.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import jax  # noqa: E402
from case_table import Texts, fill  # noqa: E402
from strategy_cases import (  # noqa: E402 # pyright: ignore[reportMissingImports]
    FACTORS,
    TENSORS,
    Case,
    allowed_errors,
    measure,
    product,
)

DEVICES = 16  # eight servers times two
COLUMNS = (*FACTORS, *(f"{name}_error" for name in TENSORS), "fraction_of_allowed")


def columns_of(case: Case) -> Texts:
    """A case as its columns of the table; heads as H/K."""
    values = ("/".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in case)
    return tuple(values)


def start_worker() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)


def measured_of(case: Case) -> Texts:
    """Runs a case: its errors, as columns of the table."""
    errors = measure(case)
    fraction = (errors / allowed_errors(case)).max()
    jax.clear_caches()
    return tuple(f"{x:.3g}" for x in (*errors.max(axis=1), fraction))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results/exactness.csv")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    cases = {columns_of(case): case for case in product(DEVICES, ragged=False)}
    lines = fill(arguments.out, COLUMNS, cases, measured_of, start_worker, arguments.processes)
    worst = max(lines, key=lambda line: float(line[-1]))
    print(f"largest fraction of what is allowed: {worst[-1]} ({', '.join(worst[: len(FACTORS)])})")
    if not all(float(line[-1]) <= 1 for line in lines):
        sys.exit("a case is less exact than allowed")


if __name__ == "__main__":
    main()
