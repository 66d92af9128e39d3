"""Configuration: JSON there and back, rules with value and cure."""

import json
import math
from types import SimpleNamespace
from typing import cast

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from cad_jax import launch
from cad_jax.attention.planned import PlannedStrategy
from cad_jax.attention.strategies import make_strategy
from cad_jax.config import (
    AttentionConfig,
    MeshConfig,
    TrainingConfig,
    config_from_dict,
    load_config,
)
from cad_jax.data import DocumentBatches
from cad_jax.launch import make_run_strategies, make_strategies
from cad_jax.model_config import RopeScaling
from cad_jax.processes import ProcessConfig
from cad_jax.recipes import RECIPES, llama3_8b_h200, stdlib_demo
from cad_jax.sharding.capacities import default_capacities
from cad_jax.sharding.cost import DEVICES, model_shape
from cad_jax.sharding.cost_model import shipped
from cad_jax.sharding.plan import home_plan
from cad_jax.sharding.tasks import DENSE_TRANSPORTS, K_START, HeadShape
from cad_jax.train_step import TrainStep
from tests.tiny_runs import tiny_config, with_changes


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_check_and_survive_json(name, tmp_path):
    config = RECIPES[name]()
    assert config.name == name
    config.check()
    config.save(tmp_path)
    assert load_config(tmp_path) == config
    assert RECIPES[name].__doc__


def test_json_holds_what_is_optional(tmp_path):
    config = tiny_config(tmp_path, "*.txt")
    capacities = default_capacities(4, 128, HeadShape(4, 2, 8), transport="relay")
    config = with_changes(
        config,
        model={"rope_scaling": RopeScaling(factor=4.0)},
        attention={"capacities": capacities},
        training={"max_minutes": 2.5},
    )
    again = config_from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.attention.capacities == capacities


