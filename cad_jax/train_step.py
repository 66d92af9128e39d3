"""The one jitted training step: microbatches, loss, gradients, optimizer.

One shard_map over ("pp", "dp", "tp") computes loss and gradients, fully manual (for a strategy that leaves pp and dp to XLA's
partitioner, manual over tp only: the same model). It ends at float32 gradients, placed like their parameters; optax runs on the global
arrays in the same jit, so that clipping sees the global norm. The loss is the sum over target tokens divided by
the number of target tokens of the WHOLE step, over all microbatches and ranks: every device returns its share.
Without pipeline stages pp is one more axis of tokens.

Shape letters: M microbatches, S servers (pp x dp), T tokens per server.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cad_jax.model import Llama, LlamaConfig, Remat
from cad_jax.optimizer import OptimizerConfig
from cad_jax.parameters import Parallelism, describe, init, shardings
from cad_jax.sharding.mesh import MESH_AXES, POOL_AXES


class Batch(NamedTuple):
    """Tokens of one step, [M, S*T] each, in the order in which ranks hold them."""

    ids: Any  # int32
    positions: Any  # int32, within the document
    targets: Any  # int32
    weights: Any  # float32, 1 where a target exists: never across documents, never padding


class TrainState(NamedTuple):
    """Global sharded arrays: what a checkpoint holds."""

    params: Any  # float32, the tree of `describe`
    opt_state: Any
    step: Any  # int32 scalar: finished updates


class DeviceStrategy(Protocol):
    """What the step needs of an attention strategy."""

    @property
    def manual_axes(self) -> tuple[str, ...]: ...

    def expand(self, arrays: Any) -> Any:
        """Plan arrays of one rank -> tables, once per microbatch."""
        ...

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, tables: Any) -> jax.Array: ...


class TrainStep:
    """The step of one model, mesh, strategy and optimizer; new batches and plans never recompile it.

    Args:
        config: the model.
        mesh: axes ("pp", "dp", "tp"). An AbstractMesh serves `trace` alone: shapes and memory of
            a mesh that is not here.
        strategy: how attention is distributed.
        optimizer: AdamW's settings.
        remat: what the backward pass computes again (`Llama.hidden`).

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
        self.automatic_pool = not set(POOL_AXES) <= set(strategy.manual_axes)
        self.parallelism = Parallelism.of(mesh, self.automatic_pool)
        self.description = describe(config, self.parallelism)
        self._definition = nnx.split(nnx.eval_shape(lambda: Llama(config, self.parallelism)))[0]
        self._optax = optimizer.make(jax.tree.map(lambda p: p.decays, self.description))
        self.batch_sharding = NamedSharding(mesh, P(None, POOL_AXES))
        self.state_shardings = self._state_shardings()
        replicated = NamedSharding(mesh, P())
        self._init = jax.jit(self._initial_state, out_shardings=self.state_shardings)
        self.step = jax.jit(
            self._step, donate_argnums=0, out_shardings=(self.state_shardings, replicated)
        )

    def init(self, seed: int) -> TrainState:
        """The state before the first update: the same values on every mesh."""
        return self._init(jnp.uint32(seed))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, for a restore."""
        shapes = jax.eval_shape(self._initial_state, jnp.uint32(0))
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            self.state_shardings,
        )

    def trace(self, microbatches: int, tokens: int, arrays: Any) -> Any:
        """The step traced on shapes alone: `.lower().compile().memory_analysis()` follows.

        Args:
            microbatches: M.
            tokens: S*T, tokens of a microbatch over all ranks.
            arrays: plan arrays stacked [M, S, ...]; only shapes and dtypes are read.
        """

        def abstract(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.batch_sharding)

        integers = abstract(jax.ShapeDtypeStruct((microbatches, tokens), jnp.int32))
        floats = abstract(jax.ShapeDtypeStruct((microbatches, tokens), jnp.float32))
        batch = Batch(integers, integers, integers, floats)
        return self.step.trace(self.abstract_state(), batch, jax.tree.map(abstract, arrays))

    def _initial_state(self, seed: jax.Array) -> TrainState:
        params = init(self.description, seed)
        return TrainState(params, self._optax.init(params), jnp.int32(0))

    def _state_shardings(self) -> TrainState:
        replicated = NamedSharding(self.mesh, P())
        of_params = shardings(self.description, self.mesh)
        shapes = jax.eval_shape(self._initial_state, jnp.uint32(0))
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
        of_tokens = _restrict(P(None, POOL_AXES), manual)
        return jax.shard_map(
            self._local_loss_and_gradients,
            mesh=self.mesh,
            in_specs=(of_params, of_tokens, of_tokens),
            out_specs=(P(), of_params),
            axis_names=set(manual),
            check_vma=False,
        )(params, batch, arrays)

    def _local_loss_and_gradients(
        self, params: Any, batch: Batch, arrays: Any
    ) -> tuple[jax.Array, Any]:
        if not self.automatic_pool:
            arrays = jax.tree.map(lambda a: a[:, 0], arrays)
        # Sum over all devices of the shares = the mean: (pp, tp) ranks compute the same sum.
        targets = self.parallelism.psum(batch.weights.astype(jnp.float32).sum(), *POOL_AXES)
        share = 1.0 / (jnp.maximum(targets, 1.0) * self.parallelism.vocab_shards)

        def microbatch_loss(params: Any, batch: Batch, arrays: Any) -> jax.Array:
            model = nnx.merge(self._definition, params)
            tables = self.strategy.expand(arrays)
            x = model.hidden(
                batch.ids,
                batch.positions,
                lambda q, k, v: self.strategy.attend(q, k, v, tables),
                self.remat,
            )
            return model.loss(x, batch.targets, batch.weights) * share

        def add(total: Any, xs: tuple[Batch, Any]) -> tuple[Any, None]:
            new = jax.value_and_grad(microbatch_loss)(params, *xs)
            return jax.tree.map(jnp.add, total, new), None

        zeros = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params))
        (loss, gradients), _ = lax.scan(add, zeros, (batch, arrays))
        return self.parallelism.psum(loss, *MESH_AXES), self._sum_replicas(gradients)

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


def stack_microbatches(
    batches: Sequence[Batch], orders: Sequence[np.ndarray | None], arrays: Sequence[Any]
) -> tuple[Batch, Any]:
    """Host: M microbatches ([S*T] each) in the order their strategy wants, and their plan arrays, stacked.

    orders: per microbatch, new position -> token index, or None where tokens stay.
    """
    placed = [
        batch if order is None else Batch(*(field[order] for field in batch))
        for batch, order in zip(batches, orders, strict=True)
    ]
    return jax.tree.map(lambda *a: np.stack(a), *placed), jax.tree.map(
        lambda *a: np.stack(a), *arrays
    )


def _restrict(spec: P, axes: tuple[str, ...]) -> P:
    """The part of a spec that mentions `axes`."""
    dims = (d if isinstance(d, tuple) else (d,) for d in spec)
    kept = (tuple(a for a in d if a in axes) for d in dims)
    return P(*(d or None for d in kept))
