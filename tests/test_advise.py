"""`cad-jax advise`: for and against CAD, what it writes, and what it refuses."""

import io
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cad_jax.advise_command import main
from cad_jax.advise_report import (
    RECIPES,
    Advice,
    AdviseArgs,
    repetition_text,
    run,
    sample_text,
    train_text,
)
from cad_jax.config import MeshConfig
from cad_jax.processes import ProcessConfig
from cad_jax.sharding.cost import model_shape
from cad_jax.simulation.advice import TOLERANCES, verdict
from cad_jax.simulation.candidates import Candidate, Outcome, Trials, draw_steps, fastest
from cad_jax.train_command import parse

ONE_LONG = [65_536, *[256] * 800]


def advice_for(folder: Path, lengths: Sequence[int], **changed: Any) -> tuple[Advice, str]:
    path = folder / "lengths.txt"
    path.write_text("\n".join(map(str, lengths)))
    arguments: dict[str, Any] = {
        "topology": "h200:8x8", "tokens_per_rank": 16_384, "steps": 1, "model": "llama3-1b",
    }  # fmt: skip
    text = io.StringIO()
    args = AdviseArgs(path, **(arguments | changed))
    return run(args, Console(file=text, width=200)), text.getvalue()


@pytest.fixture(scope="module")
def one_long(tmp_path_factory) -> tuple[Advice, str]:
    return advice_for(tmp_path_factory.mktemp("one_long"), ONE_LONG)


def test_one_long_document_among_short_ones_is_for_cad(one_long) -> None:
    advice, printed = one_long
    judged = advice.verdict
    assert judged.use_cad and not judged.reasons and judged.gain > 0.1
    assert "Use CAD: " in printed and "simulated" in printed and "derived" in printed
    assert "times on average" not in printed
    assert "--attention cad --overlap pingpong" in printed
    own = [o for o in advice.comparison.others if o.candidate.strategy != "wlb"]
    assert judged.alternative.step_s == min(o.step_s for o in own)
    assert judged.gain == pytest.approx(judged.alternative.step_s / judged.best.step_s - 1)


def test_equal_lengths_are_against_cad(tmp_path: Path) -> None:
    advice, printed = advice_for(tmp_path, [16_384] * 64)
    assert not advice.verdict.use_cad
    assert advice.verdict.reasons == ("equal_lengths",)
    assert advice.verdict.alternative.candidate.strategy == "home"
    assert "Do not use CAD here: equal lengths" in printed and "--attention home" in printed
    home = next(o for o in advice.comparison.others if o.candidate.strategy == "home")
    assert home.attention_max_over_mean == pytest.approx(1, abs=1e-9)


