"""A recipe's real training step compiled for GPUs that are not here: what it holds in memory, what its
collectives run beside.

Capacities come from plans of document lengths, as in a run; attention's seconds from the same plans, since the
compiled program does not tell them. How the rest is predicted: cad_jax.overlap.
"""

import contextlib
import dataclasses
import importlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from cad_jax.attention.planned import PlannedStrategy
from cad_jax.config import RunConfig
from cad_jax.launch import make_strategies, open_data
from cad_jax.lengths_report import read_lengths, shortage
from cad_jax.overlap import Prediction, Timeline
from cad_jax.pipeline.ticks import plan_step
from cad_jax.sharding.capacities import signal_capacities
from cad_jax.sharding.clusters import Topology
from cad_jax.sharding.cost import Device, attention_flops
from cad_jax.sharding.cost_model import FAST_ATTENTION_EFFICIENCY, analytic
from cad_jax.sharding.nano_batches import pack_halves
from cad_jax.sharding.packing import pack_step
from cad_jax.thunks import Phase, load_dump
from cad_jax.tolerance import predicted_tolerance, sample_count, with_tolerance
from cad_jax.topologies import compile_only_mesh
from cad_jax.train_step import TickArrays, TrainStep, stack
from cad_jax.xla_options import Value


@dataclass(frozen=True)
class Report:
    """One strategy's compiled step. Bytes and seconds are of one device; seconds are predicted."""

    topology: Topology
    recipe: str
    attention: str
    overlap: str
    kernel: str
    tokens_per_server: int  # of a microbatch
    exchange: str  # how rows travel, in words
    prediction: Prediction
    argument_bytes: int
    temp_bytes: int
    peak_bytes: int
    compile_s: float

    @property
    def device_bytes(self) -> int:
        return self.topology.chip.memory_bytes

    @property
    def sent_bytes(self) -> float:
        """What all collectives of a step send."""
        return sum(sum(c.traffic) * c.executions for c in self.prediction.collectives)

    @property
    def exchanged_bytes(self) -> float:
        """What the exchanges of attention among them send."""
        exchanges = (c for c in self.prediction.collectives if c.is_exchange)
        return sum(sum(c.traffic) * c.executions for c in exchanges)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        names = ("name", "kind", "where", "phase", "in_loop", "asynchronous", "between", "bytes")
        names += (
            "predicted_s",
            "hidden_fraction",
            "exposed_s",
            "loop",
            "executions",
            "is_metadata",
        )
        return {
            "topology": self.topology.name,
            "recipe": self.recipe,
            "attention": self.attention,
            "overlap": self.overlap,
            "kernel": self.kernel,
            "tokens_per_server": self.tokens_per_server,
            "collectives": [
                {n: list(v) if isinstance(v := getattr(c, n), tuple) else v for n in names}
                for c in self.prediction.collectives
            ],
            "temp_bytes": self.temp_bytes,
            "argument_bytes": self.argument_bytes,
            "peak_bytes": self.peak_bytes,
            "device_bytes": self.device_bytes,
            "sent_bytes": self.sent_bytes,
            "exchanged_bytes": self.exchanged_bytes,
            "compute_s": self.prediction.compute_s,
            "exposed_s": self.prediction.exposed_s,
            "attention_s": self.prediction.attention_s,
            "compile_s": self.compile_s,
        }


@dataclass(frozen=True)
class Documents:
    """Document lengths of microbatches to come, int64 arrays [n][N] of their N nano-batches, the longest document
    of a nano-batch, and what to say where a file has too few of them."""

    samples: list[tuple[np.ndarray, ...]]
    max_tokens: int
    repetition: str | None = None


class LoweredStep(NamedTuple):
    """A step ready to compile.

    attention_flops: forward, of all microbatches and layers, on the servers that have most of it.
    exchange: how rows travel, in words.
    """

    lowered: jax.stages.Lowered
    attention_flops: int
    exchange: str


def sample_documents(config: RunConfig, lengths: Path | None) -> Documents:
    """`attention.capacity_plans` microbatches: of a file of lengths, reshuffled for each; or of the recipe's data.

    Raises:
        ValueError: the file or the data cannot be read, or hold a document longer than a nano-batch.
    """
    count, tokens = config.attention.capacity_plans, config.training.tokens_per_microbatch
    nano_batches = config.nano_batches
    if lengths is None:
        try:
            data = open_data(config)
        except ValueError as error:
            raise ValueError(
                f"{error}; or give document lengths alone with --lengths FILE"
            ) from error
        _check_longest(config, data.max_document_tokens, "data")
        return Documents(data.sample_nano_lengths(count), data.max_document_tokens)
    documents = read_lengths(lengths)
    longest = int(documents.max())
    _check_longest(config, longest, str(lengths))
    if longest == 0:
        raise ValueError(f"{lengths} holds empty documents only: put lengths in tokens there")
    fill = pack_halves if nano_batches == 2 else pack_step
    samples = []
    for draw in range(count):
        order = np.random.default_rng((config.data.seed, draw)).permutation(len(documents))
        repeats = 2 * tokens // int(documents.sum()) + 2
        arrivals = enumerate(np.tile(documents[order], repeats).tolist())
        step, _ = fill([], arrivals, tokens, config.data.window)
        drawn = np.asarray(step.lengths, np.int64)
        samples.append(tuple(np.split(drawn, np.cumsum(step.nano_pieces)[:-1])))
    times = tokens / int(documents.sum())
    said = f"every document comes {times:.2f} times in each, on average"
    return Documents(samples, longest, shortage(lengths, documents, tokens, "a microbatch", said))


