"""The pipeline's executor: one optimizer step, ticks of all stages in step with each other.

    F F .. F | B F  B F  ..  B F | B B .. B        warm-up, steady, drain: three scans

It walks the tables of a `Schedule` and does not know which schedule they hold. In a tick all stages
run the same phase, each for a microbatch of its own, so that one program with one pool of attention
servers serves all of them; a stage without work runs on zeros, and nothing of it is kept.
- F tick: the stage's input comes from the stage before (or from the embedding), goes into a slot of
  the stash together with what its backward needs, and the output waits for the next tick.
- B tick: the loss of what the last stage finished in the F tick just before; every stage runs again
  from its slot and returns its cotangent, which travels to the stage before (or to the embedding).
  How much it computes again is the stage's own choice (`pipeline.remat`).
Embedding and loss are shared by all stages: x is broadcast to them.

Letters: T tokens of a device, N nano-batches of a microbatch, R rows of a slice (T / (N tp), or T / N
where every device has its own tokens), M microbatches, P stages, V virtual stages, Lp layers of a
virtual stage, E embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from cad_jax.pipeline.boundary import SLICE_AXIS, STAGE_AXIS, Boundary
from cad_jax.pipeline.schedule import Schedule, TickTable


class Stage(Protocol):
    """The layers of one virtual stage on one device, inside shard_map over all mesh axes.

    layers: leaves [Lp, ...]. xs, d_xs: per nano-batch [T/N, E]; where tp devices hold the same
    tokens, cotangents are shares of a sum over tp. positions: per nano-batch int32 [T/N]. tables:
    per nano-batch, what attention needs. kept: any pytree, the same shapes in every call.
    d_layers: float32, like layers.
    """

    def forward(self, layers, xs, positions, tables) -> tuple[tuple[jax.Array, ...], Any]:
        """Returns (xs, kept)."""
        ...

    def backward(
        self, layers, xs, kept, d_xs_out, positions, tables
    ) -> tuple[tuple[jax.Array, ...], Any]:
        """Returns (d_xs, d_layers)."""
        ...


class Tokens(Protocol):
    """Rows of this rank in a step, [M, N, T/N] each: the same on all stages and, but for tokens over
    tp, on all of its tp devices."""

    @property
    def ids(self) -> jax.Array: ...  # int32

    @property
    def positions(self) -> jax.Array: ...  # int32

    @property
    def targets(self) -> jax.Array: ...  # int32

    @property
    def weights(self) -> jax.Array: ...  # float32


class _ForwardTick(NamedTuple):
    """What the schedule says of an F tick, and its plan arrays ([N, ...] a leaf)."""

    table: TickTable  # [P] a field
    embedded: Any  # as `Schedule.embedded`, a scalar
    arrays: Any


class _BackwardTick(NamedTuple):
    """The same of a B tick."""

    table: TickTable
    scored: Any  # as `Schedule.losses`, a scalar
    embedded: Any  # as `Schedule.embedding_gradients`, a scalar
    arrays: Any


class _Unit(NamedTuple):
    """What this device's stage does in a tick, scalars; microbatch is -1 where it is idle."""

    active: jax.Array
    microbatch: jax.Array
    chunk: jax.Array
    slot: jax.Array


class _Entry(NamedTuple):
    """A slot of the stash: a stage's input [N, R, E] and what its forward saved."""

    x: jax.Array
    saved: Any


class _Forward(NamedTuple):
    """Carried from F tick to F tick. finished: the last output [N, R, E]; stash: [slots, ...]."""

    finished: jax.Array
    stash: _Entry


class _Backward(NamedTuple):
    """Carried from B tick to B tick. received: the cotangent that arrived [N, R, E]."""

    received: jax.Array
    loss: jax.Array
    d_outer: Any
    d_layers: Any


