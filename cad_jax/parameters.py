"""Parameters of the model: one description each, from which init, placement and restore follow.

All weights are stored with the embedding dim first after the layer dim ([L, E, X]): layers are spread over the stages of the
pipeline (pp), E over dp, X over tp. So the weights that one half of a layer needs are gathered over dp by ONE collective, side
by side, in the compute dtype, and their float32 gradients leave by one reduce-scatter. Norm weights are replicated over dp
and tp. Where E does not divide by dp, weights are replicated over dp.

Gradients inside the fully manual shard_map (check_vma=False) are those of the SUM over all devices of what each device
returns: a psum is its own transpose under that reading, and the gradient of a parameter is summed over exactly the axes its
spec does not mention (`replicated_axes`).

Shape letters: E embedding, H query heads, K key/value heads, D head dim, F ffn, V vocabulary, L layers, T tokens.
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cad_jax.model_config import LlamaConfig
from cad_jax.sharding.mesh import MESH_AXES, POOL_AXES

INIT_STD = 0.02


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the mesh axes as the model sees them.

    `automatic_pool`: pp and dp are left to XLA's partitioner (the model then sees global tokens and
    whole weights); otherwise every axis of size above 1 is manual. The default is one device,
    which needs no shard_map.

    `tokens_over_tp`: what tp splits outside attention. False: the columns and rows of the layers'
    products, whose sums it then reduces twice a layer. True: the tokens; weights are spread over
    (dp, tp) and gathered whole, heads are split inside attention alone.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    automatic_pool: bool = False
    tokens_over_tp: bool = False

    @classmethod
    def of(
        cls,
        mesh: Mesh | AbstractMesh,
        automatic_pool: bool = False,
        tokens_over_tp: bool = False,
    ) -> "Parallelism":
        sizes = dict(mesh.shape)
        return cls(sizes["pp"], sizes["dp"], sizes["tp"], automatic_pool, tokens_over_tp)

    def manual(self, *axes: str) -> tuple[str, ...]:
        """Those of `axes` that hold more than one device and are manual here."""
        automatic = POOL_AXES if self.automatic_pool else ()
        return tuple(a for a in axes if getattr(self, a) > 1 and a not in automatic)

    def psum(self, x: jax.Array, *axes: str) -> jax.Array:
        """Sum over those of `axes` that are manual here."""
        manual = self.manual(*axes)
        if not manual:
            return x
        if not self.automatic_pool or x.dtype == jnp.float32:
            return lax.psum(x, manual)
        # XLA's CPU compiler aborts on a 16-bit all-reduce of a partly manual program.
        return lax.platform_dependent(
            x,
            cpu=lambda x: lax.psum(x.astype(jnp.float32), manual).astype(x.dtype),
            default=lambda x: lax.psum(x, manual),
        )

    def index(self, axes: tuple[str, ...]) -> jax.Array:
        """Row-major index of this device within `axes`, an int32 scalar."""
        return lax.axis_index(axes) if axes else jnp.int32(0)

    @property
    def linear_tp(self) -> int:
        """Devices that share one product of a layer."""
        return 1 if self.tokens_over_tp else self.tp

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """Mesh axes a layer's weights are spread over, and gathered from, along E."""
        return ("dp", "tp") if self.tokens_over_tp else ("dp",)

    def spreads(self, embedding_dim: int) -> bool:
        """Whether a layer's weights divide over `weight_axes`; else every device holds them whole."""
        return embedding_dim % math.prod(getattr(self, a) for a in self.weight_axes) == 0

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes whose devices hold different tokens of a microbatch."""
        return self.weight_axes

    @property
    def vocab_shards(self) -> int:
        """Parts that the model splits the vocabulary into."""
        return self.tp if self.automatic_pool else self.pp * self.tp


@dataclass(frozen=True)
class Parameter:
    """One parameter: global shape (float32), placement, and how it starts.

    `std` 0 means ones (norm weights, which also take no weight decay). Rows of dim 0 from
    `live_rows` on start and stay at zero (padding of the vocabulary).
    """

    shape: tuple[int, ...]
    spec: P
    std: float = INIT_STD
    live_rows: int | None = None

    @property
    def decays(self) -> bool:
        return self.std > 0

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Mesh axes over which this parameter's gradient is summed."""
        used = {a for d in self.spec for a in ((d,) if isinstance(d, str) else d or ())}
        return tuple(a for a in MESH_AXES if a not in used)

    def init(self, key: jax.Array) -> jax.Array:
        if not self.decays:
            return jnp.ones(self.shape, jnp.float32)
        values = self.std * jax.random.normal(key, self.shape, jnp.float32)
        if self.live_rows is not None:
            live = lax.broadcasted_iota(jnp.int32, self.shape, 0) < self.live_rows
            values = jnp.where(live, values, 0.0)
        return values


