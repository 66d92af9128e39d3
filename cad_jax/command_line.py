"""What commands share: files are checked before the work that fills them, errors are one message and an exit code.
Works without jax.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

USER_ERROR = 2  # exit code


def check_number(option: str, value: float | None, least: float, most: float, cure: str) -> None:
    """Raises ValueError for a value that is given and lies outside [least, most], as nan does."""
    if value is not None and not least <= value <= most:
        low, high = (f"{x:g}" if isinstance(x, float) else f"{x}" for x in (least, most))
        raise ValueError(f"{option} must be at least {low} and at most {high}, got {value}: {cure}")


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path | None] = ()) -> None:
    """Refuses, before the work, files that could not be written after it.

    outputs: by the option that names each; None: not asked for. inputs: files that the command or its recipe
    reads, looked at only where an output is there already.

    Raises:
        ValueError: a folder is missing, the file is a folder or may not be written, a plot is no PNG, or one
            file has two purposes.
    """
    taken: dict[str, str] = {}
    if any(path is not None and os.path.exists(path) for path in outputs.values()):
        read = (os.path.realpath(path) for path in inputs if path is not None)
        taken = dict.fromkeys(read, "the file that is read")
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
    """Where to write what `path` is to hold, whole or not at all: until the end of the `with` the path has what it
    had, and has it still where an error ends it. ValueError names the path (an error of a full disk does not)."""
    target = Path(os.path.realpath(path))
    try:
        if _is_written_in_place(path, target):
            yield path
            return
        with tempfile.TemporaryDirectory(prefix=".cad-jax-", dir=target.parent) as folder:
            written = Path(folder) / target.name
            yield written
            if target.exists():
                shutil.copymode(target, written)
            written.replace(target)
    except OSError as error:
        raise ValueError(_cannot_write(path, error)) from error


def _is_written_in_place(path: Path, target: Path) -> bool:
    """Devices, also by links of the system such as /dev/stdout, and files in a folder that takes no others."""
    of_system = path.is_symlink() and path.absolute().parts[1] in ("dev", "proc")
    return of_system or _is_device(path) or not os.access(target.parent, os.W_OK)


def run_command(
    command: str,
    work: Callable[[], object],
    exit_codes: Mapping[type[Exception], int] = MappingProxyType({}),
) -> int:
    """The exit code of a command's work; what stops it is one message. exit_codes: of errors of its own."""
    code = USER_ERROR
    try:
        work()
    except tuple(exit_codes) as error:
        message = str(error)
        code = next(exit_codes[kind] for kind in exit_codes if isinstance(error, kind))
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
    return code
