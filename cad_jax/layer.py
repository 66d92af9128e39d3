"""One Llama layer as plain functions of whole weights, and as a Flax module of a device's shards.

    q, k, v = pre_attention(weights, x, positions);   x = post_attention(weights, x, out)

What lies between two attentions is a block: the second half of one layer and the first half of the
next. Loops that overlap travel with compute call the functions on parts of the rows, with weights
they gathered themselves; the module gathers its own.

Shape letters: T tokens, E embedding, H query heads, K key/value heads, D head dim, F ffn, L layers.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from cad_jax.model_config import LlamaConfig
from cad_jax.parameters import Gather, Parallelism


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def project(x: jax.Array, weight: jax.Array, dim: int, out_dtype: str) -> jax.Array:
    """x [T, N] times weight, summed over weight's `dim` (of size N), in x's dtype -> [T, M] in `out_dtype`.

    Sums are float32, and the gradient of the weight stays float32: it is never rounded.
    """
    return _product(x, weight.astype(x.dtype), 1, dim, out_dtype)


def _product(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int, dtype: DTypeLike) -> jax.Array:
    """Matrix product summed over the given dims; the other dims of a and b remain, in this order."""
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _project_fwd(
    x: jax.Array, weight: jax.Array, dim: int, out_dtype: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    weight = weight.astype(x.dtype)
    return _product(x, weight, 1, dim, out_dtype), (x, weight)


def _project_bwd(
    dim: int, out_dtype: str, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    gradient = gradient.astype(x.dtype)
    pair = (x, gradient) if dim == 0 else (gradient, x)
    return _product(gradient, weight, 1, 1 - dim, x.dtype), _product(*pair, 0, 0, jnp.float32)


project.defvjp(_project_fwd, _project_bwd)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [T, E] over its root mean square, times weight [E]; float32 inside, x's dtype out."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight[None, :]).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotary embedding of x [T, H, D]: lane i of the first half turns with lane i of the second.

    Phases are float32: positions int32 [T] (they restart with each document) times [D/2].
    """
    phases = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(phases)[:, None, :], jnp.sin(phases)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)


# Parameters of each half, by name.
PRE_NAMES = ("attention_norm", "query", "key", "value")
POST_NAMES = ("attention_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


class PreWeights(NamedTuple):
    """Whole weights of a layer's first half on one device."""

    norm: jax.Array  # [E]
    qkv: jax.Array  # [E, (H + 2 K) D]


class PostWeights(NamedTuple):
    """Whole weights of a layer's second half on one device."""

    output: jax.Array  # [E, H D]
    norm: jax.Array  # [E]
    gate_up: jax.Array  # [E, 2 F]
    down: jax.Array  # [E, F]


def pre_attention(
    config: LlamaConfig,
    parallelism: Parallelism,
    weights: PreWeights,
    x: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [T, E], positions int32 [T] -> q [T, H, D], k [T, K, D], v [T, K, D] of this device (all
    heads of its tokens, where tp splits tokens)."""
    heads = config.head_shape(parallelism.linear_tp)
    rows = rms_norm(x, weights.norm, config.norm_eps)
    qkv = project(rows, weights.qkv, 0, config.dtype).reshape(x.shape[0], -1, heads.head_dim)
    first_key = heads.num_q_heads
    q, k, v = jnp.split(qkv, (first_key, first_key + heads.num_kv_heads), axis=1)
    frequencies = jnp.asarray(config.rope_frequencies())
    return rotate(q, positions, frequencies), rotate(k, positions, frequencies), v


def post_attention(
    config: LlamaConfig,
    parallelism: Parallelism,
    weights: PostWeights,
    x: jax.Array,
    out: jax.Array,
) -> jax.Array:
    """x [T, E] and attention's out [T, H, D] -> the next layer's x [T, E]."""
    out = out.reshape(x.shape[0], -1)
    sum_axes = () if parallelism.tokens_over_tp else ("tp",)
    x = x + parallelism.psum(project(out, weights.output, 1, config.dtype), *sum_axes)
    rows = rms_norm(x, weights.norm, config.norm_eps)
    gate, up = jnp.split(project(rows, weights.gate_up, 0, config.dtype), 2, axis=1)
    hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    down = project(hidden.astype(x.dtype), weights.down, 1, config.dtype)
    return x + parallelism.psum(down, *sum_axes)


def pre_shards(
    config: LlamaConfig, parallelism: Parallelism, layer: Mapping[str, jax.Array]
) -> PreWeights:
    """This device's rows [E/dp, X] of the first half's weights, from one layer's parameters."""
    own = partial(_own_key_head, config, parallelism)
    qkv = (layer["query"], own(layer["key"]), own(layer["value"]))
    return PreWeights(layer["attention_norm"], jnp.concatenate(qkv, axis=1))


def post_shards(layer: Mapping[str, jax.Array]) -> PostWeights:
    """This device's rows [E/dp, X] of the second half's weights, from one layer's parameters."""
    gate_up = jnp.concatenate((layer["ffn_gate"], layer["ffn_up"]), axis=1)
    return PostWeights(layer["attention_output"], layer["ffn_norm"], gate_up, layer["ffn_down"])


def _own_key_head(config: LlamaConfig, parallelism: Parallelism, weight: jax.Array) -> jax.Array:
    """This device's columns of a key or value weight that is replicated because K < tp."""
    tp = parallelism.linear_tp
    if config.num_kv_heads % tp == 0:
        return weight
    head = lax.axis_index("tp") * config.num_kv_heads // tp
    return lax.dynamic_slice_in_dim(weight, head * config.head_dim, config.head_dim, axis=1)


class Layer(nnx.Module):
    """One layer, in two halves. Weights of this device: [E/dp, X/tp]; stacked [L, ...] in `Llama`."""

    def __init__(
        self, config: LlamaConfig, parallelism: Parallelism, values: Mapping[str, jax.Array]
    ) -> None:
        self.config = config
        self.parallelism = parallelism
        self.gather = Gather.of(config, parallelism)
        self.attention_norm = nnx.Param(values["attention_norm"])
        self.query = nnx.Param(values["query"])
        self.key = nnx.Param(values["key"])
        self.value = nnx.Param(values["value"])
        self.attention_output = nnx.Param(values["attention_output"])
        self.ffn_norm = nnx.Param(values["ffn_norm"])
        self.ffn_gate = nnx.Param(values["ffn_gate"])
        self.ffn_up = nnx.Param(values["ffn_up"])
        self.ffn_down = nnx.Param(values["ffn_down"])

    def _values(self) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(self))

    def pre_attention(
        self, x: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [T, E], positions int32 [T] -> q [T, H, D], k [T, K, D], v [T, K, D] of this device."""
        shards = pre_shards(self.config, self.parallelism, self._values())
        (qkv,) = self.gather.side_by_side((shards.qkv,))
        weights = PreWeights(shards.norm, qkv)
        return pre_attention(self.config, self.parallelism, weights, x, positions)

    def post_attention(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """x [T, E] and attention's out [T, H, D] -> the next layer's x [T, E]."""
        shards = post_shards(self._values())
        output, gate_up, down = self.gather.side_by_side(
            (shards.output,), (shards.gate_up,), (shards.down,)
        )
        weights = PostWeights(output, shards.norm, gate_up, down)
        return post_attention(self.config, self.parallelism, weights, x, out)
