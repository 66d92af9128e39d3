"""The command line: help, exit codes, one message without a traceback, lazy modules."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cad_jax import plan_command, train_command
from cad_jax.__main__ import COMMANDS, main
from cad_jax.model_config import RopeScaling
from cad_jax.processes import PlanDisagreementError
from cad_jax.recipes import RECIPES
from cad_jax.train import NonFiniteLossError
from cad_jax.train_command import parse

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def devices_of_the_tests(monkeypatch):
    """The test session has its devices already."""
    monkeypatch.setattr(train_command, "start_devices", lambda *args: None)


def test_help_explains_itself(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for words in ("train", "plan", "debug_cpu8", "--resume", "--attention", "Exit codes"):
        assert words in text
    assert main([]) == 2


def test_unknown_command(capsys):
    assert main(["simulat"]) == 2
    assert f"must be one of {', '.join(COMMANDS)}, got 'simulat'" in capsys.readouterr().err


def test_train_help_lists_recipes_and_options(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in RECIPES)
    with pytest.raises(SystemExit):
        main(["train", "debug_cpu8", "--help"])
    text = capsys.readouterr().out
    for option in ("--resume", "--attention", "--steps", "--mesh.dp", "--folder", "--processes"):
        assert option in text
    assert "{cad,home,all_gather,ring,native,native_dense}" in text
    assert "--model.rope-scaling.factor {None}|FLOAT" in text
    assert "Sizes of a Llama 2 or 3." in text


def test_overrides_reach_the_configuration():
    args = parse(
        shlex.split(
            "text_folder --data.paths a/*.txt b/*.txt --attention ring --steps 7 --mesh.dp 2 "
            "--training.max-minutes 1.5 --resume --folder elsewhere --processes 2 "
            "--coordinator host:1 --process-id 1"
        )
    )
    assert args.resume
    assert args.config.name == "text_folder"
    assert args.config.data.paths == ("a/*.txt", "b/*.txt")
    assert args.config.attention.strategy == "ring"
    assert args.config.training.steps == 7
    assert args.config.training.max_minutes == 1.5
    assert (args.config.mesh.dp, args.config.mesh.tp) == (2, RECIPES["text_folder"]().mesh.tp)
    assert args.config.folder == "elsewhere"
    assert (args.process.processes, args.process.process_id) == (2, 1)
    assert parse(["debug_cpu8"]).config == RECIPES["debug_cpu8"]()


def test_rope_scaling_is_set_by_its_factor(monkeypatch):
    def scaling(*options: str) -> RopeScaling | None:
        return parse(["debug_cpu8", *options]).config.model.rope_scaling

    assert scaling() is None
    assert scaling("--model.rope-scaling.factor", "8") == RopeScaling()
    assert scaling(
        *("--model.rope-scaling.factor", "4", "--model.rope-scaling.low-freq-factor", "2"),
        *("--model.rope-scaling.high-freq-factor", "3"),
        *("--model.rope-scaling.original-context-tokens", "99"),
    ) == RopeScaling(4.0, 2.0, 3.0, 99)
    config = RECIPES["debug_cpu8"]()
    scaled = replace(
        config, model=replace(config.model, rope_scaling=RopeScaling(4.0, 2.0, 3.0, 9))
    )
    monkeypatch.setitem(RECIPES, "debug_cpu8", lambda: scaled)
    assert parse(["debug_cpu8"]).config == scaled
    assert scaling("--model.rope-scaling.factor", "5") == RopeScaling(5.0, 2.0, 3.0, 9)
    assert scaling("--model.rope-scaling.factor", "None") is None


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("nothing", "debug_cpu8"),
        ("debug_cpu8 --attention spiral", "all_gather"),
        ("debug_cpu8 --mesh.dp 0", "must be at least 1"),
        ("debug_cpu8 --steps many", "many"),
        ("debug_cpu8 --processes 2", "--coordinator"),
        ("debug_cpu8 --model.rope-scaling.factor 0.5", "factor (=0.5) must be at least 1"),
        (
            "debug_cpu8 --model.rope-scaling.low-freq-factor 2",
            "low_freq_factor (=2.0) needs a factor to scale by; add --model.rope-scaling.factor",
        ),
    ],
)
def test_wrong_arguments_exit_with_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments.split()])
    assert stop.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_user_errors_are_one_message(tmp_path, capsys):
    folder = f"--folder={tmp_path}/run"
    assert main(["train", "text_folder", folder, "--data.paths", f"{tmp_path}/*.none"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("cad-jax train: every data path must match at least one file")
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert main(["train", "debug_cpu8", folder, "--mesh.dp", "16"]) == 2
    assert "dp 16 x tp 2 = 32, but there are 8" in capsys.readouterr().err


def test_a_run_that_stops_exits_with_1(monkeypatch, capsys):
    def diverging(config, resume):
        raise NonFiniteLossError("loss nan at step 3: the checkpoint of step 2 is kept")

    monkeypatch.setattr(train_command, "launch", diverging)
    assert main(["train", "debug_cpu8"]) == 1
    assert capsys.readouterr().err == (
        "cad-jax train: loss nan at step 3: the checkpoint of step 2 is kept\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PlanDisagreementError("compare both"), 1, "compare both\n"),
        (MemoryError(), 2, "the memory does not hold this (out of memory): use"),
        (OSError(28, "No space left on device", "log"), 2, "log cannot be used (No space left"),
    ],
)
def test_whatever_stops_training_is_one_message(error, code, message, monkeypatch, capsys):
    def stopped(config, resume):
        raise error

    monkeypatch.setattr(train_command, "launch", stopped)
    assert main(["train", "debug_cpu8"]) == code
    printed = capsys.readouterr().err
    assert printed.startswith(f"cad-jax train: {message}") and printed.count("\n") == 1


def test_plan_writes_its_json(tmp_path, capsys):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("900\n17\n0\n400\n")
    out = tmp_path / "plan.json"
    arguments = f"plan --lengths {lengths} --servers 4 --tokens-per-server 512 --json {out}"
    assert main(arguments.split()) == 0
    assert out.exists()
    assert main([*arguments.split()[:-1], str(tmp_path)]) == 2
    assert f"{tmp_path} cannot be written (Is a directory): name another" in capsys.readouterr().err
    lengths.write_text("900\nmany\n")
    assert main(arguments.split()) == 2
    assert "line 2" in capsys.readouterr().err


def test_sizes_nobody_has_are_one_message(tmp_path, monkeypatch, capsys):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("900\n")
    arguments = f"plan --lengths {lengths} --tokens-per-server 64 --servers"
    for servers in ("1000000", str(10**20)):
        assert main([*arguments.split(), servers]) == 2
        captured = capsys.readouterr().err
        assert captured.startswith("cad-jax plan: ") and captured.count("\n") == 1
        assert "plan fewer" in captured

    def exhausted(args):
        raise MemoryError("Unable to allocate 3 GiB")

    monkeypatch.setattr(plan_command, "run", exhausted)
    assert main([*arguments.split(), "4"]) == 2
    assert "memory does not hold this (Unable to allocate 3 GiB): use fewer ranks, tokens" in (
        capsys.readouterr().err
    )


def test_process_makes_its_devices_and_refuses_in_one_line(tmp_path):
    """A process of its own: devices from the mesh, exit code 2, nothing but the message."""
    result = subprocess.run(
        [sys.executable, "-m", "cad_jax", "train", "debug_cpu8", "--mesh.dp=3", "--mesh.tp=2"]
        + [f"--folder={tmp_path}/run", "--training.tokens-per-microbatch=1000"],
        cwd=ROOT, env=os.environ, text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith("cad-jax train: training.tokens_per_microbatch (=1000) must be")
    assert "Traceback" not in result.stderr


def test_planning_imports_no_jax():
    program = (
        "import sys; sys.modules['jax'] = None; from cad_jax.__main__ import main; "
        "assert main(['--help']) == 0; main(['plan', '--help'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "usage: cad-jax plan" in result.stdout
