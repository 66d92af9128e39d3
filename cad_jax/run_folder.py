"""The folder of one run, and who may write into it.

It holds config.json, metrics.jsonl, tensorboard/, checkpoints/, loss.png, plan.png and lock.
"""

import fcntl
from pathlib import Path
from typing import IO

from cad_jax.checkpoint import complete_steps
from cad_jax.config import CONFIG_FILE
from cad_jax.metrics import EVENTS, METRICS_FILE

CHECKPOINTS = "checkpoints"
LOCK_FILE = "lock"
PLOTS = LOSS_PLOT, PLAN_PLOT = "loss.png", "plan.png"


def check_folder(folder: Path, resume: bool) -> None:
    """Refuse to write over another run, or over files that no run left.

    Raises:
        ValueError: the folder holds a run and this one does not resume it, or files of others that a run would
            write over.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"the run folder {folder} must be a folder, and is a file; name another")
    if not resume and _has_results(folder):
        raise ValueError(
            f"the run folder {folder} holds a run already, and a new run never writes over one; "
            "add --resume to continue it, or name another with --folder"
        )
    written = CONFIG_FILE, METRICS_FILE, EVENTS, CHECKPOINTS, *PLOTS
    lock = folder / LOCK_FILE
    of_run = lock.is_file() and lock.stat().st_size == 0  # a run's own lock holds nothing
    if lock.exists() and not of_run:
        written = *written, LOCK_FILE
    others = [name for name in written if (folder / name).exists()]
    if others and not of_run and not _has_results(folder):
        raise ValueError(
            f"the run folder {folder} holds {', '.join(others)}, which no run of cad-jax left there, and a "
            "run would write over; name another with --folder"
        )


def _has_results(folder: Path) -> bool:
    """Whether the folder holds a step's metrics or anything of a checkpoint."""
    metrics, checkpoints = folder / METRICS_FILE, folder / CHECKPOINTS
    written = metrics.exists() and metrics.stat().st_size > 0
    return written or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def open_folder(folder: Path, resume: bool) -> IO[str]:
    """Make the folder and lock it for this process. Close the result to unlock.

    The lock ends with the process that holds it, however it ends.

    Raises:
        ValueError: the folder holds a run (without `resume`), is in use, or cannot be written.
    """
    check_folder(folder, resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise ValueError(
            f"the run folder {folder} cannot be written ({error.strerror}); name another with "
            "--folder"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ValueError(
            f"the run folder {folder} is in use by a run that is still going; wait for it, stop it, "
            "or name another with --folder"
        ) from error
    return lock


def begins_anew(folder: Path) -> bool:
    """Whether a run that is to go on has no complete checkpoint to go on from.

    Raises:
        ValueError: the folder holds damaged checkpoints and no whole one.
    """
    checkpoints = folder / CHECKPOINTS
    if complete_steps(checkpoints):
        return False
    damaged = sorted(entry.name for entry in checkpoints.glob("damaged_*"))
    if damaged:
        raise ValueError(
            f"{checkpoints} has no whole checkpoint to resume from, only "
            f"{', '.join(damaged)}: put a backup in place, or start anew in another --folder"
        )
    return True
