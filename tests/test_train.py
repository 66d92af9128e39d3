"""The loop: exact resume, on the same mesh and on another; stops; what it refuses; what it reports."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from cad_jax import launch as launch_module
from cad_jax.config import load_config
from cad_jax.feed import StepFeed
from cad_jax.launch import launch
from cad_jax.metrics import FIELDS, read_metrics
from cad_jax.prefetch import Prefetcher
from cad_jax.sharding.cost import DEVICES
from cad_jax.sharding.tasks import causal_pairs
from cad_jax.train import NonFiniteLossError, model_flops
from tests.tiny_runs import compile_once, tiny_config, with_changes, write_corpus

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "compiled"
    with compile_once(folder):
        yield folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, corpus):
    """24 steps without interruption, checkpoints after every 4th."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder, corpus, steps=24)
    outcome, text = run(config)
    return config, outcome, text


def run(config, resume=False):
    console = Console(file=io.StringIO(), width=160)
    outcome = launch(config, resume=resume, console=console)
    return outcome, console.file.getvalue()  # pyright: ignore


def series(folder, name):
    return [record[name] for record in read_metrics(Path(folder))]


def values(state):
    return jax.tree.map(np.asarray, state)


def saved_data_state(config, step):
    path = Path(config.folder) / "checkpoints" / str(step) / "run" / "metadata"
    return json.loads(path.read_text())["body"]["data"]


def test_resume_is_bitwise(whole_run, tmp_path):
    config, outcome, _ = whole_run
    broken = replace(config, folder=str(tmp_path / "run"))
    run(with_changes(broken, training={"steps": 5}))
    resumed, text = run(broken, resume=True)
    assert "resuming after step 5" in text and "resuming with" not in text
    transport = load_config(Path(config.folder)).attention.transport
    assert transport in ("direct", "relay"), "what auto came to"
    assert load_config(Path(broken.folder)).attention.transport == transport
    assert series(broken.folder, "step") == list(range(1, 25))
    assert series(broken.folder, "loss") == series(config.folder, "loss")
    assert series(broken.folder, "grad_norm") == series(config.folder, "grad_norm")
    jax.tree.map(np.testing.assert_array_equal, values(resumed.state), values(outcome.state))
    assert saved_data_state(broken, 24) == saved_data_state(config, 24)


def test_resume_on_another_mesh(whole_run, tmp_path):
    """dp 4, tp 2 to dp 2, tp 1: the same documents in the same order, 20 losses within 1e-5."""
    whole = whole_run[0]
    config = replace(whole, folder=str(tmp_path / "run"))
    run(with_changes(config, training={"steps": 4}))
    _, text = run(with_changes(config, mesh={"dp": 2, "tp": 1}), resume=True)
    text = " ".join(text.split())
    assert "choosing the transport anew: the run used" in text
    assert "resuming with mesh.dp 4 -> 2, mesh.tp 2 -> 1" in text
    assert "losses that differ by rounding" in text
    assert saved_data_state(config, 24) == saved_data_state(whole, 24)
    for name in ("documents", "target_tokens", "padding_tokens"):
        assert series(config.folder, name) == series(whole.folder, name)
    np.testing.assert_allclose(
        series(config.folder, "loss")[4:], series(whole.folder, "loss")[4:], rtol=1e-5
    )
    assert series(config.folder, "loss")[4:] != series(whole.folder, "loss")[4:], "the same mesh?"


def test_metrics_and_files(whole_run):
    config, _, text = whole_run
    folder = Path(config.folder)
    records = read_metrics(folder)
    assert [tuple(r) for r in records] == [FIELDS] * 24
    for name in ("config.json", "loss.png", "plan.png", "checkpoints/20", "checkpoints/24"):
        assert (folder / name).exists(), name
    assert list((folder / "tensorboard").glob("events.*"))
    assert {r["compiles"] for r in records} == {1}
    assert {r["tokens"] for r in records} == {1024}
    assert all(r["mfu"] is None for r in records)
    assert all(r["attn_max_over_mean"] <= r["attn_max_over_mean_home"] for r in records)
    assert all(0 < max(r["capacity_used"].values()) <= 1 for r in records)
    assert sum(r["target_tokens"] + r["padding_tokens"] for r in records) < 24 * 1024
    losses = series(folder, "loss")
    assert losses[-1] < losses[0] < np.log(264) * 1.1
    for words in (
        "mesh",
        "dp 4, tp 2",
        "documents",
        "step 24/24",
        "token bigrams alone",
        "summary",
    ):
        assert words in text


def test_a_strategy_that_moves_tokens_trains_alike(whole_run, tmp_path):
    config = replace(whole_run[0], folder=str(tmp_path / "run"))
    run(with_changes(config, attention={"strategy": "ring"}, training={"steps": 2}))
    np.testing.assert_allclose(
        series(config.folder, "loss"), series(whole_run[0].folder, "loss")[:2], rtol=1e-5
    )


