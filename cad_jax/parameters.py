"""Parameters of the model: one description each, from which init, placement and restore follow.

All weights are stored with the embedding dim first after the layer dim ([L, E, X]): E is spread over dp, X over tp. So the
weights that one half of a layer needs are gathered over dp by ONE collective, side by side, in the compute dtype, and their
float32 gradients leave by one reduce-scatter. Norm weights are replicated. Where E does not divide by dp, weights are
replicated over dp.

Gradients inside the fully manual shard_map (check_vma=False) are those of the SUM over all devices of what each device
returns: a psum is its own transpose under that reading, and the gradient of a parameter is summed over exactly the axes its
spec does not mention (`replicated_axes`).

Shape letters: E embedding, H query heads, K key/value heads, D head dim, F ffn, V vocabulary, L layers, T tokens.
"""

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
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    automatic_pool: bool = False

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh, automatic_pool: bool = False) -> "Parallelism":
        sizes = dict(mesh.shape)
        return cls(sizes["pp"], sizes["dp"], sizes["tp"], automatic_pool)

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
    def vocab_shards(self) -> int:
        """Parts that the model splits the vocabulary into."""
        return self.tp if self.automatic_pool else self.pp * self.tp

    @property
    def pool(self) -> int:
        """Ranks that hold different tokens."""
        return self.pp * self.dp


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
    config.check_mesh(parallelism.pp, parallelism.tp)
    layers, e = config.num_layers, config.embedding_dim
    q_columns = config.num_q_heads * config.head_dim
    kv_columns = config.num_kv_heads * config.head_dim
    dp = "dp" if e % parallelism.dp == 0 else None
    kv_axis = "tp" if config.num_kv_heads % parallelism.tp == 0 else None
    branch_std = INIT_STD * (2 * layers) ** -0.5

    def weight(columns: int, axis: str | None = "tp", std: float = INIT_STD) -> Parameter:
        return Parameter((layers, e, columns), P(None, dp, axis), std)

    table = Parameter(
        (config.padded_vocab_size, e), P(("pp", "tp"), dp), live_rows=config.vocab_size
    )
    layer_norm = Parameter((layers, e), P(None, None), std=0.0)
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
    """How whole weights come from their shards over dp: values in `dtype`, gradients in float32.

    Made once per model (`Gather.of`); hashable, so that it can be a static argument.
    """

    dtype: str
    axes: tuple[str, ...]  # manual axes to gather over
    automatic_axis: str | None = None  # axis the partitioner spreads the weights over

    @classmethod
    def of(cls, config: LlamaConfig, parallelism: Parallelism) -> "Gather":
        spread = config.embedding_dim % parallelism.dp == 0
        axes = parallelism.manual("dp") if spread else ()
        automatic = "dp" if spread and parallelism.automatic_pool else None
        return cls(config.dtype, axes, automatic)

    def side_by_side(self, *groups: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """One whole weight [E, X_i + ...] per group of this device's rows [E/dp, X_i], in one collective."""
        return _gather(tuple(jnp.concatenate(group, axis=1) for group in groups), self, 0)

    def table(self, rows: jax.Array) -> jax.Array:
        """This device's rows of a vocabulary table, [V', E] from [V', E/dp]."""
        return _gather((rows,), self, 1)[0]


def _split_like(x: jax.Array, widths: tuple[int, ...]) -> list[jax.Array]:
    return jnp.split(x, np.cumsum(widths)[:-1].tolist(), axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(shards: tuple[jax.Array, ...], gather: Gather, dim: int) -> tuple[jax.Array, ...]:
    """Float32 arrays that hold values rounded to the gather's dtype: a product casts them back (XLA
    folds the pair away), and gradients reach the reduce-scatter in float32."""
    whole = jnp.concatenate([shard.astype(gather.dtype) for shard in shards], axis=1)
    if gather.axes:
        whole = lax.all_gather(whole, gather.axes, axis=dim, tiled=True)
    elif gather.automatic_axis:
        whole = lax.with_sharding_constraint(whole, P(None, None))
    if len(shards) == 1:
        return (whole.astype(jnp.float32),)
    widths = tuple(shard.shape[1] for shard in shards)
    return tuple(part.astype(jnp.float32) for part in _split_like(whole, widths))


def _gather_fwd(
    shards: tuple[jax.Array, ...], gather: Gather, dim: int
) -> tuple[tuple[jax.Array, ...], None]:
    return _gather(shards, gather, dim), None


def _gather_bwd(
    gather: Gather, dim: int, _: None, gradients: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...]]:
    total = jnp.concatenate(gradients, axis=1)
    if gather.axes:
        total = lax.psum_scatter(total, gather.axes, scatter_dimension=dim, tiled=True)
    elif gather.automatic_axis:
        spec = (gather.automatic_axis, None) if dim == 0 else (None, gather.automatic_axis)
        total = lax.with_sharding_constraint(total, P(*spec))
    if len(gradients) == 1:
        return ((total,),)
    return (tuple(_split_like(total, tuple(g.shape[1] for g in gradients))),)


_gather.defvjp(_gather_fwd, _gather_bwd)
