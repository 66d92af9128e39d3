"""A pipeline stage whose nano-batches run one after the other, exchanges in line with compute.

The backward runs the layers again, around what attention returned where that was kept.

Letters: T tokens of a rank, N nano-batches, Lp layers of the stage on this device, E embedding,
H query heads of this device, D head dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cad_jax.attention.differentiable import Settings, Way, attend_saved
from cad_jax.layer import Layer
from cad_jax.model_config import LlamaConfig
from cad_jax.parameters import Parallelism
from cad_jax.pipeline.remat import Kept, Remat, Saved, keep, with_first

Layers = Mapping[str, jax.Array]


@dataclass(frozen=True)
class SingleStream:
    """A `stages.Stage`, inside shard_map over all mesh axes.

    config, parallelism: of the layers. way, settings: of the attention strategy. remat: what the
    backward is given, and what it computes again.
    """

    config: LlamaConfig
    parallelism: Parallelism
    way: Way
    settings: Settings
    remat: Remat = "save_attention"

    def forward(
        self,
        layers: Layers,
        xs: tuple[jax.Array, ...],
        positions: tuple[jax.Array, ...],
        tables: tuple[Any, ...],
    ) -> tuple[tuple[jax.Array, ...], tuple[Kept, ...]]:
        """Per nano-batch: x [T/N, E] after the stage's layers, and what its backward needs."""
        done = [self._forward(layers, *nano) for nano in zip(xs, positions, tables, strict=True)]
        return tuple(x for x, *_ in done), tuple(
            keep(self.remat, inputs, saved) for _, inputs, saved in done
        )

    def backward(
        self,
        layers: Layers,
        xs: tuple[jax.Array, ...],
        kept: tuple[Kept, ...],
        d_xs_out: tuple[jax.Array, ...],
        positions: tuple[jax.Array, ...],
        tables: tuple[Any, ...],
    ) -> tuple[tuple[jax.Array, ...], Layers]:
        """Per nano-batch the cotangent of its input, a share of a sum over tp as `d_xs_out` is;
        float32 gradients of the layers, summed over nano-batches."""
        nanos = zip(xs, kept, d_xs_out, positions, tables, strict=True)
        done = [self._backward(layers, *nano) for nano in nanos]
        total = done[0][1]
        for _, d_layers in done[1:]:
            total = jax.tree.map(jnp.add, total, d_layers)
        return tuple(d_x for d_x, _ in done), total

    def _layer(self, weights: Layers) -> Layer:
        return Layer(self.config, self.parallelism, weights)

    def _forward(
        self, layers: Layers, x: jax.Array, positions: jax.Array, tables: Any
    ) -> tuple[jax.Array, jax.Array, Saved]:
        """Output of the stage, inputs of every layer [Lp, T/N, E], and what attention returned."""

        def step(x: jax.Array, weights: Layers) -> tuple[jax.Array, tuple[jax.Array, Saved]]:
            layer = self._layer(weights)
            q, k, v = layer.pre_attention(x, positions)
            saved = Saved(*self.way.forward(self.settings, q, k, v, tables))
            return layer.post_attention(x, saved.out), (x, saved)

        x, (inputs, saved) = lax.scan(step, x, layers)
        return x, inputs, saved

    def _backward(
        self,
        layers: Layers,
        x: jax.Array,
        kept: Kept,
        d_x: jax.Array,
        positions: jax.Array,
        tables: Any,
    ) -> tuple[jax.Array, Layers]:
        def step(d_x: jax.Array, of_layer: Any) -> tuple[jax.Array, Layers]:
            weights, x, saved = of_layer

            def apply(weights: Layers, x: jax.Array) -> jax.Array:
                layer = self._layer(weights)
                q, k, v = layer.pre_attention(x, positions)
                out = attend_saved(self.way, self.settings, q, k, v, *saved, tables)
                return layer.post_attention(x, out)

            d_weights, d_x = jax.vjp(apply, weights, x)[1](d_x)
            return d_x, d_weights

        saved = kept.attention
        if saved is None:
            _, inputs, saved = self._forward(layers, x, positions, tables)
        elif kept.inputs is None:
            inputs = self._inputs(layers, x, saved.out)
        else:
            inputs = with_first(x, kept.inputs)
        return lax.scan(step, d_x, (layers, inputs, saved), reverse=True)

    def _inputs(self, layers: Layers, x: jax.Array, out: jax.Array) -> jax.Array:
        """Every layer's input again, [Lp, T/N, E]. With out at hand that takes only the second
        half of each layer but the last, whose output nobody needs."""

        def step(x: jax.Array, of_layer: tuple[Layers, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weights, out = of_layer
            x = self._layer(weights).post_attention(x, out)
            return x, x

        _, later = lax.scan(step, x, jax.tree.map(lambda a: a[:-1], (layers, out)))
        return with_first(x, later)
