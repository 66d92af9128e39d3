"""`cad-jax lengths`: the file, the statistics, and what is refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from cad_jax.lengths_command import main
from cad_jax.lengths_report import length_statistics, read_lengths


@pytest.fixture
def texts(tmp_path: Path) -> tuple[list[str], list[int]]:
    """Arguments that name a folder of texts, and its documents' bytes, each closed by one token."""
    folder = tmp_path / "texts"
    folder.mkdir()
    sizes = [1, 40, 7000, 3, 900, 150_000]
    for n, size in enumerate(sizes):
        (folder / f"{n}.txt").write_text("x" * size)
    paths = ["--data.paths", str(folder / "*.txt"), "--data.cache-dir", str(tmp_path / "cache")]
    return ["text_folder", *paths], [size + 1 for size in sizes]


def test_one_length_a_line_that_others_read(tmp_path: Path, texts, capsys) -> None:
    arguments, lengths = texts
    out = tmp_path / "lengths.txt"
    assert main([*arguments, "--out", str(out)]) == 0
    assert sorted(map(int, out.read_text().split())) == sorted(lengths)
    assert sorted(read_lengths(out).tolist()) == sorted(lengths)
    printed = capsys.readouterr().out
    assert re.search(r"documents\s+│ 6 ", printed) and re.search(r"longest\s+│ 150,001", printed)


def test_pieces_are_what_training_packs(tmp_path: Path, texts) -> None:
    arguments, lengths = texts
    out = tmp_path / "pieces.txt"
    assert main([*arguments, "--pieces", "--data.max-piece-tokens", "512", "--out", str(out)]) == 0
    pieces = read_lengths(out)
    expected = [min(512, n - at) for n in lengths for at in range(0, n, 512)]
    assert sorted(pieces.tolist()) == sorted(expected)


def test_statistics_against_numpy() -> None:
    lengths = np.random.default_rng(0).lognormal(8, 2, 5000).astype(np.int64)
    s = length_statistics(lengths)
    assert (s.documents, s.tokens, s.max_tokens) == (5000, np.sum(lengths), np.max(lengths))
    assert s.mean_tokens == pytest.approx(np.mean(lengths))
    for value, percent in ((s.p50_tokens, 50), (s.p90_tokens, 90), (s.p99_tokens, 99)):
        assert value == pytest.approx(np.percentile(lengths, percent))
    long = [n for n in lengths.tolist() if n > 64 * 1024]
    assert 0 < len(long) < 5000
    assert s.long_token_share == pytest.approx(sum(long) / sum(lengths.tolist()))
    squares = sum(n * n for n in lengths.tolist())
    assert s.long_square_share == pytest.approx(sum(n * n for n in long) / squares)


def test_the_limit_of_long_documents_is_not_long() -> None:
    assert length_statistics(np.array([65_536])).long_token_share == 0
    assert length_statistics(np.array([65_537])).long_square_share == 1
    assert length_statistics(np.zeros(3, np.int64)).long_token_share == 0
    with pytest.raises(ValueError, match="at least one document length, got none"):
        length_statistics(np.zeros(0, np.int64))


def test_bad_input_ends_in_2_with_a_cure(tmp_path: Path, texts, capsys) -> None:
    arguments, _ = texts
    assert main([*arguments, "--out", str(tmp_path / "none" / "x.txt")]) == 2
    assert re.search("make the folder .*none first", capsys.readouterr().err)
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert "name another file" in capsys.readouterr().err
    text = tmp_path / "texts" / "1.txt"
    assert main([*arguments, "--out", str(text)]) == 2
    assert "and is the file that is read as well: name another file" in capsys.readouterr().err
    assert text.read_text() == "x" * 40
    assert not (tmp_path / "cache").exists()  # refused before the work
    assert main(["text_folder", "--data.paths", str(tmp_path / "*.nothing")]) == 2
    assert "cad-jax lengths: " in capsys.readouterr().err
