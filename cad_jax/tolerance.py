"""The tolerance of a run that leaves it open, chosen before launch from predicted seconds."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from cad_jax.attention_config import AttentionConfig
from cad_jax.config import RunConfig
from cad_jax.sharding.cost import Device, ModelShape
from cad_jax.sharding.cost_model import CostModel
from cad_jax.simulation.advice import TIE, choose_tolerance
from cad_jax.simulation.averages import transports_of
from cad_jax.simulation.candidates import MICROBATCHES, Trials, fastest
from cad_jax.simulation.named_costs import named_costs
from cad_jax.simulation.setting import Setting

UNUSED_TOLERANCE = 0.05  # recorded for strategies that balance nothing
_FAST_KERNEL = "tokamax"  # whose speed on H100 and H200 is that of the profile named by default


def sample_count(config: RunConfig) -> int:
    """Microbatches from which a tolerance is chosen: whole steps."""
    per_step = config.training.microbatches
    return -(-MICROBATCHES // per_step) * per_step


def predicted_tolerance(
    config: RunConfig,
    samples: Sequence[tuple[np.ndarray, ...]],
    longest: int,
    *,
    device: Device,
    say: Callable[[str], None],
) -> float:
    """The tolerance of fewest predicted seconds, and says so: `simulation.advice.choose_tolerance`, over the
    transports that the run may use.

    Args:
        config: checked; its tolerance does not matter.
        samples: document lengths of `sample_count` microbatches to come, by nano-batch.
        longest: the longest document to come.
        device: what the ranks are.
        say: gets one line.
    """
    if config.attention.strategy != "cad":
        return UNUSED_TOLERANCE
    trials = _trials(config, samples, longest, device)
    asked = config.attention.asked_transport
    # "signal" bounds what a run with these exchanges could reach: its tolerance is that run's.
    overlap = "single_stream" if config.nano_batches == 1 else "pingpong"
    choices = [
        choose_tolerance(trials, transport, overlap, key_ranges=config.attention.key_ranges)
        for transport in transports_of(asked, device.name)
    ]
    bests = [best for best, _ in choices]
    best = fastest(bests, bests.index, tie=TIE)
    outcomes = choices[bests.index(best)][1]
    tolerance = best.candidate.tolerance
    assert tolerance is not None
    seconds = ", ".join(f"{o.candidate.tolerance} {o.step_s:.4g}" for o in outcomes)
    say(
        f"tolerance {tolerance}, of fewest simulated seconds a step with {best.candidate.transport} exchanges "
        f"({seconds}; kernel times {trials.setting.costs.label}, {device.name}); --attention.tolerance fixes it"
    )
    return tolerance


def with_tolerance(config: RunConfig, tolerance: float) -> RunConfig:
    """The run with its tolerance settled."""
    attention = dataclasses.replace(config.attention, tolerance=tolerance)
    return dataclasses.replace(config, attention=attention)


def _trials(
    config: RunConfig, samples: Sequence[tuple[np.ndarray, ...]], longest: int, device: Device
) -> Trials:
    model, mesh, per_step = config.model, config.mesh, config.training.microbatches
    shape = ModelShape(
        config.name, model.num_layers, model.embedding_dim, model.num_q_heads, model.num_kv_heads,
        model.head_dim, model.ffn_dim, model.vocab_size,
    )  # fmt: skip
    setting = Setting(
        shape, _costs(device, config.attention), mesh.servers, mesh.tp, mesh.pp,
        again=float(config.training.remat != "none"), head=True,
        tokens_over_tp=mesh.tp_splits == "tokens",
        element_bytes=jnp.dtype(model.dtype).itemsize,
        node=config.attention.node,
    )  # fmt: skip
    steps = []
    for first in range(0, len(samples), per_step):
        step = [list(nanos) for nanos in samples[first : first + per_step]]
        if len({len(nanos) for nanos in step}) > 1:
            step = [[np.concatenate(nanos)] for nanos in step]
        steps.append(step)
    return Trials(setting, steps, config.tokens_per_server, longest)


def _costs(device: Device, attention: AttentionConfig) -> CostModel:
    name = attention.profile
    if name is None and device.name in ("h100", "h200") and attention.kernel != _FAST_KERNEL:
        name = "h200_fa2"
    return named_costs(device, name, option="attention.profile")
