"""The boundary between two pipeline stages: what travels over it, and in which form.

Where all tp devices hold the same x, every one of them sends, and keeps, a slice of its rows. Under
the reading of `cad_jax.parameters` (gradients of the sum over all devices) the cotangent of such an
x is a sum of shares over tp: it travels as the slices of that sum. Where tp devices hold tokens of
their own, a device's one slice is all of them.

Letters: N nano-batches, T/N rows of a nano-batch on a device, R = T / N / slices rows of a slice, E
embedding.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

STAGE_AXIS, SLICE_AXIS = "pp", "tp"


@dataclass(frozen=True)
class Boundary:
    """Inside shard_map over both axes. stages: devices of pp. slices: devices of tp that hold the
    same rows."""

    stages: int
    slices: int

    def to_next(self, x: jax.Array) -> jax.Array:
        """From every stage to the next; the last one's arrives at the first."""
        pairs = [(stage, (stage + 1) % self.stages) for stage in range(self.stages)]
        with jax.named_scope("pipeline/send_fwd"):
            return lax.ppermute(x, STAGE_AXIS, pairs)

    def to_previous(self, x: jax.Array) -> jax.Array:
        """From every stage to the one before; the first one's arrives at the last."""
        pairs = [(stage, (stage - 1) % self.stages) for stage in range(self.stages)]
        with jax.named_scope("pipeline/send_bwd"):
            return lax.ppermute(x, STAGE_AXIS, pairs)

    def own_rows(self, xs: tuple[jax.Array, ...]) -> jax.Array:
        """N arrays [T/N, E], the same on every device of a slice -> this one's slices, [N, R, E]."""
        x = jnp.stack(xs)
        if self.slices == 1:
            return x
        rows = x.shape[1] // self.slices
        return lax.dynamic_slice_in_dim(x, lax.axis_index(SLICE_AXIS) * rows, rows, axis=1)

    def whole(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """The slices [N, R, E] of all devices -> N arrays [T/N, E], the same on every one."""
        if self.slices > 1:
            x = lax.all_gather(x, SLICE_AXIS, axis=1, tiled=True)
        return tuple(x)

    def summed_rows(self, d_xs: tuple[jax.Array, ...]) -> jax.Array:
        """The transpose of `whole`: shares [T/N, E] of a sum -> this device's slices of it."""
        d_x = jnp.stack(d_xs)
        if self.slices == 1:
            return d_x
        return lax.psum_scatter(d_x, SLICE_AXIS, scatter_dimension=1, tiled=True)

    def placed_rows(self, d_x: jax.Array) -> tuple[jax.Array, ...]:
        """The transpose of `own_rows`: slices [N, R, E] among zeros, [T/N, E] each."""
        if self.slices == 1:
            return tuple(d_x)
        nano_batches, rows, width = d_x.shape
        zeros = jnp.zeros((nano_batches, rows * self.slices, width), d_x.dtype)
        first = lax.axis_index(SLICE_AXIS) * rows
        return tuple(lax.dynamic_update_slice_in_dim(zeros, d_x, first, axis=1))
