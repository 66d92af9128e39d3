"""Relative speeds of servers, where they are not alike: a file of one number a line."""

import math
from collections.abc import Sequence
from pathlib import Path

from cad_jax.sharding.text_lines import numbered_lines

MAX_RATIO = 1000  # planning rounds speeds to a thousandth of their mean
MAX_LINES = 2**22  # no pool has so many servers
CURE = "pass a text file with one relative speed a line, as `cad-jax speeds` writes it"


def read_speeds(path: str | Path) -> tuple[float, ...]:
    """Speeds [S] in any unit, server after server; blank lines and those that begin with # are skipped.

    ValueError names file and line where a line is anything but a positive finite number, or what `numbered_lines`
    refuses.
    """
    speeds = []
    for number, text in numbered_lines(path, "speeds of servers", CURE, MAX_LINES):
        if text.startswith("#"):
            continue
        try:
            speed = float(text)
        except ValueError:
            speed = math.nan
        if not _is_speed(speed):
            raise ValueError(
                f"{path}, line {number}: a server's relative speed is a positive finite number, 1 "
                f"where all are alike, got {text[:40]!r}: correct the line"
            )
        speeds.append(speed)
    return tuple(speeds)


def check_speeds(speeds: Sequence[float], servers: int, source: str) -> None:
    """Raises ValueError unless there is one positive finite number for each server, none far from the others. source: where they
    come from, for the message."""
    if len(speeds) != servers:
        raise ValueError(
            f"{source} must hold one relative speed for each of the mesh's {servers} servers (pp x "
            f"dp, in rank order), got {len(speeds)}: measure them again with `cad-jax speeds`, or leave "
            "speeds out where servers are alike"
        )
    wrong = [speed for speed in speeds if not _is_speed(speed)]
    if wrong:
        raise ValueError(
            f"{source} must hold positive finite numbers, got {wrong[0]}: use 1 for a server like "
            "the others"
        )
    if max(speeds) > MAX_RATIO * min(speeds):
        raise ValueError(
            f"{source} must hold speeds of which the fastest is at most {MAX_RATIO} times the slowest, got {max(speeds)} "
            f"and {min(speeds)}: leave a server out of the mesh that is so slow"
        )


def _is_speed(value: float) -> bool:
    return math.isfinite(value) and value > 0
