"""Training by a planner of one's own, with speeds and placement: the same losses, exact resume, early refusals."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cad_jax.attention.planned import PlannedStrategy
from cad_jax.attention.strategies import make_strategy
from cad_jax.config import load_config
from cad_jax.launch import launch
from cad_jax.metrics import read_metrics
from cad_jax.sharding.capacities import home_capacities
from cad_jax.sharding.cost_model import shipped
from cad_jax.sharding.placement import place
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.tasks import HeadShape
from tests.tiny_runs import compile_once, tiny_config, with_changes, write_corpus

SPEEDS = (1.0, 0.25, 1.0, 1.0)
calls = []


def recorded(lengths, **arguments):
    """A planner of one's own."""
    calls.append((lengths.copy(), arguments))
    return plan_documents(lengths, **arguments)


def failing(lengths, **arguments):
    raise KeyError("no such document")


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    with compile_once(tmp_path_factory.getbasetemp() / "compiled"):
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(config, resume=False):
    console = Console(file=io.StringIO(), width=200)
    launch(config, resume=resume, console=console)
    return console.file.getvalue()  # pyright: ignore


def series(config, name):
    return [record[name] for record in read_metrics(Path(config.folder))]


def planned(config, **attention):
    """The run with a planner of its own, speeds and a search."""
    speeds = Path(config.folder).parent / "speeds.txt"
    speeds.write_text("\n".join(map(str, SPEEDS)))
    settings = {
        "planner": f"{__name__}:recorded",
        "speeds": str(speeds),
        "placement": "searched",
        "node": 2,
        "profile": "cpu",
        "capacity_plans": 8,
    }
    return with_changes(config, attention=settings | attention)


@pytest.fixture(scope="module")
def usual(tmp_path_factory, corpus):
    config = tiny_config(tmp_path_factory.mktemp("usual"), corpus, steps=4)
    run(config)
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """Four steps, and what the run said."""
    config = planned(tiny_config(tmp_path_factory.mktemp("planned"), corpus, steps=4))
    return config, run(config)


def test_the_same_documents_a_step_give_the_same_losses(usual, whole):
    config, text = whole
    assert series(config, "loss") == pytest.approx(series(usual, "loss"), rel=1e-5)
    assert series(config, "loss") != series(usual, "loss"), "the same order and plans?"
    for name in ("documents", "target_tokens", "padding_tokens"):
        assert series(config, name) == series(usual, name)
    assert f"planner {__name__}:recorded; documents placed searched; speeds of" in text
    attention = load_config(Path(config.folder)).attention
    assert attention.server_speeds == SPEEDS and attention.transport in ("direct", "relay")


def test_the_planner_was_told_everything(whole):
    lengths, arguments = calls[-1]
    assert arguments["speeds"].tolist() == list(SPEEDS) and arguments["node"] == 2
    assert arguments["cost_model"].label == "measured"
    assert arguments["servers"] == 4 and arguments["tokens_per_server"] == 128
    assert 0 < lengths.sum() <= 512


def test_resumed_bitwise_and_refused_in_another_order(whole, tmp_path):
    config = planned(replace(whole[0], folder=str(tmp_path / "run")))
    run(with_changes(config, training={"steps": 2}))
    with pytest.raises(ValueError, match="placement='searched' and this run has 'aligned'.*back"):
        run(with_changes(config, attention={"placement": "aligned"}), resume=True)
    text = run(config, resume=True)
    assert "losses that differ by rounding" not in text
    assert series(config, "loss") == series(whole[0], "loss")
    assert series(config, "grad_norm") == series(whole[0], "grad_norm")


def strategy(**settings) -> PlannedStrategy:
    """Of cad, over servers of 8,192 tokens."""
    heads = HeadShape(4, 2, 8)
    made = make_strategy("cad", servers=4, tokens_per_server=8192, heads=heads, **settings)
    assert isinstance(made, PlannedStrategy)
    return made


def test_a_slow_server_gets_less_work_and_capacities_are_of_such_plans():
    lengths = np.array([20_000, 3000, 5000, 4000])
    slow = strategy(speeds=SPEEDS, sample_lengths=[lengths], tolerance=0.02)
    alike = strategy(sample_lengths=[lengths], tolerance=0.02)
    work, usual = (s.prepare(lengths) for s in (slow, alike))
    assert work.figures.fallback_tasks == usual.figures.fallback_tasks == 0
    # Of 3.25 relative seconds' work a server of speed 0.25 has 1/13, others 4/13, up to the tolerance.
    shares = work.pairs / work.pairs.sum()
    assert shares[1] <= 1.03 / 13 and np.delete(shares, 1).max() <= 4 * 1.03 / 13
    assert usual.pairs.max() <= 1.03 * usual.pairs.mean()
    for pairs, figure in (
        (work.pairs, work.figures.max_over_mean),
        (work.home_pairs, work.figures.max_over_mean_home),
    ):
        even_s = pairs.sum() / sum(SPEEDS)  # in which all servers would end together
        assert figure == pytest.approx(max(pairs / SPEEDS) / even_s)
    assert work.figures.max_over_mean < 1.03 and usual.figures.max_over_mean_home < 2.5
    assert slow.capacities.query_rows > 1.1 * alike.capacities.query_rows