def test_short_contexts_are_against_cad(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(20, 900, 3000)
    advice, printed = advice_for(tmp_path, lengths.tolist(), model="llama3-8b")
    assert not advice.verdict.use_cad
    assert advice.verdict.reasons[0] == "short_contexts"
    assert "Do not use CAD here: short contexts" in printed


def test_a_slow_network_is_against_cad(tmp_path: Path) -> None:
    advice, printed = advice_for(tmp_path, ONE_LONG, between_nodes_gb_s=0.5)
    judged = advice.verdict
    assert not judged.use_cad and judged.reasons == ("slow_network",)
    assert "Do not use CAD here: slow network" in printed
    said = re.search(r"With ([\d.]+) GB/s between nodes CAD would be advised, with half", printed)
    assert said is not None and judged.needed_bytes_s == float(said[1]) * 1e9
    assert 0.5 < float(said[1]) <= 50
    enough, _ = advice_for(tmp_path, ONE_LONG, between_nodes_gb_s=float(said[1]))
    assert enough.verdict.use_cad
    half, _ = advice_for(tmp_path, ONE_LONG, between_nodes_gb_s=float(said[1]) / 2)
    assert not half.verdict.use_cad


def test_where_packing_wins_the_command_is_said_to_be_of_something_else(one_long) -> None:
    advice, _ = one_long
    args = AdviseArgs(Path("l"), "h200:8x8")
    assert "packing" not in train_text(advice, args)
    packed = replace(advice, verdict=advice.verdict._replace(use_cad=False, reasons=("packing",)))
    for model in ("llama3-8b", "llama3-1b"):
        text = train_text(packed, replace(args, model=model))
        assert text.startswith("cad_jax cannot run packing; what follows is its own fastest, cad\n")
        assert "--attention cad" in text


def test_gains_are_those_of_each_step_alone(tmp_path: Path) -> None:
    """Of steps that differ, one with the long document and one without; margins within and beyond them."""
    lengths = [65_536, 65_536, *[256] * 1536]
    advice, printed = advice_for(tmp_path, lengths, steps=3, json=tmp_path / "a.json")
    setting, judged = advice.setting, advice.verdict
    steps = draw_steps(np.array(lengths), 3, 1, 2 * 8 * 16_384)
    alone = [
        Trials(setting, [step], 2 * 16_384, 65_536).outcome(judged.alternative.candidate).step_s
        / Trials(setting, [step], 2 * 16_384, 65_536).outcome(judged.best.candidate).step_s
        - 1
        for step in steps
    ]
    assert judged.gains == pytest.approx(alone, abs=1e-9)
    least, most = min(alone), max(alone)
    assert least < judged.gain < most
    held = sum(int(nano.sum()) for step in steps for nano in step[0]) / sum(lengths)
    over = judged.alternative.candidate.strategy
    said = f"cad's gain over {over}: {least:z.1%} to {most:z.1%}, step by step"
    assert f"simulated: 3 steps with {held:.2f} times the tokens of" in printed and said in printed
    saved = json.loads((tmp_path / "a.json").read_text())["verdict"]
    assert saved["gain_of_each_step"] == list(judged.gains)
    assert (saved["least_gain"], saved["most_gain"]) == (min(judged.gains), max(judged.gains))
    args = AdviseArgs(tmp_path / "lengths.txt", "h200:8x8")
    for margin, narrow in ((least - 0.01, False), ((least + most) / 2, True), (most, False)):
        text = sample_text(advice, replace(args, margin=margin), np.array(lengths))
        assert ("lies between: other steps" in text) == narrow


def test_documents_that_may_come_twice_are_said_to(one_long) -> None:
    """Lengths of which no two are the same show it."""
    once = np.arange(1000, 1512)
    fewer, enough = (int(once.sum() / share / 2) * 2 for share in (1.5, 3.01))

    def most(tokens: int, seed: int) -> int:
        [step] = draw_steps(once, 1, 1, tokens, seed)
        return int(np.unique(np.concatenate(step[0]), return_counts=True)[1].max())

    assert {most(enough, seed) for seed in range(4)} == {1}
    assert {most(fewer, seed) for seed in range(4)} == {2}
    advice, args = one_long[0], AdviseArgs(Path("l"), "h200:8x8")
    for times, said in ((1, True), (3, False)):
        text = repetition_text(advice, args, np.array(ONE_LONG * times))
        assert (text is not None and text.endswith("held back: a document may come twice")) == said


def test_one_rank_has_nobody_to_share_with(tmp_path: Path) -> None:
    advice, printed = advice_for(tmp_path, [*[256] * 800, 9000], topology="h200:1x8")
    assert advice.verdict.reasons == ("one_rank",) and "one rank" in printed


def test_what_does_not_fit_does_not_count(tmp_path: Path) -> None:
    path, asked = tmp_path / "a.json", dict(model="llama3-405b", topology="h100:2x8")
    advice, printed = advice_for(tmp_path, ONE_LONG, json=path, **asked)
    assert advice.verdict.reasons == ("memory",) and "nothing that cad_jax has fits" in printed
    assert "cad-jax train" not in printed
    assert json.loads(path.read_text())["verdict"]["train_flags"] is None
    assert advice.largest_context["cad"] == 0


def test_the_margin_decides(tmp_path: Path, one_long) -> None:
    judged = one_long[0].verdict
    assert judged.gain < 0.9
    advice, printed = advice_for(tmp_path, ONE_LONG, margin=0.9)
    assert not advice.verdict.use_cad and "margin 90%" in printed


def test_packing_that_is_faster_is_advised_instead(one_long) -> None:
    """By more than the margin, and only where it fits the memory."""
    advice, comparison = one_long[0], one_long[0].comparison
    trials = Trials(advice.setting, [], 0, 0)
    for factor, fits, use_cad in ((0.9, True, False), (0.99, True, True), (0.9, False, True)):
        held = 0.0 if fits else 2 * comparison.usable_bytes
        packed_s = factor * comparison.best.step_s
        packed = comparison.wlb._replace(step_s=packed_s, memory_bytes=held)
        judged = verdict(trials, comparison._replace(wlb=packed), 0.02)
        assert judged.use_cad is use_cad, (factor, fits)
        assert judged.reasons == (() if use_cad else ("packing",))
        assert ("use packing instead" in judged.text) is not use_cad


def test_json_holds_everything_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "advice.json"
    advice, printed = advice_for(tmp_path, ONE_LONG, json=path, steps=2)
    saved = json.loads(path.read_text())
    passes = 2 * 2 * 8 * 16_384 / sum(ONE_LONG)  # two microbatches, almost full
    assert 0.98 * passes < saved["passes_over_lengths"] <= passes
    said = re.search(
        r"holds 270,336 tokens .* of 2 simulated microbatches: every document comes ([\d.]+) times",
        " ".join(printed.split()),
    )
    assert said is not None and float(said[1]) == pytest.approx(passes, rel=0.02)
    assert (saved["label"], saved["kernel_times"], saved["memory_label"]) == (
        "simulated", "derived", "derived",
    )  # fmt: skip
    assert (saved["ranks"], saved["tp"], saved["steps"]) == (8, 8, 2)
    assert saved["lengths"]["documents"] == len(ONE_LONG)
    assert saved["lengths"]["max_tokens"] == max(ONE_LONG)
    tried = {(o["strategy"], o["transport"], o["tolerance"]) for o in saved["outcomes"]}
    for transport in ("direct", "relay", "ragged"):
        assert {("cad", transport, t) for t in TOLERANCES} <= tried
        assert ("home", transport, None) in tried
    assert {o["strategy"] for o in saved["outcomes"]} == {
        "cad", "home", "all_gather", "ring", "wlb",
    }  # fmt: skip
    assert {o["capacities"] for o in saved["outcomes"]} == {"measured", "static", None}
    for outcome in saved["outcomes"]:
        assert outcome["step_s"] > 0 and 0 < outcome["mfu"] < 1 and outcome["memory_bytes"] > 0
    verdict = saved["verdict"]
    assert verdict["use_cad"] and verdict["text"] == advice.verdict.text
    assert verdict["best"]["step_s"] == advice.verdict.best.step_s
    assert f"--attention.tolerance {verdict['best']['tolerance']}" in verdict["train_flags"]
    assert verdict["train_recipe"] is None, "of llama3-1b"
    first = path.read_text()
    advice_for(tmp_path, ONE_LONG, json=path, steps=2)
    assert path.read_text() == first


def test_the_largest_context_fits_and_the_next_does_not(tmp_path: Path) -> None:
    """State of float32 weights, gradients and moments (20 bytes a weight over 64 devices), and of every
    token of the rank at least what a layer keeps, bound the context from above."""
    advice, _ = advice_for(tmp_path, ONE_LONG, model="llama3-8b")
    usable = 0.8 * 151_397_597_184
    kept_row = 32 * (2 * 4096 + 2 * 4096 + 4 * 32) / 8  # bf16 input and output of attention, lse
    most = 8 * (usable - 20 * 7.5e9 / 64) / (2 * kept_row)
    for strategy, tokens in advice.largest_context.items():
        assert 65_536 < tokens < most, strategy
    assert advice.largest_context["ring"] > advice.largest_context["cad"]
    twice, _ = advice_for(tmp_path, ONE_LONG, model="llama3-8b", topology="h200:16x8")
    assert twice.largest_context["cad"] > 1.5 * advice.largest_context["cad"]


def test_a_narrow_window_cuts_no_figure_off(tmp_path: Path) -> None:
    text, path = io.StringIO(), tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, ONE_LONG)))
    args = AdviseArgs(path, "h200:2x8", tokens_per_rank=16_384, steps=1, tp=2, pp=4)
    run(args, Console(file=text, width=60))
    assert "simulated" in text.getvalue() and "\N{HORIZONTAL ELLIPSIS}" not in text.getvalue()


