"""Measures what a device's work takes, with the project's own kernels and layers, into a profile.

Attention of tasks over a grid of query and key rows, forward and backward; the linear layers of one
transformer layer over tokens; an exchange in one and two collectives over bytes, where there are several
devices. How they are timed: `cad_jax.timing`.

Shape letters: CQ query rows, CK key rows, H query heads, K key/value heads, D head dim, E embedding,
T tokens, S devices.
"""

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cad_jax.attention.base import KeyRanges
from cad_jax.attention.kernels.xla import choose_blocks
from cad_jax.attention.varlen import chosen_kernel, varlen_attention, varlen_attention_bwd
from cad_jax.layer import PostWeights, PreWeights, post_attention, pre_attention
from cad_jax.model_config import LlamaConfig
from cad_jax.parameters import Parallelism
from cad_jax.sharding.cost import MODELS, ModelShape, find_device
from cad_jax.sharding.cost_model import layer_weights
from cad_jax.sharding.mesh import POOL_AXES, make_mesh
from cad_jax.sharding.profile_table import (
    AttentionRow,
    LinearRow,
    Profile,
    ProfileHeader,
    Row,
    SlackRow,
    TransferRow,
)
from cad_jax.sharding.tasks import DENSE_TRANSPORTS, TILE_ROWS, TRANSPORT_HOPS, HeadShape
from cad_jax.timing import Work, hardware

Dtype = Literal["bfloat16", "float32"]
CPU_MODEL = ModelShape("small", 2, 512, 8, 2, 64, 1536, 264)
KEY_GAP = 256  # rows between the keys of tasks, below this: they begin anywhere in a kernel's tiles


@dataclass(frozen=True)
class Sizes:
    """What is measured. Rows are counted in tiles of the kernel."""

    query_tiles: tuple[int, ...]
    document_tiles: tuple[int, ...]  # of the longest task with the same keys a tile
    fill_rows: int  # query rows of the tasks that one call holds, at least
    tokens: tuple[int, ...]
    wire_bytes: tuple[int, ...]
    rounds: int


def _powers(first: int, last: int, step: int = 2) -> tuple[int, ...]:
    return tuple(first * step**i for i in range(64) if first * step**i <= last)


SIZES = {
    ("cpu", True): Sizes(_powers(1, 16, 4), _powers(1, 64, 4), 1024, _powers(256, 4096, 4), _powers(2**16, 2**24, 16), 3),
    ("cpu", False): Sizes(_powers(1, 32), _powers(1, 64), 1024, _powers(256, 8192), _powers(2**16, 2**26, 4), 7),
    ("gpu", True): Sizes(_powers(1, 256, 4), _powers(1, 1024, 4), 32768, _powers(1024, 65536, 4), _powers(2**16, 2**28, 16), 5),
    ("gpu", False): Sizes(_powers(1, 256), _powers(1, 1024), 32768, _powers(256, 65536), _powers(2**14, 2**30, 4), 11),
}  # fmt: skip


class KernelNames(NamedTuple):
    """The kernel of each direction, none of them "auto"."""

    forward: str
    backward: str

    def __str__(self) -> str:
        if self.forward == self.backward:
            return self.forward
        return f"{self.forward} forward, {self.backward} backward"


def kernel_names(kernel: str, heads: HeadShape, dtype: str) -> KernelNames:
    """What `kernel` is on the default device. Raises as `varlen_attention` does."""

    def rows(dtype: str, *shape: int) -> Any:  # stands for an array
        return jax.ShapeDtypeStruct((TILE_ROWS, *shape), dtype)

    q, k = (rows(dtype, n, heads.head_dim) for n in (heads.num_q_heads, heads.num_kv_heads))
    scalars = rows("float32", heads.num_q_heads)
    ranges = KeyRanges(rows("int32"), rows("int32"))
    return KernelNames(
        chosen_kernel(kernel, "forward", q, k, k, ranges),
        chosen_kernel(kernel, "backward", q, k, k, q, scalars, scalars, ranges),
    )


def kernel_tile_rows(names: KernelNames, heads: HeadShape, dtype: str) -> int:
    """Query rows of a tile of the forward's kernel, or a multiple of them."""
    if names.forward != "xla":
        return TILE_ROWS
    group = heads.num_q_heads // heads.num_kv_heads
    platform = jax.default_backend()
    return choose_blocks(platform, 1 << 20, 1 << 20, group, dtype, backward=False).q


class Kernels(NamedTuple):
    """The two directions of attention, jitted."""

    forward: Callable
    backward: Callable

    @classmethod
    def of(cls, forward: str, backward: str | None = None) -> "Kernels":
        """Names as `varlen_attention` takes them; backward: the same by default."""
        return cls(
            jax.jit(partial(varlen_attention, kernel=forward)),
            jax.jit(partial(varlen_attention_bwd, kernel=backward or forward)),
        )


