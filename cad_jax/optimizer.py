"""AdamW with warm-up, cosine decay and clipping by global norm, on global sharded arrays."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (decoupled weight decay on matrices and tables, not on norms).

    The learning rate rises linearly over `warmup_steps`, then falls along half a cosine to
    `final_fraction` of the peak at `total_steps`, where it stays.

    Raises:
        ValueError: a value breaks a rule; the text names the rule, the value and the cure.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 100
    total_steps: int = 1000
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} (={getattr(self, name)}) must be positive; "
                    "usual values are learning_rate 3e-4, eps 1e-8, clip_norm 1.0"
                )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} (={getattr(self, name)}) must lie in [0, 1): it weighs the past in a "
                    "running mean; usual values are 0.9 and 0.95"
                )
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(
                f"final_fraction (={self.final_fraction}) must lie in [0, 1]: it is the share of "
                "the peak learning rate at the end; usual value 0.1"
            )
        if self.weight_decay < 0:
            raise ValueError(
                f"weight_decay (={self.weight_decay}) must not be negative; use 0 for none"
            )
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"warmup_steps (={self.warmup_steps}) must be below total_steps "
                f"(={self.total_steps}) and not negative: the cosine needs steps of its own; "
                "lower warmup_steps"
            )

    def learning_rate_at(self, step: ArrayLike) -> jax.Array:
        """Learning rate of the update that starts from `step` finished updates, float32 scalar."""
        done_steps = jnp.asarray(step, jnp.float32)
        rise = (done_steps + 1) / max(self.warmup_steps, 1)
        done = (done_steps - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0, 1)))
        fall = self.final_fraction + (1 - self.final_fraction) * cosine
        return self.learning_rate * jnp.where(done_steps < self.warmup_steps, rise, fall)

    def make(self, decays: Any) -> optax.GradientTransformation:
        """The optax transformation; `decays` is a pytree of bool like the parameters."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.scale_by_adam(self.beta1, self.beta2, self.eps),
            optax.add_decayed_weights(self.weight_decay, decays),
            optax.scale_by_learning_rate(self.learning_rate_at),
        )
