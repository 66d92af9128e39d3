"""Runs one strategy on documents and measures it against a float64 oracle: for tests and
experiments.

A case is one point of the product of strategies, kernels, mesh, heads and dtype. Inputs carry NaN
on every row of padding, so that each case also shows that padding has no effect.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cad_jax.attention.cad import key_head_copies
from cad_jax.attention.strategies import Strategy, make_strategy
from cad_jax.sharding.mesh import MESH_AXES, POOL_AXES, make_mesh
from cad_jax.sharding.tasks import K_START, HeadShape

# Halves the time to compile, for experiments too, and leaves XLA's own passes as they are.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}
TENSORS = ("out", "dq", "dk", "dv")


class Documents(NamedTuple):
    """Lengths of documents end to end, and the tokens of the microbatch they begin."""

    lengths: tuple[int, ...]
    tokens: int


# 123 tokens of padding: a whole rank and more of eight.
DOCUMENTS = Documents((3, 450, 0, 1, 130, 61), 768)
# Long enough for 128-row cuts to divide keys as well.
LONG_DOCUMENTS = Documents((433, 0, 319, 1, 1198), 2048)


class Case(NamedTuple):
    """`way` is a strategy, with its transport where it has one, and the servers among which keys may be
    divided where those are more than one; kernel "none" is the dense form."""

    way: str
    kernel: str
    servers: int
    tp: int
    heads: tuple[int, int]  # query heads, key heads, over all tp ranks
    head_dim: int
    dtype: str

    @property
    def key_ranges(self) -> int:
        return int([*self.way.split("/"), "1", "1"][2])

    @property
    def documents(self) -> Documents:
        return DOCUMENTS if self.key_ranges == 1 else LONG_DOCUMENTS

    @property
    def local_heads(self) -> HeadShape:
        """Heads of one device."""
        num_q_heads, num_kv_heads = self.heads
        return HeadShape(num_q_heads // self.tp, max(num_kv_heads // self.tp, 1), self.head_dim)

    def __str__(self) -> str:
        num_q_heads, num_kv_heads = self.heads
        return (
            f"{self.way}-{self.kernel}-S{self.servers}-tp{self.tp}-"
            f"H{num_q_heads}K{num_kv_heads}D{self.head_dim}-{self.dtype}"
        )


FACTORS = {
    "way": (
        "cad/direct",
        "cad/relay",
        "cad/direct/4",
        "cad/relay/4",
        "cad/ragged/4",
        "home/relay",
        "all_gather",
        "ring",
        "native",
        "native_dense",
    ),
    "kernel": ("xla", "reference", "none"),
    "servers": (1, 2, 4, 8),
    "tp": (1, 2),
    "heads": ((4, 4), (8, 2), (4, 1)),
    "head_dim": (32, 64, 128),
    "dtype": ("float32", "bfloat16"),
}


def product(devices: int, *, ragged: bool) -> list[Case]:
    """Every case that `devices` can hold and that exists: native is one kernel, dense is none, and one
    server divides nothing. ragged: with those whose collective a CPU lacks."""
    kernels = {"native": ("xla",), "native_dense": ("none",)}
    return [
        case
        for case in itertools.starmap(Case, itertools.product(*FACTORS.values()))
        if case.servers * case.tp <= devices
        and (case.servers > 1 or case.key_ranges == 1)
        and (ragged or "ragged" not in case.way)
        and case.kernel in kernels.get(case.way, ("xla", "reference"))
    ]


def pairwise_cover[C: tuple](cases: Sequence[C]) -> list[C]:
    """Few of the cases that hold every pair of values that any of them holds; greedy,
    deterministic."""

    def pairs(case: tuple) -> set:
        return set(itertools.combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, cases))
    cover = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        cover.append(best)
        missing -= pairs(best)
    return cover


def run(
    strategy: Strategy, mesh: jax.sharding.Mesh, num_q_heads: int, num_kv_heads: int
) -> Callable:
    """A jitted function (q, k, v, d_out, arrays) -> (out, dq, dk, dv) over global arrays in the
    strategy's own token order; heads are over all tp ranks."""
    copies = key_head_copies(num_q_heads, num_kv_heads, mesh.shape["tp"])
    manual = set(strategy.manual_axes)
    pool = POOL_AXES if manual == set(MESH_AXES) else None
    rows = P(pool, "tp")

    def local(q, k, v, arrays):
        arrays = arrays if pool is None else jax.tree.map(lambda x: x[0], arrays)
        return strategy.attend(q, k, v, strategy.expand(arrays))

    def attend(q, k, v, arrays):
        k, v = (jnp.repeat(x, copies, axis=1) for x in (k, v))
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(rows, rows, rows, P(pool)),
            out_specs=rows,
            axis_names=manual,
            check_vma=False,
        )(q, k, v, arrays)

    def both(q, k, v, d_out, arrays):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, arrays), q, k, v)
        return out, *pull(d_out)

    over_pool = NamedSharding(mesh, P(POOL_AXES))
    return jax.jit(both, in_shardings=over_pool, compiler_options=COMPILER_OPTIONS)