def test_pipelines(tmp_path: Path) -> None:
    advice, printed = advice_for(tmp_path, ONE_LONG, pp=2, microbatches=2, topology="h200:4x8")
    assert "bub-" in printed and advice.verdict.best.bubble > 0
    assert "--training.microbatches 2" in printed


@pytest.mark.parametrize("tp_splits", ["weights", "tokens"])
def test_the_printed_command_is_a_run_as_advised(one_long, tp_splits) -> None:
    """As the command line of training reads it; every recipe named has its model's sizes."""
    advice, printed = one_long
    args = AdviseArgs(Path("l"), "h200:8x8", tokens_per_rank=16_384, tp_splits=tp_splits)
    for model, recipe in RECIPES.items():
        text = train_text(advice, replace(args, model=model))
        assert "on each of the 8 nodes, I from 0 to 7," in text
        asked = parse(shlex.split(text.split("cad-jax train ")[1].replace("-id I", "-id 7")))
        config, process = asked.config, asked.process
        config.check()
        assert process == ProcessConfig(8, "HOST:PORT", 7)
        sizes = {n: v for n, v in asdict(model_shape(model)).items() if hasattr(config.model, n)}
        assert len(sizes) == 7 and sizes.items() <= asdict(config.model).items()
        assert config.name == recipe and config.data.paths and config.data.tokenizer != "byte"
        assert config.mesh == MeshConfig(1, 8, 8, tp_splits=tp_splits, platform="cuda")
        assert config.training.tokens_per_microbatch == 2 * 8 * 16_384
        assert config.training.microbatches == 1  # as simulated, whatever the recipe has
        best, attention = advice.verdict.best.candidate, config.attention
        assert (attention.strategy, config.training.overlap) == (best.strategy, best.overlap)
        assert (attention.transport, attention.tolerance) == (best.transport, best.tolerance)
    assert (
        "cad-jax train RECIPE, where the recipe has the sizes of llama3-1b:\n--mesh.pp" in printed
    )


