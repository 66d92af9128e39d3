"""`cad-jax simulate`: what it writes, and what it refuses."""

import dataclasses
import io
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cad_jax import advise_report
from cad_jax.advise_report import AdviseArgs
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.simulate_args import SimulateArgs
from cad_jax.simulate_command import main
from cad_jax.simulate_report import run
from cad_jax.simulate_steps import cost_model
from cad_jax.simulation.averages import transports_of

SIZES: dict[str, Any] = {
    "ranks": 4, "tokens_per_rank": 4096, "workload": "mixed", "longest_tokens": 8192,
    "model": "llama3-1b", "tp": 1, "steps": 1,
}  # fmt: skip
FIXED: dict[str, Any] = SIZES | {"tolerance": 0.05, "transport": "ragged"}
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
    results = run(SimulateArgs(**FIXED, **files), quiet(text))
    assert [r.name for r in results] == list(STRATEGIES)
    printed = text.getvalue()
    assert "simulated" in printed and "derived" in printed
    saved = json.loads(files["json"].read_text())
    assert saved["label"] == "simulated"
    for result in results:
        figures = saved["strategies"][result.name]
        assert figures["step_s"] == result.step_s and 0 < figures["mfu"] < 1
        assert (figures["label"], figures["memory_label"]) == ("simulated", "derived")
        parts = ("exposed_communication", "masked", "waiting")
        assert figures["idle"] == pytest.approx(sum(figures[p] for p in parts))
        busy = sum(figures[f"{kind}_s_mean"] for kind in ("linear", "head", "attention"))
        assert busy / result.step_s + figures["idle"] == pytest.approx(1)
        assert sum(figures["memory"].values()) == pytest.approx(figures["memory_bytes"])
    assert files["plot"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_trace_is_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    (row,) = run(SimulateArgs(**FIXED, strategies=("cad",), trace=path), quiet())
    (result,) = row.results
    trace = json.loads(path.read_text())["traceEvents"]
    slices = [e for e in trace if e["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    named = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    for rank in range(4):
        assert named[rank] == f"cad, ragged, tolerance 0.05, step 1 of 1: rank {rank}"
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
    sizes: dict[str, Any] = FIXED | {
        "workload": None,
        "lengths": lengths,
        "pp": 2,
        "microbatches": 2,
    }
    text = io.StringIO()
    for result in run(SimulateArgs(**sizes, json=tmp_path / "s.json"), quiet(text)):
        assert result.step_s > 0, result.name
        if result.name != "wlb":  # packing may take more microbatches
            assert result.figures()["bubble"] == pytest.approx(1 / 3), result.name
    padding = json.loads((tmp_path / "s.json").read_text())["padding"]
    assert 0 < padding < 0.2 and f"padding {padding:.1%} of" in " ".join(text.getvalue().split())


def test_stages_fill_by_default(tmp_path: Path) -> None:
    args = SimulateArgs(**FIXED, pp=2, strategies=("home",), json=tmp_path / "s.json")
    (result,) = run(args, quiet())
    assert result.figures()["bubble"] == pytest.approx(1 / 9)
    assert json.loads((tmp_path / "s.json").read_text())["microbatches"] == 8


def test_what_does_not_fit_says_so(tmp_path: Path) -> None:
    """16 bytes a parameter of 70e9 over 4 devices are 280 GB; of 1.2e9 are 5 GB."""
    for model, expected in (("llama3-70b", False), ("llama3-1b", True)):
        text, path = io.StringIO(), tmp_path / "s.json"
        sizes: dict[str, Any] = FIXED | {"model": model}
        run(SimulateArgs(**sizes, strategies=("cad",), json=path), quiet(text))
        assert ("cad does not fit: " in text.getvalue()) is not expected
        assert json.loads(path.read_text())["strategies"]["cad"]["fits"] is expected


def test_the_table_fits_a_terminal() -> None:
    text = io.StringIO()
    sizes: dict[str, Any] = FIXED | {"ranks": 16, "tp": 8, "steps": 2}
    run(SimulateArgs(**sizes, pp=2, microbatches=2), Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    heads = [line.split() for line in lines[1:4]]
    assert ["ex-", "max/"] in heads
    assert [
        "strategy",
        "ms",
        "ratio",
        "MFU",
        "posed",
        "idle",
        "bubble",
        "mean",
        "sent",
        "held",
    ] in heads
    assert "…" not in text.getvalue()


def test_a_device_without_a_published_peak(tmp_path: Path) -> None:
    text, path = io.StringIO(), tmp_path / "s.json"
    run(SimulateArgs(**SIZES, tolerance=0.05, device="cpu", profile="cpu", json=path), quiet(text))
    assert "kernel times measured" in " ".join(text.getvalue().split())
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert next(row for row in rows if row[:1] == ["cad"])[3] == "-"
    steps = json.loads(path.read_text())["strategies"]
    assert steps["cad"]["transport"] in ("direct", "relay")  # ragged needs GPUs
    assert len(steps) == len(STRATEGIES)
    assert all(s["mfu"] is None and s["fits"] is None for s in steps.values())


def test_devices_have_a_profile_of_their_own() -> None:
    for device, label in (("a100", "derived"), ("b200", "derived"), ("cpu", "measured")):
        assert cost_model(SimulateArgs(**SIZES, device=device)).label == label


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "4", "--tokens-per-rank", "64"], "give documents once"),
        (["--ranks", "4", "--tokens-per-rank", "64", "--workload", "x"], "--workload must be one of"),
        (["--ranks", "3", "--tokens-per-rank", "65536", "--workload", "mixed", "--pp", "2"],
         "must be a positive multiple of pp"),
        (["--ranks", "4", "--tokens-per-rank", "1024", "--workload", "mixed"],
         "--longest-tokens must be from 128 to --tokens-per-rank x --ranks / --pp (= 4096), got 131072"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "pretrain", "--longest-tokens", "8192"],
         "must be a multiple of 65536 and divide --tokens-per-rank"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--strategies", "cad", "cad"],
         "--strategies must name each once"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--strategies", "planner"],
         "give --planner module:function as well"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--planner", "no_such:planner"],
         "a planner's module must be importable"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--steps", "0"],
         "--steps must be at least 1"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--causes", "copies", "copies"],
         "causes must be named once each, got copies copies"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--headroom", "0.5"],
         "--headroom must be at least 1"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--device", "b200",
          "--profile", "h200_fa3"], "or give --profile analytic"),
        (["--ranks", "4", "--tokens-per-rank", "131072", "--workload", "mixed", "--pp", "4",
          "--microbatches", "1", "--strategies", "wlb"], "as many microbatches of a replica as stages (= 4)"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--model", "x"],
         "model must be one of"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--profile", "x"], "h200_fa2"),
        (["--ranks", "0", "--tokens-per-rank", "65536", "--workload", "mixed"], "--ranks must be at least"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--device", "cpu", "--transport", "ragged"],
         "--transport ragged needs GPUs, got --device cpu: use"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--node", "3"],
         "--node must divide --ranks (= 4), got 3: use a divisor"),
        *((["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", option, value],
           f"{option} must be at least ")
          for option, value in (("--headroom", "nan"), ("--headroom", "inf"), ("--tolerance", "inf"),
                                ("--tolerance", "nan"), ("--tolerance", "-0.1"), ("--recompute", "nan"),
                                ("--between-nodes-gb-s", "1e308"), ("--between-nodes-gb-s", "nan"),
                                ("--tp", "-8"), ("--microbatches", "99999999999"))),
        (["--ranks", "4000000", "--tokens-per-rank", "100", "--workload", "one_long"], "4000000 servers may take"),
        (["--ranks", "400", "--tokens-per-rank", "99999999", "--workload", "one_long"],
         "2 x --tokens-per-rank x --ranks must be at most 2147483648 tokens, got 2 x 99999999 x 400"),
        (["--ranks", "4", "--tokens-per-rank", "1001", "--workload", "one_long", "--longest-tokens", "1000",
          "--strategies", "published"], "an even number of tokens of a rank in a nano-batch, got 1001: use"),
        (["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed", "--plot", "a/b.png"],
         "make the folder a first"),
    ],
)  # fmt: skip
def test_bad_arguments_end_in_2_with_a_cure(arguments, message, capsys) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        code = main(arguments)
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("cad-jax simulate: ") and error.count("\n") == 1, error
    assert message in error


