"""Two processes of 4 devices each against one of 8: the same run, or an error on both."""

import fcntl
import io
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cad_jax.launch import launch
from cad_jax.metrics import read_metrics
from cad_jax.processes import ProcessConfig, start_devices
from tests.pool_worker import forward_rows, pipeline_config
from tests.tiny_runs import compile_once, tiny_config, write_corpus

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    with compile_once(tmp_path_factory.getbasetemp() / "compiled"):
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory, worker_id):
    """A folder with the corpus and what two processes left there, made by the first test worker that
    needs it: it takes too long to be made by each."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "two_processes"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            if (folder / "two").exists():
                pytest.fail("the two processes failed in another test worker: its error says why")
            corpus = write_corpus(folder / "corpus")
            run_two(folder / "two", corpus)
            (folder / "done").write_text(corpus)
    return folder


@pytest.fixture
def corpus(shared):
    return (shared / "done").read_text()


@pytest.fixture
def two(shared):
    return shared / "two"


def run_two(folder: Path, corpus: str) -> None:
    """Two processes that leave in `folder` what `pool_worker.main` writes."""
    folder.mkdir()
    (folder / "speeds_0.txt").write_text("1\n0.1\n1\n0.3\n")  # process 1 has no file of its own
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.pool_worker", str(folder), corpus, "2", address]
    workers = [
        subprocess.Popen(
            [*command, str(process_id)],
            cwd=ROOT,
            env=os.environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for process_id in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=500) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, err) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, err


def test_forward_is_bitwise_that_of_one_process(two, corpus):
    expected = forward_rows(tiny_config(two, corpus))
    ranks = []
    for process_id in range(2):
        with np.load(two / f"rows_{process_id}.npz") as rows:
            for rank, values in rows.items():
                ranks.append(int(rank))
                np.testing.assert_array_equal(values, expected[int(rank)])
                assert np.abs(values).max() > 0.1
    assert sorted(ranks) == [0, 1, 2, 3], "each process held its own ranks"


def test_run_is_that_of_one_process_which_carries_it_on(two, corpus, tmp_path):
    config = tiny_config(tmp_path, corpus, steps=6)
    silent = Console(file=io.StringIO())
    launch(config, console=silent)
    launch(replace(config, folder=str(two / "run")), resume=True, console=silent)
    ours, theirs = read_metrics(tmp_path / "run"), read_metrics(two / "run")
    assert [r["step"] for r in theirs] == [1, 2, 3, 4, 5, 6]
    for mine, other in zip(ours, theirs, strict=True):
        assert other["loss"] == pytest.approx(mine["loss"], rel=1e-5)
        for name in ("documents", "target_tokens", "attn_max_over_mean", "exchange_bytes_max"):
            assert other[name] == mine[name]


def refusals(two, name):
    return [json.loads((two / f"refusals_{i}.json").read_text())[name] for i in range(2)]


def test_different_plans_are_named_on_both(two):
    for text in refusals(two, "plans"):
        assert "PlanDisagreementError: processes planned different work for step 1" in text
        assert "process 0: " in text and "process 1: " in text
    assert not list((two / "other" / "checkpoints").iterdir())


def test_data_that_one_process_cannot_read_stops_both(two):
    of_first, of_second = refusals(two, "data")
    assert of_first.startswith("ValueError: every data path must match at least one file")
    assert of_second.startswith("ValueError: process 0: every data path must match")


def test_what_is_gathered_or_read_by_the_first_is_the_same_on_both(two):
    for process_id in range(2):
        agreed = json.loads((two / f"agreed_{process_id}.json").read_text())
        assert agreed["speeds"] == [1.0, 0.1, 1.0, 0.3]
        assert agreed["gathered"] == [[0, "xxx", 0.1], [1, "xxxx", 0.1]]


def test_process_settings_are_checked():
    with pytest.raises(ValueError, match=r"--process-id \(=2\) must be from 0 to .* \(=1\)"):
        ProcessConfig(2, "localhost:1", 2)
    with pytest.raises(ValueError, match="needs --coordinator HOST:PORT"):
        ProcessConfig(2)
    with pytest.raises(ValueError, match=r"8 devices, which --processes \(=3\) does not divide"):
        start_devices(ProcessConfig(3, "localhost:1", 0), 8, "cpu")


def test_a_pipeline_with_a_stage_per_process_trains_alike(two, corpus, tmp_path):
    config = pipeline_config(tmp_path, corpus)
    launch(config, console=Console(file=io.StringIO()))
    runs = [Path(config.folder), two / "pipeline" / "run"]
    one, both = ([r["loss"] for r in read_metrics(folder)] for folder in runs)
    assert len(one) == 2 and both == pytest.approx(one, rel=1e-6)
