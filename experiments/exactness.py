"""Exactness of every strategy: the full product of strategies, transports, kernels, servers, tensor
parallelism, heads, head dims and dtypes against a float64 oracle, on virtual CPU devices.

    .venv/bin/python experiments/exactness.py

A line a case goes to results/exactness.csv: the largest relative error (Frobenius norm; over the
whole tensor and over each document) of out, dq, dk and dv, and the largest error as a fraction of
what is allowed (float32: 1e-5; bfloat16: twice the naive op's). Every input carries NaN in its
padding. An interrupted run goes on where it stopped. Ends with an error if any case exceeds its
allowance.
"""

import argparse
import csv
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import jax  # noqa: E402
from strategy_cases import (  # noqa: E402 # pyright: ignore[reportMissingImports]
    FACTORS,
    TENSORS,
    Case,
    allowed_errors,
    measure,
    product,
)

DEVICES = 16  # eight servers times two
TOKENS = 768
LENGTHS = (3, 450, 0, 1, 130, 61)
COLUMNS = (*FACTORS, *(f"{name}_error" for name in TENSORS), "fraction_of_allowed")


def columns_of(case: Case) -> tuple[str, ...]:
    """A case as its columns of the table; heads as H/K."""
    values = ("/".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in case)
    return tuple(values)


def start_worker() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)


def row_of(case: Case) -> tuple[str, ...]:
    """Runs a case: its line of the table."""
    errors = measure(case, LENGTHS, TOKENS)
    fraction = (errors / allowed_errors(case, LENGTHS, TOKENS)).max()
    jax.clear_caches()
    numbers = (f"{x:.3g}" for x in (*errors.max(axis=1), fraction))
    return (*columns_of(case), *numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "experiments/results/exactness.csv")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    rows: dict[tuple[str, ...], tuple[str, ...]] = {}
    if arguments.out.exists():
        with arguments.out.open(newline="") as file:
            rows = {tuple(row[: len(FACTORS)]): tuple(row) for row in list(csv.reader(file))[1:]}
    cases = product(DEVICES)
    missing = [case for case in cases if columns_of(case) not in rows]
    print(f"{len(cases)} cases, {len(missing)} to run", flush=True)
    start = time.perf_counter()
    pool = ProcessPoolExecutor(
        arguments.processes, multiprocessing.get_context("spawn"), start_worker
    )
    with arguments.out.open("a", newline="") as file, pool:
        writer = csv.writer(file)
        if not rows:
            writer.writerow(COLUMNS)
        for done, future in enumerate(as_completed([pool.submit(row_of, c) for c in missing]), 1):
            row = future.result()
            rows[row[: len(FACTORS)]] = row
            writer.writerow(row)
            file.flush()
            if done % 20 == 0 or done == len(missing):
                minutes = (time.perf_counter() - start) / 60
                print(f"{done} of {len(missing)} after {minutes:.1f} min", flush=True)
    ordered = [rows[columns_of(case)] for case in cases]
    with arguments.out.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *ordered])
    worst = max(ordered, key=lambda row: float(row[-1]))
    print(f"largest fraction of what is allowed: {worst[-1]} ({', '.join(worst[: len(FACTORS)])})")
    if float(worst[-1]) > 1:
        sys.exit("a case is less exact than allowed")


if __name__ == "__main__":
    main()
