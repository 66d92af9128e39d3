"""What a run folder keeps when a run is started again."""

import json
import re
from io import StringIO
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from cad_jax.checkpoint import COMMIT_FILE
from cad_jax.metrics import FIELDS, MetricsLog, Reporter, read_metrics
from cad_jax.processes import ProcessConfig, start_devices
from cad_jax.run_folder import CHECKPOINTS, begins_anew, check_folder, open_folder
from cad_jax.sharding.mesh import make_mesh
from cad_jax.train import Loop, StopRequest
from tests.tiny_runs import tiny_config


def written_steps(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_metrics_of_a_run_that_starts_again_are_kept(tmp_path) -> None:
    record = dict.fromkeys(FIELDS, None) | {"capacity_used": {}}
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write({**record, "step": step})
    log.close()
    for _ in range(2):  # nothing to keep of an empty file: one copy is enough
        MetricsLog(tmp_path, resume_step=0).close()
    assert read_metrics(tmp_path) == []
    copies = sorted(tmp_path.glob("metrics_*.jsonl"))
    assert len(copies) == 1 and written_steps(copies[0]) == [1, 2, 3]


def test_resume_drops_later_lines_only(tmp_path) -> None:
    record = dict.fromkeys(FIELDS, None) | {"capacity_used": {}}
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write({**record, "step": step})
    log.close()
    MetricsLog(tmp_path, resume_step=2).close()
    assert written_steps(tmp_path / "metrics.jsonl") == [1, 2]
    assert not list(tmp_path.glob("metrics_*"))


@pytest.mark.parametrize("line", ["{}", "null", '{"step": 2, "lo', "\udcff"])
def test_a_damaged_line_costs_no_others(tmp_path, line: str) -> None:
    """A crash cuts the last line short; whoever resumes must not lose what follows another."""
    path = tmp_path / "metrics.jsonl"
    damaged = f'{{"step": 1}}\n{line}\n'.encode(errors="surrogateescape")
    path.write_bytes(damaged)
    assert read_metrics(tmp_path) == [{"step": 1}]
    path.write_bytes(damaged + b'{"step": 3}\n')
    with pytest.raises(ValueError, match=r"line 2: .* remove that line"):
        MetricsLog(tmp_path, resume_step=3)
    assert path.read_bytes() == damaged + b'{"step": 3}\n'


def test_a_lock_of_others_is_not_emptied(tmp_path) -> None:
    (tmp_path / "lock").write_text("mine")
    with pytest.raises(ValueError, match="holds lock, which no run of cad-jax left there"):
        open_folder(tmp_path, resume=False)
    assert (tmp_path / "lock").read_text() == "mine"


def test_only_damaged_checkpoints_are_not_a_new_start(tmp_path) -> None:
    assert begins_anew(tmp_path)
    (tmp_path / CHECKPOINTS / "30").mkdir(parents=True)
    assert begins_anew(tmp_path), "a save that was not finished"
    (tmp_path / CHECKPOINTS / "damaged_28").mkdir()
    with pytest.raises(ValueError, match="damaged_28: put a backup in place, or start anew"):
        begins_anew(tmp_path)
    # Orbax writes the commit file before the name.
    for other in ("31.orbax-checkpoint-tmp-1", "32_backup"):
        (tmp_path / CHECKPOINTS / other).mkdir()
        (tmp_path / CHECKPOINTS / other / COMMIT_FILE).touch()
        with pytest.raises(ValueError, match="damaged_28: put a backup in place, or start anew"):
            begins_anew(tmp_path)
    (tmp_path / CHECKPOINTS / "30" / COMMIT_FILE).touch()
    assert not begins_anew(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "loss.png", "plan.png", "tensorboard"])
@pytest.mark.parametrize("resume", [False, True])
def test_files_of_others_are_not_written_over(tmp_path, name, resume) -> None:
    """A data or model folder, say. What a run left before its first step has a lock beside it."""
    (tmp_path / "notes.txt").touch()
    check_folder(tmp_path, resume)
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"holds {name}, which no run of cad-jax left there"):
        check_folder(tmp_path, resume)
    (tmp_path / "lock").touch()
    check_folder(tmp_path, resume)


def test_absent_platform_is_refused(monkeypatch) -> None:
    def none_of_that_kind():
        raise RuntimeError("no such backend")

    monkeypatch.setattr("jax.devices", none_of_that_kind)
    monkeypatch.setattr("jax.config.update", lambda name, value: None)
    with pytest.raises(ValueError, match=r"platform \(='cuda'\).*--mesh.platform cpu"):
        start_devices(ProcessConfig(), 8, "cuda")


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (20, "all 20 steps are done"),
        (
            7,
            r"at step 20 already, training.steps \(=7\) asks for fewer: nothing was trained; add "
            "--steps with more than 20 to go on",
        ),
    ],
)
def test_a_finished_run_says_where_it_is(tmp_path, steps, reason) -> None:
    """Resumed at step 20, with nothing left to do: no step is fed, run or saved."""
    loop = Loop(
        config=tiny_config(tmp_path, "*.txt", steps=steps),
        mesh=make_mesh(dp=4, tp=2),
        train_step=cast(Any, None),
        state=cast(Any, "as restored"),
        step=20,
        data_state={},
        prefetcher=cast(Any, None),
        checkpointer=cast(Any, SimpleNamespace(wait=lambda: None)),
        metrics=None,
        reporter=cast(Any, None),
    )
    outcome = loop.run(StopRequest())
    assert (outcome.step, outcome.state) == (20, "as restored")
    assert re.search(reason, outcome.reason), outcome.reason


def test_progress_never_passes_its_end() -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    reporter = Reporter(7, console)
    reporter.start(20)
    reporter.stop()
    assert "20/20" in screen.getvalue() and "20/7" not in screen.getvalue()
