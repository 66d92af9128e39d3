"""Text files line by line: what is yielded, and that nothing is cut without a word."""

import pytest

from cad_jax.sharding.text_lines import MAX_LINE_CHARACTERS, numbered_lines


def lines(path, **bounds):
    return list(numbered_lines(path, "numbers", "give fewer", **bounds))


def test_lines_that_are_not_blank_with_their_numbers(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbf one \r\n\n\t\ntwo\xc3\xa9")
    assert lines(file) == [(1, "one"), (4, "two\u00e9")]


def test_lines_have_bounds(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("1\n\n2\n")
    assert lines(file, max_lines=3) == [(1, "1"), (3, "2")]
    with pytest.raises(ValueError, match=r"a.txt must have at most 2 lines, .* more: give fewer"):
        lines(file, max_lines=2)
    most = "7" * MAX_LINE_CHARACTERS
    for end in ("", "\n"):
        file.write_text(f"1\n{most}{end}")
        assert lines(file) == [(1, "1"), (2, most)]
    # A reader that took a part of this line would take 1 for a whole number.
    file.write_text(f"1\n{' ' * (MAX_LINE_CHARACTERS - 1)}12\n")
    with pytest.raises(ValueError, match="a.txt, line 2: a line must have at most 4096 .* fewer"):
        lines(file)


def test_what_is_no_text_file(tmp_path):
    (tmp_path / "latin").write_bytes(b"1\n\xe9\n")
    for path in (tmp_path, tmp_path / "none", tmp_path / "latin"):
        with pytest.raises(ValueError, match=f"numbers cannot be read from {path} .*: give fewer"):
            lines(path)
    with pytest.raises(ValueError, match="zero, line 1: a line must have at most"):
        lines("/dev/zero")
