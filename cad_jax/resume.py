"""What a resumed run may change of the configuration its checkpoint was written with, and what follows."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from cad_jax.attention_config import AttentionConfig
from cad_jax.config import RunConfig

# What decides the course of training. Data is checked by content, and the number of steps may differ.
_FIXED = (
    "model",
    "optimizer",
    "training.tokens_per_microbatch",
    "training.microbatches",
    "attention.placement",
)
# What decides who computes what of the same step: other sums of the same numbers, in another order.
_ROUNDING = ("mesh", "attention")
_NO_ROUNDING = ("attention.speeds",)  # what they hold is in server_speeds
# "auto" says nothing of what the run came to: of a platform, and of a transport before it was recorded.
_OPEN = ("mesh.platform", "attention.transport")


def check_resume(config: RunConfig, saved: dict[str, Any]) -> None:
    """Refuse to continue a run under settings that would make it another run.

    saved: the dict form of the configuration that wrote the checkpoint.

    Raises:
        ValueError: all fields that differ, both values of each, the cure.
    """
    found = [
        f"{name}={old!r} and this run has {new!r}"
        for name, old, new in _differences(config, saved, _FIXED)
    ]
    if found:
        raise ValueError(
            f"the checkpoint was written with {'; with '.join(found)}: a resumed run must train the "
            f"same model on the same tokens the same way; set {'it' if len(found) == 1 else 'them'} "
            "back, or start a new run folder"
        )


def rounding_changes(config: RunConfig, saved: dict[str, Any]) -> list[str]:
    """Fields, with both values, by which the run goes on as it would have but for rounding, and not bit
    for bit: the mesh, and what plans follow from. Both configurations with everything settled."""
    return [
        f"{name} {old!r} -> {new!r}"
        for name, old, new in _differences(config, saved, _ROUNDING)
        if name not in _NO_ROUNDING and not (name in _OPEN and "auto" in (old, new))
    ]


def _differences(
    config: RunConfig, saved: dict[str, Any], paths: Sequence[str]
) -> Iterator[tuple[str, Any, Any]]:
    """(field, value in saved, value now) of all that differ. What an earlier version did not write is
    as it is by default."""
    current = config.to_dict()
    saved = saved | {
        "attention": dataclasses.asdict(AttentionConfig()) | saved.get("attention", {})
    }

    def compare(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(old, dict) and isinstance(new, dict):
            for key in {**old, **new}:
                yield from compare(f"{name}.{key}", old.get(key), new.get(key))
        elif old != new:
            yield name, old, new

    for path in paths:
        old, new = saved, current
        for part in path.split("."):
            old, new = old.get(part, {}), new[part]
        yield from compare(path, old, new)
