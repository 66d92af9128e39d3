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
        start = self.prepare()
        clock(start, 1)
        self.repeats = max(1, round(SAMPLE_S / max(clock(start, 1), 1e-6)))


def clock() -> Clock:
    """What times so many runs, in seconds of one: CPU seconds on CPU, seconds elsewhere."""
    read = time.process_time if jax.default_backend() == "cpu" else time.perf_counter

    def run(start: Callable[[], object], repeats: int) -> float:
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
    """To be called before XLA counts the cores for its threads; where the system allows."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def hardware() -> str:
    """The default device in words."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    info = Path("/proc/cpuinfo")
    names = (
        [x for x in info.read_text().splitlines() if x.startswith("model name")]
        if info.exists()
        else []
    )
    return f"1 core of {names[0].split(':')[1].strip() if names else platform.processor()}"
