"""Checkpoints: asynchronous, atomic, checked end to end, independent of the mesh.

A checkpoint of step n is the folder `<folder>/<n>/` that Orbax writes under a temporary name and renames
when complete. It holds two items: `state` (parameters and optimizer, sharded arrays) and `run` (JSON: the
position in the data, the configuration, and one record per array with shape, dtype and two checksums).

The checksums are computed on the devices from the values that are saved and again from the values that
are restored, so they cover the whole way to the disk and back. They are sums of 32-bit words modulo 2^32,
one plain and one with an odd weight per position: integer sums do not depend on their order, hence not on
the mesh, and any single changed word changes both.
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

COMMIT_FILE = "commit_success.txt"
WEIGHT_STRIDE = 0x9E3779B2  # even, so that weight = stride * position + 1 is odd


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and how many checkpoints to keep."""

    every_steps: int = 50
    """Save after every so many steps; a final save is always made."""
    keep: int = 3
    """Complete checkpoints kept; older ones are deleted after a newer one is complete."""

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(
                f"checkpoint.every_steps (={self.every_steps}) must be at least 1; to save only at "
                "the end, give a number larger than training.steps"
            )
        if self.keep < 2:
            raise ValueError(
                f"checkpoint.keep (={self.keep}) must be at least 2, or a damaged checkpoint leaves "
                "nothing to fall back to"
            )


class CheckpointMismatchError(ValueError):
    """The checkpoint belongs to another architecture or optimizer than the run."""


class _DamagedError(Exception):
    """The checkpoint cannot be read back as it was written."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint read back: the step it was saved after, the state, the run's own record."""

    step: int
    state: Any
    data: dict[str, Any]
    config: dict[str, Any]


def array_names(tree: Any) -> list[str]:
    """Names of the tree's arrays, `params/layers/q` style, in flattening order."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def _checksums(leaves: list[jax.Array]) -> jax.Array:
    """Per array: plain sum, weighted sum, 1 if every value is finite. uint32 [arrays, 3]."""
    rows = []
    for leaf in leaves:
        finite = jnp.uint32(1)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            finite = jnp.all(jnp.isfinite(leaf)).astype(jnp.uint32)
        words = leaf
        if leaf.dtype != jnp.bool_:
            bits = min(leaf.dtype.itemsize * 8, 32)
            words = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{bits}"))
        words = words.astype(jnp.uint32)
        position = jnp.zeros(words.shape, jnp.uint32)
        for dim in range(words.ndim):
            stride = math.prod(words.shape[dim + 1 :]) & 0xFFFFFFFF
            position += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride)
        weight = position * np.uint32(WEIGHT_STRIDE) + np.uint32(1)
        plain = jnp.sum(words, dtype=jnp.uint32)
        rows.append(jnp.stack([plain, jnp.sum(words * weight, dtype=jnp.uint32), finite]))
    return jnp.stack(rows)


def _replicated(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return None


def _unreadable(error: Exception, item: str) -> str:
    """What a failed read of an item says to people: which file of the checkpoint, and why.

    Beside that, the libraries' texts print their own objects.
    """
    files = re.findall(rf'file "[^"]*/({item}/[^"]+)"', str(error))
    status = re.match(r"[A-Z_]+(?=: )", str(error))  # TensorStore's, such as NOT_FOUND
    why = "missing or changed"
    if isinstance(error, OSError) and error.strerror:
        why = error.strerror
    elif status:
        why = status[0].lower().replace("_", " ")
    which = f"its file {files[-1]}" if files else f"its folder {item}"
    return f"{which} cannot be read ({why})"


def _canonical(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _all_processes(ok: bool) -> bool:
    """True only if every process says so."""
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.asarray(ok))))


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint in a folder of checkpoints, ascending; none where there is no folder."""
    return [step for step in _numbered(folder) if (folder / str(step) / COMMIT_FILE).exists()]


def _numbered(folder: Path) -> list[int]:
    # Others are saves that a kill cut short, which hold a commit file for a moment, and what people put there.
    return sorted(int(entry.name) for entry in folder.glob("*") if entry.name.isdigit())


