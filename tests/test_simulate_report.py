"""`cad-jax simulate`: what it writes, and what it refuses."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cad_jax.simulate_command import main
from cad_jax.simulate_report import SimulateArgs, run

SIZES: dict[str, Any] = {
    "ranks": 4, "tokens_per_rank": 4096, "workload": "mixed", "longest_tokens": 8192,
    "model": "llama3-1b", "tp": 1,
}  # fmt: skip
STRATEGIES = ("cad", "published", "home", "all_gather", "ring", "wlb")


def quiet(text: io.StringIO | None = None) -> Console:
    return Console(file=text or io.StringIO(), width=120)


def test_every_strategy_and_everything_written(tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "json": tmp_path / "s.json",
        "trace": tmp_path / "t.json",
        "plot": tmp_path / "p.png",
    }
    text = io.StringIO()
    results = run(SimulateArgs(**SIZES, **files), quiet(text))
    assert [r.strategy.split()[0] for r in results] == list(STRATEGIES)
    printed = text.getvalue()
    assert "simulated" in printed and "derived" in printed
    saved = json.loads(files["json"].read_text())
    assert saved["label"] == "simulated"
    for result in results:
        figures = saved["steps"][result.strategy]
        assert figures["step_s"] == result.step_s and 0 < figures["mfu"] < 1
        parts = ("exposed_communication", "bubble", "waiting")
        assert figures["idle"] == pytest.approx(sum(figures[p] for p in parts))
        busy = figures["linear_s_mean"] + figures["attention_s_mean"]
        assert busy / result.step_s + figures["idle"] == pytest.approx(1)
        assert sum(figures["memory"].values()) == pytest.approx(figures["memory_bytes"])
    assert files["plot"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_trace_is_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    (result,) = run(SimulateArgs(**SIZES, strategies=("cad",), trace=path), quiet())
    trace = json.loads(path.read_text())["traceEvents"]
    slices = [e for e in trace if e["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    for rank in range(4):
        mine = sorted((e["ts"], e["dur"], e["cat"]) for e in slices
                      if e["pid"] == rank and names[rank, e["tid"]] == "compute")  # fmt: skip
        assert mine[-1][0] + mine[-1][1] <= 1e6 * result.step_s * (1 + 1e-9)
        ends = np.array([ts + dur for ts, dur, _ in mine])
        assert (np.array([ts for ts, *_ in mine])[1:] >= ends[:-1] - 1e-3).all(), "one at a time"
        attention = sum(dur for _, dur, cat in mine if cat == "attention")
        assert attention == pytest.approx(1e6 * result.accounts.attention_s[rank])


def test_pipelines_and_length_files(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    documents = np.random.default_rng(0).integers(1, 6000, 60)
    lengths.write_text("\n".join(map(str, documents)))
    sizes = SIZES | {"workload": None, "lengths": lengths, "pp": 2, "microbatches": 2}
    for result in run(SimulateArgs(**sizes), quiet()):
        assert result.step_s > 0, result.strategy
        if result.strategy == "cad":
            assert result.figures()["bubble"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "4", "--tokens-per-rank", "64"], "give documents once"),
        (["--ranks", "4", "--tokens-per-rank", "64", "--workload", "x"], "--workload must be one of"),
        (["--ranks", "3", "--tokens-per-rank", "65536", "--workload", "mixed", "--pp", "2"],
         "must be a positive multiple of pp"),
        (["--ranks", "4", "--tokens-per-rank", "1024", "--workload", "mixed"], "from 128 to nano_tokens"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--model", "x"],
         "model must be one of"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--profile", "x"], "h200_fa2"),
        (["--ranks", "0", "--tokens-per-rank", "65536", "--workload", "mixed"], "--ranks must be at least"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--plot", "a/b.png"],
         "make the folder a first"),
    ],
)  # fmt: skip
def test_bad_arguments_end_in_2_with_a_cure(arguments, message, capsys) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        try:
            code = main(arguments)
        except SystemExit as stop:  # what the arguments' own class refuses
            code = stop.code
    assert code == 2
    captured = capsys.readouterr()
    assert message in " ".join((captured.out + captured.err).split())