class Inputs(NamedTuple):
    """q, d_out [N, H, D], k, v [N, K, D] in a case's dtype, document order; NaN on rows of
    padding."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray


def make_inputs(
    lengths: Sequence[int], tokens: int, heads: tuple[int, int], head_dim: int, dtype: str, seed=0
) -> Inputs:
    """Normal values for `tokens` rows of which the documents fill the first."""
    rng = np.random.default_rng(seed)
    padding = np.arange(tokens)[:, None, None] >= sum(lengths)

    def draw(num_heads):
        values = rng.standard_normal((tokens, num_heads, head_dim)).astype(np.float32)
        return np.asarray(jnp.asarray(np.where(padding, np.nan, values), jnp.dtype(dtype)))

    q, k, v, d_out = (draw(heads[which]) for which in (0, 1, 1, 0))
    return Inputs(q, k, v, d_out)


def in_order(result: Sequence, order: np.ndarray | None) -> list[np.ndarray]:
    """Rows of a strategy's results back in document order, float64."""
    arrays = [np.asarray(x, np.float64) for x in result]
    return arrays if order is None else [x[np.argsort(order)] for x in arrays]


def relative_errors(got, want, lengths: Sequence[int]) -> np.ndarray:
    """||got - want|| / ||want|| (Frobenius) of each tensor as a whole, then of each document's
    rows: [tensors, 1 + documents]. A document whose exact values all but vanish (a single token has
    dq = 0) is measured against the tensor's root mean square instead; where that is zero too,
    absolutely."""
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    parts = [slice(0, bounds[-1]), *map(slice, bounds[:-1], bounds[1:])]
    errors = np.zeros((len(want), len(parts)))
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        mean_square = np.sum(y[parts[0]] ** 2) / max(y[parts[0]].size, 1)
        for j, rows in enumerate(parts):
            size = np.sqrt(max(np.sum(y[rows] ** 2), mean_square * y[rows].size))
            errors[i, j] = np.linalg.norm(x[rows] - y[rows]) / (size or 1.0)
    return errors


def assert_padding_untouched(result: Sequence[np.ndarray], lengths: Sequence[int]) -> None:
    """Outputs and gradients of padding are exactly zero, everything else is finite."""
    for name, x in zip(TENSORS, result, strict=True):
        assert np.isfinite(x).all(), name
        assert not x[sum(lengths) :].any(), name


def strategy_of(case: Case, tokens_per_server: int, **settings) -> Strategy:
    name, transport, *_ = case.way.split("/") + ["auto"]
    return make_strategy(
        name,
        servers=case.servers,
        tokens_per_server=tokens_per_server,
        heads=case.local_heads,
        kernel="auto" if case.kernel == "none" else case.kernel,
        transport=transport,
        key_ranges=case.key_ranges,
        **settings,
    )


