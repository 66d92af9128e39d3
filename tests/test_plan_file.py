"""The file that `cad-jax plan` writes is a plan that runs."""

import json
from functools import partial

import jax
from strategy_cases import exact, in_order, relative_errors

import cad_jax
from cad_jax.plan_command import main
from cad_jax.sharding.mesh import make_mesh
from cad_jax.sharding.tasks import SERVER

MODULE = """
import dataclasses
import cad_jax

def upside_down(lengths, **arguments):
    plan = cad_jax.plan_documents(lengths, **arguments)
    tasks = plan.tasks.copy()
    tasks[:, 6] = plan.servers - 1 - tasks[:, 6]
    return dataclasses.replace(plan, tasks=tasks)
"""


def test_a_plan_of_ones_own_runs_from_its_file(tmp_path, monkeypatch):
    """Another planner, another order of documents, key sub-ranges: as dense attention."""
    (tmp_path / "upside.py").write_text(MODULE)
    (tmp_path / "lengths.txt").write_text("20\n450\n37\n1\n")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = (
        f"--lengths {tmp_path}/lengths.txt --servers 4 --tokens-per-server 128 --model llama3-8b "
        f"--transport direct --key-ranges 3 --placement aligned --json {tmp_path}/plan.json"
    ).split()
    assert main(arguments) == 0
    ours = cad_jax.Plan.load(tmp_path / "plan.json")
    assert main([*arguments, "--planner", "upside:upside_down"]) == 0
    plan = cad_jax.Plan.load(tmp_path / "plan.json")
    assert plan.lengths.tolist() == [450, 37, 20, 1]  # the long one begins on a rank
    assert sorted(plan.tasks[:, SERVER]) == sorted(3 - ours.tasks[:, SERVER])
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["max_over_mean"] == plan.max_over_mean and figures["plan_s"] > 0

    lengths = tuple(plan.lengths.tolist())
    inputs, want = exact(lengths, 512, (32, 8), 128, "float32")
    attend = jax.jit(partial(cad_jax.core_attention, mesh=make_mesh(dp=4), kernel="reference"))
    got = in_order([attend(*inputs[:3], plan.arrays())], None)
    assert relative_errors(got, want[:1], lengths).max() <= 1e-5


def test_a_planner_that_is_none_or_fails_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "lengths.txt").write_text("20\n")
    pool = f"--lengths {tmp_path}/lengths.txt --servers 2 --tokens-per-server 64".split()
    assert main([*pool, "--planner", "nowhere:f"]) == 2
    assert "'nowhere:f' is not" in capsys.readouterr().err
    assert main([*pool, "--planner", "cad_jax:Plan", "--json", f"{tmp_path}/x.json"]) == 2
    assert "Plan does not (" in capsys.readouterr().err
    (tmp_path / "failing.py").write_text("def plan(lengths, **options):\n    return lengths[99]\n")
    monkeypatch.syspath_prepend(tmp_path)
    for placement in ("sequential", "searched"):
        own = [
            "--planner",
            "failing:plan",
            "--placement",
            placement,
            "--json",
            f"{tmp_path}/x.json",
        ]
        assert main([*pool, *own]) == 2
        error = capsys.readouterr().err
        assert "planner plan must plan every step's documents, and raised IndexError" in error
    assert not (tmp_path / "x.json").exists()