def attention_work(
    k_lo: np.ndarray,
    k_hi: np.ndarray,
    key_rows: int,
    heads: HeadShape,
    dtype: str,
    kernels: Kernels,
) -> tuple[Work, Work]:
    """Forward and backward of one call on random operands. k_lo, k_hi: int [CQ], as `KeyRanges`."""
    lo, hi = (np.asarray(x, np.int32) for x in (k_lo, k_hi))

    def draw(rows: int, count: int, seed: int) -> jax.Array:
        rng = np.random.default_rng(seed)
        values = rng.standard_normal((min(rows, 4096), count, heads.head_dim), np.float32)
        return jnp.asarray(
            np.resize(values, (rows, count, heads.head_dim)).astype(jnp.dtype(dtype))
        )

    def operands() -> tuple[jax.Array, ...]:
        queries, keys = (len(lo), heads.num_q_heads), (key_rows, heads.num_kv_heads)
        return draw(*queries, 0), draw(*keys, 1), draw(*keys, 2)

    def forward() -> Callable[[], object]:
        return partial(kernels.forward, *operands(), KeyRanges(jnp.asarray(lo), jnp.asarray(hi)))

    def backward() -> Callable[[], object]:
        d_out = draw(len(lo), heads.num_q_heads, 3)
        # About what random scores sum to: weights stay ordinary numbers.
        lse = np.log(np.maximum(hi - lo, 1) * np.exp(0.5)).astype(np.float32)
        lse = jnp.asarray(np.repeat(lse[:, None], heads.num_q_heads, axis=1))
        ranges = KeyRanges(jnp.asarray(lo), jnp.asarray(hi))
        return partial(kernels.backward, *operands(), d_out, lse, jnp.zeros_like(lse), ranges)

    return Work(forward, 1), Work(backward, 1)


def task_batch(query_rows: int, key_rows: int, copies: int) -> tuple[np.ndarray, np.ndarray, int]:
    """k_lo, k_hi and key rows of `copies` equal causal tasks, each with keys of its own that begin
    anywhere within a kernel's tiles.
    """
    first = np.cumsum(np.random.default_rng(0).integers(0, KEY_GAP, copies) + key_rows) - key_rows
    hi = first[:, None] + key_rows - query_rows + np.arange(query_rows)[None] + 1
    return np.repeat(first, query_rows), hi.reshape(-1), int(first[-1]) + key_rows


def linear_work(model: ModelShape, tokens: int, dtype: Dtype) -> tuple[Work, Work]:
    """The block between two attentions: forward, and forward with its gradients."""
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        embedding_dim=model.embedding_dim,
        num_layers=model.num_layers,
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn_dim=model.ffn_dim,
        dtype=dtype,
    )
    E, F = model.embedding_dim, model.ffn_dim
    width = model.num_q_heads * model.head_dim
    qkv = width + 2 * model.num_kv_heads * model.head_dim
    alone = Parallelism()

    def block(weights, x, out, positions):
        after, before = weights
        x = post_attention(config, alone, after, x, out)
        return x, pre_attention(config, alone, before, x, positions)

    def both(weights, x, out, positions, gradient):
        result, transpose = jax.vjp(partial(block, positions=positions), weights, x, out)
        return result, transpose(gradient(result))

    def draw(*shape: int) -> jax.Array:
        values = np.random.default_rng(0).standard_normal(
            (min(shape[0], 512), *shape[1:]), np.float32
        )
        return jnp.asarray((np.resize(values, shape) / 32).astype(jnp.dtype(dtype)))

    def operands() -> tuple:
        norm = jnp.ones(E, jnp.float32)
        after = PostWeights(draw(E, width), norm, draw(E, 2 * F), draw(E, F))
        out = draw(tokens, width).reshape(tokens, model.num_q_heads, model.head_dim)
        positions = jnp.arange(tokens, dtype=jnp.int32)
        return (after, PreWeights(norm, draw(E, qkv))), draw(tokens, E), out, positions

    forward = jax.jit(block)
    with_gradients = jax.jit(partial(both, gradient=partial(jax.tree.map, jnp.ones_like)))
    return (
        Work(lambda: partial(forward, *operands()), 1),
        Work(lambda: partial(with_gradients, *operands()), 1),
    )


