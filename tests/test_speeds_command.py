"""`cad-jax speeds`: a file with one relative speed a server, from what was measured on every device."""

import jax
import numpy as np
import pytest

from cad_jax import server_speeds
from cad_jax.__main__ import main
from cad_jax.server_speeds import ServerSpeeds, measure_speeds
from cad_jax.sharding.mesh import make_mesh
from cad_jax.sharding.speeds import check_speeds, read_speeds
from tests.tiny_runs import tiny_config

COMMAND = ["speeds", "debug_cpu8", "--rounds", "2"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(server_speeds, "ROWS", {"cpu": 128, "gpu": 128})


def seconds_of(took):
    """In the place of `timing.measure`: what each device's forward and backward take together."""

    def timed(works, rounds, done):
        for number, work in enumerate(works):
            work.samples = [took[number // 2] / 2] * rounds

    return timed


def test_a_file_that_training_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(server_speeds, "measure", seconds_of([1, 1, 1, 4, 1, 1, 2, 1]))
    out = tmp_path / "speeds.txt"
    assert main([*COMMAND, "--out", str(out)]) == 0
    speeds = read_speeds(out)
    check_speeds(speeds, 4, str(out))
    assert speeds == (1.333, 0.333, 1.333, 0.667), "median 0.75 of 1, 1/4, 1, 1/2"
    text = out.read_text()
    assert text.startswith("# measured 20") and "xla attention of 128 tokens, float32" in text
    assert "medians of 2 interleaved rounds; servers of mesh pp 1, dp 4" in text
    said = capsys.readouterr().out.replace("\n", "")
    assert f"wrote {out}" in said and "servers are alike" not in said
    again = [*COMMAND, "--attention.speeds", str(out), "--out", str(out)]
    monkeypatch.setattr(server_speeds, "measure", seconds_of([1] * 8))
    assert main(again) == 0 and read_speeds(out) == (1, 1, 1, 1), (
        "the run's own file, measured again"
    )


def test_a_server_is_as_slow_as_the_slowest_of_its_devices(tmp_path, monkeypatch):
    """Three devices of given seconds among eight of 1: servers of two devices, relative to the median."""
    took = [1, 1, 4, 1, 1, 2, 0.5, 1]
    monkeypatch.setattr(server_speeds, "measure", seconds_of(took))
    result = measure_speeds(tiny_config(tmp_path, "*.txt"), make_mesh(dp=4, tp=2))
    assert result.seconds.tolist() == [[1, 1], [4, 1], [1, 2], [0.5, 1]]
    assert (result.speeds / result.speeds[0]).tolist() == [1, 0.25, 0.5, 1]
    assert np.median(result.speeds) == 1 and not result.alike


def test_every_device_is_measured_on_itself(tmp_path, monkeypatch):
    used, measure = [], server_speeds.measure

    def timed(works, rounds, done):
        measure(works, rounds, done)
        used.extend(jax.tree.leaves(work.prepare()())[0].devices() for work in works)

    monkeypatch.setattr(server_speeds, "measure", timed)
    config = tiny_config(tmp_path, "*.txt", dp=2, tp=1)
    result = measure_speeds(config, make_mesh(dp=2, tp=1), rounds=1)
    assert used == [{d} for d in jax.devices()[:2] for _ in range(2)], "forward and backward"
    assert result.seconds.shape == (2, 1) and result.seconds.min() > 0


def test_all_processes_seconds_count(tmp_path, monkeypatch):
    """Of two processes each gets the other's by the gather alone."""
    mesh = make_mesh(dp=4, tp=2)
    monkeypatch.setattr(server_speeds, "measure", lambda *_: None)
    monkeypatch.setattr(server_speeds.Work, "seconds", property(lambda self: 0.5))
    other = [(number, 3.0) for number in (6, 7)]
    monkeypatch.setattr(server_speeds, "gathered", lambda own: [own[:6], other])
    result = measure_speeds(tiny_config(tmp_path, "*.txt"), mesh)
    assert result.seconds[:, 0].tolist() == [1, 1, 1, 3]


def test_refusals(tmp_path, capsys):
    for arguments, words in (
        (["--rounds", "0"], "--rounds must be at least 1 and at most 1000, got 0"),
        (["--out", str(tmp_path / "no" / "s.txt")], "make the folder"),
    ):
        assert main(["speeds", "debug_cpu8", "--out", str(tmp_path / "s.txt"), *arguments]) == 2
        assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_alike():
    seconds = np.ones((4, 1))
    assert ServerSpeeds(np.array([1, 1.02, 0.995, 1]), seconds, "").alike
    assert not ServerSpeeds(np.array([1, 1.02, 0.97, 1]), seconds, "").alike