def test_killed_inside_a_save(whole_run, tmp_path, compiled):
    """SIGKILL twice, each time while a checkpoint is half written; what follows is bitwise."""
    config = replace(whole_run[0], folder=str(tmp_path / "run"))
    corpus = config.data.paths[0]
    command = [sys.executable, "-m", "tests.tiny_runs", str(tmp_path), corpus, "12", str(compiled)]
    checkpoints = Path(config.folder) / "checkpoints"
    for _ in range(2):
        begun = steps_begun(checkpoints)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            while len(steps_begun(checkpoints) - begun) < 3 or not half_written(checkpoints):
                assert process.poll() is None, "it ended before it was killed"
            process.kill()
        assert process.returncode == -signal.SIGKILL
    done = max(int(p.name) for p in checkpoints.iterdir() if (p / "commit_success.txt").exists())
    assert max(series(config.folder, "step")) - done <= 2
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=300)
    assert series(config.folder, "step") == list(range(1, 13))
    assert series(config.folder, "loss") == series(whole_run[0].folder, "loss")[:12]


def steps_begun(checkpoints):
    """Steps that have a folder, complete or not."""
    names = [p.name.split(".")[0] for p in checkpoints.glob("*")]
    return {int(name) for name in names if name.isdigit()}


def half_written(checkpoints):
    return [p for p in checkpoints.glob("*") if "tmp" in p.name]


def test_nan_stops_and_keeps_the_last_good_checkpoint(whole_run, tmp_path, monkeypatch):
    make, calls = StepFeed.make, []

    def poisoned(self):
        work = make(self)
        calls.append(work)
        if len(calls) == 6:
            batch = work.batch._replace(weights=work.batch.weights * np.nan)
            work = work._replace(batch=batch)
        return work

    monkeypatch.setattr(StepFeed, "make", poisoned)
    config = replace(whole_run[0], folder=str(tmp_path / "run"))
    with pytest.raises(NonFiniteLossError, match="loss nan .* at step 6.*step 4 is kept"):
        run(config)
    folder = Path(config.folder)
    assert series(folder, "step") == [1, 2, 3, 4, 5]
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["4"]
    monkeypatch.undo()
    run(with_changes(config, training={"steps": 8}), resume=True)
    assert series(folder, "loss") == series(whole_run[0].folder, "loss")[:8]


def test_sigterm_saves_and_stops(whole_run, tmp_path):
    config = replace(whole_run[0], folder=str(tmp_path / "run"))
    config = with_changes(config, training={"steps": 500})
    metrics = Path(config.folder) / "metrics.jsonl"

    def terminate():
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=terminate)
    thread.start()
    outcome, text = run(config)
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    assert 2 <= outcome.step < 500
    assert f"stopped by SIGTERM after step {outcome.step}" in text
    assert (Path(config.folder) / "checkpoints" / str(outcome.step)).is_dir()
    steps = min(outcome.step, 24)
    assert series(config.folder, "loss")[:steps] == series(whole_run[0].folder, "loss")[:steps]


def test_time_limit_stops_with_a_checkpoint(whole_run, tmp_path):
    config = replace(whole_run[0], folder=str(tmp_path / "run"))
    outcome, text = run(with_changes(config, training={"steps": 500, "max_minutes": 1e-4}))
    assert outcome.step == 1
    assert "max_minutes (=0.0001) reached after step 1; add --resume" in text
    assert (Path(config.folder) / "checkpoints" / "1").is_dir()


def test_data_that_fails_midway_saves_what_is_done(whole_run, tmp_path, monkeypatch):
    make, calls = StepFeed.make, []

    def failing(self):
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("data.txt:7 cannot be read any more")
        return make(self)

    monkeypatch.setattr(StepFeed, "make", failing)
    config = replace(whole_run[0], folder=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="data.txt:7 cannot be read"):
        run(config)
    assert [p.name for p in (Path(config.folder) / "checkpoints").iterdir()] == ["3"]


def refuses(config, match, resume=False):
    before = {p: p.read_bytes() for p in Path(config.folder).rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=match):
        run(config, resume=resume)
    after = {p: p.read_bytes() for p in Path(config.folder).rglob("*") if p.is_file()}
    assert {p: b for p, b in after.items() if p in before} == before, "something was overwritten"