def _check_longest(config: RunConfig, longest: int, source: str) -> None:
    tokens, nano_batches = config.training.tokens_per_microbatch, config.nano_batches
    if longest > tokens // nano_batches:
        what, cure = "a microbatch", "shorter documents"
        if nano_batches == 2:
            what, cure = "half a microbatch", "--overlap single_stream"
        raise ValueError(
            f"a document must fit {what} of all ranks of a stage ({tokens // nano_batches} tokens), the "
            f"longest of {source} has {longest}: raise training.tokens_per_microbatch (={tokens}), or use "
            f"{cure}"
        )


def choose_kernel(config: RunConfig) -> str:
    """The kernel to compile: `auto` would ask which device this process has."""
    if config.attention.strategy.startswith("native"):
        return "auto"
    return "triton" if config.attention.kernel == "auto" else config.attention.kernel


def lower_step(
    config: RunConfig, topology: Topology, documents: Documents, kernel: str
) -> LoweredStep:
    """The real training step for a topology, with capacities from plans of `documents`.

    Raises:
        ValueError: the mesh is not the topology's, there is no compiler, or the documents do not fit.
    """
    shape, schedule = config.mesh, config.schedule()
    mesh = compile_only_mesh(topology, shape.pp, shape.dp, shape.tp)
    microbatches, per_step = documents.samples, config.training.microbatches
    step_lengths = [microbatches[m % len(microbatches)] for m in range(per_step)]
    if config.attention.tolerance is None:
        drawn = [microbatches[m % len(microbatches)] for m in range(sample_count(config))]
        chosen = predicted_tolerance(
            config, drawn, documents.max_tokens, device=topology.device, say=print
        )
        config = with_tolerance(config, chosen)
    whole, nano = make_strategies(
        config, microbatches, documents.max_tokens, device=topology.device, kernel=kernel
    )
    strategy = nano or whole
    layers = config.model.num_layers
    carried = step_lengths
    planned = strategy
    if config.training.overlap == "signal":  # the work of a real step, the travel of an empty one
        assert isinstance(strategy, PlannedStrategy)
        capacities = signal_capacities(strategy.capacities)
        strategy = dataclasses.replace(strategy, capacities=capacities)
        carried = [tuple(np.zeros(0, np.int64) for _ in nanos) for nanos in step_lengths]
    if schedule:
        plans = plan_step(schedule, strategy, carried)
        arrays = TickArrays(plans.forward, plans.backward)
        layers //= shape.pp * shape.virtual_stages  # of one tick
        loads = plan_step(schedule, planned, step_lengths).pairs[: schedule.ticks]
        pairs = int(loads.max(axis=-1).sum())
    else:
        arrays = stack([[strategy.prepare(n).arrays for n in nanos] for nanos in carried])
        pairs = sum(int(planned.prepare(n).pairs.max()) for nanos in step_lengths for n in nanos)
    step = TrainStep(
        config.model,
        mesh,
        strategy,
        config.optimizer,
        config.training.remat,
        nano_strategy=nano and strategy,
        schedule=schedule,
        tokens_over_tp=config.head_axis is not None,
    )
    with _tracing_for(mesh, kernel):
        lowered = step.trace(per_step, config.training.tokens_per_microbatch, arrays).lower()
    exchange = strategy.describe()
    if strategy.transport is not None and config.attention.asked_transport == "auto":
        exchange += (
            "; a run may take ragged where that passes its test on the machine, which "
            "--attention.transport ragged compiles"
        )
    flops = attention_flops(config.model.head_shape(shape.tp), layers * pairs)
    return LoweredStep(lowered, flops, exchange)


def attention_seconds(forward_flops: int, kernel: str, device: Device) -> dict[Phase, float]:
    """Seconds of so much attention, forward and backward, at the kernel's fraction of the peak."""
    costs = analytic(device, attention_efficiency=FAST_ATTENTION_EFFICIENCY[kernel])
    return {
        "forward": costs.attention_flops_s(forward_flops),
        "backward": costs.attention_flops_s(forward_flops, backward=True),
    }


def compile_step(
    config: RunConfig, topology: Topology, documents: Documents, options: Mapping[str, Value]
) -> Report:
    """Compile one strategy's step and read the result. Raises as `lower_step` does."""
    kernel = choose_kernel(config)
    step = lower_step(config, topology, documents, kernel)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        compiled = step.lowered.compile(compiler_options={**options, "xla_dump_to": folder})
        compile_s = time.perf_counter() - start
        hlo = compiled.as_text()
        assert hlo is not None
        program = load_dump(Path(folder), hlo, topology.devices)
    named = "xla" if kernel == "auto" else kernel
    attention_s = attention_seconds(step.attention_flops, named, topology.device)
    timeline = Timeline(program, topology, attention_s)
    memory = compiled.memory_analysis()
    assert memory is not None
    arguments, temporaries = (
        int(size) for size in (memory.argument_size_in_bytes, memory.temp_size_in_bytes)
    )
    new_outputs = int(memory.output_size_in_bytes - memory.alias_size_in_bytes)
    return Report(
        topology=topology,
        recipe=config.name,
        attention=config.attention.strategy,
        overlap=config.training.overlap,
        kernel=named,
        tokens_per_server=config.tokens_per_server,
        exchange=step.exchange,
        prediction=timeline.predict(),
        argument_bytes=arguments,
        temp_bytes=temporaries,
        peak_bytes=arguments + new_outputs + temporaries,
        compile_s=compile_s,
    )


def _tracing_for(mesh: Mesh, kernel: str) -> contextlib.AbstractContextManager:
    """tokamax chooses its kernels by the default device, and refuses others than GPUs."""
    context = contextlib.ExitStack()
    if kernel == "tokamax":
        context.enter_context(importlib.import_module("tokamax").config.cross_compile(True))
        context.enter_context(jax.default_device(mesh.devices.flat[0]))
    return context
