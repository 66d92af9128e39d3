"""What a resumed run may change, what it may not, and what it says of it."""

from dataclasses import replace

import pytest

from cad_jax.model_config import RopeScaling
from cad_jax.resume import check_resume, rounding_changes
from tests.tiny_runs import tiny_config, with_changes


@pytest.fixture
def config(tmp_path):
    return tiny_config(tmp_path, "*.txt")


def test_what_a_resume_may_change(config):
    other = with_changes(
        replace(config, folder="elsewhere"),
        mesh={"dp": 2, "tp": 1},
        attention={"strategy": "ring", "tolerance": 0.2},
        training={"steps": 99},
        checkpoint={"every_steps": 7},
    )
    check_resume(other, config.to_dict())


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("model", {"num_layers": 3}),
        ("model", {"rope_scaling": RopeScaling()}),
        ("optimizer", {"learning_rate": 1.0}),
        ("training", {"microbatches": 7}),
        ("training", {"tokens_per_microbatch": 1024}),
        ("attention", {"placement": "aligned"}),
    ],
)
def test_what_it_must_not_change(config, part, change):
    with pytest.raises(ValueError, match=f"written with {part}.{next(iter(change))}=.*set it back"):
        check_resume(with_changes(config, **{part: change}), config.to_dict())


def test_all_that_differs_is_named_at_once(config):
    other = with_changes(config, model={"num_layers": 3}, attention={"placement": "aligned"})
    with pytest.raises(ValueError) as refusal:
        check_resume(other, config.to_dict())
    assert "model.num_layers=2 and this run has 3; with attention.placement=" in str(refusal.value)
    assert "'sequential' and this run has 'aligned'" in str(refusal.value)
    assert "set them back" in str(refusal.value)


def test_what_an_earlier_version_did_not_write_is_as_by_default(config):
    saved = config.to_dict()
    for name in ("placement", "planner", "speeds", "server_speeds", "node", "profile"):
        del saved["attention"][name]
    check_resume(config, saved)
    assert rounding_changes(config, saved) == []
    with pytest.raises(ValueError, match="placement='sequential' and this run has 'aligned'"):
        check_resume(with_changes(config, attention={"placement": "aligned"}), saved)


def test_what_changes_plans_alone_is_named(config):
    saved = config.to_dict()
    other = with_changes(
        replace(config, folder="elsewhere"),
        mesh={"dp": 2, "platform": "cpu"},
        attention={
            "planner": "a:b",
            "speeds": "s.txt",
            "server_speeds": (1.0, 2.0),
            "node": 2,
            "capacity_plans": 7,
            "profile_digest": "0f",
            "transport": "relay",
        },  # fmt: skip
        training={"steps": 99},
    )
    assert rounding_changes(other, saved) == [
        "mesh.dp 4 -> 2",
        "attention.planner None -> 'a:b'",
        "attention.server_speeds None -> [1.0, 2.0]",
        "attention.node 1 -> 2",
        "attention.profile_digest None -> '0f'",
        "attention.capacity_plans 40 -> 7",
    ], "auto says nothing, of a platform or of a transport"
    assert rounding_changes(config, saved) == []
    assert rounding_changes(config, other.to_dict())[0] == "mesh.dp 2 -> 4"
    other = with_changes(other, mesh={"platform": "cuda"}, attention={"transport": "direct"})
    saved["mesh"]["platform"], saved["attention"]["transport"] = "cpu", "relay"
    found = rounding_changes(other, saved)
    assert "mesh.platform 'cpu' -> 'cuda'" in found
    assert "attention.transport 'relay' -> 'direct'" in found
