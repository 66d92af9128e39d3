"""A whole step through the pipeline's executor on virtual devices."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cad_jax.attention.strategies import make_strategy
from cad_jax.layer import rms_norm
from cad_jax.model import Llama
from cad_jax.parameters import Parallelism, describe
from cad_jax.pipeline.pingpong import PingPong
from cad_jax.pipeline.remat import Remat
from cad_jax.pipeline.schedule import interleaved
from cad_jax.pipeline.single_stream import SingleStream
from cad_jax.pipeline.stages import run_schedule
from cad_jax.pipeline.ticks import plan_step
from tests import llama_oracle
from tests.llama_cases import jit, make_batch, mesh_of, random_params, tiny_config


class Fields(NamedTuple):
    ids: Any
    positions: Any
    targets: Any
    weights: Any


@dataclass
class Case:
    """One step: mesh (pp, dp, tp), M microbatches of N nano-batches of `tokens` over dp ranks."""

    shape: tuple[int, int, int]
    microbatches: int
    name: str
    kernel: str = "reference"
    virtual_stages: int = 1
    nano_batches: int = 1
    tokens: int = 48
    layers_each: int = 1
    tokens_over_tp: bool = False
    pingpong: bool = False
    changes: dict = field(default_factory=dict)
    transport: str = "direct"
    remat: Remat = "save_attention"
    tolerance: float = 0.0
    key_ranges: int = 1

    def __post_init__(self):
        pp, dp, tp = self.shape
        self.mesh = mesh_of(*self.shape)
        layers = pp * self.virtual_stages * self.layers_each
        self.config = tiny_config(num_layers=layers, **self.changes)
        self.parallelism = Parallelism(pp, dp, tp, tokens_over_tp=self.tokens_over_tp)
        self.description = describe(self.config, self.parallelism)
        self.params = random_params(self.description)
        self.schedule = interleaved(pp, self.microbatches, self.virtual_stages)
        self.token_axes = ("dp", "tp") if self.tokens_over_tp else ("dp",)
        self.ranks = dp * tp if self.tokens_over_tp else dp
        self.strategy = make_strategy(
            self.name,
            servers=pp * self.ranks,
            tokens_per_server=self.tokens // self.ranks,
            heads=self.config.head_shape(1 if self.tokens_over_tp else tp),
            kernel=self.kernel,
            axis_names=("pp", *self.token_axes),
            tolerance=self.tolerance,
            key_ranges=self.key_ranges,
            stages=pp,
            transport=self.transport,
        )
        rng = np.random.default_rng(5)
        count = self.microbatches * self.nano_batches
        lengths = [self.documents(rng, i) for i in range(count)]
        self.batch, self.of_document = make_batch(lengths, self.tokens, self.config.vocab_size)
        by_microbatch = np.reshape(lengths, (self.microbatches, self.nano_batches, -1))
        self.plans = plan_step(self.schedule, self.strategy, by_microbatch)

    def documents(self, rng, number):
        """Long and short ones, most nano-batches with padding at the end."""
        cuts = np.sort(rng.choice(np.arange(1, self.tokens), 2, replace=False))
        lengths = np.diff([0, *cuts, self.tokens]).tolist()
        return lengths if number % 3 == 0 else [*lengths[:2], 0]

    @property
    def stage(self):
        strategy = self.strategy
        if self.pingpong:
            return PingPong(self.config, self.parallelism, strategy.settings, self.remat)
        sides = self.config, self.parallelism, strategy.way, strategy.settings
        return SingleStream(*sides, self.remat)

    # Host.

    def stored(self, layers):
        """Layers in model order -> as devices hold them: virtual stages of a stage side by side."""
        shape = (self.virtual_stages, self.shape[0], self.layers_each)
        order = np.arange(np.prod(shape)).reshape(shape).swapaxes(0, 1).ravel()
        return jax.tree.map(lambda a: np.asarray(a)[order], layers)

    def from_stored(self, layers):
        shape = (self.shape[0], self.virtual_stages, self.layers_each)
        order = np.arange(np.prod(shape)).reshape(shape).swapaxes(0, 1).ravel()
        return jax.tree.map(lambda a: np.asarray(a)[order], layers)

    def arrays(self):
        """Plan arrays of the F and of the B ticks, [ticks, N, P * ranks, ...]."""
        return self.plans.forward, self.plans.backward

    def inputs(self):
        """params, batch and arrays of both phases, placed."""
        fields = []
        orders = [order for nanos in self.plans.orders for order in nanos]
        for values in self.batch:
            rows = [row if o is None else row[o] for row, o in zip(values, orders, strict=True)]
            fields.append(np.reshape(rows, (self.microbatches, self.nano_batches, -1)))
        params = {**self.params, "layers": self.stored(self.params["layers"])}
        values = (params, Fields(*fields), *self.arrays())
        return jax.tree.map(
            lambda a, spec: jax.device_put(a, NamedSharding(self.mesh, spec)),
            values,
            self.specs(values),
        )

    def specs(self, values):
        of_params = jax.tree.map(lambda p: p.spec, self.description)
        pool = P(None, None, ("pp", *self.token_axes))
        others = jax.tree.map(lambda _: pool, values[2:])
        return of_params, Fields(*(P(None, None, self.token_axes),) * 4), *others

    # Device.

    def expand(self, arrays):
        return self.strategy.expand(arrays)

    def local(self, params, batch, forward, backward):
        config = self.config
        definition = nnx.split(nnx.eval_shape(lambda: Llama(config, self.parallelism)))[0]
        pp, _, tp = self.shape
        share = 1.0 / (float(self.batch.weights.sum()) * pp * tp)

        def embed(params, ids):
            if self.tokens_over_tp:
                ids = lax.all_gather(ids, "tp", tiled=True)
            table = lax.all_gather(params["embedding"], "dp", axis=1, tiled=True)
            rows = ids - lax.axis_index(("pp", "tp")) * table.shape[0]
            mine = (rows >= 0) & (rows < table.shape[0])
            found = table[jnp.where(mine, rows, 0)].astype(config.dtype)
            x = jnp.where(mine[:, None], found, 0)
            if self.tokens_over_tp:
                return lax.psum_scatter(x, "tp", tiled=True)
            return lax.psum(x, "tp")

        def loss(params, x, targets, weights):
            x = rms_norm(x, params["final_norm"], config.norm_eps)
            return nnx.merge(definition, params).loss(x, targets, weights) * share

        forward, backward = jax.tree.map(lambda a: a[:, :, 0], (forward, backward))
        loss, gradients = run_schedule(
            self.schedule,
            self.stage,
            embed,
            loss,
            params,
            batch,
            self.expand,
            forward,
            backward,
            self.tokens_over_tp,
        )
        gradients = jax.tree.map(
            lambda p, g: lax.psum(g, p.replicated_axes) if p.replicated_axes else g,
            self.description,
            gradients,
        )
        return lax.psum(loss, ("pp", "dp", "tp")), gradients

    def step(self, values):
        """Jitted: (params, batch, forward arrays, backward arrays) -> loss, gradients."""
        specs = self.specs(values)
        local = jax.shard_map(
            self.local, mesh=self.mesh, in_specs=specs, out_specs=(P(), specs[0]), check_vma=False
        )
        return jit(local)

    def run(self):
        """Loss and gradients in the model's own order of layers."""
        values = self.inputs()
        loss, gradients = jax.block_until_ready(self.step(values)(*values))
        return float(loss), {**gradients, "layers": self.from_stored(gradients["layers"])}

    def expected(self):
        return llama_oracle.loss_and_gradients(
            self.params, self.config, self.batch, self.of_document
        )


def check(case, result):
    """Against the float64 model: the loss, and every gradient in Frobenius norm."""
    (loss, gradients), (want_loss, want) = result, case.expected()
    assert abs(loss - want_loss) <= 2e-6 * want_loss
    errors = llama_oracle.relative_errors(gradients, want)
    assert all(error <= 2e-5 for error in errors.values()), errors  # NaN is no small error
