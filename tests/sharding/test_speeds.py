"""Speeds of servers from a file: what is read, what is refused."""

import pytest

from cad_jax.sharding import speeds
from cad_jax.sharding.speeds import check_speeds, read_speeds


def test_numbers_a_line_comments_and_blank_lines(tmp_path):
    file = tmp_path / "speeds.txt"
    file.write_text("\ufeff# measured\n1.25\n\n 0.5 \n1e-1\n3\n")
    assert read_speeds(file) == (1.25, 0.5, 0.1, 3.0)


@pytest.mark.parametrize("line", ["fast", "0", "-1", "nan", "inf", "1,5", "1 2"])
def test_anything_else_is_refused_with_its_line(tmp_path, line):
    file = tmp_path / "speeds.txt"
    file.write_text(f"1.0\n{line}\n")
    with pytest.raises(ValueError, match=r"speeds.txt, line 2: .* positive finite .*correct the"):
        read_speeds(file)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot be read from .*none.* pass a text file"):
        read_speeds(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read from .*binary"):
        read_speeds(tmp_path / "binary")


def test_larger_files_are_refused_and_never_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(speeds, "MAX_LINES", 3)
    file = tmp_path / "speeds.txt"
    file.write_text("# measured\n1\n2\n")
    assert read_speeds(file) == (1.0, 2.0)
    file.write_text("# measured\n1\n2\n3\n")
    with pytest.raises(ValueError, match="must have at most 3 lines, and has more: pass a text"):
        read_speeds(file)


def test_one_positive_number_a_server():
    check_speeds((1.0, 0.5), 2, "s.txt")
    with pytest.raises(
        ValueError, match=r"s.txt must hold .* each of .* 4 servers .*, got 2: meas"
    ):
        check_speeds((1.0, 0.5), 4, "s.txt")
    with pytest.raises(
        ValueError, match="s.txt must hold positive finite numbers, got -1.0: use 1"
    ):
        check_speeds((1.0, -1.0), 2, "s.txt")
    with pytest.raises(
        ValueError, match="at most 1000 times the slowest, got 1.0 and 0.0009: leave"
    ):
        check_speeds((1.0, 0.0009), 2, "s.txt")
