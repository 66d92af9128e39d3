"""What a run leaves open, settled before launch the same way in every process: speeds from a file, which
profile is meant, a tolerance, and of its transport what it began with. config.json records all of it."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import jax

from cad_jax.attention_config import PLANNED_STRATEGIES
from cad_jax.config import CONFIG_FILE, RunConfig, load_config
from cad_jax.data import DocumentBatches
from cad_jax.processes import from_first_process, together
from cad_jax.resume import rounding_changes
from cad_jax.sharding.cost import DEVICES, find_device
from cad_jax.sharding.speeds import read_speeds
from cad_jax.simulation.named_costs import profile_path
from cad_jax.tolerance import predicted_tolerance, sample_count, with_tolerance

# Of attention, what a transport may be kept without.
_NO_CHOICE = ("tolerance", "transport", "kernel")


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


def with_profile_digest(config: RunConfig) -> RunConfig:
    """The run with a digest of its profile's content, where it names a file: one that was measured again
    gives other plans. Collective.

    Raises:
        ValueError: the file cannot be read, or is another than that of process 0.
    """
    profile = config.attention.profile
    if profile is None or profile == "analytic":
        return config
    first = from_first_process(lambda: _digest(profile))

    def check() -> None:
        own = _digest(profile)
        if own != first:
            raise ValueError(
                f"attention.profile (={profile}) must be the same file for every process, and this one's "
                f"content (sha256 {own}) is not that of process 0 ({first}); copy that one"
            )

    together(check)
    attention = dataclasses.replace(config.attention, profile_digest=first)
    return dataclasses.replace(config, attention=attention)


def _digest(profile: str) -> str:
    path = profile_path(profile, "attention.profile")
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ValueError(
            f"attention.profile (={profile}) must be a file that can be read ({error}); name one that "
            "`cad-jax profile` wrote, or one that ships"
        ) from error


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
    configuration, if mesh and plans' settings are the same, tolerance aside. None: it is to be chosen.
    Collective.

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
        of_choice = dataclasses.replace(
            config.attention, **{name: getattr(begun.attention, name) for name in _NO_CHOICE}
        )
        changes = rounding_changes(
            dataclasses.replace(config, attention=of_choice), begun.to_dict()
        )
        if not changes:
            return before
        if config.attention.strategy in PLANNED_STRATEGIES:
            say(
                f"choosing the transport anew: the run used {before}, and goes on with "
                f"{', '.join(changes)}; --attention.transport fixes it"
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
