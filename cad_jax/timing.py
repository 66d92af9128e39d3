"""Times many pieces of work on the default device in turn, round after round, so that a drift of the
machine meets them alike; medians count.

On CPU a device is one core: the process should be pinned to one (`pin_to_one_core`), and CPU seconds
are counted, which other processes disturb least. Elsewhere seconds pass until the result is there.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

SAMPLE_S = 0.005  # a sample repeats work that is shorter

Clock = Callable[[Callable[[], object], int], float]


@dataclass
class Work:
    """Something to time. prepare(): puts the operands on the device and returns what starts the work on
    them and returns arrays to wait for; operands do not outlive a sample. parts: what the seconds are
    divided by.
    """

    prepare: Callable[[], Callable[[], object]]
    parts: float
    samples: list[float] = field(default_factory=list)
    repeats: int = 1

    @property
    def seconds(self) -> float:
        """Median of the samples, of one part."""
        return float(np.median(self.samples)) / self.parts

    def sample(self, clock: Clock) -> None:
        self.samples.append(clock(self.prepare(), self.repeats))

    def warm_up(self, clock: Clock) -> None:
        """Compiles, and repeats short work so that a sample takes SAMPLE_S."""
        self.repeats = max(1, round(SAMPLE_S / max(clock(self.prepare(), 1), 1e-6)))


def clock() -> Clock:
    """What times so many runs, in seconds of one: CPU seconds on CPU, seconds elsewhere."""
    read = time.process_time if jax.default_backend() == "cpu" else time.perf_counter

    def run(start: Callable[[], object], repeats: int) -> float:
        jax.block_until_ready(start())  # operands still on their way to the device are not timed
        begin, done = read(), None
        for _ in range(repeats):
            done = start()
        jax.block_until_ready(done)
        return (read() - begin) / repeats

    return run


def measure(works: Iterable[Work], rounds: int, done: Callable[[], None]) -> None:
    """Times all works in turn, `rounds` times; calls `done` after each, and after each warm-up."""
    works, timed = list(works), clock()
    for work in works:
        work.warm_up(timed)
        done()
    for _ in range(rounds):
        for work in works:
            work.sample(timed)
            done()


def pin_to_one_core() -> None:
    """Pins this process where the default device is a core, if the system allows. To be called before
    the backend starts: XLA counts the cores for its threads then.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    if jax.default_backend() != "cpu":
        os.sched_setaffinity(0, cores)


def processor_name() -> str:
    """Of the host, as its system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def hardware() -> str:
    """The default device in words."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return f"1 core of {processor_name()}"