class Checkpointer:
    """Saves and restores one run's training state under `folder` (created if missing).

    Every process of the run makes one and calls `save`, `restore` and `close` in the same order.
    `say` receives one line for whatever a person should know (a fallback, a step put aside).
    """

    def __init__(self, folder: Path, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        self.folder = folder.absolute()
        self.config = config
        self._say = say
        self._digest = None
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax narrates every file otherwise
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for unfinished in self.folder.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished)  # of a save that a kill cut short: never read again
            complete = complete_steps(self.folder)
            for step in _numbered(self.folder):
                if step not in complete:
                    self._put_aside(step, "incomplete")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoint_folder")
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=config.keep, enable_async_checkpointing=True
            ),
        )

    def _put_aside(self, step: int, why: str) -> None:
        """Rename a step's folder so that neither this code nor Orbax takes it for a checkpoint."""
        target = self.folder / f"{why}_{step}"
        attempt = 1
        while target.exists():
            attempt += 1
            target = self.folder / f"{why}_{step}_{attempt}"
        os.rename(self.folder / str(step), target)
        self._say(f"checkpoint of step {step} is {why}: moved to {target}, not used")

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return complete_steps(self.folder)

    def _checksums_of(self, state: Any) -> np.ndarray:
        leaves = jax.tree.leaves(state)
        if self._digest is None:
            self._digest = jax.jit(_checksums, out_shardings=_replicated(leaves[0]))
        return np.asarray(self._digest(leaves))

    def save(self, step: int, state: Any, data: dict[str, Any], config: dict[str, Any]) -> float:
        """Start saving; returns the seconds for which it held up the caller.

        Blocks until an earlier save is complete (its error, if any, is raised here) and until the
        state's values exist. The caller may donate `state` to the next step right after.

        Raises:
            FloatingPointError: the state holds NaN or infinity; nothing is written.
        """
        started = time.perf_counter()
        names = array_names(state)
        sums = self._checksums_of(state)
        for name, row in zip(names, sums, strict=True):
            if not row[2]:
                raise FloatingPointError(f"{name} holds NaN or infinity after step {step}")
        arrays = {
            name: [list(leaf.shape), str(leaf.dtype), int(row[0]), int(row[1])]
            for name, leaf, row in zip(names, jax.tree.leaves(state), sums, strict=True)
        }
        body = {"step": step, "data": data, "config": config, "arrays": arrays}
        body = json.loads(_canonical(body))
        record = {"body": body, "sha256": hashlib.sha256(_canonical(body).encode()).hexdigest()}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]
                run=ocp.args.JsonSave(record),  # pyright: ignore[reportCallIssue]
            ),
            force=True,
        )
        return time.perf_counter() - started

    def _read_record(self, step: int) -> dict[str, Any]:
        try:
            record = self._manager.restore(
                step,
                args=ocp.args.Composite(run=ocp.args.JsonRestore()),  # pyright: ignore[reportCallIssue]
            )["run"]
            body = record["body"]
            digest = hashlib.sha256(_canonical(body).encode()).hexdigest()
        except (PermissionError, MemoryError):
            raise
        except Exception as error:
            raise _DamagedError(_unreadable(error, "run")) from error
        if digest != record["sha256"]:
            raise _DamagedError("its record does not match its own digest")
        return body

    def _check_architecture(self, step: int, saved: dict[str, list[Any]], abstract: Any) -> None:
        expected = dict(zip(array_names(abstract), jax.tree.leaves(abstract), strict=True))
        cure = (
            "resume with the configuration the run began with (config.json in the run folder), "
            "or start a new run folder"
        )
        where = f"checkpoint of step {step} in {self.folder}"
        for name, leaf in expected.items():
            if name not in saved:
                raise CheckpointMismatchError(
                    f"{where} has no array {name}, which this run's state of shape "
                    f"{tuple(leaf.shape)} needs; {cure}"
                )
            shape, dtype = tuple(saved[name][0]), saved[name][1]
            if shape != tuple(leaf.shape):
                raise CheckpointMismatchError(
                    f"{where} holds {name} of shape {shape}, this run's is {tuple(leaf.shape)}; "
                    f"{cure}"
                )
            if dtype != str(leaf.dtype):
                raise CheckpointMismatchError(
                    f"{where} holds {name} in {dtype}, this run's is in {leaf.dtype}; {cure}"
                )
        for name in saved:
            if name not in expected:
                raise CheckpointMismatchError(
                    f"{where} holds {name}, which this run's state does not have; {cure}"
                )

    def _read_state(self, step: int, saved: dict[str, list[Any]], abstract: Any) -> Any:
        try:
            state = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract)  # pyright: ignore[reportCallIssue]
                ),
            )["state"]
        except (PermissionError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            raise _DamagedError(_unreadable(error, "state")) from error
        for name, row in zip(array_names(state), self._checksums_of(state), strict=True):
            if [int(row[0]), int(row[1])] != saved[name][2:]:
                raise _DamagedError(f"{name} does not match the checksum saved with it")
        return state

    def restore(
        self, abstract: Any, accept: Callable[[dict[str, Any]], None] = lambda config: None
    ) -> Restored | None:
        """Read the newest checkpoint that is whole, onto the shardings of `abstract`.

        abstract: the state's tree with `jax.ShapeDtypeStruct` leaves that carry shardings. accept:
        raises ValueError for a saved configuration that the run must not go on from. Returns None
        when there is no checkpoint. A damaged one is put aside (renamed, not deleted), said so, and
        the one before it is tried.

        Raises:
            ValueError: what `accept` raised.
            CheckpointMismatchError: an array's name, shape or dtype differs from the run's.
            ValueError: there are checkpoints and all of them are damaged.
        """
        tried = []
        for step in reversed(self.steps()):
            body, state, damage = {}, None, ""
            try:
                body = self._read_record(step)
            except _DamagedError as error:
                damage = str(error)
            readable = _all_processes(not damage)
            if readable:
                accept(body["config"])
                self._check_architecture(step, body["arrays"], abstract)
                try:
                    state = self._read_state(step, body["arrays"], abstract)
                except _DamagedError as error:
                    damage = str(error)
                readable = _all_processes(not damage)
            if readable:
                return Restored(body["step"], state, body["data"], body["config"])
            tried.append(f"step {step}: {damage or 'damaged as seen from another process'}")
            self._say(f"checkpoint of {tried[-1]}; falling back to the one before it")
            if jax.process_index() == 0:
                self._put_aside(step, "damaged")
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices(f"checkpoint_{step}_put_aside")
            self._manager.reload()
        if tried:
            raise ValueError(
                f"no checkpoint in {self.folder} can be read back whole ({'; '.join(tried)}); bring "
                "back an intact copy of one, or start a new run folder"
            )
        return None

    def wait(self) -> None:
        """Block until the save in flight is complete; raises its error."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def close(self) -> None:
        """Wait for the save in flight, raise its error, release Orbax's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()
