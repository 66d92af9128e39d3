"""Kills a training run (SIGKILL) at random moments and checks what is left of it.

    python experiments/kill_test.py [--kills 20] [--seed 0] [--out experiments/results/kill_test.csv]

One run of `cad-jax train debug_cpu8`, saving every 3 steps, is killed again and again: a quarter of
the kills fall anywhere from the start of the process (start-up, restore, compilation), half within
1.5 s of its first complete save, a quarter as soon after that as a checkpoint is half written. Every time the next process must go
on from the newest checkpoint that was complete when it was killed. At the end the run goes on to its
last step, and every line of metrics.jsonl must hold the losses of a run that nobody touched, bitwise.
Exits with 1 if anything differs. A row of the CSV is a kill.
"""

import argparse
import csv
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from cad_jax.metrics import read_metrics

STEPS, EVERY_STEPS = 600, 3
FIELDS = (
    "kill",
    "aim",
    "after_s",
    "inside_save",
    "steps_done",
    "last_complete_save",
    "resumed_from",
    "steps_lost",
)


def start(folder: Path, cache: Path, log: Path, every_steps: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "cad_jax", "train", "debug_cpu8", "--resume"]
    command += [f"--folder={folder}", f"--steps={STEPS}", f"--optimizer.total-steps={STEPS}"]
    command += [f"--checkpoint.every-steps={every_steps}", "--training.microbatches=1"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT
    )


def complete_saves(folder: Path) -> list[int]:
    marks = (folder / "checkpoints").glob("*/commit_success.txt")
    return sorted(int(m.parent.name) for m in marks if m.parent.name.isdigit())


def half_written(folder: Path, since: float) -> bool:
    """Whether a save begun after `since` (seconds of the epoch) is not complete."""
    for path in (folder / "checkpoints").glob("*tmp*"):
        try:
            if path.stat().st_mtime > since:
                return True
        except FileNotFoundError:
            continue  # it was complete a moment later
    return False


def steps_done(folder: Path) -> int:
    records = read_metrics(folder)
    return records[-1]["step"] if records else 0


def saved_beyond(folder: Path, step: int) -> bool:
    return complete_saves(folder)[-1:] > [step]


def wait_for(condition, process: subprocess.Popen, what: str) -> None:
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended (exit code {process.returncode}) before {what}")
        time.sleep(0.0005)


def resumed_from(log: Path) -> int | None:
    """The step that a process said it resumed from; None if it did not come to saying so."""
    for line in log.read_text().splitlines():
        if line.startswith("resuming after step "):
            return int(line.split()[-1])
        if line.startswith("there is no checkpoint to resume from"):
            return 0
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a run at random moments.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments/results/kill_test.csv"))
    args = parser.parse_args()
    rng = random.Random(args.seed)
    work = Path(tempfile.mkdtemp(prefix="kill_test_"))
    whole, run, cache = work / "whole", work / "run", work / "compiled"
    if start(whole, cache, work / "whole.log", every_steps=STEPS).wait():
        raise RuntimeError((work / "whole.log").read_text())

    rows, failures = [], []
    for kill in range(1, args.kills + 1):
        log = work / f"kill_{kill}.log"
        saved = complete_saves(run)
        before = saved[-1] if saved else 0
        aim = ("anywhere", "training", "saving", "training")[kill % 4]
        began = time.time()
        process = start(run, cache, log, EVERY_STEPS)
        if aim == "anywhere":
            time.sleep(rng.uniform(0.5, 12.0))
        else:
            wait_for(partial(saved_beyond, run, before), process, "it saved once")
            time.sleep(rng.uniform(0.0, 1.5))
            if aim == "saving":
                wait_for(partial(half_written, run, began), process, "it saved")
        process.kill()
        inside_save = half_written(run, began)
        process.wait()
        done, saved = steps_done(run), complete_saves(run)
        last = saved[-1] if saved else 0
        origin = resumed_from(log)
        if origin not in (None, before):
            failures.append(f"kill {kill}: resumed from {origin}, the last save was {before}")
        if done - last > 2 * EVERY_STEPS:
            failures.append(f"kill {kill}: {done - last} steps lost, saving every {EVERY_STEPS}")
        after_s = round(time.time() - began, 2)
        lost = max(done - last, 0)
        row = (kill, aim, after_s, int(inside_save), done, last, before, lost)
        rows.append(dict(zip(FIELDS, row, strict=True)))
        print(rows[-1], flush=True)

    if start(run, cache, work / "end.log", every_steps=STEPS).wait():
        raise RuntimeError((work / "end.log").read_text())
    ours, theirs = read_metrics(whole), read_metrics(run)
    for name in ("step", "loss", "grad_norm", "documents", "target_tokens"):
        if [r[name] for r in ours] != [r[name] for r in theirs]:
            failures.append(f"{name} differs from the run that nobody touched")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    inside = sum(row["inside_save"] for row in rows)
    print(f"{len(rows)} kills, {inside} inside a save; {len(theirs)} steps; failures: {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
