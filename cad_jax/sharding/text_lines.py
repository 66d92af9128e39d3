"""Text files that people write or pass on, line by line and never more of them than the reader bargained for."""

from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 2**26  # their numbers take half a gigabyte
MAX_LINE_CHARACTERS = 4096


def numbered_lines(
    path: str | Path, what: str, cure: str, max_lines: int = MAX_LINES
) -> Iterator[tuple[int, str]]:
    """Lines of a UTF-8 text file that are not blank, stripped, each with its number from 1 on.

    what: the file holds, and cure: what to do about one that cannot be used, for messages.

    Raises:
        ValueError: the file cannot be read, has more lines, or a line of more than MAX_LINE_CHARACTERS: little is
            read of one that is not text, or has no end.
    """
    try:
        with Path(path).open(encoding="utf-8-sig") as file:
            number = 0
            while line := file.readline(MAX_LINE_CHARACTERS + 1):
                number += 1
                if number > max_lines:
                    raise ValueError(
                        f"{path} must have at most {max_lines} lines, and has more: {cure}"
                    )
                if len(line.removesuffix("\n")) > MAX_LINE_CHARACTERS:
                    raise ValueError(
                        f"{path}, line {number}: a line must have at most {MAX_LINE_CHARACTERS} characters, "
                        f"and has more: {cure}"
                    )
                if text := line.strip():
                    yield number, text
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} cannot be read from {path} ({error}): {cure}") from error
