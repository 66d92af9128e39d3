"""How fast each server of a mesh is beside the others: a short measurement of attention on every device,
gathered over all processes.

What makes servers unlike lasts for a run, such as another kind of GPU or one that is throttled; a device is
measured with nothing beside it on its process's other devices.
"""

import datetime
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from cad_jax.config import RunConfig
from cad_jax.processes import gathered
from cad_jax.profiler import Kernels, attention_work, kernel_names, task_batch
from cad_jax.timing import Work, hardware, measure

ROWS = {"cpu": 1024, "gpu": 16384}  # of a causal document: enough to fill a device
ROUNDS = 11
ALIKE = 0.03  # a spread below this is noise, or not worth telling a planner


class ServerSpeeds(NamedTuple):
    """speeds: relative to the median server, float64 [S]; every process holds the same. seconds: of each device's
    forward and backward, float64 [S, tp]. what: was measured, in words."""

    speeds: np.ndarray
    seconds: np.ndarray
    what: str

    @property
    def alike(self) -> bool:
        return float(np.ptp(self.speeds)) < ALIKE

    def save(self, path: Path) -> None:
        """As `sharding.speeds.read_speeds` reads it."""
        lines = [f"# measured {self.what}", *(f"{speed:.3f}" for speed in self.speeds)]
        path.write_text("\n".join(lines) + "\n")


def measure_speeds(
    config: RunConfig, mesh: Mesh, rounds: int = ROUNDS, done: Callable[[], None] = lambda: None
) -> ServerSpeeds:
    """Speeds of the mesh's servers in core attention as the run computes it: its heads on one device, dtype
    and kernel. Collective. A server is as slow as the slowest of its tp devices.

    done: called after each sample of this process.

    Raises:
        ValueError: a kernel that refuses.
    """
    heads, dtype = config.model.head_shape(config.mesh.tp), config.model.dtype
    kernel = config.attention.kernel
    names = kernel_names(kernel, heads, dtype)
    rows = ROWS["cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"]
    k_lo, k_hi, key_rows = task_batch(rows, rows, 1)
    kernels = Kernels.of(*names)
    mine = [
        (number, device)
        for number, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    works = [
        [_on(device, w) for w in attention_work(k_lo, k_hi, key_rows, heads, dtype, kernels)]
        for _, device in mine
    ]
    measure([work for pair in works for work in pair], rounds, done)
    own = [
        (number, sum(work.seconds for work in pair))
        for (number, _), pair in zip(mine, works, strict=True)
    ]
    seconds = np.zeros(mesh.size)
    for of_process in gathered(own):
        for number, device_s in of_process:
            seconds[number] = device_s
    seconds = seconds.reshape(config.mesh.servers, config.mesh.tp)
    speed = 1.0 / seconds.max(axis=1)
    kinds = sorted({device.device_kind for device in mesh.devices.flat})
    devices = hardware() if kinds == [jax.devices()[0].device_kind] else ", ".join(kinds)
    what = (
        f"{datetime.date.today()} on {devices}: {names} attention of {rows} tokens, {dtype}, medians of "
        f"{rounds} interleaved rounds; servers of mesh pp {config.mesh.pp}, dp {config.mesh.dp}, in rank order"
    )
    return ServerSpeeds(speed / np.median(speed), seconds, what)


def _on(device: Any, work: Work) -> Work:
    """The same on a device of one's choice."""

    def within(action: Callable[[], object]) -> object:
        with jax.default_device(device):
            return action()

    def prepare() -> Callable[[], object]:
        with jax.default_device(device):
            return partial(within, work.prepare())

    return Work(prepare, work.parts)
