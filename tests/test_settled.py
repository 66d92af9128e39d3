"""What a run leaves open: settled once, recorded, and kept by the resumed run."""

from dataclasses import replace

import pytest

from cad_jax.config import AttentionConfig, MeshConfig, config_from_dict
from cad_jax.launch import open_data
from cad_jax.settled import (
    kept_transport,
    settled_tolerance,
    with_first_speeds,
    with_speeds,
    with_transport,
)
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
    assert (
        "used direct on mesh pp 1, dp 4, tp 2, .* tp splits weights, and goes on on".replace(
            ".*", "virtual_stages 1,"
        )
        in said[0]
    )
    assert len(said) == 2 and "--attention.transport fixes it" in said[1]


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
