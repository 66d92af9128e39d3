"""Small programs whose compiled schedule is known: exchanges in a loop, tied to a product each, or not."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cad_jax.attention.base import KeyRanges
from cad_jax.attention.varlen import load_kernel
from cad_jax.sharding.mesh import MESH_AXES, POOL_AXES

ROWS = WIDTH = 2048
TRIPS = 3


def _exchange(x: jax.Array, scope: str) -> jax.Array:
    with jax.named_scope(scope):
        ranks = lax.axis_size(POOL_AXES)
        return lax.all_to_all(x.reshape(ranks, -1, WIDTH), POOL_AXES, 0, 0).reshape(x.shape)


def pingpong(mesh: Mesh, tied: bool) -> jax.stages.Lowered:
    """Two streams of rows: each exchange of the one has a product of the other to hide behind, if tied to it."""

    def tie(exchanged, compute):
        return lax.optimization_barrier((exchanged, compute)) if tied else (exchanged, compute)

    def body(carry, w):
        ping, pong = carry
        ping, pong = tie(_exchange(ping, "exchange/dispatch_fwd/hop1"), pong @ w)
        pong, ping = tie(_exchange(pong, "exchange/dispatch_fwd/hop1"), ping @ w)
        ping, pong = tie(_exchange(ping, "exchange/combine_fwd/hop1"), pong @ w)
        pong, ping = tie(_exchange(pong, "exchange/combine_fwd/hop1"), ping @ w)
        return (ping, pong), None

    return _lower(mesh, lambda ping, pong, w: lax.scan(body, (ping, pong), w)[0])


def mixed(mesh: Mesh) -> jax.stages.Lowered:
    """One of each: an exchange beside a product, a send between stages beside an attention kernel, a small sum
    within a node, a gather in a branch."""
    attend = load_kernel("triton").forward

    def body(carry, w):
        x, rows = carry
        received = _exchange(rows, "exchange/dispatch_fwd/hop1")
        received, x = lax.optimization_barrier((received, x @ w))
        with jax.named_scope("pipeline/send_fwd"):
            sent = lax.ppermute(x, "pp", [(0, 1), (1, 0)])
        heads = received.reshape(ROWS, -1, 64)
        ranges = KeyRanges(*(jnp.full(ROWS, stop, jnp.int32) for stop in (0, ROWS)))
        out, _ = attend(heads[:, :4], heads[:, :2], heads[:, 2:4], ranges, 1.0)
        sent, out = lax.optimization_barrier((sent, out))
        x = lax.psum(sent, "tp")
        row = lax.cond(
            x[0, 0] > 0, lambda: lax.all_gather(x[:8], "dp", tiled=True).sum(0), lambda: x[1]
        )
        return (jnp.tanh(x) + row[None], received.at[:, :256].set(out.reshape(ROWS, -1))), None

    return _lower(mesh, lambda x, rows, w: lax.scan(body, (x, rows), w)[0])


def ragged(mesh: Mesh) -> jax.stages.Lowered:
    """A ragged exchange in a loop, tied to a product, with its gradient."""
    ranks = mesh.shape["pp"] * mesh.shape["dp"]
    even = jnp.arange(ranks, dtype=jnp.int32) * (ROWS // ranks)
    sizes = jnp.full(ranks, ROWS // ranks, jnp.int32)

    def body(x, w):
        with jax.named_scope("exchange/dispatch_fwd/hop1"):
            start = lax.axis_index(POOL_AXES) * (ROWS // ranks) + jnp.zeros_like(even)
            received = lax.ragged_all_to_all(
                x, jnp.zeros_like(x), even, sizes, start, sizes, axis_name=POOL_AXES
            )
        received, y = lax.optimization_barrier((received, x @ w))
        return jnp.tanh(received @ w) + y, None

    def run(x, rows, w):
        total, pull = jax.vjp(lambda x: lax.scan(body, x, w)[0], x)
        return total, pull(rows)[0]

    return _lower(mesh, run)


def _lower(mesh: Mesh, run) -> jax.stages.Lowered:
    def shaped(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    rows = shaped((mesh.size * ROWS, WIDTH), P(MESH_AXES))
    weights = shaped((TRIPS, WIDTH, WIDTH), P())
    specs = (P(MESH_AXES), P(MESH_AXES), P())
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(MESH_AXES), check_vma=False)
    return jax.jit(mapped).lower(rows, rows, weights)
