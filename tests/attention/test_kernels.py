"""One suite for every attention kernel, against a dense float64 oracle.

Range cases share one shape, so that each kernel compiles once for all of them.
Shape letters: CQ query rows, CK key rows, H query heads, K key/value heads, D head dim.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from cad_jax.attention.base import KeyRanges, attended_keys, tile_tables
from cad_jax.attention.kernels import xla
from cad_jax.attention.merge import merge_partials
from cad_jax.attention.varlen import (
    KERNEL_NAMES,
    load_kernel,
    varlen_attention,
    varlen_attention_bwd,
)
from tests.oracles import causal_ranges, dense_varlen, relative_error

KERNELS = ("reference", "xla", "triton")
FLOAT32_GATE = 1e-5
ROWS, KEYS, HEADS, KV_HEADS, DIM = 523, 651, 4, 2, 32
TENSORS = ("out", "dq", "dk", "dv")


def ranges_of(rows: int, *tasks) -> KeyRanges:
    """Tasks (q_row, k_row, q_start, q_stop, k_start): causal, keys of the document from buffer row k_row."""
    lo, hi = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for q_row, k_row, q_start, q_stop, k_start in tasks:
        part = slice(q_row, q_row + q_stop - q_start)
        lo[part] = k_row
        hi[part] = k_row + np.arange(q_start, q_stop) + 1 - k_start
    return KeyRanges(lo, hi)


def documents(*lengths) -> KeyRanges:
    return KeyRanges(*causal_ranges(lengths, ROWS))


def window(length: int, width: int) -> KeyRanges:
    lo, hi = documents(length)
    return KeyRanges(np.maximum(lo, hi - width), hi)


def holes(length: int) -> KeyRanges:
    """A document in which every third row, and a run that covers a whole tile, attend nothing."""
    lo, hi = documents(length)
    dead = (np.arange(ROWS) % 3 == 1) | ((np.arange(ROWS) >= 100) & (np.arange(ROWS) < 270))
    return KeyRanges(np.where(dead, 0, lo), np.where(dead, 0, hi))


CASES = {
    "odd_lengths": documents(1, 63, 65, 127, 129),
    "one_document_to_the_last_row": documents(ROWS),
    "ends_two_rows_early": documents(400, ROWS - 402),
    "short_documents_share_tiles": documents(*[1, 3, 7, 0, 30, 2] * 12),
    "single_tokens": documents(*[1] * ROWS),
    "nothing": documents(),
    "query_shard_with_long_prefix": ranges_of(ROWS, (0, 0, KEYS - 128, KEYS, 0)),
    "shards_of_documents": ranges_of(
        ROWS, (0, 0, 8, 13, 0), (5, 13, 100, 350, 0), (255, 363, 30, 128, 0), (353, 491, 0, 160, 0)
    ),
    "document_of_two_tasks_shares_keys": ranges_of(ROWS, (0, 0, 10, 60, 0), (50, 0, 300, 600, 0)),
    "keys_with_unread_gaps": ranges_of(ROWS, (0, 70, 0, 90, 0), (90, 400, 200, 250, 30)),
    "window_of_40": window(500, 40),
    "window_of_1": window(500, 1),
    "rows_without_keys_inside_tiles": holes(520),
}


def operands(rows, keys, heads, kv_heads, dim, dtype, ranges: KeyRanges, seed=0):
    """q, k, v, d_out with NaN in every row that no range touches."""
    rng = np.random.default_rng(seed)
    live = ranges.k_lo < ranges.k_hi
    attended = np.zeros(keys, bool)
    for lo, hi in zip(*ranges, strict=True):
        attended[lo:hi] = True

    def draw(count, heads, alive):
        x = rng.normal(size=(count, heads, dim)).astype(np.float32)
        return jnp.asarray(np.where(alive[:, None, None], x, np.nan), dtype)

    q, k, v = (
        draw(rows, heads, live),
        draw(keys, kv_heads, attended),
        draw(keys, kv_heads, attended),
    )
    return (q, k, v, draw(rows, heads, live)), live, attended


@partial(jax.jit, static_argnames="kernel")
def gradients(q, k, v, d_out, out, lse, ranges, kernel):
    """dq, dk, dv; delta of rows without keys is NaN where d_out is."""
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    return varlen_attention_bwd(q, k, v, d_out, lse, delta, ranges, kernel=kernel)


@partial(jax.jit, static_argnames="kernel")
def attend(q, k, v, d_out, ranges, kernel):
    """out, lse, dq, dk, dv"""
    out, lse = varlen_attention(q, k, v, ranges, kernel=kernel)
    return out, lse, *gradients(q, k, v, d_out, out, lse, ranges, kernel)


@cache
def expected_of(name):
    ranges = CASES[name]
    (q, k, v, d_out), _, _ = operands(ROWS, KEYS, HEADS, KV_HEADS, DIM, jnp.float32, ranges)
    return dense_varlen(q, k, v, *ranges, d_out=d_out)


def check(results, expected, live, attended, gates) -> None:
    out, lse, dq, dk, dv = (np.asarray(x, np.float32) for x in results)
    for name, result, gate in zip(TENSORS, (out, dq, dk, dv), gates, strict=True):
        assert np.isfinite(result).all(), name
        want = getattr(expected, name)
        if name in ("dq", "dk") and not np.abs(want).max() > 1e-9:
            # A softmax over one key has no gradient: rounding is compared with dv, of the same scale.
            assert np.linalg.norm(result) <= gate * np.linalg.norm(expected.dv), name
        else:
            assert relative_error(result, want) <= gate, name
    assert not out[~live].any() and not dq[~live].any()
    assert not dk[~attended].any() and not dv[~attended].any()
    assert np.isneginf(lse[~live]).all()
    np.testing.assert_allclose(lse[live], expected.lse[live], atol=max(1e-5, gates[0]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_ranges(kernel, case) -> None:
    args, live, attended = operands(ROWS, KEYS, HEADS, KV_HEADS, DIM, jnp.float32, CASES[case])
    results = attend(*args, CASES[case], kernel)
    check(results, expected_of(case), live, attended, [FLOAT32_GATE] * 4)


SHAPES = {  # rows, keys, H, K, D: odd buffers, query groups of 1, 4, 8 and one key head
    "mha": (63, 127, 4, 4, 32),
    "gqa4": (130, 200, 8, 2, 64),
    "gqa8": (65, 131, 16, 2, 32),
    "mqa": (65, 131, 8, 1, 128),
    "one_row": (1, 1, 2, 1, 32),
}


def ragged(rows: int, keys: int) -> KeyRanges:
    """Three tasks with prefixes of different lengths; the last two rows and keys are slack."""
    if rows < 3:
        return ranges_of(rows, (0, 0, 0, rows, 0))
    first = rows // 3
    shift = (keys - rows) // 2
    return ranges_of(
        rows,
        (0, 0, shift, shift + first, 0),
        (first, shift + first, 0, first, 0),
        (2 * first, shift + 2 * first, shift, rows - 2 * first + shift - 2, 0),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_shapes(kernel, shape) -> None:
    rows, keys = SHAPES[shape][:2]
    ranges = ragged(rows, keys)
    args, live, attended = operands(*SHAPES[shape], jnp.float32, ranges)
    expected = dense_varlen(*args[:3], *ranges, d_out=args[3])
    check(attend(*args, ranges, kernel), expected, live, attended, [FLOAT32_GATE] * 4)


def naive(q, k, v, ranges):
    """What people write: products and weights in the input dtype, softmax in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    keys = jnp.arange(k.shape[0])[None]
    mask = (keys >= ranges.k_lo[:, None]) & (keys < ranges.k_hi[:, None])
    scores = jnp.where(mask[None], scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1) * mask[None]
    return jnp.einsum("hqk,khd->qhd", weights.astype(v.dtype), v)