def mesh_of(case: Case) -> jax.sharding.Mesh:
    """Pools of four and more span two mesh axes."""
    pp = 2 if case.servers >= 4 else 1
    return make_mesh(pp=pp, dp=case.servers // pp, tp=case.tp)


def divides_keys(strategy: Any, lengths: Sequence[int]) -> bool:
    """Whether the plan of a planned strategy has tasks that begin past a document's first key."""
    return bool(strategy.plan(np.asarray(lengths)).tasks[:, K_START].any())


def measure(case: Case) -> np.ndarray:
    """`relative_errors` of a case; also checks that padding stays without effect."""
    lengths, tokens = case.documents
    tolerance = 0.0 if case.key_ranges == 1 else 0.1
    strategy = strategy_of(case, tokens // case.servers, tolerance=tolerance)
    if case.key_ranges > 1:
        # A relay sends a key to many servers for little more than to one: there whole prefixes may be
        # cheaper than to send queries to several, and are taken then.
        assert divides_keys(strategy, lengths) or "relay" in case.way
    prepared = strategy.prepare(np.asarray(lengths))
    inputs, want = exact(lengths, tokens, case.heads, case.head_dim, case.dtype)
    placed = inputs if prepared.order is None else [x[prepared.order] for x in inputs]
    result = run(strategy, mesh_of(case), *case.heads)(*placed, prepared.arrays)
    got = in_order(jax.block_until_ready(result), prepared.order)
    assert_padding_untouched(got, lengths)
    return relative_errors(got, want, lengths)


@cache
def exact(lengths, tokens, heads, head_dim, dtype) -> tuple[Inputs, list[np.ndarray]]:
    """Inputs and their float64 out, dq, dk, dv."""
    inputs = make_inputs(lengths, tokens, heads, head_dim, dtype)
    want = oracles.causal_documents(*inputs[:3], lengths, inputs.d_out)
    return inputs, [want.out, want.dq, want.dk, want.dv]


@cache
def naive_errors(lengths, tokens, heads, head_dim, dtype) -> np.ndarray:
    """`relative_errors` of masked dense attention on one device: products and weights in the
    case's own dtype, softmax in float32."""
    inputs, want = exact(lengths, tokens, heads, head_dim, dtype)
    document = np.append(np.repeat(np.arange(len(lengths)), lengths), np.full(tokens, -1))[:tokens]
    causal = np.tri(tokens, dtype=bool) & (document[:, None] == document)
    mask = causal[None, None]  # padding attends padding: no empty rows, no effect on documents

    def attend(q, k, v):
        grouped = q.reshape(tokens, k.shape[1], -1, head_dim)
        scores = jnp.einsum("nkgd,skd->kgns", grouped, k) * jnp.asarray(head_dim**-0.5, q.dtype)
        weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1, where=mask)
        return jnp.einsum("kgns,skd->nkgd", weights.astype(v.dtype), v).reshape(q.shape)

    def both(q, k, v, d_out):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d_out)

    real = [jnp.nan_to_num(x) for x in inputs]
    got = jax.jit(both)(*real)
    return relative_errors(in_order(got, None), want, lengths)


@cache
def unsplit_errors(case: Case) -> np.ndarray:
    """`relative_errors` of the case's documents on one server, whose kernel sees each whole."""
    lengths, tokens = case.documents
    alone = case._replace(way="home/direct", servers=1)
    strategy = strategy_of(alone, tokens)
    inputs, want = exact(lengths, tokens, case.heads, case.head_dim, case.dtype)
    arrays = strategy.prepare(np.asarray(lengths)).arrays
    got = run(strategy, mesh_of(alone), *case.heads)(*inputs, arrays)
    return relative_errors(in_order(got, None), want, lengths)


def allowed_errors(case: Case) -> np.ndarray:
    """float32: 1e-5. bfloat16: twice the naive op's, of the same document or of the whole tensor; where
    keys are divided, of the whole tensor 1.5 times those of the kernel that sees documents whole."""
    lengths, tokens = case.documents
    if case.dtype == "float32":
        return np.full((len(TENSORS), 1 + len(lengths)), 1e-5)
    naive = naive_errors(lengths, tokens, case.heads, case.head_dim, case.dtype)
    allowed = 2 * np.maximum(naive, naive[:, :1])
    if case.key_ranges > 1:
        allowed[:, 0] = np.minimum(allowed[:, 0], 1.5 * unsplit_errors(case)[:, 0])
    return allowed
