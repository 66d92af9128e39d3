"""Several processes as one run: start-up, and agreement on what every step does.

Every process plans for itself; plans are pure functions of the same data, so they must come out equal.
`Agreement` gathers a few words per process and step, so that a difference is an error on all of them,
and so that all of them stop at the same step.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DIGEST_WORDS = 4  # int32 words of a digest that travel; the word after them says "stop"
MESSAGE_BYTES = 2048  # of one process's refusal, as the others see it


@dataclasses.dataclass(frozen=True)
class ProcessConfig:
    """Which process of how many this is; a run of one process needs none of it."""

    processes: int = 1
    """How many processes the run has."""
    coordinator: str = ""
    """host:port of process 0, the same on every process."""
    process_id: int = 0
    """This process's number, from 0."""

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ValueError(
                f"--processes (={self.processes}) must be at least 1; leave it out for a run of one "
                "process"
            )
        if not 0 <= self.process_id < self.processes:
            raise ValueError(
                f"--process-id (={self.process_id}) must be from 0 to --processes - 1 "
                f"(={self.processes - 1}); give each process another of these numbers, or raise "
                "--processes"
            )
        if self.processes > 1 and ":" not in self.coordinator:
            raise ValueError(
                f"--processes (={self.processes}) above 1 needs --coordinator HOST:PORT, got "
                f"{self.coordinator!r}; give an address of process 0 that all reach, the same to all"
            )


def start_devices(config: ProcessConfig, mesh_devices: int, platform: str) -> None:
    """Choose the platform, give the CPU its virtual devices, join the other processes.

    To be called before anything touches a device. platform: "auto" for what JAX finds, or a name
    JAX knows ("cpu", "cuda").

    Raises:
        ValueError: the mesh's devices do not divide among the processes, or the platform is absent.
    """
    if mesh_devices % config.processes:
        raise ValueError(
            f"the mesh has {mesh_devices} devices, which --processes (={config.processes}) does not "
            "divide; change mesh.pp, mesh.dp or mesh.tp, or the number of processes"
        )
    if platform != "auto":
        jax.config.update("jax_platforms", platform)
    jax.config.update("jax_num_cpu_devices", mesh_devices // config.processes)
    if config.processes > 1:
        jax.distributed.initialize(config.coordinator, config.processes, config.process_id)
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # JAX asserts where a plugin is not installed
        raise ValueError(
            f"mesh.platform (={platform!r}) needs devices of that kind and JAX found none "
            f"({error or 'no plugin for it'}): install pip's extra cuda12 on a machine with GPUs, or "
            "use --mesh.platform cpu"
        ) from error


class PlanDisagreementError(RuntimeError):
    """Processes planned different work for the same step."""


class Agreement:
    """Exchanges, per step and process, a digest of the step's work and a wish to stop.

    `start` dispatches one small gather and returns a function that gives its outcome: True if any
    process wishes to stop. That function raises PlanDisagreementError, on every process, if digests
    differ. Every process calls both in the same order, from one thread.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._alone = jax.process_count() == 1
        self._devices = list(mesh.devices.flat)
        axes = tuple(mesh.axis_names)
        self._rows = NamedSharding(mesh, PartitionSpec(axes))
        self._gather = jax.jit(
            lambda words: words, out_shardings=NamedSharding(mesh, PartitionSpec())
        )

    def start(self, step: int, digests: Sequence[str] | None, stop: bool) -> Callable[[], bool]:
        """digests: of the step's plans; None if this process has none to offer (it failed)."""
        if self._alone:
            return lambda: stop
        sha = bytes(4 * DIGEST_WORDS)
        if digests is not None:
            sha = hashlib.sha256("\n".join(digests).encode()).digest()
        words = np.frombuffer(sha[: 4 * DIGEST_WORDS], np.int32)
        row = np.append(words, np.int32(stop))[None]
        shape = (len(self._devices), row.shape[1])
        gathered = self._gather(jax.make_array_from_callback(shape, self._rows, lambda index: row))
        return lambda: self._outcome(step, np.asarray(gathered.addressable_data(0)))

    def _outcome(self, step: int, rows: np.ndarray) -> bool:
        holders: dict[bytes, set[int]] = {}
        for device, row in zip(self._devices, rows, strict=True):
            holders.setdefault(row[:DIGEST_WORDS].tobytes(), set()).add(device.process_index)
        if len(holders) > 1:
            nothing = bytes(4 * DIGEST_WORDS)
            parties = "; ".join(
                f"process{'es' if len(group) > 1 else ''} {', '.join(map(str, sorted(group)))}: "
                f"{'failed to plan' if digest == nothing else digest.hex()}"
                for digest, group in sorted(holders.items(), key=lambda item: min(item[1]))
            )
            raise PlanDisagreementError(
                f"processes planned different work for step {step} ({parties}): they must read the "
                "same data with the same configuration and versions; compare both, then --resume"
            )
        return bool(rows[:, DIGEST_WORDS].any())


def together[T](action: Callable[[], T]) -> T:
    """Run `action` on every process; where it raises on any, raise on all.

    Without this, the processes that went on would wait for the one that failed. That one raises its
    own error; the others raise ValueError with its text.
    """
    if jax.process_count() == 1:
        return action()
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    text = np.zeros(MESSAGE_BYTES, np.uint8)
    if failure is not None:
        encoded = (str(failure) or type(failure).__name__).encode()[:MESSAGE_BYTES]
        text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    messages = multihost_utils.process_allgather(text)
    if failure is not None:
        raise failure
    for process, row in enumerate(messages):
        message = bytes(row).rstrip(b"\0").decode(errors="replace")
        if message:
            raise ValueError(f"process {process}: {message}")
    return result  # pyright: ignore[reportReturnType]


def from_first_process[T](action: Callable[[], T]) -> T:
    """What `action` returns on process 0, JSON values, on every process (floats to the bit, tuples as
    lists); its ValueError is raised on all."""
    alone = jax.process_count() == 1
    value = together(action if jax.process_index() == 0 else lambda: None)
    return value if alone else gathered(value)[0]  # pyright: ignore[reportReturnType]


def gathered[T](value: T) -> list[T]:
    """Every process's value, JSON values, in the order of processes. Collective."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    if jax.process_count() == 1:
        return [json.loads(text.tobytes())]
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(len(text))))
    row = np.zeros(int(sizes.max()), np.uint8)
    row[: len(text)] = text
    rows = np.asarray(multihost_utils.process_allgather(row), np.uint8)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def first_process(action: Callable[[], None]) -> None:
    """Run `action` on process 0 alone, before any process goes on; its ValueError is raised on all."""
    together(action if jax.process_index() == 0 else lambda: None)
