"""What a run leaves open, settled before launch the same way in every process: speeds from a file, a
tolerance, and of its transport what it began with. config.json records all three."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax

from cad_jax.attention_config import PLANNED_STRATEGIES
from cad_jax.config import CONFIG_FILE, MeshConfig, RunConfig, load_config
from cad_jax.data import DocumentBatches
from cad_jax.processes import from_first_process
from cad_jax.sharding.cost import DEVICES, find_device
from cad_jax.sharding.speeds import read_speeds
from cad_jax.tolerance import predicted_tolerance, sample_count, with_tolerance


def with_speeds(config: RunConfig) -> RunConfig:
    """The run with the speeds of its file, where it names one. Its `check` knows whether they fit.

    Raises:
        ValueError: the file cannot be read.
    """
    if config.attention.speeds is None:
        return config
    return _with_speeds(config, read_speeds(config.attention.speeds))


def with_first_speeds(config: RunConfig) -> RunConfig:
    """The same with the file that process 0 reads. Collective."""
    path = config.attention.speeds
    if path is None:
        return config
    speeds = from_first_process(lambda: read_speeds(path))
    return _with_speeds(config, tuple(speeds))


def _with_speeds(config: RunConfig, speeds: tuple[float, ...]) -> RunConfig:
    attention = dataclasses.replace(config.attention, server_speeds=speeds)
    return dataclasses.replace(config, attention=attention)


def settled_tolerance(
    config: RunConfig, data: DocumentBatches, folder: Path, resume: bool, say: Callable[[str], None]
) -> RunConfig:
    """The run with a tolerance: its own; where it leaves that open, the one that it began with; else the one
    of fewest predicted seconds for its first documents. Collective; the same on every process.

    Raises:
        ValueError: the folder's configuration cannot be read.
    """
    if config.attention.tolerance is not None:
        return config

    def chosen() -> float:
        begun = _begun(folder, resume)
        if begun is not None and begun.attention.tolerance is not None:
            return begun.attention.tolerance
        count = sample_count(config)
        samples = data.sample_nano_lengths(2 * count)[count:]  # at first packing holds none back
        device = find_device(jax.devices()[0].device_kind) or DEVICES["h200"]
        return predicted_tolerance(
            config, samples, data.max_document_tokens, device=device, say=say
        )

    return with_tolerance(config, from_first_process(chosen))


def kept_transport(
    config: RunConfig, folder: Path, resume: bool, say: Callable[[str], None]
) -> str | None:
    """The transport that a resumed run keeps where it leaves the choice to auto: that of its folder's
    configuration, if the mesh is the same. None: it is to be chosen. Collective.

    Raises:
        ValueError: the folder's configuration cannot be read.
    """
    if config.attention.asked_transport != "auto" or not resume:
        return None

    def kept() -> str | None:
        begun = _begun(folder, resume)
        if begun is None or begun.attention.asked_transport == "auto":
            return None
        before = begun.attention.asked_transport
        if _shape(begun.mesh) == _shape(config.mesh):
            return before
        if config.attention.strategy in PLANNED_STRATEGIES:
            say(
                f"choosing the transport anew: the run used {before} on mesh {_named(begun.mesh)}, and "
                f"goes on on {_named(config.mesh)}; --attention.transport fixes it"
            )
        return None

    return from_first_process(kept)


def with_transport(config: RunConfig, transport: str | None) -> RunConfig:
    """The run with the transport that auto came to; None where nothing is planned."""
    if config.attention.asked_transport != "auto" or transport is None:
        return config
    attention = dataclasses.replace(config.attention, transport=transport)  # pyright: ignore
    return dataclasses.replace(config, attention=attention)


def _begun(folder: Path, resume: bool) -> RunConfig | None:
    return load_config(folder) if resume and (folder / CONFIG_FILE).exists() else None


def _shape(mesh: MeshConfig) -> MeshConfig:
    return dataclasses.replace(mesh, platform="auto")


def _named(mesh: MeshConfig) -> str:
    parts = (f"{axis} {getattr(mesh, axis)}" for axis in ("pp", "dp", "tp", "virtual_stages"))
    return f"{', '.join(parts)}, tp splits {mesh.tp_splits}"
