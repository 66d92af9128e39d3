"""What commands share: files are checked before the work that fills them, errors are one message and an exit code.
Works without jax.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

USER_ERROR = 2  # exit code
MAX_LINES = 2**26  # of a file: their numbers take half a gigabyte
MAX_LINE_CHARACTERS = 80


def check_number(option: str, value: float | None, least: float, most: float, cure: str) -> None:
    """Raises ValueError for a value that is given and lies outside [least, most], as nan does."""
    if value is not None and not least <= value <= most:
        low, high = (f"{x:g}" if isinstance(x, float) else f"{x}" for x in (least, most))
        raise ValueError(f"{option} must be at least {low} and at most {high}, got {value}: {cure}")


def numbered_lines(path: str | Path, what: str) -> Iterator[tuple[int, str]]:
    """Lines of a text file that are not blank, stripped, each with its number from 1 on.

    No more than MAX_LINE_CHARACTERS are read at once: whoever refuses the first line that is none of its kind
    never reads much of a file that is not text. what: the file holds. ValueError where it cannot be read, or has
    more than MAX_LINES.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", errors="replace") as file:
            number = 0
            while line := file.readline(MAX_LINE_CHARACTERS):
                number += 1
                if number > MAX_LINES:
                    raise ValueError(
                        f"{path} must have at most {MAX_LINES} lines, and has more: give a part of them"
                    )
                if text := line.strip():
                    yield number, text
    except OSError as error:
        raise ValueError(
            f"cannot read {what} from {path} ({error}): pass a text file with one number a line"
        ) from error


def check_outputs(outputs: Mapping[str, Path | None], inputs: Sequence[Path | None] = ()) -> None:
    """Refuses, before the work, files that could not be written after it.

    outputs: by the option that names each; None: not asked for. inputs: files that the command reads.

    Raises:
        ValueError: a folder is missing, the file is a folder or may not be written, a plot is no PNG, or one
            file has two purposes.
    """
    taken = {os.path.realpath(path): "the file that is read" for path in inputs if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        if option == "--plot" and path.suffix.lower() != ".png":
            raise ValueError(f"--plot (={path}) must name a file that ends in .png: add that")
        place = os.path.realpath(path)
        if place in taken and not _is_device(path):
            raise ValueError(
                f"{option} (={path}) must name a file of its own, and is {taken[place]} as well: "
                "name another file"
            )
        taken[place] = option
        _check_output(path)


def _check_output(path: Path) -> None:
    try:
        if not path.parent.is_dir():
            raise ValueError(f"cannot write {path}: make the folder {path.parent} first")
        if _is_device(path):
            return
        existed = path.exists()
        with path.open("ab"):  # permissions, file systems and quotas are too many to ask for
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ValueError(_cannot_write(path, error)) from error


def _is_device(path: Path) -> bool:
    """A pipe, a terminal and their like: opening one may have effects."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _cannot_write(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error.strerror or error}): name another file"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """For the one statement that writes a file: nothing half-written stays, and ValueError names the path
    (an error of a full disk does not)."""
    try:
        yield path
    except BaseException as error:
        if path.is_file() and not path.is_symlink():
            path.unlink()
        if isinstance(error, OSError):
            raise ValueError(_cannot_write(path, error)) from error
        raise


def run_command(command: str, work: Callable[[], object]) -> int:
    """The exit code of a command's work; what stops it is one message."""
    try:
        work()
    except MemoryError as error:  # what was free when the work began is not any more
        message = (
            f"the memory does not hold this ({str(error) or 'out of memory'}): use fewer ranks, tokens or "
            "documents, or a larger machine"
        )
    except ValueError as error:
        message = str(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        place = error.filename or "a file"
        message = f"{place} cannot be used ({error.strerror or error}): name another file"
    else:
        return 0
    print(f"cad-jax {command}: {message}", file=sys.stderr)
    return USER_ERROR