def run_schedule(
    schedule: Schedule,
    stage: Stage,
    embed: Callable[[Any, jax.Array], jax.Array],
    loss: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array],
    params: dict[str, Any],
    batch: Tokens,
    expand: Callable[[Any], Any],
    forward_arrays: Any,
    backward_arrays: Any,
    tokens_over_tp: bool = False,
) -> tuple[jax.Array, dict[str, Any]]:
    """Loss and gradients of a step on this device, inside shard_map over all axes (check_vma=False).

    Args:
        schedule: for as many stages as axis pp has devices.
        stage: runs the layers.
        embed: (params, ids int32 [T]) -> this stage's share [T, E] of their embedding: the sum over
            pp, which the executor takes. On tp devices that hold the same tokens it is the same.
        loss: (params, x [T, E] after the last layer, targets [T], weights [T]) -> this device's
            share of the step's loss, a float32 scalar, 0 where all weights are; x is the same on
            every stage.
        params: float32 shards. Leaves of "layers" are [V * Lp, ...], virtual stage 0 first:
            virtual stage v of stage s holds layers (v P + s) Lp and on.
        batch: the microbatches.
        expand: plan arrays of one nano-batch in one tick -> its tables.
        forward_arrays, backward_arrays: plan arrays of the F and B ticks, leaves [ticks, N, ...].
        tokens_over_tp: T tokens are this device's alone; else its tp peers hold the same ones.

    Returns: this device's share of the loss, to be summed over all devices, and float32 gradients
        like params, to be summed over the axes that a parameter is replicated on.

    Raises:
        ValueError: rows, layers or stages do not fit each other.
    """
    slices = 1 if tokens_over_tp else lax.axis_size(SLICE_AXIS)
    _check(schedule, params, batch, slices)
    boundary = Boundary(schedule.stages, slices)
    executor = _Executor(schedule, boundary, stage, embed, loss, params, batch, expand)
    f_ticks = _ForwardTick(schedule.forward, schedule.embedded, forward_arrays)
    b_ticks = _BackwardTick(
        schedule.backward, schedule.losses, schedule.embedding_gradients, backward_arrays
    )
    warm_up, steady = schedule.warmup_ticks, schedule.steady_ticks

    def filling(forward: _Forward, tick: _ForwardTick) -> tuple[_Forward, None]:
        return executor.forward_tick(forward, tick), None

    def pair(
        state: tuple[_Forward, _Backward], ticks: tuple[_BackwardTick, _ForwardTick]
    ) -> tuple[tuple[_Forward, _Backward], None]:
        forward, backward = executor.backward_tick(*state, ticks[0])
        return (executor.forward_tick(forward, ticks[1]), backward), None

    def draining(backward: _Backward, tick: _BackwardTick) -> tuple[_Backward, None]:
        return executor.backward_tick(forward, backward, tick)[1], None

    forward = executor.empty_forward(jax.tree.map(lambda a: jnp.asarray(a[0]), f_ticks))
    forward, _ = lax.scan(filling, forward, _rows(f_ticks, 0, warm_up))
    pairs = _rows(b_ticks, 0, steady), _rows(f_ticks, warm_up, warm_up + steady)
    (forward, backward), _ = lax.scan(pair, (forward, executor.empty_backward(forward)), pairs)
    last = _rows(b_ticks, steady, steady + schedule.drain_ticks)
    backward, _ = lax.scan(draining, backward, last)
    layers = jax.tree.map(
        lambda a, like: a.reshape(like.shape), backward.d_layers, params["layers"]
    )
    return backward.loss, {**backward.d_outer, "layers": layers}


def _check(schedule: Schedule, params: dict[str, Any], batch: Tokens, slices: int) -> None:
    """Raises ValueError where sizes do not fit each other."""
    stages = lax.axis_size(STAGE_AXIS)
    layers = jax.tree.leaves(params["layers"])[0].shape[0]
    microbatches, _, tokens = batch.ids.shape
    if schedule.stages != stages:
        raise ValueError(
            f"the schedule must have as many stages (={schedule.stages}) as mesh axis pp has "
            f"devices (={stages}): make it for stages={stages}"
        )
    if schedule.microbatches != microbatches:
        raise ValueError(
            f"the schedule must have as many microbatches (={schedule.microbatches}) as the batch "
            f"(={microbatches}): make it for microbatches={microbatches}"
        )
    if layers % schedule.virtual_stages:
        raise ValueError(
            f"a stage's layers (={layers}) must be divisible by virtual_stages "
            f"(={schedule.virtual_stages}): every virtual stage holds as many"
        )
    if tokens % slices:
        raise ValueError(
            f"a nano-batch's tokens per rank (={tokens}) must be divisible by tp (={slices}): rows "
            "travel between stages in tp slices; use a multiple"
        )


