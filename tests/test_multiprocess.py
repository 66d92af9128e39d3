"""Two processes of 4 devices each against one of 8: the same run, or an error on both."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cad_jax.metrics import read_metrics
from tests.tiny_runs import write_corpus

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--model.embedding-dim=32 --model.head-dim=8 --model.ffn-dim=64 --training.microbatches=1 "
    "--training.tokens-per-microbatch=512 --data.max-piece-tokens=None --data.window=8 "
    "--attention.capacity-plans=20 --attention.kernel=xla --data.source=text"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Programs compile once for the runs of this module."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def train(folder, corpus, environment, *options, processes=1, each=()):
    """Runs `cad-jax train debug_cpu8` in so many processes; returns (exit code, stderr) of each.

    each: per process, options of its own.
    """
    address = f"localhost:{free_port()}"
    started = []
    for process_id in range(processes):
        command = [sys.executable, "-m", "cad_jax", "train", "debug_cpu8", *MODEL.split()]
        command += [f"--folder={folder}", f"--data.cache-dir={folder.parent}/cache", *options]
        command += ["--data.paths", corpus]
        if processes > 1:
            command += [f"--processes={processes}", f"--coordinator={address}"]
            command += [f"--process-id={process_id}", *(each[process_id] if each else ())]
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(p.returncode, err) for p, (_, err) in zip(started, outputs, strict=True)]


def test_two_processes_equal_one(tmp_path, corpus, environment):
    """Also a resume by another number of processes, in the middle."""
    one, two = tmp_path / "one", tmp_path / "two"
    code, err = train(one, corpus, environment, "--steps=6")[0]
    assert code == 0, err
    for options in (("--steps=3",), ("--steps=6", "--resume")):
        for code, err in train(two, corpus, environment, *options, processes=2):
            assert code == 0, err
    ours, theirs = read_metrics(one), read_metrics(two)
    assert [r["step"] for r in theirs] == [1, 2, 3, 4, 5, 6]
    assert theirs[0]["loss"] == ours[0]["loss"], "the forward pass is bitwise the same"
    for mine, other in zip(ours, theirs, strict=True):
        assert other["loss"] == pytest.approx(mine["loss"], rel=1e-5)
        for name in ("documents", "target_tokens", "attn_max_over_mean", "exchange_bytes_max"):
            assert other[name] == mine[name]
    assert json.loads((two / "config.json").read_text())["mesh"]["dp"] == 4
    code = train(two, corpus, environment, "--steps=7", "--resume")[0][0]
    assert code == 0 and len(read_metrics(two)) == 7


def test_different_plans_are_named_on_both(tmp_path, corpus, environment):
    each = (("--attention.tolerance=0.05",), ("--attention.tolerance=0.06",))
    results = train(
        tmp_path / "run", corpus, environment, "--steps=4", processes=2, each=each
    )
    for code, err in results:
        assert code == 1, err
        assert "processes planned different work for step 1 (process 0: " in err
        assert "Traceback" not in err
    assert not (tmp_path / "run" / "checkpoints" / "1").exists()


def test_one_process_that_refuses_stops_both(tmp_path, corpus, environment):
    missing = str(tmp_path / "nothing" / "*.txt")
    results = train(
        tmp_path / "run", corpus, environment, processes=2, each=((), ("--data.paths", missing))
    )
    assert [code for code, _ in results] == [2, 2], results
    assert "process 1: every data path must match at least one file" in results[0][1]
    assert "every data path must match at least one file" in results[1][1]