def test_a_profile_that_is_read_is_not_written(tmp_path, capsys) -> None:
    file = tmp_path / "a.csv"
    file.write_text("kept")
    for option in ("--json", "--trace"):
        sizes = ["--ranks", "4", "--tokens-per-rank", "65536", "--workload", "mixed"]
        assert main([*sizes, "--profile", str(file), option, str(file)]) == 2
        assert "a file of its own, and is the file that is read as well" in capsys.readouterr().err
    assert file.read_text() == "kept"


def test_an_odd_number_of_tokens_leaves_out_the_published_planner_alone() -> None:
    text = io.StringIO()
    sizes: dict[str, Any] = FIXED | {"tokens_per_rank": 1001, "longest_tokens": 1000}
    results = run(SimulateArgs(**sizes, strategies=("home", "published")), quiet(text))
    assert [r.name for r in results] == ["home"]
    assert "published is left out: its planner needs an even number" in text.getvalue()


def test_documents_repeat_where_there_are_too_few(tmp_path: Path, capsys) -> None:
    few = tmp_path / "few.txt"
    sizes = ["--ranks", "4", "--tokens-per-rank", "4096"]
    few.write_text("0\n0\n")
    assert main([*sizes, "--lengths", str(few)]) == 2
    assert "document lengths must not all be 0" in capsys.readouterr().err
    few.write_text("1000\n2000\n")
    text = io.StringIO()
    args: dict[str, Any] = FIXED | {"workload": None, "lengths": few, "strategies": ("home",)}
    run(SimulateArgs(**args), quiet(text))
    said = re.search(
        r"holds 3,000 tokens .* come ([\d.]+) times on", " ".join(text.getvalue().split())
    )
    # 32,768 slots hold ten or eleven pairs of documents.
    assert said is not None and 9 < float(said[1]) < 11


