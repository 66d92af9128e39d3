"""The ragged exchange is used only where it was seen to work: its self-test, on a run's own mesh before the run.

XLA's ragged all-to-all exists on GPUs alone, takes other ways within a node and between nodes, and has
open bugs (wrong rows, crashes, hangs). The self-test runs all four phases of a small exchange under
`ragged` and under `direct`, forward and backward, and compares bit for bit: the two send the same
blocks and sum in the same order. A run that asked for `ragged` is refused where it fails; "auto"
then chooses from the dense transports, and says why.

Shape letters: S servers, T tokens per server, H query heads, K key/value heads, D head dim.
"""

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from cad_jax.attention.strategies import Strategy
from cad_jax.attention_config import AttentionConfig
from cad_jax.processes import together
from cad_jax.sharding import exchange
from cad_jax.sharding.capacities import home_capacities
from cad_jax.sharding.layout import PlanArrays
from cad_jax.sharding.mesh import MESH_AXES, POOL_AXES, pool_size
from cad_jax.sharding.plan import Plan
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.tables import expand
from cad_jax.sharding.tasks import (
    DENSE_TRANSPORTS,
    SERVER,
    TRANSPORT_HOPS,
    HeadShape,
    home_tasks,
)
from cad_jax.xla_options import gpu_options

TOKENS = 160  # of a rank: blocks of very different size, and some of none
ROUNDS = 3  # other values each
TIMEOUT_S = 600.0  # compilation and the first start of NCCL included
AGREEMENT_S = 60.0  # by which processes may be apart besides

type Strategies = tuple[Strategy, Strategy | None]


def check_platform(attention: AttentionConfig, platform: str) -> None:
    """Refuse the ragged exchange on devices that have none.

    Raises:
        ValueError: the run asks for ragged and platform (of JAX's devices) is not "gpu".
    """
    if attention.asked_transport == "ragged" and platform != "gpu":
        raise ValueError(
            f"{_where(attention)} needs GPUs: JAX's backend {platform!r} has no ragged all-to-all; "
            f"{_cure(attention)}, or --mesh.platform cuda"
        )


def _where(attention: AttentionConfig) -> str:
    """The setting that asks for ragged."""
    given = attention.capacities is not None
    return f"attention.{'capacities.' if given else ''}transport (=ragged)"


def _cure(attention: AttentionConfig) -> str:
    if attention.capacities is not None:
        return "leave attention.capacities out, or take those of another transport"
    return "use --attention.transport auto, direct or relay"


def proven_strategies(
    make: Callable[[Sequence[str]], Strategies],
    *,
    mesh: Mesh,
    platform: str,
    attention: AttentionConfig,
    kept: str | None = None,
    heads: HeadShape,
    dtype: DTypeLike,
    say: Callable[[str], None],
) -> Strategies:
    """`make(candidates)`, where ragged is a candidate only if it passes its self-test on this mesh;
    that runs only where ragged would be used. Collective over all processes.

    Args:
      make: a run's strategies, with the transports that "auto" chooses from.
      platform: of the mesh's devices, as JAX names it.
      attention: what the run asks for.
      kept: the transport that "auto" came to earlier in this run, and comes to again where it works.
      heads, dtype: of one device; of q, k and v.
      say: for people.

    Raises:
      ValueError: the run asks for ragged and that fails; or the self-test does not come to an end, after
        which the devices of this process are of no use.
    """
    candidates = tuple(TRANSPORT_HOPS) if platform == "gpu" else DENSE_TRANSPORTS
    if kept is not None and kept in candidates:
        candidates = (kept,)
    elif kept is not None:
        say(f"the run used {kept} exchanges, which {platform!r} does not have: choosing anew")
    made = make(candidates)
    if all(strategy is None or strategy.transport != "ragged" for strategy in made):
        return made
    say("testing the ragged exchange on this mesh, bit for bit against the direct one")
    trouble = find_trouble(mesh, heads, dtype)
    if trouble is None:
        return made
    if attention.asked_transport != "auto":
        raise ValueError(
            f"{_where(attention)} must pass its self-test on this mesh, and {trouble}; "
            f"{_cure(attention)}"
        )
    say(f"no ragged exchange: {trouble}")
    return make(DENSE_TRANSPORTS)


def find_trouble(
    mesh: Mesh, heads: HeadShape, dtype: DTypeLike, timeout_s: float = TIMEOUT_S
) -> str | None:
    """What is wrong with the ragged exchange on this mesh, None where it passes its self-test.

    Raises:
      ValueError: it did not come to an end within timeout_s, here or in another process.
    """
    trouble = None
    try:
        wrong = _within(timeout_s, lambda: _wrong_elements(mesh, heads, dtype), "did not")
        if wrong:
            trouble = f"{wrong:,} elements differed from the direct exchange's"
    except jax.errors.JaxRuntimeError as error:
        trouble = f"XLA failed ({str(error).splitlines()[0][:300]})"
    try:
        # A process that hangs leaves after timeout_s, and those that wait for it must not wait for ever.
        _within(
            timeout_s + AGREEMENT_S,
            lambda: together(lambda: _raise_if(trouble)),
            "did not in another process",
        )
    except _TimedOutError:
        raise
    except ValueError as error:  # on all processes, whichever of them saw it
        return str(error)
    return None