def _rows[Ticks](ticks: Ticks, start: int, stop: int) -> Ticks:
    return jax.tree.map(lambda a: jnp.asarray(a[start:stop]), ticks)


@dataclass(frozen=True)
class _Executor:
    """Ticks of one step on one device; see `run_schedule`."""

    schedule: Schedule
    boundary: Boundary
    stage: Stage
    embed: Callable[[Any, jax.Array], jax.Array]
    loss: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
    params: dict[str, Any]
    batch: Tokens
    expand: Callable[[Any], Any]

    # Ticks.

    @jax.named_scope("forward")
    def forward_tick(self, state: _Forward, tick: _ForwardTick) -> _Forward:
        own = self._unit(tick.table)
        enters = self._is_stage(0) & (tick.embedded >= 0)
        embedded = self._embedded(self._outer, tick.embedded)
        x = jnp.where(enters, embedded, self.boundary.to_next(state.finished))
        x = jnp.where(own.active, x, 0)
        xs, saved = self.stage.forward(
            self._layers(own),
            self.boundary.whole(x),
            self._positions(own),
            self._tables(tick.arrays),
        )
        entry = _Entry(x, saved)
        stash = jax.tree.map(lambda buffer, new: _put(buffer, own, new), state.stash, entry)
        return _Forward(self.boundary.own_rows(xs), stash)

    @jax.named_scope("backward")
    def backward_tick(
        self, forward: _Forward, state: _Backward, tick: _BackwardTick
    ) -> tuple[_Forward, _Backward]:
        """Returns `forward` for the F tick to come, which begins when this tick's stage is done."""
        own = self._unit(tick.table)
        share, pull = jax.vjp(
            lambda outer, x: self._share_of_loss(outer, x, tick.scored),
            self._outer,
            forward.finished,
        )
        d_scored, d_finished = pull(jnp.ones_like(share))
        d_x = jnp.where(self._finishes(tick.scored), d_finished, state.received)
        d_x = jnp.where(own.active, d_x, 0)
        entry = jax.tree.map(lambda buffer: _take(buffer, own), forward.stash)
        # The stage begins when the loss is done, also where it runs attention again first: devices of
        # one host could otherwise wait in the loss's collectives and in an exchange for each other.
        x, d_x = lax.optimization_barrier((entry.x, d_x))
        d_xs, d_layers = self.stage.backward(
            self._layers(own),
            self.boundary.whole(x),
            entry.saved,
            self.boundary.placed_rows(d_x),
            self._positions(own),
            self._tables(tick.arrays),
        )
        # The stash is read before the F tick writes it, and their buffers are never alive together.
        d_xs, forward = lax.optimization_barrier((d_xs, forward))
        d_x = self.boundary.summed_rows(d_xs)

        _, pull = jax.vjp(lambda outer: self._embedded(outer, tick.embedded), self._outer)
        enters = self._is_stage(0) & (tick.embedded >= 0)
        (d_embedded,) = pull(jnp.where(enters, d_x, 0))
        return forward, _Backward(
            received=self.boundary.to_previous(d_x),
            loss=state.loss + share,
            d_outer=jax.tree.map(
                jnp.add, state.d_outer, jax.tree.map(jnp.add, d_scored, d_embedded)
            ),
            d_layers=jax.tree.map(lambda a, b: _add(a, own, b), state.d_layers, d_layers),
        )

    def empty_forward(self, first: _ForwardTick) -> _Forward:
        """Before the first tick; first: any one tick, for its shapes."""

        def entry() -> _Entry:
            own = self._unit(first.table)
            x = self._embedded(self._outer, first.embedded)
            args = (
                self._layers(own),
                self.boundary.whole(x),
                self._positions(own),
                self._tables(first.arrays),
            )
            return _Entry(x, self.stage.forward(*args)[1])

        shapes = jax.eval_shape(entry)
        slots = self.schedule.slots
        stash = jax.tree.map(lambda s: jnp.zeros((slots, *s.shape), s.dtype), shapes)
        return _Forward(jnp.zeros(shapes.x.shape, shapes.x.dtype), stash)

    def empty_backward(self, forward: _Forward) -> _Backward:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), (self._outer, self._chunks))
        return _Backward(jnp.zeros_like(forward.finished), jnp.float32(0.0), *zeros)

    # Work of a tick.

    def _is_stage(self, stage: int) -> jax.Array:
        return lax.axis_index(STAGE_AXIS) == stage

    def _finishes(self, scored: jax.Array) -> jax.Array:
        """Is this device's stage the one whose output the loss is computed of?"""
        return self._is_stage(self.schedule.stages - 1) & (scored >= 0)

    def _unit(self, table: TickTable) -> _Unit:
        own = lax.axis_index(STAGE_AXIS)
        microbatch, chunk, slot = (_at(jnp.asarray(column), own) for column in table)
        return _Unit(microbatch >= 0, microbatch, chunk, slot)

    def _positions(self, unit: _Unit) -> tuple[jax.Array, ...]:
        return tuple(self._of_microbatch(self.batch.positions, unit.microbatch))

    def _of_microbatch(self, rows: jax.Array, microbatch: jax.Array) -> jax.Array:
        """Rows [M, N, T/N] -> [N, T/N]; some microbatch's for none (-1)."""
        return _at(rows, jnp.maximum(microbatch, 0))

    def _tables(self, arrays: Any) -> tuple[Any, ...]:
        nano_batches = range(self.batch.ids.shape[1])
        return tuple(self.expand(jax.tree.map(itemgetter(n), arrays)) for n in nano_batches)

    # Parameters.

    @property
    def _outer(self) -> dict[str, Any]:
        """Everything but the layers."""
        return {name: value for name, value in self.params.items() if name != "layers"}

    @property
    def _chunks(self) -> Any:
        """The layers by virtual stage: leaves [V, Lp, ...]."""
        chunks = self.schedule.virtual_stages
        return jax.tree.map(lambda a: a.reshape(chunks, -1, *a.shape[1:]), self.params["layers"])

    def _layers(self, unit: _Unit) -> Any:
        return jax.tree.map(lambda a: _at(a, unit.chunk), self._chunks)

    # Where microbatches enter and leave the pipeline.

    def _embedded(self, outer: dict[str, Any], microbatch: jax.Array) -> jax.Array:
        """The embedding of a microbatch's ids, [N, R, E]; of no meaning for none (-1)."""
        ids = self._of_microbatch(self.batch.ids, microbatch)
        x = self.embed({**self.params, **outer}, ids.reshape(-1))
        return lax.psum(self.boundary.own_rows(tuple(x.reshape(*ids.shape, -1))), STAGE_AXIS)

    def _share_of_loss(
        self, outer: dict[str, Any], finished: jax.Array, scored: jax.Array
    ) -> jax.Array:
        """This device's share of the loss of the last stage's output; 0 where none is scored."""
        x = jnp.where(self._finishes(scored), finished, 0)
        x = jnp.concatenate(self.boundary.whole(lax.psum(x, STAGE_AXIS)))
        targets = self._of_microbatch(self.batch.targets, scored).reshape(-1)
        weights = self._of_microbatch(self.batch.weights, scored).reshape(-1)
        weights = jnp.where(scored >= 0, weights, 0)
        return self.loss({**self.params, **outer}, x, targets, weights)


def _at(array: jax.Array, index: int | jax.Array) -> jax.Array:
    """array[index], by a slice."""
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _set(array: jax.Array, index: jax.Array, new: jax.Array) -> jax.Array:
    """array with array[index] = new, by a slice in place."""
    return lax.dynamic_update_index_in_dim(array, new, index, 0)


def _take(buffer: jax.Array, unit: _Unit) -> jax.Array:
    """The unit's slot of a buffer [slots, ...]; zeros where idle, whatever the slot holds."""
    return jnp.where(unit.active, _at(buffer, unit.slot), 0)


def _put(buffer: jax.Array, unit: _Unit, new: jax.Array) -> jax.Array:
    """The buffer with the unit's slot replaced; unchanged where idle."""
    return _set(buffer, unit.slot, jnp.where(unit.active, new, _at(buffer, unit.slot)))


def _add(total: jax.Array, unit: _Unit, new: jax.Array) -> jax.Array:
    """Gradients [V, Lp, ...] with those of the unit's virtual stage added; unchanged where idle."""
    own = _at(total, unit.chunk)
    return _set(total, unit.chunk, own + jnp.where(unit.active, new, 0))
