import dataclasses
import json
import math
import tracemalloc
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from cad_jax import metrics, plan_plot, pool_limits, schedule_report
from cad_jax.lengths_report import read_lengths
from cad_jax.pipeline.prediction import first_microbatches
from cad_jax.plan_args import PlanArgs
from cad_jax.plan_report import first_tokens, padding, run
from cad_jax.pool_limits import available_bytes, planning_bytes
from cad_jax.sharding.cost import DEVICES
from cad_jax.sharding.cost_model import from_csv, shipped
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.tasks import HeadShape, home_tasks
from cad_jax.simulation.named_costs import named_costs, profile_file

FIELDS = {
    "version", "servers", "tokens_per_server", "tolerance", "heads", "capacities", "fallback_tasks",
    "documents", "starts", "tasks", "max_over_mean", "max_over_mean_home", "moves",
    "plan_s", "plan_s_median", "plan_s_p99", "bytes_in_mean", "bytes_in_max", "bytes_out_max",
    "wire_bytes",
}  # fmt: skip


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_reports_a_plan(tmp_path):
    lengths = write(tmp_path / "lengths.txt", "3000\n\n0\n 40 \n1\n500\n600\n")
    args = PlanArgs(lengths, servers=4, tokens_per_server=1024, json=tmp_path / "plan.json")
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
    assert set(figures["wire_bytes"]) == {"direct", "relay", "ragged"}
    text = console.export_text()
    assert "fewer than" not in text
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
        (f"7\n{'9' * 4000}\n", "line 2: .* got '9{40}'"),
        (f"7\n{'9' * 5000}\n", "line 2: a line must have at most 4096 .*: pass a text file"),
        ("٣\n", "line 1"),
        ("\n \n", "holds no document lengths: put one whole number"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_lengths(write(tmp_path / "lengths.txt", text))


def test_repeated_plans_give_a_median_and_key_ranges_lower_bytes(tmp_path):
    lengths = write(tmp_path / "lengths.txt", "65000\n")
    figures = {}
    for key_ranges in (1, 4):
        path = tmp_path / "plan.json"
        args = PlanArgs(
            lengths, 8, 8192, key_ranges=key_ranges, transport="ragged", repeat=5, json=path
        )
        run(args, Console(quiet=True)).check()
        figures[key_ranges] = json.loads(path.read_text())
        assert 0 < figures[key_ranges]["plan_s_median"] <= figures[key_ranges]["plan_s_p99"]
    assert figures[4]["bytes_in_mean"] < figures[1]["bytes_in_mean"]
    assert any(k_start for *_, k_start, _, _, _ in figures[4]["tasks"])


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path):
    lengths = write(tmp_path / "lengths.txt", "100\n")
    with pytest.raises(ValueError, match="document lengths cannot be read from .*nowhere"):
        read_lengths(tmp_path / "nowhere.txt")
    two = write(tmp_path / "two.txt", "1\n1\n")
    for options, message in (
        ({"model": "gpt"}, "model must be one of llama2-7b, .* got 'gpt'"),
        ({"servers": 0}, f"--servers must be at least 1 and at most {2**31}, got 0: plan"),
        (
            {"tolerance": -1.0},
            "--tolerance must be at least 0 and at most 10, got -1.0: 0.05 is usual",
        ),
        ({"tolerance": math.inf}, "--tolerance must .* got inf: 0.05 is usual"),
        ({"tolerance": math.nan}, "--tolerance must .* got nan: 0.05 is usual"),
        ({"key_ranges": 0}, "--key-ranges must be at least 1 .* got 0: use 1"),
        ({"node": 0}, "--node must be at least 1 .* got 0: use 1"),
        ({"servers": 8, "node": 3}, r"--node \(=3\) must divide --servers \(=8\)"),
        ({"repeat": 0}, "--repeat must be at least 1 .* got 0: use 1"),
        ({"tokens_per_server": 10**20}, f"at most {2**31}, got 10+: plan fewer"),
        ({"servers": 2**26}, rf"at most {2**31} tokens, got {2**26} x 64 = {2**32}: plan fewer"),
        ({"servers": 10**6}, "1000000 servers may take .* GiB, .*: plan fewer servers"),
        ({"plot": tmp_path / "no" / "x.png"}, "make the folder .*no first"),
        ({"plot": tmp_path / "noext"}, r"--plot \(=.*noext\) must name a file that ends in .png"),
        (
            {"json": lengths},
            r"--json \(=.*\) must name a file of its own, and is the file that is read",
        ),
        (
            {"plot": tmp_path / "a.png", "json": tmp_path / "a.png"},
            "is --json as well: name another",
        ),
        ({"device": "b200"}, "--device .* is of --profile"),
        ({"device": "h1", "profile": "h200_fa3"}, "--device must be one of .* got h1"),
        ({"profile": "h3"}, "profile must be one of .* got 'h3'"),
        (
            {"pp": 2, "key_ranges": 4, "node": 2},
            "--key-ranges, --node: of one microbatch's plan alone, .*: leave",
        ),
        (
            {"speeds": two, "servers": 3},
            "two.txt must hold one relative speed for each .* 3 servers.* got 2",
        ),
        ({"pp": 2, "speeds": lengths}, "--speeds: of one microbatch's plan alone"),
        ({"pp": 4}, "--pp must be at least 1 and at most 2, got 4"),
        ({"pp": 2, "microbatches": 10**9}, "--microbatches must be at least 1 and at most 4096"),
        ({"tp": 2, "pingpong": True}, "--tp, --pingpong: of a pipelined step alone: give --pp"),
        ({"pp": 2, "servers": 100_000}, "100000 servers may take .* GiB, .*: plan fewer servers"),
    ):
        values = dict(servers=2, tokens_per_server=64, json=tmp_path / "plan.json") | options
        with pytest.raises(ValueError, match=message):
            run(PlanArgs(lengths, **values), Console(quiet=True))  # type: ignore[arg-type]
    assert not (tmp_path / "plan.json").exists()