def test_damaged_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json must be the JSON a run writes"):
        load_config(tmp_path)
    values = tiny_config(tmp_path, "*.txt").to_dict()
    with pytest.raises(ValueError, match="field model.depth is unknown"):
        config_from_dict(values | {"model": values["model"] | {"depth": 3}})
    del values["model"]["ffn_dim"]
    with pytest.raises(ValueError, match="model.* is incomplete .*ffn_dim"):
        config_from_dict(values)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: MeshConfig(dp=0), r"mesh.dp \(=0\) must be at least 1; use 1 to leave the axis"),
        (
            lambda: AttentionConfig(tolerance=-0.1),
            r"tolerance \(=-0.1\) must be finite and not negative; use 0.05",
        ),
        (lambda: AttentionConfig(tolerance=math.inf), r"\(=inf\) must be finite .*; use 0.05"),
        (lambda: AttentionConfig(tolerance=math.nan), r"\(=nan\) must be finite .*; use 0.05"),
        (lambda: AttentionConfig(key_ranges=0), r"key_ranges \(=0\) must be at least 1; use 1"),
        (
            lambda: AttentionConfig(strategy="ring", key_ranges=4),
            r"key_ranges \(=4\) needs attention.strategy cad, which plans .*, got ring; leave it out",
        ),
        (
            lambda: AttentionConfig(capacity_plans=0),
            r"capacity_plans \(=0\) must be at least 1; use 200",
        ),
        (
            lambda: TrainingConfig(steps=0),
            r"training.steps \(=0\) must be at least 1; give the num",
        ),
        (
            lambda: TrainingConfig(tokens_per_microbatch=0),
            r"tokens_per_microbatch \(=0\) must be at least 1; give a multiple of mesh.dp",
        ),
        (lambda: TrainingConfig(microbatches=0), r"microbatches \(=0\) must be .* 1; use 1 to"),
        (
            lambda: TrainingConfig(max_minutes=0),
            r"max_minutes \(=0\) must be positive; give more, or None for no limit",
        ),
        (lambda: TrainingConfig(seed=-1), r"seed \(=-1\) must be from 0 to 2\*\*32 - 1; use 0"),
        (
            lambda: ProcessConfig(processes=0),
            r"--processes \(=0\) must be at least 1; leave it out",
        ),
        (
            lambda: ProcessConfig(processes=2, process_id=2, coordinator="a:1"),
            r"--process-id \(=2\) must be from 0 to .* \(=1\); give each process another",
        ),
        (
            lambda: ProcessConfig(processes=2, coordinator="somewhere"),
            r"needs --coordinator HOST:PORT, got 'somewhere'; give an address of process 0",
        ),
    ],
)
def test_rules_of_the_parts(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_rules_between_the_parts(tmp_path):
    config = tiny_config(tmp_path, "*.txt")
    config.check()
    with pytest.raises(
        ValueError, match=r"\(=514\) must be divisible by .* \(=4 x 1 x 1\).*use 516"
    ):
        with_changes(config, training={"tokens_per_microbatch": 514}).check()
    with pytest.raises(ValueError, match=r"num_q_heads \(=4\) must be divisible by tp \(=3\)"):
        with_changes(config, mesh={"tp": 3}).check()
    with pytest.raises(ValueError, match=r"attention.node \(=3\) must divide the mesh's 4 servers"):
        with_changes(config, attention={"node": 3}).check()
    with pytest.raises(ValueError, match=r"\(=4294967296\) must be at most 2147483648, .*more mic"):
        with_changes(config, training={"tokens_per_microbatch": 2**32}).check()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_number_is_finite(tmp_path, value):
    """Of all parts, parts of parts as well; where a part has a rule of its own, that one may say so."""
    config = tiny_config(tmp_path, "*.txt")
    for part, name in (
        ("training", "max_minutes"), ("optimizer", "weight_decay"), ("optimizer", "eps"),
        ("optimizer", "clip_norm"), ("model", "norm_eps"), ("model", "rope_theta"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{name} \(=.*\) must"):
            with_changes(config, **{part: {name: value}}).check()
    with pytest.raises(ValueError, match=r"factor \(=.*\) must be"):
        with_changes(config, model={"rope_scaling": RopeScaling(factor=value)}).check()
    with pytest.raises(ValueError, match=r"training.max_minutes \(=nan\) must be a finite number"):
        with_changes(config, training={"max_minutes": math.nan}).check()


@pytest.mark.parametrize("name, samples", [("cad", 40), ("home", 40), ("ring", 0), ("native", 0)])
def test_only_planned_strategies_draw_samples(name, samples, tmp_path):
    """The others have no capacities to set; drawing samples packs hundreds of microbatches."""
    drawn = []

    def sample_nano_lengths(batches):
        drawn.extend([(np.array([300, 212]),)] * batches)
        return drawn

    config = with_changes(tiny_config(tmp_path, "*.txt"), attention={"strategy": name})
    data = SimpleNamespace(
        sample_nano_lengths=sample_nano_lengths, nano_batches=1, tokens_per_microbatch=512,
        max_document_tokens=512,
    )  # fmt: skip
    strategy, _ = make_run_strategies(config, cast(DocumentBatches, data))
    assert strategy.name == name
    assert len(drawn) == samples


def test_a_run_divides_keys_where_it_is_told_to(tmp_path):
    config = with_changes(
        tiny_config(tmp_path, "*.txt"),
        attention={"key_ranges": 4, "tolerance": 0.1, "transport": "direct"},
        mesh={"dp": 4},
        training={"tokens_per_microbatch": 2048},
    )
    data = SimpleNamespace(
        sample_nano_lengths=lambda batches: [(np.array([1000, 44, 1000]),)] * batches,
        nano_batches=1, tokens_per_microbatch=2048, max_document_tokens=2048,
    )  # fmt: skip
    strategy, _ = make_run_strategies(config, cast(DocumentBatches, data))
    assert isinstance(strategy, PlannedStrategy)
    assert strategy.capacities.partials > 1
    assert strategy.plan(np.array([1000, 44, 1000])).tasks[:, K_START].any()


def test_a_run_plans_as_it_is_told_to(tmp_path):
    attention = {
        "planner": "cad_jax.sharding.plan:home_plan", "server_speeds": (1.0, 1.0, 0.5, 1.0), "node": 2,
        "placement": "aligned", "profile": str(shipped("cpu")), "tolerance": 0.1, "key_ranges": 2,
        "capacities": default_capacities(4, 128, HeadShape(2, 1, 8)),
    }  # fmt: skip
    config = with_changes(tiny_config(tmp_path, "*.txt"), attention=attention)
    config.check()
    strategy, _ = make_strategies(config, [], 512, device=DEVICES["cpu"], kernel="xla")
    assert isinstance(strategy, PlannedStrategy)
    planning = strategy.planning
    assert planning.planner is home_plan and planning.speeds == (1.0, 1.0, 0.5, 1.0)
    assert (planning.node, planning.placement) == (2, "aligned")
    assert (planning.tolerance, planning.key_ranges) == (0.1, 2)
    assert planning.cost_model is not None
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_whole_microbatches_travel_as_their_nano_batches_do(tmp_path, monkeypatch):
    """auto chooses once: a run records one transport."""
    asked = []

    def recorded(*args, **kwargs):
        asked.append(kwargs["candidates"])
        return make_strategy(*args, **kwargs)

    monkeypatch.setattr(launch, "make_strategy", recorded)
    config = tiny_config(tmp_path, "*.txt", overlap="pingpong")
    data = SimpleNamespace(
        sample_nano_lengths=lambda count: [(np.array([200]), np.array([100, 99]))] * count,
        nano_batches=2, tokens_per_microbatch=512, max_document_tokens=512,
    )  # fmt: skip
    whole, nano = make_run_strategies(config, cast(DocumentBatches, data))
    assert nano is not None and asked == [DENSE_TRANSPORTS, (nano.transport,)]
    assert whole.transport == nano.transport


def test_demo_is_about_five_million_parameters_in_pieces_of_half_a_step():
    config = stdlib_demo()
    assert 4.5e6 < config.model.num_parameters < 5.5e6
    assert (config.mesh.pp, config.mesh.dp, config.mesh.tp) == (1, 4, 2)
    piece = config.data.max_piece_tokens
    assert piece is not None
    step_tokens = config.training.tokens_per_microbatch * config.training.microbatches
    assert piece <= step_tokens // 2
    assert config.training.max_minutes == 6.0


def test_llama3_8b_traces_on_its_own_mesh():
    """The real configuration on a mesh that is not here: shapes, shardings and sizes."""
    config = with_changes(llama3_8b_h200(), attention={"kernel": "xla"})
    shape = model_shape("llama3-8b")
    for name in ("num_layers", "embedding_dim", "num_q_heads", "num_kv_heads", "ffn_dim"):
        assert getattr(config.model, name) == getattr(shape, name)
    assert config.model.num_parameters == 8_030_261_248
    mesh = AbstractMesh((config.mesh.pp, config.mesh.dp, config.mesh.tp), ("pp", "dp", "tp"))
    tokens, microbatches = config.training.tokens_per_microbatch, config.training.microbatches
    nano_batches = config.nano_batches
    data = SimpleNamespace(
        sample_nano_lengths=lambda count: [(np.array([tokens // nano_batches]),) * nano_batches],
        nano_batches=nano_batches, tokens_per_microbatch=tokens, max_document_tokens=tokens,
    )  # fmt: skip
    strategies = make_run_strategies(config, cast(DocumentBatches, data))
    step = TrainStep(
        config.model, mesh, strategies[0], config.optimizer, config.training.remat,
        nano_strategy=strategies[1], tokens_over_tp=config.mesh.tp_splits == "tokens",
    )  # fmt: skip
    # Whole microbatches with documents as long as they are, then nano-batches: the recipe's own tokens.
    for strategy, parts in zip(strategies, (1, 2), strict=True):
        if strategy is not None:
            longest = tokens // parts
            lengths = [longest], [longest // 2] * 2, [longest - 7, 0, 7], [1] * 100
            assert len(lengths) == microbatches
            prepared = [strategy.prepare(np.array(documents)).arrays for documents in lengths]
            arrays = _stacked(prepared, parts)
            step.trace(microbatches, tokens, arrays)
    state = step.abstract_state()
    per_device_bytes = sum(
        leaf.dtype.itemsize * _size(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(state)
    )
    assert per_device_bytes < 12 * 8.1e9 / config.mesh.dp, "parameters and moments are spread"
    assert per_device_bytes < 20e9, "beside 141 GB of an H200"


def _stacked(microbatches, nano_batches):
    """A step's plan arrays, [M, N, S, ...]: the nano-batches of a microbatch are alike."""
    return jax.tree.map(
        lambda *rows: np.stack([np.stack([row] * nano_batches) for row in rows]), *microbatches
    )


def _size(shape):
    size = 1
    for dim in shape:
        size *= dim
    return size
