"""What a run leaves open: settled once, recorded, and kept by the resumed run."""

import hashlib
from dataclasses import replace

import pytest

from cad_jax import settled
from cad_jax.config import AttentionConfig, MeshConfig, config_from_dict
from cad_jax.launch import open_data
from cad_jax.resume import rounding_changes
from cad_jax.settled import (
    kept_transport,
    settled_tolerance,
    with_first_speeds,
    with_profile_digest,
    with_speeds,
    with_transport,
)
from cad_jax.sharding.cost_model import shipped
from cad_jax.simulation.advice import TOLERANCES
from cad_jax.tolerance import with_tolerance
from tests.tiny_runs import tiny_config, with_changes, write_corpus


def test_a_tolerance_is_settled_once(tmp_path):
    config = tiny_config(tmp_path, write_corpus(tmp_path / "corpus"))
    config = replace(config, mesh=MeshConfig(dp=4), attention=AttentionConfig(tolerance=None))
    data, folder, said = open_data(config), tmp_path / "run", []
    first = settled_tolerance(config, data, folder, False, said.append)
    assert first.attention.tolerance in TOLERANCES and len(said) == 1
    again = settled_tolerance(config, data, folder, False, said.append)
    assert again == first, "deterministic"
    assert with_tolerance(config, 0.3).attention.tolerance == 0.3
    # What the run's folder says counts for a resumed run, whatever would be predicted now.
    folder.mkdir()
    with_tolerance(config, 0.07).save(folder)
    kept = settled_tolerance(config, data, folder, True, pytest.fail)
    assert kept.attention.tolerance == 0.07
    assert settled_tolerance(config, data, folder, False, said.append) == first
    # By hand.
    fixed = with_tolerance(config, 0.15)
    assert settled_tolerance(fixed, data, folder, True, pytest.fail) == fixed
    assert config_from_dict(config.to_dict()) == config, "None survives JSON"


def test_a_transport_is_kept_on_the_same_mesh_and_chosen_anew_on_another(tmp_path):
    config, said = tiny_config(tmp_path, "*.txt"), []
    recorded = with_transport(config, "direct")
    assert recorded.attention.transport == "direct"
    assert with_transport(config, None) == config, "nothing is planned"
    assert kept_transport(config, tmp_path, True, said.append) is None, "no configuration yet"
    recorded.save(tmp_path)
    assert kept_transport(config, tmp_path, True, said.append) == "direct"
    same = with_changes(config, mesh={"platform": "cpu"}, attention={"tolerance": 0.2})
    assert kept_transport(same, tmp_path, True, said.append) == "direct"
    assert kept_transport(config, tmp_path, False, said.append) is None, "a new run"
    by_hand = with_changes(config, attention={"transport": "relay"})
    assert kept_transport(by_hand, tmp_path, True, said.append) is None
    assert with_transport(by_hand, "direct") == by_hand
    assert said == []
    for change in ({"dp": 2}, {"tp_splits": "tokens"}):
        other = with_changes(config, mesh=change)
        assert kept_transport(other, tmp_path, True, said.append) is None
    for settings in ({"strategy": "home"}, {"key_ranges": 2}, {"node": 2, "capacity_plans": 9}):
        other = with_changes(config, attention=settings)
        assert kept_transport(other, tmp_path, True, said.append) is None
    assert "the run used direct, and goes on with mesh.dp 4 -> 2; --attention.trans" in said[0]
    assert "with attention.node 1 -> 2, attention.capacity_plans 40 -> 9; " in said[-1]
    assert len(said) == 5 and all("--attention.transport fixes it" in line for line in said)


def test_a_profile_that_was_measured_again_is_noticed(tmp_path):
    file, said = tmp_path / "own.csv", []
    file.write_bytes(shipped("cpu").read_bytes())
    config = with_changes(tiny_config(tmp_path, "*.txt"), attention={"profile": str(file)})
    begun = with_profile_digest(config)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert begun.attention.profile_digest and digest.startswith(begun.attention.profile_digest)
    assert config_from_dict(begun.to_dict()) == begun == with_profile_digest(begun)
    with_transport(begun, "direct").save(tmp_path)
    assert kept_transport(begun, tmp_path, True, said.append) == "direct" and not said
    file.write_text(file.read_text() + "\n")
    again = with_profile_digest(begun)
    assert "attention.profile_digest" in rounding_changes(again, begun.to_dict())[0]
    assert (
        kept_transport(again, tmp_path, True, said.append) is None and "profile_digest" in said[0]
    )
    named = with_changes(config, attention={"profile": "cpu"})
    assert with_profile_digest(named).attention.profile_digest == begun.attention.profile_digest
    for name in (None, "analytic"):
        other = with_changes(config, attention={"profile": name})
        assert with_profile_digest(other) == other
    for name, words in (
        ("none.csv", r"profile \(=none.csv\) must be a file"),
        ("x", "^attention.profile must be one of .*got 'x'"),
    ):
        with pytest.raises(ValueError, match=words):
            with_profile_digest(with_changes(config, attention={"profile": name}))


def test_a_profile_must_be_that_of_process_0(tmp_path, monkeypatch):
    monkeypatch.setattr(settled, "from_first_process", lambda action: "of process 0")
    config = with_changes(tiny_config(tmp_path, "*.txt"), attention={"profile": "cpu"})
    with pytest.raises(
        ValueError, match="must be the same file for every .*of process 0.*copy that"
    ):
        with_profile_digest(config)


def test_speeds_come_from_their_file_and_are_recorded(tmp_path):
    file = tmp_path / "speeds.txt"
    file.write_text("1\n0.1\n1\n1\n")
    config = with_changes(tiny_config(tmp_path, "*.txt"), attention={"speeds": str(file)})
    read = with_speeds(config)
    assert read.attention.server_speeds == (1.0, 0.1, 1.0, 1.0)
    assert with_first_speeds(config) == read
    assert config_from_dict(read.to_dict()) == read
    read.check()
    file.write_text("1\n2\n")
    with pytest.raises(ValueError, match=r"speeds.txt must hold one .* mesh's 4 servers .*, got 2"):
        with_speeds(read).check()
    given = with_changes(tiny_config(tmp_path, "*.txt"), attention={"server_speeds": (1.0,)})
    with pytest.raises(ValueError, match=r"attention.server_speeds must hold .* 4 servers .*got 1"):
        with_speeds(given).check()