def test_padding_is_said(tmp_path):
    lengths = write(tmp_path / "lengths.txt", "900\n17\n")
    text = StringIO()
    run(PlanArgs(lengths, servers=4, tokens_per_server=512), Console(file=text, width=300))
    assert (
        f"{lengths} holds 917 tokens of documents, fewer than the 2,048 of 4 servers x 512: the rest is padding\n"
        in text.getvalue()
    )
    step = PlanArgs(lengths, servers=4, tokens_per_server=128, pp=2, microbatches=5)
    said = padding(step, np.array([900, 17]))
    assert (
        said is not None
        and "the 1,280 of a step of 5 microbatches of 2 ranks x 128: the rest is padding" in said
    )


def test_the_longest_documents_axis_has_all_ranks(tmp_path, monkeypatch):
    """Of even documents nothing moves: the longest is on the first rank alone."""
    drawn = []
    monkeypatch.setattr(plan_plot.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plan = plan_documents(
        np.array([512, *[500] * 7]), servers=8, tokens_per_server=512, num_q_heads=2,
        num_kv_heads=1, head_dim=64, tolerance=0.5,
    )  # fmt: skip
    assert plan.tasks[plan.tasks[:, 0] == 0][:, -2:].max() < 2
    plan_plot.plot(plan, tmp_path / "plan.png", "a title")
    (axes,) = (axes for axes in drawn[0].axes if "longest document" in axes.get_title())
    assert min(axes.get_ylim()) < 0 and max(axes.get_ylim()) > 7


def test_more_servers_than_memory_holds_are_refused(tmp_path, monkeypatch):
    lengths = write(tmp_path / "lengths.txt", "100\n200\n")
    args = PlanArgs(lengths, servers=100, tokens_per_server=64)
    monkeypatch.setattr(pool_limits, "available_bytes", lambda: 0.5 * 2**20)
    with pytest.raises(ValueError, match=r"free \(0.0 GiB\), and 2 documents over 100 servers"):
        run(args, Console(quiet=True))
    monkeypatch.setattr(pool_limits, "available_bytes", lambda: 4.0 * 2**20)
    run(args, Console(quiet=True))
    monkeypatch.undo()
    assert 2**20 < available_bytes() <= math.inf


def test_planning_stays_below_the_memory_it_is_refused_for(tmp_path):
    """One document over all servers, the most that planning was seen to take."""
    servers = 300
    lengths = write(tmp_path / "lengths.txt", f"{servers * 4096}\n")
    run(PlanArgs(lengths, 4, 4096), Console(quiet=True))  # loads what is loaded once
    tracemalloc.start()
    try:
        run(PlanArgs(lengths, servers, 4096), Console(quiet=True))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 < peak_bytes / planning_bytes(servers, documents=1) < 1.0


def test_plots_of_large_pools_stay_in_bounds(tmp_path):
    """At the same width for each server this would be 7,000 pixels wide."""
    lengths = write(tmp_path / "lengths.txt", "100\n" * 50)
    plot_path = tmp_path / "plan.png"
    run(PlanArgs(lengths, servers=300, tokens_per_server=8, plot=plot_path), Console(quiet=True))
    with Image.open(plot_path) as image:
        assert image.width <= 4000


def legend_and_bars(figure):
    """The legend's box and those of all bars, in pixels."""
    figure.draw_without_rendering()
    (legend,) = figure.legends
    renderer = figure._get_renderer()
    return legend.get_window_extent(renderer), [
        patch.get_window_extent(renderer) for axes in figure.axes for patch in axes.patches
    ]


def test_legends_lie_beside_all_bars(tmp_path, monkeypatch):
    figures = []

    class Kept(Figure):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            figures.append(self)

    monkeypatch.setattr(plan_plot, "Figure", Kept)
    monkeypatch.setattr(metrics, "Figure", Kept)
    lengths = write(tmp_path / "lengths.txt", "4000\n" + "7\n" * 12)
    plot_path = tmp_path / "plan.png"
    plan = run(PlanArgs(lengths, 8, 512, plot=plot_path), Console(quiet=True))
    pairs = np.arange(1, 9)
    metrics.plot_plan(tmp_path / "plan_2.png", 3, pairs[::-1], pairs, speeds=pairs.tolist())
    assert [text.get_text() for text in figures[1].legends[0].get_texts()] == [
        "at home: max/mean 8.000", "planned: max/mean 1.000",
    ]  # fmt: skip
    assert len(figures) == 2
    for figure in figures:
        legend, bars = legend_and_bars(figure)
        assert len(bars) == 16
        assert not any(legend.overlaps(bar) for bar in bars)
    shows_who_serves_whom_and_where_the_longest_went(figures[0], plan)


def shows_who_serves_whom_and_where_the_longest_went(figure: Figure, plan: Plan) -> None:
    """Pair by pair."""
    away, at_home, served = np.zeros((8, 8)), np.zeros((8, 4000)), np.zeros((8, 4000))
    for document, q_start, q_stop, _, _, home, server in plan.tasks.tolist():
        if home != server:
            away[home, server] += sum(range(q_start + 1, q_stop + 1))
        if document == 0:
            at_home[home, q_start:q_stop] += 1
            served[server, q_start:q_stop] += 1
    image = next(image for axes in figure.axes for image in axes.images)
    percent = np.ma.filled(image.get_array(), 0.0)
    assert away.any() and percent == pytest.approx(100 * away / plan.loads().mean())
    (axes,) = (axes for axes in figure.axes if "longest document, 4,000" in axes.get_title())
    drawn = np.zeros((2, 8, 4000))
    for bars in axes.collections:
        for path in bars.get_paths():
            (left, bottom), (right, top) = path.get_extents().get_points()
            lower = abs(bottom - round(bottom)) < 1e-9  # from the rank's line down: at home
            rank = round(bottom) if lower else round(top)
            drawn[0 if lower else 1, rank, round(left) : round(right)] += 1
    assert np.array_equal(drawn[0], at_home) and np.array_equal(drawn[1], served)


def test_a_pipelined_step_is_predicted(tmp_path):
    (tmp_path / "lengths.txt").write_text("\n".join(["8000", "100", "3000"] * 60))
    args = PlanArgs(
        tmp_path / "lengths.txt", 8, 8192, pp=4, microbatches=3, pingpong=True, json=tmp_path / "o"
    )
    console = Console(file=StringIO(), width=200)
    run(args, console)
    step = json.loads((tmp_path / "o").read_text())["step"]
    assert (step["stages"], step["ticks_of_each_phase"], step["stash_slots"]) == (4, 6, 3)
    assert step["in_flight"] == [3, 3, 3, 1]
    assert step["pool"]["lockstep_s"] < step["per_stage"]["lockstep_s"] < step["home"]["lockstep_s"]
    assert step["balanced_s"] <= step["pool"]["lockstep_s"]
    assert "one plan a tick for all stages" in console.file.getvalue()  # pyright: ignore
    with pytest.raises(ValueError, match=r"servers \(=8\) must be divisible by pp \(=3\).*use 9"):
        run(dataclasses.replace(args, pp=3), console)
    with pytest.raises(ValueError, match="needs 80 microbatches of 16384 tokens.*give more"):
        run(dataclasses.replace(args, microbatches=80), console)
    with pytest.raises(ValueError, match=r"fit one stage's microbatch.*\(= 2 x 2048\).*8000"):
        run(dataclasses.replace(args, tokens_per_server=2048), console)


def pictures(monkeypatch) -> list[Figure]:
    """The figures that are saved from now on, as empty files."""
    drawn = []

    def save(figure: Figure, path: Path, **_) -> None:
        path.touch()
        drawn.append(figure)

    monkeypatch.setattr(plan_plot.Figure, "savefig", save)
    return drawn


def test_with_stages_the_plan_is_that_of_the_heaviest_tick(tmp_path, monkeypatch):
    """Found by hand among the ticks of 1F1B: of 3 microbatches over 2 stages, tick t holds t on stage 0 and t - 1 on
    stage 1, forward; in turn, backward."""
    drawn = pictures(monkeypatch)
    lengths = [*[64] * 64, 4096, 2048, 2048]  # microbatches of 4,096 tokens
    path = write(tmp_path / "lengths.txt", "\n".join(map(str, lengths)))
    text = StringIO()
    args = PlanArgs(path, 8, 1024, pp=2, microbatches=3, plot=tmp_path / "plan.png")
    plan = run(args, Console(file=text, width=300))
    packed = [sorted(m[0].tolist()) for m in first_microbatches(np.array(lengths), 3, 4096)]
    heavy = sum(length**2 for length in lengths if length > 64)
    pairs = {(a, b): sum(x**2 for m in (a, b) if 0 <= m < 3 for x in packed[m])
             for a in range(-1, 3) for b in (a - 1, a + 1)}  # fmt: skip
    assert max(pairs.values()) == heavy
    held = [plan.lengths[plan.starts // 4096 == stage] for stage in range(2)]
    stages = [next(m for m in range(3) if sorted(h.tolist()) == packed[m]) for h in held]
    assert pairs[stages[0], stages[1]] == heavy
    printed = " ".join(text.getvalue().split())
    assert f"(microbatch of each stage: {stages[0]}, {stages[1]})" in printed
    assert "Plan of the step's heaviest tick" in drawn[0].legends[0].get_title().get_text()
    with pytest.raises(ValueError, match="--repeat: of one microbatch's plan alone"):
        run(dataclasses.replace(args, repeat=2), Console(quiet=True))


def test_a_picture_says_what_it_shows(tmp_path, monkeypatch):
    drawn = pictures(monkeypatch)
    path = write(tmp_path / "mine.txt", "4000\n" + "7\n" * 12)
    text = StringIO()
    args = PlanArgs(path, 8, 2048, plot=tmp_path / "plan.png", planner="cad_jax:plan_documents")
    run(args, Console(file=text, width=300))
    title = "Plan: llama3-8b, 8 servers x 2,048 tokens, documents of mine.txt, planner cad_jax:plan_documents"
    assert drawn[0].legends[0].get_title().get_text() == title
    assert title in " ".join(text.getvalue().split())
    (moves,) = (axes for axes in drawn[0].axes if "who serves whom" in axes.get_title())
    assert "the diagonal, is left out" in moves.get_title()


def test_a_byte_order_mark_is_no_number(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_bytes(b"\xef\xbb\xbf100\n7\n")
    assert read_lengths(path).tolist() == [100, 7]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(pp=4, virtual_stages=3),
            r"layers of llama3-8b \(=32\).*pp x virtual_stages \(=4 x 3\)",
        ),
        (
            dict(pp=4, pingpong=True, tokens=33),
            r"\(= 1 x 33\) must be even for ping-pong, which halves",
        ),
        (dict(microbatches=10**8), r"each of its 100000000 microbatches.*256 tokens in all"),
    ],
)
def test_steps_that_cannot_be_are_refused_at_once(changes, words):
    sizes = dict(pp=2, microbatches=2, virtual_stages=1, tp=1, pingpong=False, tokens=64) | changes
    with pytest.raises(ValueError, match=words):
        schedule_report.predict(
            np.full(256, 1),
            servers=4,
            tokens_per_server=sizes.pop("tokens"),
            model="llama3-8b",
            tolerance=0.05,
            **sizes,
        )


def test_speeds_and_kernel_times(tmp_path):
    """A server of half the speed gets half the pairs; seconds are those of the cost model."""
    lengths = write(tmp_path / "lengths.txt", "30000\n" + "300\n" * 9)
    speeds = write(tmp_path / "speeds.txt", "2\n2\n\n1.0\n2\n")
    args = PlanArgs(
        lengths, 4, 8192, speeds=speeds, profile="h200_fa2", json=tmp_path / "plan.json"
    )
    text = StringIO()
    plan = run(args, Console(file=text, width=120))
    loads, saved = plan.loads(), json.loads((tmp_path / "plan.json").read_text())
    shares = loads.sum() * np.array([2, 2, 1, 2]) / 7
    assert (loads <= 1.05 * shares + 1).all() and loads[2] < 0.6 * loads[0]
    assert saved["max_over_share"] == pytest.approx((loads / shares).max())
    assert saved["max_over_share_home"] == pytest.approx((plan.home_loads() / shares).max())
    assert saved["speeds"] == [2, 2, 1, 2] and saved["kernel_times"] == "derived"
    costs, heads = from_csv(shipped("h200_fa2"), DEVICES["h200"]), HeadShape(32, 8, 128)
    for name, tasks in (("", plan.tasks), ("_home", home_tasks(plan.lengths, 8192, plan.starts))):
        both = sum(costs.server_s(tasks, 4, heads, backward=b) for b in (False, True))
        seconds = both * np.array([7 / 8, 7 / 8, 7 / 4, 7 / 8])
        assert saved[f"attention_s_max{name}"] == pytest.approx(seconds.max())
        wanted = seconds.max() / seconds.mean()
        assert saved[f"attention_s_max_over_mean{name}"] == pytest.approx(wanted)
    assert "max / share of pairs, by speed" in text.getvalue() and "derived" in text.getvalue()


def test_a_profile_may_have_any_name(tmp_path, monkeypatch):
    """One that ships goes before a file of its name; of a name that is no file, csv says which was meant."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.txt", "cpu", "analytic"):
        Path(name).write_bytes(shipped("cpu").read_bytes())
    assert profile_file("mine.txt") == Path("mine.txt")
    assert [profile_file(name) for name in ("cpu", "analytic", "none", None)] == [None] * 4
    assert profile_file("none.csv") == Path("none.csv")
    assert named_costs(DEVICES["cpu"], "mine.txt").label == "measured"


def test_a_file_that_is_read_is_not_written(tmp_path):
    lengths = write(tmp_path / "lengths.txt", "100\n")
    for name in ("speeds", "profile"):
        file = write(tmp_path / f"{name}.csv", "kept")
        args = PlanArgs(lengths, 2, 64, **{name: file}, json=file)  # pyright: ignore
        with pytest.raises(ValueError, match="--json .* and is the file that is read as well"):
            run(args, Console(quiet=True))
        assert file.read_text() == "kept"