def test_ranks_hold_documents_in_the_order_of_placement():
    """Aligned: the longest first, each to the rank of least work; what its rank leaves free is filled by the next."""
    lengths = np.array([4000, 8192, 4192, 8000, 8184])
    padding = 4 * 8192 - lengths.sum()
    usual, aligned = (
        strategy(placement=p, sample_lengths=[lengths]).prepare(lengths)
        for p in ("sequential", "aligned")
    )
    assert usual.order is None and aligned.order is not None
    assert sorted(aligned.order.tolist()) == list(range(4 * 8192))
    document = np.repeat(np.arange(6), [*lengths, padding])[aligned.order].reshape(4, -1)
    assert [set(of_rank.tolist()) for of_rank in document] == [{1}, {4, 3}, {3, 2}, {2, 0, 5}]
    keys = np.concatenate([*(np.arange(n) + 1 for n in lengths), np.zeros(padding, int)])
    assert aligned.home_pairs.tolist() == keys[aligned.order].reshape(4, -1).sum(axis=1).tolist()
    assert aligned.home_pairs.sum() == usual.home_pairs.sum()


def test_capacities_are_of_plans_of_placed_documents():
    """They hold the plan of the sample as it will be laid, and no more than that or any home plan needs."""
    lengths = np.array([700, 9000, 300, 6000, 2000, 5000, 4096, 100, 5000])
    made = strategy(placement="aligned", sample_lengths=[lengths], tolerance=0.02, node=2)
    roomy = strategy(placement="aligned", tolerance=0.02, node=2)
    laid = lengths[place(lengths, "aligned", 4, 8192)]
    plan = plan_documents(
        laid, servers=4, tokens_per_server=8192, num_q_heads=4, num_kv_heads=2, head_dim=8,
        tolerance=0.02, node=2, capacities=roomy.capacities,
    )  # fmt: skip
    needed = required_capacities(plan, made.transport)
    floor = home_capacities(4, 8192, HeadShape(4, 2, 8), None, made.transport)
    for name in ("query_rows", "key_rows", "merge_runs", "assemble_runs"):
        wanted = max(getattr(needed, name), getattr(floor, name))
        assert getattr(made.capacities, name) == wanted, name
    assert made.prepare(lengths).figures.fallback_tasks == 0


def test_strategies_refuse_what_they_do_not_have():
    shape = dict(servers=4, tokens_per_server=64, heads=HeadShape(4, 2, 8))
    for name, settings, words in (
        (
            "ring",
            dict(speeds=SPEEDS),
            "speeds, nodes and a cost model are of strategy cad.* for ring: leave it",
        ),
        ("home", dict(planner=recorded), "are of strategy cad.*for home: leave it out"),
        ("ring", dict(placement="aligned"), "must be sequential for ring, .*: leave it out"),
        ("home", dict(placement="searched"), "needs strategy cad and one stage, got home and 1"),
        ("cad", dict(placement="searched", stages=2), "got cad and 2; use aligned"),
    ):
        with pytest.raises(ValueError, match=words):
            make_strategy(name, **shape, **settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("attention", "mesh", "words"),
    [
        (
            {"planner": "no_such_module:plan"},
            {},
            "module must be importable, 'no_such_module' .*put its folder on the path",
        ),
        ({"planner": "plan"}, {}, "must be named module:function, got 'plan'"),
        (
            {"planner": f"{__name__}:failing"},
            {},
            r"planner failing must plan every step's .*, and raised KeyError .*: correct it, or leave",
        ),
        (
            {"profile": str(shipped("h200_fa2"))},
            {},
            "a profile of h100 h200, but the device is cpu: name",
        ),
        ({"speeds": "none.txt"}, {}, "cannot be read from none.txt .*`cad-jax speeds` writes it"),
        ({}, {"dp": 2}, "must hold one relative speed for each of the mesh's 2 servers .*, got 4"),
        (
            {"placement": "searched"},
            {"pp": 2, "dp": 2},
            r"placement \(=searched\) compares plans .* needs mesh.pp 1 \(=2\).*; use aligned",
        ),
    ],
)
def test_refusals_before_anything(attention, mesh, words, corpus, tmp_path):
    config = planned(tiny_config(tmp_path, corpus), **attention)
    with pytest.raises(ValueError, match=words):
        run(with_changes(config, mesh=mesh))
    assert not Path(config.folder).exists()


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (
            {"strategy": "ring", "planner": "a:b"},
            r"attention.planner \(=a:b\) needs attention.strategy cad, .*, got ring; leave it out",
        ),
        (
            {"strategy": "home", "speeds": "s.txt"},
            r"speeds \(=s.txt\) needs .* cad.*, got home; le",
        ),
        (
            {"strategy": "native", "node": 2},
            r"node \(=2\) needs attention.strategy cad.*native; le",
        ),
        ({"node": 0}, r"attention.node \(=0\) must be at least 1; use 1 where nodes play no part"),
        (
            {"strategy": "all_gather", "placement": "aligned"},
            r"placement \(=aligned\) needs .* cad or home, .* order, got all_gather; use sequential",
        ),
        ({"strategy": "home", "placement": "searched"}, r"needs .* cad, got home; use aligned or"),
        (
            {"placement": "random"},
            "placement must be one of sequential, aligned, searched, got 'rand",
        ),
        (
            {"planner": "a:b", "tolerance": None},
            r"planner \(=a:b\) needs an attention.tolerance.* give one, such as 0.05",
        ),
        ({"speeds": "s.txt", "tolerance": None}, r"speeds \(=s.txt\) needs an attention.tolerance"),
        ({"server_speeds": (1.0,), "tolerance": None}, r"server_speeds .* an attention.tolerance"),
        ({"placement": "aligned", "tolerance": None}, r"placement .* needs an attention.tolerance"),
        ({"server_speeds": (1.0, 0.0)}, "server_speeds must hold positive finite numbers, got 0.0"),
    ],
)
def test_settings_that_do_not_apply_are_refused(attention, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        with_changes(tiny_config(tmp_path, "*.txt"), attention=attention)
