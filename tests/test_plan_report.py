import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cad_jax.plan_report import PlanArgs, first_tokens, read_lengths, run

FIELDS = {
    "servers", "tokens_per_server", "tolerance", "documents", "tasks", "max_over_mean",
    "max_over_mean_home", "moves", "plan_s", "bytes_in_mean", "bytes_in_max", "bytes_out_max",
    "wire_bytes",
}  # fmt: skip


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_reports_a_plan(tmp_path):
    lengths = write(tmp_path / "lengths.txt", "3000\n\n0\n 40 \n1\n500\n600\n")
    args = PlanArgs(
        lengths, servers=4, tokens_per_server=1024, json=tmp_path / "plan.json",
        plot=tmp_path / "plan.png",
    )  # fmt: skip
    console = Console(record=True, width=100, quiet=False, file=open(tmp_path / "log", "w"))  # noqa: SIM115
    plan = run(args, console)
    console.file.close()
    plan.check()
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert set(figures) == FIELDS
    assert figures["documents"] == [3000, 0, 40, 1, 500, 555]
    assert figures["tasks"] == plan.tasks.tolist()
    assert figures["max_over_mean"] < figures["max_over_mean_home"]
    assert figures["moves"] == plan.moves > 0 and figures["plan_s"] > 0
    # One head shape for all: 32 query heads, 8 key heads of 128, two bytes each.
    rows = plan.travelling_rows()
    bytes_in = rows.query_rows_in * 32 * 128 * 2 + rows.key_rows_in * 2 * 8 * 128 * 2
    bytes_out = rows.query_rows_out * 32 * 128 * 2 + rows.key_rows_out * 2 * 8 * 128 * 2
    assert figures["bytes_in_mean"] == bytes_in.mean()
    assert figures["bytes_in_max"] == bytes_in.max()
    assert figures["bytes_out_max"] == bytes_out.max()
    assert set(figures["wire_bytes"]) == {"direct", "relay"}
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    text = console.export_text()
    assert "max / mean pairs" in text and f"{plan.max_over_mean:.3f}" in text


def test_the_last_document_is_cut_and_a_short_file_leaves_padding():
    lengths = np.array([5, 0, 7])
    assert first_tokens(lengths, 12).tolist() == [5, 0, 7]
    assert first_tokens(lengths, 6).tolist() == [5, 0, 1]
    assert first_tokens(lengths, 5).tolist() == [5]
    assert first_tokens(lengths, 99).tolist() == [5, 0, 7]
    assert lengths.tolist() == [5, 0, 7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3\nfour\n", "line 2: a document length is a whole number .* got 'four': correct or rem"),
        ("3\n\n-4\n", "line 3: .* got '-4'"),
        ("1.5\n", "line 1: .* got '1.5'"),
        ("99999999999\n", "line 1: .* from 0 to 2147483647"),
        ("٣\n", "line 1"),
        ("\n \n", "holds no document lengths: put one whole number"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_lengths(write(tmp_path / "lengths.txt", text))


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path):
    lengths = write(tmp_path / "lengths.txt", "100\n")
    with pytest.raises(ValueError, match="cannot read document lengths from .*nowhere"):
        read_lengths(tmp_path / "nowhere.txt")
    for options, message in (
        ({"model": "gpt"}, "model must be one of llama2-7b, .* got 'gpt'"),
        ({"servers": 0}, "servers must be at least 1, got 0"),
        ({"tolerance": -1.0}, "tolerance must be at least 0, got -1.0"),
        ({"plot": tmp_path / "no" / "x.png"}, "make the folder .*no first"),
    ):
        values = dict(servers=2, tokens_per_server=64, json=tmp_path / "plan.json") | options
        with pytest.raises(ValueError, match=message):
            run(PlanArgs(lengths, **values), Console(quiet=True))  # type: ignore[arg-type]
    assert not (tmp_path / "plan.json").exists()


def test_plot_needs_a_png_name():
    with pytest.raises(ValueError, match=r"--plot \(=noext\) must name a file that ends in .png"):
        PlanArgs(Path("lengths.txt"), 4, 512, plot=Path("noext"))