@pytest.mark.parametrize(
    "kernel, dim", [("reference", 64), ("xla", 32), ("xla", 128), ("triton", 128)]
)
def test_bfloat16_errs_at_most_twice_the_naive_op(kernel, dim) -> None:
    ranges = ragged(200, 260)
    args, live, attended = operands(200, 260, 4, 2, dim, jnp.bfloat16, ranges)
    expected = dense_varlen(*args[:3], *ranges, d_out=args[3])
    clean = [jnp.nan_to_num(x) for x in args]
    out, vjp = jax.vjp(lambda *x: naive(*x, ranges), *clean[:3])
    errors = [
        relative_error(np.asarray(x, np.float32), getattr(expected, name))
        for x, name in zip((out, *vjp(clean[3])), TENSORS, strict=True)
    ]
    check(attend(*args, ranges, kernel), expected, live, attended, [2 * e for e in errors])


def test_4092_tokens() -> None:
    ranges = KeyRanges(*causal_ranges([4092], 4100))
    args, live, attended = operands(4100, 4100, 1, 1, 32, jnp.float32, ranges)
    expected = dense_varlen(*args[:3], *ranges, d_out=args[3])
    check(attend(*args, ranges, "xla"), expected, live, attended, [FLOAT32_GATE] * 4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_lse_fails_the_gate(kernel) -> None:
    """The gates are tight enough to see a log-sum-exp that is off by one percent."""
    ranges = CASES["odd_lengths"]
    (q, k, v, d_out), _, _ = operands(ROWS, KEYS, HEADS, KV_HEADS, DIM, jnp.float32, ranges)
    out, lse, *_ = attend(q, k, v, d_out, ranges, kernel)
    expected = expected_of("odd_lengths")
    grads = gradients(q, k, v, d_out, out, lse * 1.01, ranges, kernel)
    for name, grad in zip(TENSORS[1:], grads, strict=True):
        assert relative_error(grad, getattr(expected, name)) > 100 * FLOAT32_GATE


SPLIT_ROWS = 512


@pytest.mark.parametrize(
    "kernel, dtype",
    [
        ("reference", "float32"),
        ("xla", "float32"),
        ("xla", "bfloat16"),
        ("triton", "bfloat16"),
    ],
)
def test_key_splits_merge_to_the_unsplit_result(kernel, dtype) -> None:
    """One document's keys in 1, 2, 4, 16 parts: output and summed gradients err at most 1.5 times as much."""
    ranges = KeyRanges(*causal_ranges([SPLIT_ROWS]))
    args, _, _ = operands(SPLIT_ROWS, SPLIT_ROWS, 2, 1, 32, dtype, ranges)
    q, k, v, d_out = args
    expected = dense_varlen(q, k, v, *ranges, d_out=d_out)

    @jax.jit
    def partial_out(k_lo, k_hi):
        return varlen_attention(q, k, v, KeyRanges(k_lo, k_hi), kernel=kernel)

    errors = {}
    for parts in (1, 2, 4, 16):
        size = SPLIT_ROWS // parts
        cuts = []
        for part in range(parts):
            lo = np.full(SPLIT_ROWS, part * size, np.int32)
            cuts.append((lo, np.clip(ranges.k_hi, lo, lo + size)))
        outs, lses = zip(*(partial_out(*cut) for cut in cuts), strict=True)
        out, lse = jax.jit(merge_partials)(np.stack(outs), np.stack(lses))
        grads = [gradients(q, k, v, d_out, out, lse, KeyRanges(*cut), kernel) for cut in cuts]
        sums = (
            np.sum([np.asarray(x, np.float32) for x in g], axis=0) for g in zip(*grads, strict=True)
        )
        results = (out, *(x.astype(np.asarray(out).dtype) for x in sums))
        errors[parts] = [
            relative_error(x, getattr(expected, name))
            for x, name in zip(results, TENSORS, strict=True)
        ]
    for parts in (2, 4, 16):
        for name, split, whole in zip(TENSORS, errors[parts], errors[1], strict=True):
            assert split <= 1.5 * whole, (name, parts)


def test_merge() -> None:
    rng = np.random.default_rng(0)
    out = jnp.asarray(rng.normal(size=(3, 5, 2, 4)), jnp.float32)
    lse = jnp.asarray(rng.normal(size=(3, 5, 2)) * 40, jnp.float32)
    one_out, one_lse = merge_partials(out[:1], lse[:1])
    assert (one_out == out[0]).all() and (one_lse == lse[0]).all()

    lse = lse.at[1, 2].set(-jnp.inf).at[:, 3].set(-jnp.inf)
    out = out.at[1, 2].set(jnp.nan)  # a weight of zero wins over whatever the row holds
    merged, total = merge_partials(out, lse)
    weights = np.exp(np.asarray(lse, np.float64))
    sums = weights.sum(axis=0)
    expected = (weights[..., None] * np.nan_to_num(np.asarray(out, np.float64))).sum(axis=0)
    expected /= np.where(sums > 0, sums, 1)[..., None]
    assert relative_error(merged, expected) < 1e-6
    assert not np.asarray(merged)[3].any() and np.isneginf(np.asarray(total)[3]).all()
    np.testing.assert_allclose(np.delete(total, 3, 0), np.log(np.delete(sums, 3, 0)), rtol=1e-6)
    assert merge_partials(out.astype(jnp.bfloat16), lse)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("case", CASES)
def test_tile_tables_list_the_tiles_that_exist(case) -> None:
    block_q, block_k = 32, 16
    ranges = CASES[case]
    tables = jax.tree.map(np.asarray, tile_tables(ranges, KEYS, block_q, block_k))
    keys = np.arange(KEYS)
    mask = (keys >= ranges.k_lo[:, None]) & (keys < ranges.k_hi[:, None])
    attended = np.asarray(attended_keys(KeyRanges(*map(jnp.asarray, ranges)), KEYS))
    assert (attended == mask.any(axis=0)).all()
    counts = []
    for i in range(-(-ROWS // block_q)):
        rows = mask[i * block_q : (i + 1) * block_q]
        tiles = [rows[:, j * block_k : (j + 1) * block_k] for j in range(-(-KEYS // block_k))]
        needed = [j for j, tile in enumerate(tiles) if tile.any()]
        counts.append(len(needed))
        first, stop = tables.key_first[i], tables.key_stop[i]
        if not needed:
            assert first == stop
            continue
        assert (first, stop) == (needed[0], needed[-1] + 1)
        live = rows.any(axis=1)
        inner = [j for j in needed if tiles[j].shape[1] == block_k and tiles[j][live].all()]
        assert list(range(tables.inner_first[i], tables.inner_stop[i])) == inner
        for j in needed:
            assert tables.query_first[j] <= i < tables.query_stop[j]
    listed = tables.key_stop - tables.key_first
    if "gap" not in case and "two_tasks" not in case:  # ranges may bridge keys between two tasks
        assert listed.sum() == sum(counts)
    assert (np.diff(listed[tables.costliest]) <= 0).all()


def test_xla_walks_each_existing_pair_once() -> None:
    """Its flat lists hold exactly the pairs of the tile tables: work follows the tiles that exist."""
    blocks = xla.Blocks(32, 16, jnp.dtype(jnp.float32))
    for ranges in CASES.values():
        plain, masked = xla._walks(KeyRanges(*map(jnp.asarray, ranges)), KEYS, blocks)
        tables = tile_tables(ranges, KEYS, 32, 16)
        count = jnp.zeros((-(-ROWS // 32), -(-KEYS // 16)), jnp.int32)
        for walk in (plain, masked):
            count = xla._for_pairs(walk, walk.total, lambda i, j, c: c.at[i, j].add(1), count)
        tiles = np.arange(count.shape[1])
        first, stop = np.asarray(tables.key_first)[:, None], np.asarray(tables.key_stop)[:, None]
        assert (np.asarray(count) == ((tiles >= first) & (tiles < stop))).all()


def chunked_case():
    """Four ranks' queries of one step in document order, with very different work per rank."""
    ranges = KeyRanges(*(x.reshape(4, 64) for x in causal_ranges([150, 3, 80], 256)))
    flat = KeyRanges(*(x.reshape(-1) for x in ranges))
    args, _, _ = operands(256, 256, 4, 2, 32, jnp.float32, flat)
    return ranges, [jnp.nan_to_num(x) for x in args]


def test_varying_trip_counts_inside_shard_map_and_scan() -> None:
    ranges, (q, k, v, d_out) = chunked_case()
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def one_rank(q, k, v, d_out, ranges):
        def layer(_, scale):
            out, lse, dq, dk, dv = attend(q * scale, k, v, d_out, ranges, "xla")
            return None, (out, dq * scale, jax.lax.psum((dk, dv), "dp"))

        return jax.lax.scan(layer, None, jnp.ones(2))[1]

    sharded, whole = P("dp"), P()
    run = jax.shard_map(
        one_rank,
        mesh=mesh,
        in_specs=(sharded, whole, whole, sharded, sharded),
        out_specs=(P(None, "dp"), P(None, "dp"), whole),
        check_vma=False,
    )
    flat = KeyRanges(*(x.reshape(-1) for x in ranges))
    out, dq, (dk, dv) = jax.block_until_ready(jax.jit(run)(q, k, v, d_out, flat))
    expected = dense_varlen(q, k, v, *flat, d_out=d_out)
    for result, name in zip((out, dq, dk, dv), TENSORS, strict=True):
        for layer in np.asarray(result):
            assert relative_error(layer, getattr(expected, name)) <= FLOAT32_GATE


def test_chunks_need_no_collective_inside_their_loops() -> None:
    """Queries sharded by the partitioner, keys replicated: exact, and loop bodies stay local."""
    ranges, (q, k, v, d_out) = chunked_case()
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, P("dp"))
    scale = q.shape[-1] ** -0.5

    def step(q, k, v, d_out, ranges):
        out, lse = xla.forward_chunks(q, k, v, ranges, scale)
        delta = (out * d_out).sum(axis=-1)
        dq, dk, dv = xla.backward_chunks(q, k, v, d_out, lse, delta, ranges, scale)
        return out, dq, dk.sum(axis=0), dv.sum(axis=0)

    def chunk(x):
        return jax.device_put(jnp.reshape(x, (4, 64, *x.shape[1:])), sharding)

    local = KeyRanges(*(jax.device_put(x, sharding) for x in ranges))
    args = (chunk(q), k, v, chunk(d_out), local)
    compiled = jax.jit(step).lower(*args).compile()
    results = jax.block_until_ready(compiled(*args))
    expected = dense_varlen(q, k, v, *(x.reshape(-1) for x in ranges), d_out=d_out)
    for result, name in zip(results, TENSORS, strict=True):
        want = getattr(expected, name)
        assert relative_error(np.reshape(result, want.shape), want) <= FLOAT32_GATE
    inside = [
        line
        for line in compiled.as_text().splitlines()
        if "while/body" in line and any(f" {c}(" in line for c in COLLECTIVES)
    ]
    assert not inside
    assert " all-reduce(" in compiled.as_text()  # the sums over ranks: the search does find them


COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "all-reduce-start",
)


def test_blocks_fit_their_buffers() -> None:
    for platform in ("cpu", "gpu"):
        for group in (1, 4, 8, 32):
            for backward in (False, True):
                blocks = xla.choose_blocks(platform, 24, 9, group, jnp.bfloat16, backward=backward)
                assert 0 < blocks.q <= 24 and 0 < blocks.k <= 16


def test_auto_is_xla_on_cpu() -> None:
    ranges = CASES["odd_lengths"]
    (q, k, v, _), _, _ = operands(ROWS, KEYS, HEADS, KV_HEADS, DIM, jnp.float32, ranges)
    outs = [varlen_attention(q, k, v, ranges, kernel=name)[0] for name in ("auto", "xla")]
    assert (outs[0] == outs[1]).all()


def test_refusals_name_the_rule_and_the_cure() -> None:
    ranges = ranges_of(4, (0, 0, 0, 4, 0))
    q, k = jnp.zeros((4, 4, 24)), jnp.zeros((4, 2, 24))
    with pytest.raises(ValueError, match="one of auto, reference.*'flash'"):
        varlen_attention(q, k, k, ranges, kernel="flash")
    with pytest.raises(ValueError, match="head dim 24 is not a power of two.*kernel='xla'"):
        varlen_attention(q, k, k, ranges, kernel="triton")
    with pytest.raises(ValueError, match="K dividing H"):
        varlen_attention(q[:, :3], k, k, ranges, kernel="xla")
    with pytest.raises(ValueError, match="per query row, 4"):
        varlen_attention(q, k, k, KeyRanges(ranges.k_lo[:3], ranges.k_hi), kernel="xla")


def test_missing_package_is_named_with_its_cure() -> None:
    try:
        load_kernel("tokamax")
    except ImportError as error:
        assert "pip install 'cad-jax[tokamax]'" in str(error)
    assert set(KERNELS) < set(KERNEL_NAMES)