def _raise_if(trouble: str | None) -> None:
    if trouble is not None:
        raise ValueError(trouble)


class _TimedOutError(ValueError):
    """Not a result of the self-test: it has none."""


def _within[T](timeout_s: float, action: Callable[[], T], otherwise: str) -> T:
    """`action()`, in a thread of its own: what hangs on a device cannot be stopped, only left."""
    result: list[T] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            result.append(action())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failure:
        raise failure[0]
    if not result:
        raise _TimedOutError(
            f"the self-test of the ragged exchange must end within {timeout_s:.0f} s and {otherwise}: "
            "XLA's ragged all-to-all hangs on this mesh; use --attention.transport relay"
        )
    return result[0]


def _wrong_elements(mesh: Mesh, heads: HeadShape, dtype: DTypeLike) -> int:
    """Elements of all phases' results, over all devices and rounds, that are not `direct`'s."""
    servers = pool_size(mesh)
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    pool, none = PartitionSpec(POOL_AXES), PartitionSpec()
    sharding = NamedSharding(mesh, pool)
    arrays = jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]),
        tuple(_plan(servers, heads, t).arrays() for t in ("direct", "ragged")),
    )

    def compare(direct: PlanArrays, ragged: PlanArrays, seed: jax.Array) -> jax.Array:
        rank = lax.axis_index(MESH_AXES).astype(jnp.uint32)
        start = (rank * ROUNDS + seed) * np.uint32(0xC2B2AE35)
        results = [
            _all_phases(jax.tree.map(lambda x: x[0], part), heads, dtype, start)
            for part in (direct, ragged)
        ]
        differ = [jnp.sum(_bits(x) != _bits(y)) for x, y in zip(*results, strict=True)]
        return lax.psum(sum(differ), MESH_AXES)

    program = jax.jit(
        jax.shard_map(
            compare, mesh=mesh, in_specs=(pool, pool, none), out_specs=none, check_vma=False
        ),
        compiler_options=gpu_options({"ragged"}) if on_gpus else None,
    )
    # One program for every round: a stale or unfinished buffer shows as an earlier round's values.
    return sum(int(program(*arrays, np.uint32(seed))) for seed in range(ROUNDS))


def _plan(servers: int, heads: HeadShape, transport: str) -> Plan:
    """Tasks on random servers: a document over half of the ranks, and short ones."""
    rng = np.random.default_rng(servers)
    room = servers * TOKENS
    lengths = [room // 2]
    while sum(lengths) < room:
        lengths.append(min(int(rng.integers(1, TOKENS)), room - sum(lengths)))
    tasks = home_tasks(np.array(lengths), TOKENS)
    tasks[:, SERVER] = rng.integers(0, servers, len(tasks))
    least = home_capacities(servers, TOKENS, heads, transport=transport)
    plan = Plan(servers, TOKENS, np.array(lengths), tasks, 0.0, heads, least)
    return dataclasses.replace(plan, capacities=required_capacities(plan, transport))


def _all_phases(
    arrays: PlanArrays, heads: HeadShape, dtype: DTypeLike, start_of_rank: jax.Array
) -> list[jax.Array]:
    """Results of dispatch and combine, forward and backward, on values of this rank's own, which
    follow from start_of_rank, uint32.
    """
    tables = expand(arrays, heads, TOKENS)
    query_rows, key_rows = arrays.k_lo.shape[0], arrays.key_extent.shape[0]
    q_heads, kv_heads, head_dim = heads.num_q_heads, heads.num_kv_heads, heads.head_dim
    numbers = itertools.count(1)

    def values(*shape: int) -> jax.Array:
        """Float32 in [-1, 1) that hardly repeat, from multiples of odd constants: cheap to compile."""
        position = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
        start = start_of_rank + np.uint32(next(numbers) * 0x85EBCA6B % 2**32)
        bits = (position + start) * np.uint32(0x9E3779B1)
        return (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1.0

    def rows(number: int, num_heads: int) -> jax.Array:
        return values(number, num_heads, head_dim).astype(dtype)

    def scalars(number: int) -> jax.Array:
        return values(number, q_heads)

    q, d_out = rows(TOKENS, q_heads), rows(TOKENS, q_heads)
    k, v = rows(TOKENS, kv_heads), rows(TOKENS, kv_heads)
    lse, delta = scalars(TOKENS), scalars(TOKENS)
    out, out_lse = rows(query_rows, q_heads), scalars(query_rows)
    dq, dk, dv = rows(query_rows, q_heads), rows(key_rows, kv_heads), rows(key_rows, kv_heads)
    phases = (
        exchange.dispatch_fwd(q, k, v, tables, POOL_AXES),
        exchange.combine_fwd(out, out_lse, tables, POOL_AXES),
        exchange.dispatch_bwd(q, k, v, lse, d_out, delta, tables, POOL_AXES),
        exchange.combine_bwd(dq, dk, dv, tables, POOL_AXES),
    )
    return jax.tree.leaves([exchange.complete(phase) for phase in phases])


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
