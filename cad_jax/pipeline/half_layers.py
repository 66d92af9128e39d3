"""Layers in halves, and blocks pulled back in parts: what the ping-pong loop does to weights and cotangents.

Letters: N nano-batch rows of a rank, L layers of the stage.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from cad_jax.layer import POST_NAMES, PRE_NAMES
from cad_jax.pipeline.parts import Part, split_rows

type Layers = Mapping[str, jax.Array]  # one device's shards of stacked layers, float32 [L, ...]


def block_vjp(block: Callable[..., Any], weights: Any, *operands: jax.Array) -> tuple[Any, Any]:
    """jax.vjp of a block in its weights (whole, compute dtype; gradients float32) and its floating
    operands."""
    floating = [x for x in operands if jnp.issubdtype(x.dtype, jnp.floating)]
    others = operands[len(floating) :]
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    return jax.vjp(lambda w, *rows: block(w, *rows, *others), wide, *floating)


def pull_parts(
    parts: list[tuple[Any, Any]], cotangents: Sequence[jax.Array], shares: Sequence[float]
) -> list[Part]:
    """The parts' vjp functions on their ranges of the cotangents' rows."""
    ranges = split_rows(cotangents, shares)
    return [Part(pull, (rows,)) for (_, pull), rows in zip(parts, ranges, strict=True)]


def total(trees: Iterable[Any]) -> Any:
    first, *rest = trees
    return functools.reduce(partial(jax.tree.map, jnp.add), rest, first)


def layer_at(
    layers: Layers, index: int, names: Iterable[str] | None = None
) -> dict[str, jax.Array]:
    return {name: layers[name][index] for name in names or layers}


def half_layers(
    layers: Layers, post: slice, pre: slice
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Second halves of the layers in `post` and first halves of those in `pre`, stacked."""
    return {n: layers[n][post] for n in POST_NAMES}, {n: layers[n][pre] for n in PRE_NAMES}


def matrices_through(collective: Callable[[tuple], tuple], halves: Any) -> Any:
    """The matrices of `halves` through one collective; norm weights are whole on every device."""
    leaves, structure = jax.tree.flatten(halves)
    spread = [i for i, leaf in enumerate(leaves) if leaf.ndim == 2]
    for i, leaf in zip(spread, collective(tuple(leaves[i] for i in spread)), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)
