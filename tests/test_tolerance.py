"""A tolerance that a run leaves open: what decides it."""

from dataclasses import replace

import numpy as np
import pytest

from cad_jax.config import AttentionConfig, RunConfig
from cad_jax.launch import make_strategies
from cad_jax.recipes import llama3_8b_h200
from cad_jax.sharding.cost import DEVICES
from cad_jax.sharding.cost_model import shipped
from cad_jax.simulation.advice import TOLERANCES
from cad_jax.tolerance import predicted_tolerance, sample_count


def large_run(**attention) -> RunConfig:
    config = llama3_8b_h200()
    training = replace(config.training, microbatches=1)
    settings = AttentionConfig(**({"tolerance": None, "transport": "relay"} | attention))
    return replace(config, attention=settings, training=training)


def uneven(nano_tokens: int, microbatches: int) -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(1)

    def nano() -> np.ndarray:
        lengths = [nano_tokens // 4]
        while sum(lengths) < nano_tokens - 4096:
            lengths.append(int(rng.integers(100, 4096)))
        return np.array(lengths, np.int64)

    return [(nano(), nano()) for _ in range(microbatches)]


def test_exchanges_that_hide_take_little_tolerance_and_slow_ones_much() -> None:
    config, said = large_run(), []
    samples = uneven(8 * 65_536, sample_count(config))
    fast = replace(DEVICES["h200"], between_nodes_bytes_s=400e9)
    slow = replace(DEVICES["h200"], between_nodes_bytes_s=0.5e9)
    chosen = [
        predicted_tolerance(config, samples, 8 * 65_536, device=device, say=said.append)
        for device in (fast, slow)
    ]
    assert chosen[0] <= 0.02 and chosen[1] == max(TOLERANCES)
    assert f"tolerance {chosen[0]}, of fewest simulated seconds" in said[0]
    assert "relay exchanges" in said[0] and "--attention.tolerance fixes it" in said[0]


def test_kernel_times_are_named_as_plan_names_them_and_wide_elements_cost_their_bytes() -> None:
    config, said = large_run(), []
    samples = uneven(8 * 65_536, sample_count(config))

    def seconds(config: RunConfig) -> str:
        predicted_tolerance(config, samples, 8 * 65_536, device=DEVICES["h200"], say=said.append)
        return said[-1]

    fa2 = replace(config, attention=replace(config.attention, profile="h200_fa2"))
    fa3 = replace(config, attention=replace(config.attention, profile="h200_fa3"))
    file = replace(config, attention=replace(config.attention, profile=str(shipped("h200_fa3"))))
    usual = seconds(config)
    assert usual == seconds(fa2) != seconds(fa3) == seconds(file)
    assert usual != seconds(replace(config, model=replace(config.model, dtype="float32")))


def test_planning_that_knows_nodes_is_simulated_so() -> None:
    """Bytes within a node are cheap to it: over a slow network other seconds come out."""
    config, said = large_run(), []
    mesh = replace(config.mesh, dp=16, tp=1)
    samples = uneven(16 * 4096, sample_count(config))
    for node in (1, 8):
        attention = replace(config.attention, node=node)
        asked = replace(config, mesh=mesh, attention=attention)
        device = replace(DEVICES["h200"], between_nodes_bytes_s=1e9)
        predicted_tolerance(asked, samples, 16 * 4096, device=device, say=said.append)
    assert said[0] != said[1]


def test_strategies_that_balance_nothing_record_the_usual_one() -> None:
    config = large_run(strategy="home")
    value = predicted_tolerance(config, [], 1, device=DEVICES["h200"], say=pytest.fail)
    assert value == 0.05


def test_a_profile_that_does_not_fit_is_named_as_it_was_given() -> None:
    config = large_run()
    unfit = replace(config, attention=replace(config.attention, profile="cpu", tolerance=0.05))
    arguments: dict = dict(device=DEVICES["h200"])
    for settle in (
        lambda: predicted_tolerance(unfit, [], 1, say=pytest.fail, **arguments),
        lambda: make_strategies(unfit, [], 1, kernel="xla", **arguments),
    ):
        with pytest.raises(ValueError, match="of cpu, but .* or give attention.profile analytic"):
            settle()


def test_whole_steps_are_simulated() -> None:
    for microbatches, expected in ((1, 4), (2, 4), (3, 6), (8, 8)):
        config = large_run()
        training = replace(config.training, microbatches=microbatches)
        assert sample_count(replace(config, training=training)) == expected
