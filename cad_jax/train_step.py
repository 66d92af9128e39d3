"""The one jitted training step: microbatches, loss, gradients, optimizer.

One shard_map over ("pp", "dp", "tp") computes loss and gradients, fully manual (for a strategy that leaves pp and dp to XLA's
partitioner, manual over tp only: the same model). It ends at float32 gradients, placed like their parameters; optax runs on the global
arrays in the same jit, so that clipping sees the global norm. The loss is the sum over target tokens divided by
the number of target tokens of the WHOLE step, over all microbatches and ranks: every device returns its share.

A microbatch is one nano-batch or two; two run as ping-pong, each its own plan. Without pipeline stages microbatches run one after
the other, with them by the table of a schedule.

Shape letters: M microbatches, N nano-batches of a microbatch, S servers (pp x dp), R = dp T tokens of a nano-batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cad_jax.attention.differentiable import Settings, Way
from cad_jax.model import Llama, LlamaConfig
from cad_jax.optimizer import OptimizerConfig
from cad_jax.parameters import Parallelism, describe, init, shardings
from cad_jax.pipeline.pingpong import PingPong
from cad_jax.pipeline.remat import Remat, check_remat
from cad_jax.pipeline.schedule import Schedule
from cad_jax.pipeline.single_stream import SingleStream
from cad_jax.pipeline.stages import Stage, run_schedule
from cad_jax.sharding.mesh import MESH_AXES, POOL_AXES
from cad_jax.xla_options import gpu_options

SERVERS = P(None, None, POOL_AXES)  # of plan arrays


class Batch(NamedTuple):
    """Tokens of one step, [M, N, R] each, in the order in which dp ranks hold them."""

    ids: Any  # int32
    positions: Any  # int32, within the document
    targets: Any  # int32
    weights: Any  # float32, 1 where a target exists: never across documents, never padding


class TrainState(NamedTuple):
    """Global sharded arrays: what a checkpoint holds."""

    params: Any  # float32, the tree of `describe`
    opt_state: Any
    step: Any  # int32 scalar: finished updates


class TickArrays(NamedTuple):
    """Plan arrays of a pipelined step: of its F ticks and of its B ticks, [ticks, N, S, ...] each."""

    forward: Any
    backward: Any


class DeviceStrategy(Protocol):
    """What the step needs of an attention strategy."""

    @property
    def transport(self) -> str | None: ...

    @property
    def manual_axes(self) -> tuple[str, ...]: ...

    @property
    def way(self) -> Way | None:
        """Forward and backward for loops that place them by hand; None where XLA derives them."""
        ...

    @property
    def settings(self) -> Settings: ...

    def expand(self, arrays: Any) -> Any:
        """Plan arrays of one rank -> tables, once per microbatch."""
        ...

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array: ...


class TrainStep:
    """The step of one model, mesh, strategy and optimizer; new batches and plans never recompile it.

    Args:
        config: the model.
        mesh: axes ("pp", "dp", "tp"). An AbstractMesh, of a mesh that is not here, serves `trace`.
        strategy: how attention is distributed.
        optimizer: AdamW's settings.
        remat: what the backward pass computes again (`Llama.run_layers`, `pipeline.remat`).
        nano_strategy: the same for batches of two nano-batches, which run as ping-pong.
        schedule: of the pipeline's ticks, where pp is above 1.
        tokens_over_tp: what tp splits outside attention (`Parallelism`), in the strategies too.

    Raises:
        ValueError: the model does not split over the mesh.
    """

    def __init__(
        self,
        config: LlamaConfig,
        mesh: Mesh | AbstractMesh,
        strategy: DeviceStrategy,
        optimizer: OptimizerConfig,
        remat: Remat = "save_attention",
        nano_strategy: DeviceStrategy | None = None,
        schedule: Schedule | None = None,
        tokens_over_tp: bool = False,
    ) -> None:
        if tuple(mesh.axis_names) != MESH_AXES:
            raise ValueError(
                f"the mesh has axes {tuple(mesh.axis_names)}, the train step needs {MESH_AXES}: "
                "make it with cad_jax.make_mesh"
            )
        self.config = config
        self.mesh = mesh
        self.strategy = strategy
        self.optimizer = optimizer
        self.remat: Remat = remat
        self.nano_strategy = nano_strategy
        self.schedule = schedule
        self.automatic_pool = not set(POOL_AXES) <= set(strategy.manual_axes)
        self._check()
        self.parallelism = Parallelism.of(mesh, self.automatic_pool, tokens_over_tp)
        self.description = describe(config, self.parallelism)
        self._definition = nnx.split(nnx.eval_shape(lambda: Llama(config, self.parallelism)))[0]
        self._optax = optimizer.make(jax.tree.map(lambda p: p.decays, self.description))
        self.batch_sharding = NamedSharding(mesh, P(None, None, self.parallelism.token_axes))
        self.arrays_sharding = NamedSharding(mesh, SERVERS)
        self.state_shardings = self._state_shardings()
        replicated = NamedSharding(mesh, P())
        self._init = jax.jit(self._initial_state, out_shardings=self.state_shardings)
        on_gpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform in ("gpu", "cuda")
        self.step = jax.jit(
            self._step,
            donate_argnums=0,
            out_shardings=(self.state_shardings, replicated),
            compiler_options=gpu_options(self.transports) if on_gpus else None,
        )

    @property
    def transports(self) -> set[str | None]:
        """How the rows of its strategies travel."""
        return {s.transport for s in (self.strategy, self.nano_strategy) if s is not None}

    def init(self, seed: int) -> TrainState:
        """The state before the first update: the same values on every mesh."""
        return self._init(jnp.uint32(seed))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, for a restore."""
        shapes = jax.eval_shape(self._initial_state, jax.ShapeDtypeStruct((), jnp.uint32))
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            self.state_shardings,
        )

    def trace(self, microbatches: int, tokens: int, arrays: Any) -> Any:
        """The step traced on shapes alone: `.lower().compile().memory_analysis()` follows.

        Args:
            microbatches: M.
            tokens: of a microbatch over all dp ranks, N R.
            arrays: plan arrays [M, N, S, ...] (TickArrays of a pipeline); only shapes and dtypes
                are read.
        """

        def abstract(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        nano_batches = jax.tree.leaves(arrays)[0].shape[1]
        shape = (microbatches, nano_batches, tokens // nano_batches)
        integers = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        floats = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.batch_sharding)
        batch = Batch(integers, integers, integers, floats)
        arrays = jax.tree.map(lambda x: abstract(x, self.arrays_sharding), arrays)
        return self.step.trace(self.abstract_state(), batch, arrays)

    def _check(self) -> None:
        stages = self.mesh.shape["pp"]
        check_remat(self.remat, stages, 1 if self.nano_strategy is None else 2)
        if stages > 1 and self.strategy.way is None:
            raise ValueError(
                f"a pipeline (mesh axis pp = {stages}) needs an attention strategy that places its "
                "own collectives; native leaves them to XLA's partitioner: use another strategy, or "
                "pp=1"
            )
        if (stages > 1) != (self.schedule is not None):
            raise ValueError(
                f"a schedule belongs to a pipeline: mesh axis pp is {stages}, and "
                f"{'one' if self.schedule else 'none'} is given; give one where pp is above 1, and "
                "only there"
            )

    def _initial_state(self, seed: jax.Array) -> TrainState:
        params = init(self.description, seed)
        return TrainState(params, self._optax.init(params), jnp.int32(0))

    def _state_shardings(self) -> TrainState:
        replicated = NamedSharding(self.mesh, P())
        of_params = shardings(self.description, self.mesh)
        shapes = jax.eval_shape(self._initial_state, jax.ShapeDtypeStruct((), jnp.uint32))
        of_optimizer = optax.tree_map_params(
            self._optax,
            lambda _, sharding: sharding,
            shapes.opt_state,
            of_params,
            transform_non_params=lambda _: replicated,
        )
        return TrainState(of_params, of_optimizer, replicated)

    def _step(
        self, state: TrainState, batch: Batch, arrays: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, gradients = self.loss_and_gradients(state.params, batch, arrays)
        updates, opt_state = self._optax.update(gradients, state.opt_state, state.params)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(gradients),
            "learning_rate": self.optimizer.learning_rate_at(state.step),
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.step + 1), metrics

    def loss_and_gradients(self, params: Any, batch: Batch, arrays: Any) -> tuple[jax.Array, Any]:
        """Mean loss over the step's target tokens (nats, float32 scalar) and its float32 gradients."""
        manual = MESH_AXES if not self.automatic_pool else ("tp",)
        of_params = jax.tree.map(lambda p: _restrict(p.spec, manual), self.description)
        params = {**params, "layers": self._reordered(params["layers"], to_stages=True)}
        loss, gradients = jax.shard_map(
            self._local_loss_and_gradients,
            mesh=self.mesh,
            in_specs=(
                of_params,
                _restrict(self.batch_sharding.spec, manual),
                _restrict(SERVERS, manual),
            ),
            out_specs=(P(), of_params),
            axis_names=set(manual),
            check_vma=False,
        )(params, batch, arrays)
        layers = self._reordered(gradients["layers"], to_stages=False)
        return loss, {**gradients, "layers": layers}

    def _reordered(self, layers: Any, *, to_stages: bool) -> Any:
        """Stacked layers [L, ...] from their own order to that of an interleaved pipeline, in which
        a stage's virtual stages stand together, or back. What is stored keeps the layers' order, so
        that a checkpoint does not depend on the schedule."""
        chunks = self.schedule.virtual_stages if self.schedule is not None else 1
        if chunks == 1:
            return layers
        stages = self.mesh.shape["pp"]
        leading = (chunks, stages) if to_stages else (stages, chunks)

        def move(x: jax.Array, sharding: NamedSharding) -> jax.Array:
            # Norm weights lie over stages alone: small, and their way has to be spelled out to XLA.
            x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, P())) if x.ndim == 2 else x
            moved = x.reshape(*leading, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
            return lax.with_sharding_constraint(moved, sharding)

        return jax.tree.map(move, layers, self.state_shardings.params["layers"])

    def _local_loss_and_gradients(
        self, params: Any, batch: Batch, arrays: Any
    ) -> tuple[jax.Array, Any]:
        if not self.automatic_pool:
            arrays = jax.tree.map(lambda a: a[:, :, 0], arrays)
        # Sum over all devices of the shares = the mean: (pp, tp) ranks compute the same sum.
        targets = self.parallelism.psum(
            batch.weights.astype(jnp.float32).sum(), *self.parallelism.token_axes
        )
        share = 1.0 / (jnp.maximum(targets, 1.0) * self.parallelism.vocab_shards)

        def embed(params: Any, ids: jax.Array) -> jax.Array:
            return nnx.merge(self._definition, params).embed_share(ids)

        def share_of_loss(params: Any, x: jax.Array, targets: jax.Array, weights: jax.Array):
            model = nnx.merge(self._definition, params)
            return model.loss(model.normed(x), targets, weights) * share

        if self.schedule is None:
            loss, gradients = self._accumulated(params, batch, arrays, share_of_loss)
        else:
            loss, gradients = run_schedule(
                self.schedule,
                self._stage(batch.ids.shape[1]),
                embed,
                share_of_loss,
                params,
                batch,
                self._strategy(batch.ids.shape[1]).expand,
                arrays.forward,
                arrays.backward,
                self.parallelism.tokens_over_tp,
            )
        return self.parallelism.psum(loss, *MESH_AXES), self._sum_replicas(gradients)

    def _accumulated(
        self, params: Any, batch: Batch, arrays: Any, share_of_loss: Callable[..., jax.Array]
    ) -> tuple[jax.Array, Any]:
        """Microbatches one after the other, gradients added up in float32."""
        nano_batches = batch.ids.shape[1]
        strategy = self._strategy(nano_batches)

        def microbatch_loss(params: Any, batch: Batch, arrays: Any) -> jax.Array:
            model = nnx.merge(self._definition, params)
            tables = [
                strategy.expand(jax.tree.map(lambda a, n=n: a[n], arrays))
                for n in range(nano_batches)
            ]
            x = model.embed(batch.ids.reshape(-1))
            if nano_batches == 1:
                x = model.run_layers(
                    x,
                    batch.positions[0],
                    lambda q, k, v: strategy.attend(q, k, v, tables[0]),
                    self.remat,
                )
            else:
                stage = PingPong(self.config, self.parallelism, strategy.settings)
                halves = tuple(x.reshape(nano_batches, -1, x.shape[1]))
                positions = tuple(batch.positions)
                x = jnp.concatenate(stage.apply(params["layers"], halves, positions, tuple(tables)))
            targets, weights = batch.targets.reshape(-1), batch.weights.reshape(-1)
            return share_of_loss(params, x, targets, weights)

        def add(total: Any, xs: tuple[Batch, Any]) -> tuple[Any, None]:
            new = jax.value_and_grad(microbatch_loss)(params, *xs)
            return jax.tree.map(jnp.add, total, new), None

        zeros = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params))
        return lax.scan(add, zeros, (batch, arrays))[0]

    def _strategy(self, nano_batches: int) -> DeviceStrategy:
        if nano_batches == 1:
            return self.strategy
        if self.nano_strategy is None or nano_batches != 2:
            raise ValueError(
                f"microbatches come whole, or as two nano-batches with a nano_strategy, got "
                f"{nano_batches} and {'one' if self.nano_strategy else 'none'}: give TrainStep a "
                "nano_strategy and two nano-batches, or leave microbatches whole"
            )
        return self.nano_strategy

    def _stage(self, nano_batches: int) -> Stage:
        strategy = self._strategy(nano_batches)
        if nano_batches == 2:
            return PingPong(self.config, self.parallelism, strategy.settings, self.remat)
        way = strategy.way
        assert way is not None
        return SingleStream(self.config, self.parallelism, way, strategy.settings, self.remat)

    def _sum_replicas(self, gradients: Any) -> Any:
        """Each gradient summed over the axes its parameter is replicated on, a collective per set of axes."""
        leaves, structure = jax.tree.flatten(gradients)
        axes_of = [
            self.parallelism.manual(*p.replicated_axes) for p in jax.tree.leaves(self.description)
        ]
        for axes in dict.fromkeys(axes_of):  # not a set: every process must trace the same order
            if not axes:
                continue
            where = [i for i, own in enumerate(axes_of) if own == axes]
            for i, total in zip(where, lax.psum([leaves[i] for i in where], axes), strict=True):
                leaves[i] = total
        return jax.tree.unflatten(structure, leaves)


def stack(trees: Sequence[Sequence[Any]]) -> Any:
    """Host: pytrees of arrays [M][N] as one, its arrays [M, N, ...]."""
    of_microbatch = [jax.tree.map(lambda *a: np.stack(a), *row) for row in trees]
    return jax.tree.map(lambda *a: np.stack(a), *of_microbatch)


def stack_microbatches(
    batches: Sequence[Sequence[Batch]], orders: Sequence[Sequence[np.ndarray | None]]
) -> Batch:
    """Host: N nano-batches ([R] a field) of M microbatches in the order their strategy wants.

    orders: per nano-batch, new position -> token index, or None where tokens stay.
    """
    return stack(
        [
            [b if o is None else Batch(*(f[o] for f in b)) for b, o in zip(*m, strict=True)]
            for m in zip(batches, orders, strict=True)
        ]
    )


def _restrict(spec: P, axes: tuple[str, ...]) -> P:
    """The part of a spec that mentions `axes`."""
    dims = (d if isinstance(d, tuple) else (d,) for d in spec)
    kept = (tuple(a for a in d if a in axes) for d in dims)
    return P(*(d or None for d in kept))