def describe(config: LlamaConfig, parallelism: Parallelism) -> dict[str, Any]:
    """Nested dict of Parameter: the model's parameter tree. Shapes do not depend on the mesh.

    Weights that end a residual branch start smaller by sqrt(2 L), the number of branches.

    Raises:
        ValueError: the model does not split over the mesh.
    """
    config.check_mesh(parallelism.pp, parallelism.tp, parallelism.tokens_over_tp)
    layers, e = config.num_layers, config.embedding_dim
    q_columns = config.num_q_heads * config.head_dim
    kv_columns = config.num_kv_heads * config.head_dim
    dp = "dp" if e % parallelism.dp == 0 else None
    rows = parallelism.weight_axes if parallelism.spreads(e) else None
    columns_axis = None if parallelism.tokens_over_tp else "tp"
    kv_axis = columns_axis if config.num_kv_heads % parallelism.tp == 0 else None
    branch_std = INIT_STD * (2 * layers) ** -0.5

    def weight(columns: int, axis: str | None = columns_axis, std: float = INIT_STD) -> Parameter:
        return Parameter((layers, e, columns), P("pp", rows, axis), std)

    table = Parameter(
        (config.padded_vocab_size, e), P(("pp", "tp"), dp), live_rows=config.vocab_size
    )
    layer_norm = Parameter((layers, e), P("pp", None), std=0.0)
    tree: dict[str, Any] = {
        "embedding": table,
        "final_norm": Parameter((e,), P(None), std=0.0),
        "layers": {
            "attention_norm": layer_norm,
            "query": weight(q_columns),
            "key": weight(kv_columns, kv_axis),
            "value": weight(kv_columns, kv_axis),
            "attention_output": weight(q_columns, std=branch_std),
            "ffn_norm": layer_norm,
            "ffn_gate": weight(config.ffn_dim),
            "ffn_up": weight(config.ffn_dim),
            "ffn_down": weight(config.ffn_dim, std=branch_std),
        },
    }
    if not config.tied_embeddings:
        tree["head"] = table
    return tree


def init(description: Mapping[str, Any], seed: jax.Array | int) -> dict[str, Any]:
    """Parameter values, float32, a function of the seed and each parameter's name alone."""
    root = jax.random.key(seed)

    def start(path: tuple[Any, ...], parameter: Parameter) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return parameter.init(jax.random.fold_in(root, zlib.crc32(name.encode())))

    return jax.tree_util.tree_map_with_path(start, dict(description))


def shardings(description: Mapping[str, Any], mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """NamedSharding of each parameter."""
    return jax.tree.map(lambda p: NamedSharding(mesh, p.spec), dict(description))


@dataclass(frozen=True)
class Gather:
    """How whole weights come from their shards: values in `dtype`, gradients in float32.

    Made once per model (`of`: the layers' weights; `of_tables`: the vocabulary tables, always over
    dp alone); hashable, so that it can be a static argument.
    """

    dtype: str
    axes: tuple[str, ...]  # manual axes to gather over
    automatic_axis: str | None = None  # axis the partitioner spreads the weights over

    @classmethod
    def of(cls, config: LlamaConfig, parallelism: Parallelism) -> "Gather":
        spread = parallelism.spreads(config.embedding_dim)
        axes = parallelism.manual(*parallelism.weight_axes) if spread else ()
        automatic = "dp" if spread and parallelism.automatic_pool else None
        return cls(config.dtype, axes, automatic)

    @classmethod
    def of_tables(cls, config: LlamaConfig, parallelism: Parallelism) -> "Gather":
        return cls.of(config, dataclasses.replace(parallelism, tokens_over_tp=False))

    def side_by_side(self, *groups: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """One whole weight [E, X_i + ...] per group of this device's rows [E/dp, X_i], in one collective."""
        return _gather(tuple(jnp.concatenate(group, axis=1) for group in groups), self, 0)

    def whole(self, shards: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Whole weights [E, X_i] in `dtype` from this device's rows [E/dp, X_i], in one collective.

        For loops that place collectives by hand; `scatter` takes their gradients back.
        """
        return _columns(_whole(shards, self, 0), shards)

    def scatter(self, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Float32 gradients of whole weights [E, X_i] -> this device's rows, summed over dp."""
        return _columns(_scatter(gradients, self, 0), gradients)

    def table(self, rows: jax.Array) -> jax.Array:
        """This device's rows of a vocabulary table, [V', E] from [V', E/dp]."""
        return _gather((rows,), self, 1)[0]


def _columns(x: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """x split along its columns into widths like those of `parts`."""
    bounds = np.cumsum([part.shape[1] for part in parts])[:-1].tolist()
    return tuple(jnp.split(x, bounds, axis=1)) if bounds else (x,)


def _whole(shards: tuple[jax.Array, ...], gather: Gather, dim: int) -> jax.Array:
    whole = jnp.concatenate([shard.astype(gather.dtype) for shard in shards], axis=1)
    if gather.axes:
        with jax.named_scope("weights/gather"):
            return lax.all_gather(whole, gather.axes, axis=dim, tiled=True)
    if gather.automatic_axis:
        return lax.with_sharding_constraint(whole, P(None, None))
    return whole


def _scatter(gradients: tuple[jax.Array, ...], gather: Gather, dim: int) -> jax.Array:
    total = jnp.concatenate(gradients, axis=1)
    if gather.axes:
        with jax.named_scope("weights/scatter"):
            return lax.psum_scatter(total, gather.axes, scatter_dimension=dim, tiled=True)
    if gather.automatic_axis:
        spec = (gather.automatic_axis, None) if dim == 0 else (None, gather.automatic_axis)
        return lax.with_sharding_constraint(total, P(*spec))
    return total


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(shards: tuple[jax.Array, ...], gather: Gather, dim: int) -> tuple[jax.Array, ...]:
    """Float32 arrays that hold values rounded to the gather's dtype: a product casts them back (XLA
    folds the pair away), and gradients reach the reduce-scatter in float32."""
    parts = _columns(_whole(shards, gather, dim), shards)
    return tuple(part.astype(jnp.float32) for part in parts)


def _gather_fwd(
    shards: tuple[jax.Array, ...], gather: Gather, dim: int
) -> tuple[tuple[jax.Array, ...], None]:
    return _gather(shards, gather, dim), None


def _gather_bwd(
    gather: Gather, dim: int, _: None, gradients: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...]]:
    return (_columns(_scatter(gradients, gather, dim), gradients),)


_gather.defvjp(_gather_fwd, _gather_bwd)
