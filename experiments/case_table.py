"""A table of measurements, a line a case, that an interrupted run goes on filling."""

import csv
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Texts = tuple[str, ...]


def fill(
    path: Path,
    columns: Sequence[str],
    cases: Mapping[Texts, Any],
    measure: Callable[[Any], Texts],
    start_worker: Callable[[], None],
    processes: int | None,
    progress_every: int = 20,
) -> list[Texts]:
    """Measures the cases that the table lacks; returns all lines, in the order of `cases`.

    path: of the CSV; lines are added as they come, put in order at the end. cases: by their first
    columns. measure: in a worker process, which `start_worker` made ready, the other columns.
    """
    width = len(next(iter(cases)))
    lines: dict[Texts, Texts] = {}
    if path.exists():
        with path.open(newline="") as file:
            lines = {tuple(row[:width]): tuple(row) for row in list(csv.reader(file))[1:]}
    missing = [key for key in cases if key not in lines]
    print(f"{len(cases)} cases, {len(missing)} to run", flush=True)
    start = time.perf_counter()
    workers = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start_worker)
    with path.open("a", newline="") as file, workers:
        writer = csv.writer(file)
        if not lines:
            writer.writerow(columns)
        futures = {workers.submit(measure, cases[key]): key for key in missing}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                key = futures[future]
                lines[key] = (*key, *future.result())
                writer.writerow(lines[key])
                file.flush()
                if done % progress_every == 0 or done == len(missing):
                    minutes = (time.perf_counter() - start) / 60
                    print(f"{done} of {len(missing)} after {minutes:.1f} min", flush=True)
        finally:  # interrupted, or a case failed: do not wait for all the others
            workers.shutdown(cancel_futures=True)
    ordered = [lines[key] for key in cases]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *ordered])
    return ordered
