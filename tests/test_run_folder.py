"""What a run folder keeps when a run is started again."""

import json

import pytest

from cad_jax.metrics import FIELDS, MetricsLog, read_metrics
from cad_jax.processes import ProcessConfig, start_devices
from cad_jax.run_folder import CHECKPOINTS, check_nothing_lost


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


def test_only_damaged_checkpoints_are_not_a_new_start(tmp_path) -> None:
    check_nothing_lost(tmp_path)
    (tmp_path / CHECKPOINTS / "damaged_28").mkdir(parents=True)
    with pytest.raises(ValueError, match="damaged_28: put a backup in place, or start anew"):
        check_nothing_lost(tmp_path)


def test_absent_platform_is_refused(monkeypatch) -> None:
    def none_of_that_kind():
        raise RuntimeError("no such backend")

    monkeypatch.setattr("jax.devices", none_of_that_kind)
    monkeypatch.setattr("jax.config.update", lambda name, value: None)
    with pytest.raises(ValueError, match=r"platform \(='cuda'\).*--mesh.platform cpu"):
        start_devices(ProcessConfig(), 8, "cuda")