def test_drawn_steps_hold_long_documents_as_often_as_the_data() -> None:
    """In one pass over the data, as many as there are."""
    lengths = np.array([8000, *[100] * 80])
    steps = draw_steps(lengths, 16, 1, 16_000)
    held = np.concatenate([nano for step in steps for nano in step[0]])
    assert all(nano.sum() <= 16_000 // len(step[0]) for step in steps for nano in step[0])
    assert abs((held == 8000).sum() - 16) <= 4
    # Packing holds one long document back until another comes: not in the steps that are drawn.
    one_step = [draw_steps(lengths, 1, 1, 16_000, seed)[0][0] for seed in range(8)]
    assert sum((nano == 8000).sum() for nanos in one_step for nano in nanos) >= 4
    undivided = draw_steps(np.array([9000, *[100] * 80]), 16, 1, 16_000)
    assert {len(step[0]) for step in undivided} == {1, 2}
    again = draw_steps(lengths, 16, 1, 16_000)
    for one, other in zip(steps, again, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def test_of_equal_outcomes_the_preferred_one() -> None:
    """Within the tie, by preference; beyond it, by seconds alone."""
    made = [
        Outcome(Candidate("cad", tolerance=tolerance), seconds, *([0.0] * 8), each_step_s=())
        for tolerance, seconds in ((0.01, 1.0), (0.02, 1.0009), (0.05, 1.002), (0.1, 0.9995))
    ]

    def chosen(tie: float) -> float | None:
        return fastest(made, lambda o: o.candidate.tolerance or 0.0, tie=tie).candidate.tolerance

    assert [chosen(tie) for tie in (0.0, 0.001, 0.01)] == [0.1, 0.01, 0.01]


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, [], "document lengths cannot be read from"),
        ("12\nx3\n", [], r"line 2: a document length is a whole number of tokens .* correct or"),
        ("-4\n", [], "line 1: a document length is"),
        ("", [], "holds no document lengths"),
        ("0\n0\n", [], "must not all be 0"),
        (
            "3000000\n",
            [],
            r"must fit one stage's microbatch of 1048576 tokens, .* has 3000000: use",
        ),
        ("100\n", ["--model", "gpt5"], "model must be one of llama2-7b.* got 'gpt5'"),
        ("100\n", ["--topology", "h200"], "DEVICE:NODESxDEVICES_PER_NODE"),
        ("100\n", ["--topology", "tpu:2x4"], "one of h100, h200, b200, got 'tpu'"),
        ("100\n", ["--tp", "3"], "must divide the 64 devices"),
        ("100\n", ["--tp", "64", "--model", "llama2-7b"], "tp must divide the 32 query heads"),
        (
            "100\n",
            ["--pp", "8", "--microbatches", "3", "--tp", "1"],
            "at least half of --pp .=8.* use 4 or",
        ),
        ("100\n", ["--tokens-per-rank", "0"], "--tokens-per-rank must be at least 1"),
        ("100\n", ["--tokens-per-rank", "1001"], "divisible by --tp"),
        ("100\n", ["--tokens-per-rank", "200000000"], "must be at most 2147483648 tokens"),
        (
            "100\n",
            ["--nodes-bandwidth", "0"],
            "--between-nodes-gb-s must be at least 0.001 and at most 1e.06, got 0",
        ),
        ("100\n", ["--margin", "2"], "--margin must be at least 0 and at most 1, got 2"),
        ("100\n", ["--profile", "h300"], "profile must be one of"),
        ("100\n", ["--json", "/nowhere/a.json"], "make the folder /nowhere first"),
    ],
)
def test_bad_input_ends_in_2_with_a_cure(
    content: str | None, arguments: list[str], message: str, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "lengths.txt"
    if content is not None:
        path.write_text(content)
    if "--topology" not in arguments:
        arguments = ["--topology", "h200:8x8", *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        try:
            code = main(["--lengths", str(path), *arguments])
        except SystemExit as stop:  # what the arguments' own class refuses
            code = stop.code
    assert code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error), error
