"""Core attention disaggregation: the six phases of one layer's core attention, put together.

    dispatch -> attend -> combine              forward: q, k, v to the servers, out and lse home
    dispatch_bwd -> attend_bwd -> combine_bwd  backward: q, k, v, lse, d_out, delta to the servers,
                                               dq, dk, dv home

Each phase is a plain function of arrays. Servers keep nothing between forward and backward: what
the backward needs (q, k, v, out, lse) stays at home and is sent again.

Letters: T tokens per server, S servers, H query heads, K key/value heads, D head dim, CQ query and
CK key rows of a server's buffers; H and K of one device where a function runs inside shard_map.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cad_jax.attention import differentiable
from cad_jax.attention.base import KeyRanges
from cad_jax.attention.differentiable import Settings, Way, output_delta
from cad_jax.attention.merge import merge_partials
from cad_jax.attention.varlen import varlen_attention, varlen_attention_bwd
from cad_jax.sharding import exchange
from cad_jax.sharding.layout import PlanArrays
from cad_jax.sharding.mesh import MESH_AXES, POOL_AXES, pool_size
from cad_jax.sharding.tables import Tables, expand
from cad_jax.sharding.tasks import HeadShape


def _exchange(phase, settings: Settings, *operands):
    """Runs a phase of the exchange. Where nothing travels in a step its collectives are skipped on
    CPU; on GPUs the conditional would wait for the host in every layer."""
    run = partial(_run, phase, settings.axis_names)
    return jax.lax.platform_dependent(
        *operands, cpu=partial(run, skip_empty=True), default=partial(run, skip_empty=False)
    )


def _run(phase, axis_names, *operands, skip_empty: bool):
    return exchange.complete(phase(*operands, axis_names, skip_empty=skip_empty))


def dispatch(settings: Settings, q, k, v, tables: Tables):
    """q [T, H, D], k, v [T, K, D] at home -> q_buf [CQ, H, D], k_buf, v_buf [CK, K, D] at
    servers."""
    return _exchange(exchange.dispatch_fwd, settings, q, k, v, tables)


def attend(settings: Settings, q_buf, k_buf, v_buf, tables: Tables):
    """One kernel call for all tasks of the server: out_buf [CQ, H, D], lse_buf [CQ, H] float32."""
    return varlen_attention(q_buf, k_buf, v_buf, _ranges(tables), kernel=settings.kernel)


def combine(settings: Settings, out_buf, lse_buf, tables: Tables):
    """Partial outputs come home and merge: out [T, H, D], lse [T, H] float32 (padding: 0, -inf)."""
    return merge_partials(*_exchange(exchange.combine_fwd, settings, out_buf, lse_buf, tables))


def dispatch_bwd(settings: Settings, q, k, v, lse, d_out, delta, tables: Tables):
    """Home rows -> (q, k, v, lse, d_out, delta) in the servers' buffers; lse, delta [T, H]
    float32."""
    return _exchange(exchange.dispatch_bwd, settings, q, k, v, lse, d_out, delta, tables)


def attend_bwd(settings: Settings, buffers, tables: Tables):
    """One backward kernel call over what `dispatch_bwd` returned: dq_buf, dk_buf, dv_buf."""
    q, k, v, lse, d_out, delta = buffers
    return varlen_attention_bwd(q, k, v, d_out, lse, delta, _ranges(tables), kernel=settings.kernel)


def combine_bwd(settings: Settings, dq_buf, dk_buf, dv_buf, tables: Tables):
    """Partial gradients come home: dq, dk, dv summed in float32, in a fixed order, cast once."""
    return _exchange(exchange.combine_bwd, settings, dq_buf, dk_buf, dv_buf, tables)


def _ranges(tables: Tables) -> KeyRanges:
    return KeyRanges(tables.k_lo, tables.k_hi)


def forward(settings: Settings, q, k, v, tables: Tables):
    """The three forward phases: out [T, H, D] and lse [T, H] float32 at home."""
    q_buf, k_buf, v_buf = dispatch(settings, q, k, v, tables)
    out_buf, lse_buf = attend(settings, q_buf, k_buf, v_buf, tables)
    return combine(settings, out_buf, lse_buf, tables)


def backward(settings: Settings, q, k, v, out, lse, d_out, tables: Tables):
    """The three backward phases: dq [T, H, D], dk and dv [T, K, D] at home."""
    buffers = dispatch_bwd(settings, q, k, v, lse, d_out, output_delta(out, d_out), tables)
    dq_buf, dk_buf, dv_buf = attend_bwd(settings, buffers, tables)
    return combine_bwd(settings, dq_buf, dk_buf, dv_buf, tables)


PLANNED = Way(forward, backward)


def core_attention_local(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    arrays: PlanArrays,
    *,
    axis_names: tuple[str, ...] = POOL_AXES,
    kernel: str = "auto",
) -> jax.Array:
    """Core attention for callers already inside shard_map over (at least) the pool's axes.

    That shard_map needs check_vma=False: what is exchanged and computed here carries no types of the
    axes it varies over. JAX then differentiates the sum over all ranks of what each returns: inside,
    differentiate each rank's own share of a loss, not its psum, and psum the gradients of shared weights.

    Args:
      q: [T, H, D] rows of this rank, heads of this device.
      k, v: [T, K, D].
      arrays: this rank's part of `Plan.arrays()`, each leaf with its leading dim of 1 (what
        shard_map hands over for a spec of the pool's axes) or without it.
      axis_names: mesh axes of the pool, in the plan's rank order (row-major).
      kernel: see `varlen_attention`.

    Returns: out [T, H, D] in q's dtype, differentiable in q, k and v.

    Raises:
      ValueError: the shapes, the arrays and the axes do not fit each other, or the shard_map checks them.
    """
    varying = jax.typeof(q).manual_axis_type.varying
    if varying:
        raise ValueError(
            "core_attention_local must be in a shard_map that does not check which axes values vary over, "
            f"got rows that vary over {sorted(varying)}: pass check_vma=False to jax.shard_map, and where you "
            "differentiate inside it, take each rank's own share of the loss (not its psum) and psum the gradients"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q, k and v must be floating point, got {q.dtype}: cast them")
    rows_and_dims = {(x.shape[0], *x.shape[2:]) for x in (q, k, v)}
    if q.ndim != 3 or k.shape != v.shape or len(rows_and_dims) > 1:
        raise ValueError(
            "q must be [T, H, D] and k and v [T, K, D], with the same T and D, got "
            f"{q.shape}, {k.shape} and {v.shape}: pass the rows of this rank's tokens"
        )
    if arrays.k_lo.ndim == 2:
        if arrays.k_lo.shape[0] != 1:
            raise ValueError(
                "inside shard_map the arrays must be one rank's part, got those of "
                f"{arrays.k_lo.shape[0]} ranks: pass them in with the spec P({axis_names})"
            )
        arrays = jax.tree.map(lambda x: x[0], arrays)
    try:
        ranks = math.prod(jax.lax.axis_size(axis) for axis in axis_names)
    except NameError as error:
        raise ValueError(
            f"axis_names must be axes of the shard_map around the call, got {axis_names} ({error}): name "
            "those of the pool, in the plan's rank order"
        ) from error
    servers = arrays.dispatch[0].peers
    if servers != ranks:
        raise ValueError(
            f"the plan must have as many servers as axis_names {axis_names} have ranks "
            f"(= {ranks}), but it has {servers}: plan with servers={ranks}, or name the pool's axes"
        )
    heads = HeadShape(q.shape[1], k.shape[1], q.shape[2])
    tables = expand(arrays, heads, q.shape[0])
    return differentiable.attend(PLANNED, Settings(axis_names, kernel), q, k, v, tables)


def core_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    arrays: PlanArrays,
    *,
    mesh: Mesh,
    kernel: str = "auto",
) -> jax.Array:
    """Core attention over global arrays, for a step that is plain jit.

    Tokens are sharded over the mesh axes pp and dp, heads over tp. With fewer key heads than tp
    ranks every rank gets a copy of the one it needs; the gradients of the copies add up. Padding may
    hold anything; documents must be finite: NaN in one reaches others on its servers. There are first
    derivatives alone: a derivative of the gradient raises NotImplementedError.

    Args:
      q: [S * T, H, D], documents laid end to end, padding last; S is pp * dp of the mesh.
      k, v: [S * T, K, D].
      arrays: `Plan.arrays()` of a plan for S servers and the heads of ONE device.
      mesh: of `make_mesh`.
      kernel: see `varlen_attention`.

    Returns: out [S * T, H, D] in q's dtype, differentiable in q, k and v.

    Raises:
      ValueError: the shapes, the plan and the mesh do not fit each other.
    """
    if not (isinstance(arrays, PlanArrays) and isinstance(mesh, Mesh)):
        raise ValueError(
            "core_attention needs plan.arrays() and a mesh of cad_jax.make_mesh, got "
            f"{type(arrays).__name__} and {type(mesh).__name__}: pass those"
        )
    if tuple(mesh.axis_names) != MESH_AXES:
        raise ValueError(
            f"the mesh must have axes {MESH_AXES}, got {tuple(mesh.axis_names)}: make it with "
            "cad_jax.make_mesh, or call core_attention_local inside a shard_map over your own"
        )
    servers, tp = pool_size(mesh), mesh.shape[MESH_AXES[-1]]
    if arrays.k_lo.shape[0] != servers:
        raise ValueError(
            f"the plan must have as many servers as the mesh has pp x dp ranks (= {servers}), but "
            f"it has {arrays.k_lo.shape[0]}; plan with servers={servers} or change the mesh"
        )
    if q.shape[0] % servers:
        raise ValueError(
            f"q must hold servers x tokens_per_server rows (servers = {servers}), got "
            f"{q.shape[0]}; pad the step to a multiple"
        )
    copies = key_head_copies(q.shape[1], k.shape[1], tp)
    k, v = (jnp.repeat(x, copies, axis=1) for x in (k, v))
    rows = P(POOL_AXES, MESH_AXES[-1])
    return jax.shard_map(
        partial(core_attention_local, kernel=kernel),
        mesh=mesh,
        in_specs=(rows, rows, rows, P(POOL_AXES)),
        out_specs=rows,
        check_vma=False,
    )(q, k, v, arrays)


def key_head_copies(num_q_heads: int, num_kv_heads: int, tp: int) -> int:
    """How often each key head is repeated before heads are sharded over tp ranks.

    Raises:
      ValueError: the heads cannot be sharded over tp.
    """
    if num_q_heads % tp:
        raise ValueError(
            f"num_q_heads (= {num_q_heads}) must be divisible by tp (= {tp}); choose a tp that "
            f"divides {num_q_heads}"
        )
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ValueError(
            f"num_kv_heads (= {num_kv_heads}) must divide tp (= {tp}) or be a multiple of it; "
            f"choose another tp for {num_q_heads} query heads"
        )
    return max(1, tp // num_kv_heads)