def uneven(tmp_path: Path) -> Path:
    """Hundreds of short documents, then a few long ones."""
    path = tmp_path / "uneven.txt"
    path.write_text("100\n" * 700 + "14000\n" * 10)
    return path


def test_steps_are_means_over_the_file_not_its_beginning(tmp_path: Path) -> None:
    lengths, path, text = uneven(tmp_path), tmp_path / "s.json", io.StringIO()
    args: dict[str, Any] = FIXED | {"workload": None, "lengths": lengths, "steps": 5}
    (row,) = run(SimulateArgs(**args, strategies=("home",), json=path), quiet(text))
    assert row.step_s < 1  # and is printed in ms
    saved = json.loads(path.read_text())
    # Of the file: tokens of the document that a token lies in.
    context = (700 * 100**2 + 10 * 14000**2) / (700 * 100 + 10 * 14000)
    assert saved["context_tokens"] == pytest.approx(context, rel=0.25)  # of its beginning: 100
    seconds = [step["step_s"] for step in saved["strategies"]["home"]["steps"]]
    assert len(seconds) == 5 and row.step_s == pytest.approx(sum(seconds) / 5)
    assert saved["strategies"]["home"]["step_s"] == pytest.approx(sum(seconds) / 5)
    printed = " ".join(text.getvalue().split())
    assert f"{1e3 * min(seconds):.3g}-{1e3 * max(seconds):.3g}" in printed and min(seconds) < max(
        seconds
    )
    share = saved["documents_tokens"] / (700 * 100 + 10 * 14000)
    assert (
        f"5 steps of 1 x 2 x 4 x 4,096 tokens drawn from {lengths}, --seed 0, {share:.1%}"
        in printed
    )
    assert f"in the whole file of {context:,.0f}" in printed


def test_what_is_left_open_is_of_fewest_seconds(tmp_path: Path) -> None:
    """Against every transport and tolerance by itself."""
    args: dict[str, Any] = SIZES | {"workload": None, "lengths": uneven(tmp_path)}
    args["strategies"] = ("cad", "published")
    text = io.StringIO()
    chosen = {row.name: row for row in run(SimulateArgs(**args), quiet(text))}
    every: dict[str, list[float]] = {"cad": [], "published": []}
    for tolerance, transport in product(
        (0.003, 0.01, 0.02, 0.05, 0.1, 0.2), ("direct", "relay", "ragged")
    ):
        fixed = SimulateArgs(**args, tolerance=tolerance, transport=transport)  # type: ignore[arg-type]
        for row in run(fixed, quiet()):
            every[row.name].append(row.step_s)
    for name, seconds in every.items():
        assert min(seconds) <= chosen[name].step_s <= 1.002 * min(seconds)
        assert max(seconds) > 1.01 * min(seconds)
    way = chosen["cad"].candidate
    printed = " ".join(text.getvalue().split())
    assert f"{way.transport} {way.tolerance}" in printed
    assert "transport (of direct, relay, ragged) and tolerance (of 0.003," in printed
    text = io.StringIO()
    run(SimulateArgs(**args, tolerance=0.05, transport="ragged"), quiet(text))
    assert "of fewest simulated seconds" not in text.getvalue()


