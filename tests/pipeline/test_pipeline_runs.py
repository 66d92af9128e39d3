"""Whole runs with pipeline stages and ping-pong: one device's losses, resumed bitwise, refused early."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cad_jax.launch import launch, make_run_strategies, open_data
from cad_jax.sharding.planner import plan_documents
from tests.tiny_runs import compile_once, tiny_config, with_changes, write_corpus

STEPS = 30
PIPELINE = dict(pp=2, dp=2, tp=2, tp_splits="tokens")
asked = []  # of `told`


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    with compile_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


def records(config):
    lines = (Path(config.folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(config):
    return [record["loss"] for record in records(config)]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, corpus):
    config = tiny_config(tmp_path_factory.mktemp("whole"), corpus, overlap="pingpong", steps=STEPS)
    config = with_changes(config, mesh=PIPELINE, checkpoint={"every_steps": 10})
    launch(config)
    return config


def test_a_pipeline_follows_one_device(whole_run, corpus, tmp_path):
    one = tiny_config(tmp_path, corpus, dp=1, tp=1, overlap="pingpong", steps=STEPS)
    launch(one)
    assert len(losses(one)) == STEPS
    assert losses(whole_run) == pytest.approx(losses(one), rel=1e-5)
    steps = records(whole_run)
    # Both programs were needed: some step had a document longer than half a microbatch.
    assert {step["nano_batches"] for step in steps} == {1, 2}
    # They were compiled once each, whatever batches came.
    assert [step["compiles"] for step in steps] == sorted(step["compiles"] for step in steps)
    assert steps[-1]["compiles"] == 2
    assert all(step["fallback_tasks"] == 0 for step in steps)


def test_a_resumed_pipeline_is_bitwise_the_whole_run(whole_run, corpus, tmp_path):
    config = tiny_config(tmp_path, corpus, overlap="pingpong", steps=2)
    config = with_changes(config, mesh=PIPELINE, checkpoint={"every_steps": 2})
    launch(config)
    launch(with_changes(config, training={"steps": 4}), resume=True)
    assert losses(config) == losses(whole_run)[:4]


def test_a_pipelines_checkpoint_goes_on_without_one(whole_run, corpus, tmp_path):
    config = tiny_config(tmp_path, corpus, overlap="pingpong", steps=2)
    config = with_changes(config, mesh=PIPELINE, checkpoint={"every_steps": 2})
    launch(config)
    other = with_changes(config, mesh=dict(pp=1, dp=4, tp=2), training={"steps": 4})
    launch(other, resume=True)
    assert losses(other) == pytest.approx(losses(whole_run)[:4], rel=1e-5)


def told(lengths, **arguments):
    """A planner of one's own."""
    asked.append(arguments)
    return plan_documents(lengths, **arguments)


def test_own_plans_of_placed_documents_follow_the_whole_run(whole_run, corpus, tmp_path):
    """Plans by tick and nano-batch of another planner, for a slow server, documents aligned to ranks."""
    config = tiny_config(tmp_path, corpus, overlap="pingpong", steps=2)
    speeds = (1.0, 0.5, 1.0, 1.0)
    attention = {"planner": f"{__name__}:told", "server_speeds": speeds, "placement": "aligned"}
    launch(with_changes(config, mesh=PIPELINE, attention=attention))
    assert losses(config) == pytest.approx(losses(whole_run)[:2], rel=1e-5)
    assert losses(config) != losses(whole_run)[:2], "the same order and plans?"
    assert all(a["servers"] == 4 and a["starts"] is not None for a in asked)
    assert asked[-1]["speeds"].tolist() == list(speeds)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(mesh=dict(pp=4, dp=2, tp=1)),
            r"num_layers \(=2\) must be divisible by pp \(=4\).*use pp=2",
        ),
        (
            dict(attention=dict(strategy="native"), training=dict(overlap="single_stream")),
            r"strategy \(=native\).*mesh.pp 1 \(=2\).*use another strategy",
        ),
        (
            dict(attention=dict(strategy="ring")),
            r"overlap \(=pingpong\) needs attention.strategy cad or home.*single_stream",
        ),
        (
            dict(training=dict(remat="none")),
            r"remat \(=none\) must be one of save_attention, save_stage, full for pipeline stages",
        ),
        (
            dict(mesh=dict(pp=1, dp=4), training=dict(remat="full")),
            r"remat \(=full\) must be one of save_attention for ping-pong on one stage",
        ),
        (
            dict(training=dict(tokens_per_microbatch=516)),
            r"\(=516\) must be divisible by .*\(=2 x 2 x 2\).*use 520",
        ),
        (
            dict(mesh=dict(virtual_stages=2), training=dict(microbatches=3)),
            r"num_layers \(=2\) must be divisible by mesh.pp x mesh.virtual_stages \(=2 x 2\)",
        ),
        (
            dict(
                model=dict(num_layers=4), mesh=dict(virtual_stages=2), training=dict(microbatches=3)
            ),
            r"microbatches must be a multiple of stages \(= 2\), got 3: use 4",
        ),
        (
            dict(attention=dict(placement="searched")),
            r"placement \(=searched\) compares plans .* needs mesh.pp 1 \(=2\).*; use aligned",
        ),
        (
            dict(mesh=dict(pp=1, dp=4, virtual_stages=2)),
            r"virtual_stages \(=2\) above 1 needs a pipeline.*use 1",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything(changes, words, corpus, tmp_path):
    config = tiny_config(tmp_path, corpus, overlap="pingpong")
    config = with_changes(with_changes(config, mesh=PIPELINE), **changes)
    with pytest.raises(ValueError, match=words):
        launch(config)
    assert not Path(config.folder).exists()


def test_capacities_that_hold_no_tick_are_refused(corpus, tmp_path):
    config = with_changes(tiny_config(tmp_path, corpus, overlap="pingpong"), mesh=PIPELINE)
    _, nano = make_run_strategies(config, open_data(config))
    small = replace(nano.capacities, key_rows=16)
    with pytest.raises(ValueError, match=r"hold at least the home plan.*key_rows.*raise them"):
        launch(with_changes(config, attention={"capacities": small}))
    assert not Path(config.folder).exists()