def test_refusals_before_launch(whole_run, tmp_path, monkeypatch):
    def no_launch(*args, **kwargs):
        raise AssertionError("the step was built")

    config = whole_run[0]
    fresh = replace(config, folder=str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        patch.setattr(launch_module, "Loop", no_launch)
        refuses(config, "holds a run already.*add --resume .* or name another with --folder")
        refuses(
            with_changes(fresh, mesh={"dp": 8, "tp": 2}),
            r"dp 8 x tp 2 = 16, but there are 8; choose",
        )
        refuses(
            with_changes(fresh, training={"tokens_per_microbatch": 510}),
            r"tokens_per_microbatch \(=510\) must be divisible by mesh.dp .*\(=4 x 1 x 1\).*use 512",
        )
        refuses(
            with_changes(fresh, mesh={"dp": 1, "tp": 8}),
            r"num_q_heads \(=4\) must be divisible by tp \(=8\)",
        )
        refuses(
            with_changes(fresh, model={"vocab_size": 200}),
            r"model.vocab_size \(=200\) must hold every id of tokenizer 'byte', which has 264",
        )
        refuses(with_changes(fresh, data={"paths": (str(tmp_path / "no*"),)}), "matches none")
        (tmp_path / "empty.txt").write_text("")
        refuses(
            with_changes(fresh, data={"paths": (str(tmp_path / "empty.txt"),)}),
            "must hold at least one token",
        )
        refuses(
            with_changes(
                fresh, data={"long_documents": "refuse"}, training={"tokens_per_microbatch": 64}
            ),
            "longer than a step",
        )
    assert not Path(fresh.folder).exists()


def test_refused_capacities(whole_run, tmp_path, monkeypatch):
    config = whole_run[0]
    kept = []
    make = launch_module.make_strategy
    monkeypatch.setattr(
        launch_module, "make_strategy", lambda *a, **k: kept.append(make(*a, **k)) or kept[-1]
    )
    run(with_changes(replace(config, folder=str(tmp_path / "a")), training={"steps": 1}))
    small = replace(kept[0].capacities, key_rows=16)
    refuses(
        with_changes(replace(config, folder=str(tmp_path / "b")), attention={"capacities": small}),
        "capacities must hold at least the home plan.*key_rows.*raise them",
    )


def test_refused_resumes(whole_run, tmp_path):
    config = whole_run[0]
    refuses(
        with_changes(config, model={"num_layers": 3}),
        "written with model.num_layers=2 and this run has 3.*set it back",
        resume=True,
    )
    refuses(
        with_changes(config, training={"microbatches": 1}), "training.microbatches=2", resume=True
    )
    refuses(
        with_changes(config, data={"seed": 5}),
        "written with seed=0 and this run has 5",
        resume=True,
    )
    other = write_corpus(tmp_path / "other", seed=9)
    refuses(with_changes(config, data={"paths": (other,)}), "written with data=", resume=True)


def test_a_folder_in_use_is_refused(whole_run, tmp_path):
    config = replace(whole_run[0], folder=str(tmp_path / "run"))
    with launch_module.open_folder(Path(config.folder), resume=False):
        refuses(config, "in use by a run that is still going")


def test_resume_without_a_checkpoint_starts_over(whole_run, tmp_path):
    config = replace(whole_run[0], folder=str(tmp_path / "run"))
    _, text = run(with_changes(config, training={"steps": 2}), resume=True)
    first = f"there is no checkpoint to resume from in {config.folder} (no such folder yet): the run begins at step 0"
    assert " ".join(text.split()).startswith(first)
    assert series(config.folder, "loss") == series(whole_run[0].folder, "loss")[:2]


def test_model_flops_against_counting(tmp_path, corpus):
    """One product of [m, k] and [k, n] is 2 m k n; the backward pass makes two of each."""
    config = tiny_config(tmp_path, corpus)
    tokens, lengths = 512, np.array([300, 100])
    e, h, k, d, f, v = 32, 4, 2, 8, 64, 264
    products = 2 * (e * h * d + 2 * e * k * d + h * d * e + 3 * e * f) + e * v
    linear = 3 * 2 * tokens * products
    pairs = int(causal_pairs(0, lengths, 0, lengths).sum())
    attention = 3 * 2 * (2 * h * d * pairs) * 2
    assert model_flops(config, tokens, pairs) == linear + attention
    assert DEVICES["h200"].peak_flops is not None


def test_prefetcher_hands_over_in_order_and_stops():
    made = []

    def make():
        made.append(len(made))
        if len(made) == 4:
            raise OSError("disk gone")
        return made[-1]

    prefetcher = Prefetcher(make, ahead=1)
    got = [prefetcher.take()[0] for _ in range(3)]
    assert got == [0, 1, 2]
    with pytest.raises(OSError, match="disk gone"):
        prefetcher.take()
    prefetcher.close()


def test_prefetcher_stays_one_ahead():
    made = threading.Semaphore(0)
    count = []

    def make():
        count.append(1)
        made.release()
        return len(count)

    prefetcher = Prefetcher(make, ahead=1)
    made.acquire()
    assert not made.acquire(timeout=0.2), "made a second item before the first was taken"
    assert prefetcher.take()[0] == 1
    assert made.acquire(timeout=5)
    prefetcher.close()
    assert not prefetcher._thread.is_alive()