def transfer_work(mesh: Mesh, hops: int, slot_rows: int, parts: float) -> Work:
    """`hops` all-to-alls one after another, rows of 128 lanes of 16 bits, slot_rows to each rank."""
    size = mesh.size
    shape = (size, slot_rows, 128)

    def exchange(send):
        for hop in range(hops):
            if hop:  # what a relay does between its hops: rows in another order
                rows = send.reshape(-1, shape[-1])
                send = jnp.take(rows, jnp.arange(rows.shape[0])[::-1], axis=0).reshape(shape)
            send = lax.all_to_all(send, POOL_AXES, 0, 0, tiled=True)
        return send

    spec = P(POOL_AXES)
    run = jax.jit(
        jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    sharding = jax.sharding.NamedSharding(mesh, spec)

    def prepare() -> Callable[[], object]:
        send = np.ones((size * size, *shape[1:]), np.uint16)
        return partial(run, jax.device_put(send, sharding))

    return Work(prepare, parts)


class Measurement(NamedTuple):
    """Works whose seconds make one row of the profile."""

    works: list[Work]
    to_row: Callable[[list[float]], Row]

    @property
    def row(self) -> Row:
        return self.to_row([work.seconds for work in self.works])


def _attention(
    heads: HeadShape, dtype: str, names: KernelNames, sizes: Sizes
) -> Iterator[Measurement]:
    kernels, tile = Kernels.of(*names), kernel_tile_rows(names, heads, dtype)
    for tiles in sizes.query_tiles:
        for longest in sizes.document_tiles:
            if longest < tiles:
                continue
            query_rows, key_rows = tiles * tile, (tiles + longest) * tile // 2
            copies = max(1, sizes.fill_rows // query_rows)
            works = attention_work(*task_batch(query_rows, key_rows, copies), heads, dtype, kernels)
            for work in works:
                work.parts = copies
            cells = (heads.num_q_heads, heads.num_kv_heads, heads.head_dim, query_rows, key_rows)
            yield Measurement(list(works), lambda s, cells=cells: AttentionRow(*cells, *s))


def _slack(heads: HeadShape, dtype: str, names: KernelNames, sizes: Sizes) -> Iterator[Measurement]:
    kernels, few = Kernels.of(*names), kernel_tile_rows(names, heads, dtype)
    many = 8 * sizes.fill_rows
    for query_rows, key_rows in ((many, few), (few, many)):
        nothing = np.zeros(query_rows, np.int64)
        works = attention_work(nothing, nothing, key_rows, heads, dtype, kernels)
        cells = (heads.num_q_heads, heads.num_kv_heads, heads.head_dim, query_rows, key_rows)
        yield Measurement(list(works), lambda s, cells=cells: SlackRow(*cells, *s))


def _linear(model: ModelShape, dtype: Dtype, sizes: Sizes) -> Iterator[Measurement]:
    weights = layer_weights(model)
    for tokens in sizes.tokens:

        def row(seconds: list[float], tokens: int = tokens) -> LinearRow:
            forward_s, both_s = seconds
            # A difference: noise must not make nothing of it.
            return LinearRow(weights, tokens, forward_s, max(both_s - forward_s, forward_s / 10))

        yield Measurement(list(linear_work(model, tokens, dtype)), row)


def _transfers(sizes: Sizes) -> Iterator[Measurement]:
    devices = jax.device_count()
    if devices == 1 or jax.process_count() > 1:
        return
    mesh = make_mesh(dp=devices)
    parts = devices if jax.default_backend() == "cpu" else 1  # one process works for all ranks
    for transport in DENSE_TRANSPORTS:
        hops = TRANSPORT_HOPS[transport]
        for size in sizes.wire_bytes:
            slot_rows = max(1, size // (256 * devices))
            cells = (transport, "within_node", devices, hops, hops * slot_rows * 256 * devices)
            work = transfer_work(mesh, hops, slot_rows, parts)
            yield Measurement([work], lambda s, cells=cells: TransferRow(*cells, *s))


def measurements(model: ModelShape, dtype: Dtype, kernel: str, sizes: Sizes) -> list[Measurement]:
    """All that a profile holds, for the attention heads and linear layers of `model`, to be timed by
    `measure`. kernel: see `varlen_attention`.
    """
    heads = HeadShape(model.num_q_heads, model.num_kv_heads, model.head_dim)
    names = kernel_names(kernel, heads, dtype)
    return [
        *_attention(heads, dtype, names, sizes),
        *_slack(heads, dtype, names, sizes),
        *_linear(model, dtype, sizes),
        *_transfers(sizes),
    ]


def collect(
    timed: Sequence[Measurement],
    model: ModelShape,
    dtype: Dtype,
    kernel: str,
    notes: tuple[str, ...],
) -> Profile:
    """The profile of what was timed on the default device; the rest, as `measurements` got it, is for its
    header."""
    device = jax.devices()[0]
    cpu = device.platform == "cpu"
    known = find_device("cpu" if cpu else device.device_kind)
    heads = HeadShape(model.num_q_heads, model.num_kv_heads, model.head_dim)
    names = kernel_names(kernel, heads, dtype)
    header = ProfileHeader(
        label="measured",
        devices=known.name if known else "_".join(device.device_kind.lower().split()),
        hardware=hardware(),
        date=datetime.date.today().isoformat(),
        jax=jax.__version__,
        kernel=str(names),
        dtype=dtype,
        tile_rows=kernel_tile_rows(names, heads, dtype),
        tiles_of="buffer",
        notes=notes,
    )
    return Profile(header, tuple(m.row for m in timed))


def default_model() -> tuple[ModelShape, Dtype]:
    """A model and a dtype for the kind of the default device."""
    if jax.default_backend() == "cpu":
        return CPU_MODEL, "float32"
    return MODELS["llama3-8b"], "bfloat16"
