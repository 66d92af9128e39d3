"""A planner of one's own: found by name, checked, and used like ours."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from cad_jax.sharding.cost import server_loads
from cad_jax.sharding.plan import Plan, home_plan
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.planners import load_planner, plan_with, wire_cost
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.tasks import HOME, SERVER, HeadShape

LENGTHS = np.array([1500, 20, 300, 1], np.int64)
ARGUMENTS: dict[str, Any] = dict(
    servers=4, tokens_per_server=512, num_q_heads=4, num_kv_heads=1, head_dim=8, tolerance=0.05
)
CAPACITIES = plan_documents(LENGTHS, **ARGUMENTS).capacities


def next_rank(
    lengths, *, servers, tokens_per_server, num_q_heads, num_kv_heads, head_dim, **options
):
    """Every task to the rank after its home."""
    home = home_plan(
        lengths, servers=servers, tokens_per_server=tokens_per_server,
        heads=HeadShape(num_q_heads, num_kv_heads, head_dim), capacities=CAPACITIES,
    )  # fmt: skip
    tasks = home.tasks.copy()
    tasks[:, SERVER] = (tasks[:, HOME] + 1) % servers
    return dataclasses.replace(home, tasks=tasks)


def halved(lengths, **arguments):
    return plan_documents(lengths // 2, **arguments)


def half_done(lengths, **arguments):
    plan = plan_documents(lengths, **arguments)
    return dataclasses.replace(plan, tasks=plan.tasks[: len(plan.tasks) // 2])


def greedy(lengths, **arguments):
    roomy = plan_documents(lengths, **(arguments | dict(capacities=None)))
    needed = required_capacities(roomy, roomy.capacities.transport)
    return dataclasses.replace(roomy, capacities=needed)


def listed(lengths, **arguments):
    return plan_documents(lengths, **arguments).tasks


def ruthless(lengths, **arguments):
    """Writes to what it is given."""
    plan = plan_documents(lengths, **arguments)
    lengths[:] = 0
    return plan


def test_a_named_planner_makes_the_plan():
    planner = load_planner(f"{__name__}:next_rank")
    plan = plan_with(planner, LENGTHS, **ARGUMENTS)
    assert np.array_equal(plan.tasks[:, SERVER], (plan.tasks[:, HOME] + 1) % 4)
    # Rank 3 has the last task: to rank 0 goes what rank 3 had at home.
    assert plan.loads().tolist() == np.roll(plan.home_loads(), 1).tolist()


def test_ours_is_one_too():
    planner = load_planner("cad_jax:plan_documents")
    assert planner is plan_documents
    assert plan_with(planner, LENGTHS, **ARGUMENTS) == plan_documents(LENGTHS, **ARGUMENTS)


def test_what_it_is_given_stays_as_it_was():
    plan = plan_with(ruthless, LENGTHS, **ARGUMENTS)
    assert LENGTHS.sum() == 1821 and np.array_equal(plan.lengths, LENGTHS)


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (halved, r"planner halved must plan what it is asked to: lengths is \[1500 .*pass it on"),
        (half_done, "planner half_done made a plan that cannot run: every allowed .* missing"),
        (greedy, "planner greedy must plan what it is asked to: capacities is Cap"),
        (listed, r"planner listed must return a cad_jax.Plan, got ndarray: begin with"),
    ],
)
def test_plans_that_cannot_run_are_refused(planner, message):
    with pytest.raises(ValueError, match=message):
        plan_with(planner, LENGTHS, **ARGUMENTS, capacities=CAPACITIES)


def test_documents_from_other_starts_are_another_plan():
    def end_to_end(lengths, *, starts, **arguments):
        return plan_documents(lengths, **arguments)

    starts = np.array([0, 1600, 1700, 2040])
    assert plan_with(plan_documents, LENGTHS, starts=starts, **ARGUMENTS).starts.tolist() == [
        0, 1600, 1700, 2040,
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"must plan what it is asked to: starts is \[   0 1600"):
        plan_with(end_to_end, LENGTHS, starts=starts, **ARGUMENTS)


def failing(lengths, **arguments):
    raise KeyError("share")


def test_what_a_planner_raises_is_named_in_a_plan_and_in_the_cost_of_an_order():
    message = (
        r"planner failing must plan every step's .* raised KeyError \('share'\) for 4 of them, the "
    )
    for use in (plan_with, lambda planner, lengths, **rest: wire_cost(planner, **rest)(lengths)):
        with pytest.raises(ValueError, match=message + "longest of 1500 .* 4 servers: correct it"):
            use(failing, LENGTHS, **ARGUMENTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", r"'broken:plan' is not \(ZeroDivisionError: division by zero\): correct it"),
        ("def plan(:", r"'broken:plan' is not \(SyntaxError: .*\): correct it"),
        ("import no_such_module", r"is not \(No module named 'no_such_module'\): install it"),
    ],
)
def test_modules_that_fail_are_refused(text, message, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_planner("broken:plan")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan_documents", r"must be named module:function, got 'plan_documents': name it so"),
        (":f", "must be named module:function, got ':f'"),
        ("no_such_module:f", "'no_such_module:f' is not .*: install it, or put .*PYTHONPATH="),
        (".plan:f", "importable, '.plan' of '.plan:f' is not .*: correct it"),
        ("cad_jax:plan", "module 'cad_jax' has none of the name 'plan': correct the name"),
        ("cad_jax.sharding.plan:FORMAT_VERSION", "has int of the name 'FORMAT_VERSION'"),
    ],
)
def test_names_that_name_no_planner_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        load_planner(name)


def test_the_cost_of_an_order_is_what_its_plan_sends():
    """By hand: 512 rows of two ranks at home, everything moved by one rank, direct."""

    def plan(lengths, **arguments) -> Plan:
        home = plan_documents(lengths, **(arguments | dict(tolerance=10.0, transport="direct")))
        tasks = home.tasks.copy()
        tasks[:, SERVER] = 1 - tasks[:, HOME]
        return dataclasses.replace(home, tasks=tasks)

    arguments = ARGUMENTS | dict(servers=2)
    cost = wire_cost(plan, **arguments)
    assert server_loads(plan(np.array([512, 512]), **arguments).tasks, 2).tolist() == [131328] * 2
    # Units of 2 heads of 8: q and out 2, keys and values 1. To either of two ranks as much as the
    # larger pair needs: 512 rows. Scalars of 4 bytes a head go with out, and with d_out and d_q.
    unit, scalars = 2 * 8 * 2, 2 * 4
    dispatch, output = 2 * 512 * 3, 2 * 512 * 2
    forward = dispatch * unit + output * (unit + scalars)
    backward = (dispatch + output) * (unit + scalars) + dispatch * unit
    assert cost(np.array([512, 512])) == forward + backward