def test_keys_may_be_divided_and_nodes_known(tmp_path: Path) -> None:
    """Sixteen ranks of two nodes, a slow network between: divided keys carry less, and who knows nodes leaves them less often."""
    path = tmp_path / "lengths.txt"
    path.write_text("8000\n" * 16 + "32000\n" * 4 + "100\n" * 800)
    args: dict[str, Any] = {
        "ranks": 16, "tokens_per_rank": 8192, "tp": 1, "lengths": path, "tolerance": 0.05,
        "transport": "ragged", "strategies": ("cad",), "steps": 2, "between_nodes_gb_s": 1.0,
    }  # fmt: skip
    text = io.StringIO()
    (whole,), (divided,), (knowing,) = (
        run(SimulateArgs(**args, **more), quiet(text))
        for more in ({}, {"key_ranges": 8}, {"node": 8})
    )
    assert divided.figures()["wire_bytes_mean"] < 0.95 * whole.figures()["wire_bytes_mean"]
    assert divided.step_s < 0.95 * whole.step_s and knowing.step_s < 0.85 * whole.step_s
    assert "ragged 0.05 k8" in " ".join(text.getvalue().split())


def test_auto_tries_what_a_device_has() -> None:
    assert transports_of("auto", "cpu") == ("direct", "relay")
    assert transports_of("auto", "h200") == ("direct", "relay", "ragged")
    assert transports_of("relay", "h200") == ("relay",)


def test_simulate_and_advise_say_the_same(tmp_path: Path) -> None:
    lengths = uneven(tmp_path)
    asked: dict[str, Any] = {
        "lengths": lengths,
        "model": "llama3-1b",
        "tokens_per_rank": 4096,
        "tp": 1,
    }
    advice = advise_report.run(AdviseArgs(**asked, topology="h200:1x4", steps=1), quiet())
    outcomes = advice.comparison.cad + advice.comparison.others
    said = {o.candidate: o.step_s for o in outcomes}
    held = {o.candidate: o.memory_bytes for o in outcomes}
    rows = run(SimulateArgs(**asked, ranks=4, steps=1), quiet())
    assert len(rows) == len(STRATEGIES)
    for row in rows:
        if row.name != "published":
            least = min(s for c, s in said.items() if c.strategy == row.name and c.key_ranges == 1)
            assert row.step_s <= 1.002 * least, row.name
        if row.name in ("cad", "home"):
            assert row.step_s == pytest.approx(said[row.candidate])
            assert row.memory.total == held[row.candidate]


def at_home(lengths: np.ndarray, **options: Any) -> Plan:
    """A planner that moves nothing."""
    options["tolerance"] = 100.0
    return plan_documents(lengths, **options)


def as_ours(lengths: np.ndarray, **options: Any) -> Plan:
    return plan_documents(lengths, **options)


def half_done(lengths: np.ndarray, **options: Any) -> Plan:
    plan = plan_documents(lengths, **options)
    return dataclasses.replace(plan, tasks=plan.tasks[:-1])


def test_a_planner_of_ones_own_beside_the_others(tmp_path: Path) -> None:
    args: dict[str, Any] = FIXED | {"workload": None, "lengths": uneven(tmp_path), "pp": 2}
    args |= {"microbatches": 2, "tokens_per_rank": 8192, "strategies": ("cad",)}
    cad, ours = run(SimulateArgs(**args, planner=f"{__name__}:as_ours"), quiet())
    assert ours.name == "planner" and ours.figures() == cad.figures()
    cad, still = run(SimulateArgs(**args, planner=f"{__name__}:at_home"), quiet())
    assert (
        still.figures()["attention_max_over_mean"] > 1.2 > cad.figures()["attention_max_over_mean"]
    )
    with pytest.raises(ValueError, match="planner half_done made a plan that cannot run"):
        run(SimulateArgs(**args, planner=f"{__name__}:half_done"), quiet())


def test_a_slow_rank_takes_longer_and_is_given_less(tmp_path: Path) -> None:
    """Equal documents, one a rank: at home all wait for the one that takes 0.875 / 0.5 of the mean rank's seconds."""
    (tmp_path / "even.txt").write_text("4096\n" * 8)
    (tmp_path / "speeds.txt").write_text("1\n1\n0.5\n1\n")
    args: dict[str, Any] = FIXED | {"workload": None, "lengths": tmp_path / "even.txt"}
    args |= {"strategies": ("home", "cad", "published"), "tolerance": 0.01}
    alike = {row.name: row.step_s for row in run(SimulateArgs(**args), quiet())}
    slow = {
        row.name: row.step_s
        for row in run(SimulateArgs(**args, speeds=tmp_path / "speeds.txt"), quiet())
    }
    assert slow["home"] / alike["home"] == pytest.approx(1.75, rel=0.03)
    assert slow["published"] / alike["published"] == pytest.approx(1.75, rel=0.03)
    assert slow["cad"] < 0.98 * slow["published"]
    (tmp_path / "speeds.txt").write_text("1\n1\n")
    with pytest.raises(ValueError, match="one relative speed for each of the mesh's 4 servers"):
        run(SimulateArgs(**args, speeds=tmp_path / "speeds.txt"), quiet())
