"""What a stage keeps of its forward for its backward, and what it computes again.

- save_attention: every layer's input, and what its attention returned.
- save_stage: what every attention returned; the layers' inputs come from the stage's own.
- full: nothing but the stage's input; attention and its exchanges run again.

Letters: T tokens of a rank, N nano-batches, Lp layers of a stage, E embedding, H query heads, D head
dim.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Remat = Literal["none", "save_attention", "save_stage", "full"]


class Saved(NamedTuple):
    """What attention returned in every layer of a stage, for one nano-batch."""

    out: jax.Array  # [Lp, T/N, H, D], compute dtype
    lse: jax.Array  # float32 [Lp, T/N, H]; with tokens over tp a rank's rows, this device's heads


class Kept(NamedTuple):
    """What a stage's backward is given for one nano-batch besides the stage's input."""

    inputs: Any  # [Lp - 1, T/N, E], of every layer but the first; None where they come again
    attention: Any  # Saved, or None where attention runs again


def keep(remat: Remat, inputs: jax.Array, attention: Saved) -> Kept:
    """inputs [Lp, T/N, E]: of every layer."""
    return Kept(
        inputs=inputs[1:] if remat == "save_attention" else None,
        attention=None if remat == "full" else attention,
    )


def with_first(x: jax.Array, later: jax.Array) -> jax.Array:
    """The inputs of all layers [Lp, T/N, E] from the stage's own and those of the later ones."""
    return jnp.concatenate((x[None], later))


def check_remat(remat: Remat, stages: int, nano_batches: int) -> None:
    """Raises ValueError where the loop that stages and nano-batches ask for has no such policy."""
    if stages > 1:
        offered, loop = ("save_attention", "save_stage", "full"), "pipeline stages"
    elif nano_batches > 1:
        # A backward right after its forward: there is nothing to gain from keeping less.
        offered, loop = ("save_attention",), "ping-pong on one stage"
    else:
        offered, loop = ("none", "save_attention", "full"), "layers one after the other"
    if remat not in offered:
        raise ValueError(
            f"training.remat (={remat}) must be one of {', '.join(offered)} for {loop}: the others "
            "would save nothing there, or are not written for its backward; use save_attention"
        )
