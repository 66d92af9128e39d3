"""Seconds against tiles counted by hand, closed forms, the laws a grid must follow, and published points."""

import dataclasses
import re

import numpy as np
import pytest

from cad_jax.sharding.attention_grid import tiled_shape
from cad_jax.sharding.cost import DEVICES, MODELS, Device
from cad_jax.sharding.cost_model import CostModel, analytic, from_csv, shipped, shipped_profiles
from cad_jax.sharding.profile_table import (
    AttentionRow,
    LinearRow,
    Profile,
    ProfileHeader,
    SlackRow,
    TransferRow,
    load,
)
from cad_jax.sharding.tasks import Capacities, HeadShape

H200, CPU = DEVICES["h200"], DEVICES["cpu"]
HEADS = HeadShape(4, 1, 128)  # Llama-3-8B, tp 8
TOY = Device("toy", 1e12, 1e12, 1e11, 1e10, 8, 1e-5)
TILE = 128
TASK_S, TILE_S, VISIT_S = 3e-6, 2e-7, 5e-10  # a law: per task, per tile, per key that a tile visits


def count_tiles(q_start, q_stop, k_start, k_stop, tile, offset) -> tuple[int, int]:
    """Tiles with a row that sees a key, and the keys that they visit, row by row."""
    visits: dict[int, int] = {}
    for q in range(q_start, q_stop):
        if min(q + 1, k_stop) > k_start:
            at = (offset + q - q_start) // tile
            end = q_start - offset + (at + 1) * tile
            visits[at] = min(end, k_stop) - k_start
    return len(visits), sum(visits.values())


def test_tiles_against_counting_rows():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        tile = int(rng.integers(1, 9))
        q_start, rows = rng.integers(0, 40, 2).tolist()
        k_stop = int(rng.integers(1, q_start + rows + 1)) if q_start + rows else 0
        k_start = int(rng.integers(0, k_stop)) if k_stop else 0
        task, offset = (q_start, q_start + rows, k_start, k_stop), int(rng.integers(0, tile))
        shape = tiled_shape(*task, tile, offset)
        tiles, visits = count_tiles(*task, tile, offset)
        assert shape.rows == tiles * tile, (task, tile, offset)
        assert shape.keys * tiles == pytest.approx(visits), (task, tile, offset)


def law(tiles, visits):
    """Seconds of a task by the law; backward three times as much."""
    return TASK_S + TILE_S * tiles + VISIT_S * visits


def law_profile(**header) -> Profile:
    rows: list[AttentionRow | SlackRow | LinearRow | TransferRow] = []
    for q in (128, 512, 2048):
        for longest in (128, 512, 2048, 8192):
            if longest >= q:
                keys = (longest + q) // 2
                forward_s = law(*count_tiles(keys - q, keys, 0, keys, TILE, 0))
                rows.append(AttentionRow(4, 1, 128, q, keys, forward_s, 3 * forward_s))
    rows += [
        SlackRow(4, 1, 128, 4096, 128, 4096e-9 + 128 * 2e-9, 8192e-9 + 128 * 6e-9),
        SlackRow(4, 1, 128, 128, 4096, 128e-9 + 4096 * 2e-9, 256e-9 + 4096 * 6e-9),
        LinearRow(1000, 100, 1e-3 + 100e-5, 2 * (1e-3 + 100e-5)),
        LinearRow(1000, 400, 1e-3 + 400e-5, 2 * (1e-3 + 400e-5)),
        *(
            TransferRow(name, "within_node", 2, hops, size, hops * 7e-5 + size / 3e9)
            for name, hops in (("direct", 1), ("relay", 2))
            for size in (10**5, 10**7)
        ),
    ]
    values = {
        "label": "measured", "devices": "toy cpu", "hardware": "none", "date": "2026-01-01",
        "jax": "none", "kernel": "law", "dtype": "float32", "tile_rows": TILE, "tiles_of": "task",
    }  # fmt: skip
    return Profile(ProfileHeader(**values | header), tuple(rows))


def law_model(tmp_path, **header) -> CostModel:
    law_profile(**header).save(tmp_path / "law.csv")
    return from_csv(tmp_path / "law.csv", TOY)


def test_a_linear_law_is_followed_between_grid_points(tmp_path):
    """Bilinear in tiled rows and keys a tile: exact for any task inside the grid, key sub-ranges too."""
    model = law_model(tmp_path)
    rng, got, want = np.random.default_rng(1), [], []
    for _ in range(200):
        q_start = int(rng.integers(0, 2000))
        q_stop = q_start + int(rng.integers(1, 2049))
        k_start = int(rng.integers(0, q_start + 1))
        tiles, visits = count_tiles(q_start, q_stop, k_start, q_stop, TILE, 0)
        if not 128 <= visits / tiles <= 4160:
            continue
        tasks = np.array([[0, q_start, q_stop, k_start, q_stop, 0, 0]])
        got.append(model.server_s(tasks, 1, HEADS)[0])
        want.append(law(tiles, visits))
        alone = model.task_s(q_stop - q_start, q_stop - k_start, HEADS, backward=True)
        assert alone == pytest.approx(3 * want[-1], rel=1e-4)
    assert len(got) > 100
    assert got == pytest.approx(want, rel=1e-4)  # six digits in the file


def test_beyond_the_grid_the_device_is_saturated(tmp_path):
    model = law_model(tmp_path)
    rows = float(model.task_s(2048, 5120, HEADS))  # 16 tiles of 4160 keys: the last point
    for times in (2, 4):
        keys = 4160 + (2048 * times - TILE) // 2  # as many keys a tile
        assert model.task_s(2048 * times, keys, HEADS) == pytest.approx(times * rows)
    assert model.task_s(128, 4 * 4160, HEADS) == pytest.approx(4 * model.task_s(128, 4160, HEADS))
    assert model.pair_s(HEADS) == pytest.approx(rows / (2048 * 4160))


def test_heads_cost_in_proportion_and_the_nearest_grid_counts(tmp_path):
    profile = law_profile()
    slow = [
        row._replace(q_heads=8, kv_heads=8, forward_s=10 * row.forward_s)
        for row in profile.of(AttentionRow)
    ]
    dataclasses.replace(profile, rows=(*profile.rows, *slow)).save(tmp_path / "two.csv")
    model = from_csv(tmp_path / "two.csv", TOY)
    base = model.task_s(512, 2048, HEADS)
    assert model.task_s(512, 2048, HeadShape(32, 8, 128)) == pytest.approx(8 * base)
    assert model.task_s(512, 2048, HeadShape(4, 1, 64)) == pytest.approx(base / 2)
    assert model.task_s(512, 2048, HeadShape(16, 16, 128)) == pytest.approx(2 * 10 * base)


def test_analytic_closed_forms():
    model = analytic(TOY, attention_efficiency=(0.5, 0.25), linear_efficiency=0.8)
    tiles = np.arange(1, 17)  # a document of 2048 tokens: its i-th tile visits i x 128 keys
    flops = 4 * 4 * 128 * float((128 * 128 * tiles).sum())
    assert model.task_s(2048, 2048, HEADS) == pytest.approx(flops / 0.5e12)
    assert model.task_s(2048, 2048, HEADS, backward=True) == pytest.approx(2.5 * flops / 0.25e12)
    assert model.task_s(64, 4096, HEADS) == model.task_s(128, 4096, HEADS)  # a whole tile
    llama = MODELS["llama3-8b"]  # 4096 x (4096 + 2 x 1024 + 4096) + 3 x 4096 x 14336 weights
    products = 2 * (4096 * 10240 + 3 * 4096 * 14336) * 65536 / 8
    assert model.linear_s(llama, 65536, 8) == pytest.approx(products / 0.8e12)
    assert model.linear_s(llama, 65536, 8, backward=True) == pytest.approx(2 * products / 0.8e12)
    assert model.transfer_s(5e9, within_node=True, hops=2) == pytest.approx(0.05 + 2e-5)
    assert model.transfer_s(5e9, within_node=False, hops=1) == pytest.approx(0.5 + 1e-5)
    slow = analytic(TOY, between_nodes_bytes_s=1e9)
    assert slow.transfer_s(5e9, within_node=False, hops=1) == pytest.approx(5 + 1e-5)
    assert model.label == "derived" and model.linear_s(llama, 0, 8) == 0


def test_cuts_on_tiles_cost_nothing_where_nothing_is_fixed():
    """Queries cut into shards, and keys into sub-ranges, add up to the task they came from."""
    model = analytic(TOY)
    whole = model.server_s(np.array([[0, 1024, 4096, 0, 4096, 0, 0]]), 1, HEADS)[0]
    cuts = [1024, 1152, 2048, 2432, 4096]
    shards = [[0, a, b, 0, b, 0, 0] for a, b in zip(cuts, cuts[1:], strict=False)]
    for shard in shards:
        alone = model.server_s(np.array([shard]), 1, HEADS)[0]
        assert alone == model.task_s(shard[2] - shard[1], shard[2], HEADS)
    together = model.task_s(np.diff(cuts), np.array(cuts[1:]), HEADS).sum()
    assert together == pytest.approx(whole)
    keys = [
        0,
        512,
        1024,
        1536,
        4096,
    ]  # a rectangle, another, one that the diagonal leaves, a triangle
    parts = [
        [0, 1024, 4096, a, b, 0, i] for i, (a, b) in enumerate(zip(keys, keys[1:], strict=False))
    ]
    seconds = model.server_s(np.array(parts), len(parts), HEADS)
    assert seconds.sum() == pytest.approx(whole)
    assert seconds[0] == pytest.approx(4 * 4 * 128 * 3072 * 512 / 0.6e12)  # a rectangle


@pytest.mark.parametrize("name", ["h200_fa2", "h200_fa3"])
def test_more_rows_never_cost_less(name):
    model = from_csv(shipped(name), H200)
    rows = np.unique(np.r_[np.arange(1, 3000, 37), 2 ** np.arange(18)])
    tiles = TILE * np.unique(np.r_[np.arange(1, 30), 2 ** np.arange(11)])
    for backward in (False, True):
        by_rows = model.task_s(tiles, 200_000, HEADS, backward=backward)  # the same last row
        by_keys = model.task_s(100, 100 + rows, HEADS, backward=backward)
        documents = model.task_s(rows, rows, HEADS, backward=backward)
        for seconds in (by_rows, by_keys, documents):
            assert np.all(np.diff(seconds) >= 0) and np.all(seconds > 0)


def test_noise_does_not_make_a_larger_task_cheaper(tmp_path):
    profile = law_profile()
    rng = np.random.default_rng(0)
    rows = tuple(
        r._replace(forward_s=r.forward_s * rng.uniform(0.3, 1))
        if isinstance(r, AttentionRow)
        else r
        for r in profile.rows
    )
    dataclasses.replace(profile, rows=rows).save(tmp_path / "noisy.csv")
    model = from_csv(tmp_path / "noisy.csv", TOY)
    tiles = np.arange(1, 17)
    for keys in range(1088, 6000, 128):  # that a tile visits, on average
        last = keys + (tiles - 1) * TILE // 2
        assert np.all(np.diff(model.task_s(TILE * tiles, last, HEADS)) >= -1e-18)
    for rows in TILE * tiles:
        assert np.all(np.diff(model.task_s(rows, np.arange(rows, 9000, 64), HEADS)) >= -1e-18)


def test_servers_sum_their_tasks(tmp_path):
    """Whatever the order of servers; tasks that go on where another ends are one."""
    model = law_model(tmp_path)
    tasks = np.array(
        [
            [0, 0, 512, 0, 512, 0, 1], [1, 128, 384, 0, 384, 0, 1], [1, 384, 640, 0, 640, 1, 1],
            [2, 0, 128, 0, 128, 1, 3], [2, 256, 512, 128, 512, 1, 3], [2, 512, 640, 0, 640, 1, 3],
        ]
    )  # fmt: skip
    seconds = model.server_s(tasks, 5, HEADS)
    one = [law(*count_tiles(0, 512, 0, 512, TILE, 0)), law(*count_tiles(128, 640, 0, 640, TILE, 0))]
    three = [
        law(*count_tiles(*bounds, TILE, 0))
        for bounds in ((0, 128, 0, 128), (256, 512, 128, 512), (512, 640, 0, 640))
    ]
    assert seconds == pytest.approx([0, sum(one), 0, sum(three), 0], rel=1e-4)
    assert model.server_s(tasks[:0], 3, HEADS).tolist() == [0, 0, 0]


def test_tiles_that_cut_the_buffer_hold_several_tasks(tmp_path):
    """Thirty-two documents of 16 tokens fill four tiles, of 128 keys each, as one of 512 would not."""
    own, shared = law_model(tmp_path), law_model(tmp_path, tiles_of="buffer")
    tasks = np.array([[d, 0, 16, 0, 16, 0, 0] for d in range(32)])
    one_tile = law(1, 128)
    assert own.server_s(tasks, 1, HEADS)[0] == pytest.approx(32 * one_tile, rel=1e-4)
    # A tile visits the keys of its rows up to the tile's end: 16 of each document.
    assert shared.server_s(tasks, 1, HEADS)[0] == pytest.approx(4 * one_tile, rel=1e-4)
    # 100 rows first, so that the next task's 128 rows lie in two tiles and not in one; the rows of
    # another server do not count.
    tasks = np.array(
        [[2, 0, 50, 0, 50, 0, 0], [0, 0, 100, 0, 100, 0, 1], [1, 1024, 1152, 0, 1152, 0, 1]]
    )
    late = law(*count_tiles(1024, 1152, 0, 1152, TILE, 100))
    want = [one_tile * 50 / 128, one_tile * 100 / 128 + late]
    assert shared.server_s(tasks, 2, HEADS) == pytest.approx(want, rel=1e-4)


def test_buffers_without_work_cost_where_it_was_measured(tmp_path):
    model = law_model(tmp_path)
    tasks = np.array(
        [
            [0, 0, 512, 0, 512, 0, 0],
            [0, 512, 640, 128, 640, 0, 0],
            [3, 256, 384, 128, 384, 1, 1],
            [3, 640, 768, 640, 768, 1, 1],
        ]
    )
    capacities = Capacities("direct", 1000, 3000, (1,), (1,), (1,), (1,), 1, 1, 1)
    # 360 and 744 rows without queries; 3000 - 640 and 3000 - 384 without keys that anybody needs: those
    # between the last two tasks' are no part of the buffer.
    for backward, query_s, key_s in ((False, 1e-9, 2e-9), (True, 2e-9, 6e-9)):
        plain = model.server_s(tasks, 2, HEADS, backward=backward)
        padded = model.server_s(tasks, 2, HEADS, backward=backward, capacities=capacities)
        want = [360 * query_s + 2360 * key_s, 744 * query_s + 2616 * key_s]
        assert padded - plain == pytest.approx(want, rel=1e-4)
    nothing = analytic(TOY)
    assert np.array_equal(
        nothing.server_s(tasks, 2, HEADS), nothing.server_s(tasks, 2, HEADS, capacities=capacities)
    )


def test_products_and_links_of_a_profile(tmp_path):
    model = law_model(tmp_path)
    flops = 2 * 1000 * 250
    assert model.product_s(flops, 250) == pytest.approx(1e-3 + 250e-5, rel=1e-4)
    assert model.product_s(flops, 250, backward=True) == pytest.approx(
        2 * (1e-3 + 250e-5), rel=1e-4
    )
    assert model.product_s(2 * 1000 * 4000, 4000) == pytest.approx(10 * (1e-3 + 400e-5), rel=1e-4)
    within = model.transfer_s(3e9, within_node=True, hops=2)
    assert within == pytest.approx(1 + 2 * 7e-5, rel=1e-4)
    assert model.transfer_s(1e10, within_node=False, hops=1) == pytest.approx(1 + TOY.hop_latency_s)


def tflops(model: CostModel, q_rows, k_rows, *, backward=False) -> float:
    """Causal FLOPs over seconds, summed over the tasks; 2.5 times the forward's FLOPs backward."""
    q, k = np.broadcast_arrays(np.asarray(q_rows, float), np.asarray(k_rows, float))
    flops = 4 * 4 * 128 * (q * k - q * (q - 1) / 2).sum() * (2.5 if backward else 1)
    return flops / model.task_s(q, k, HEADS, backward=backward).sum() / 1e12


def test_published_throughputs_fa2():
    """Figure 5 of arXiv 2510.18121 (H200) and the flash-attention repository's chart (H100)."""
    model = from_csv(shipped("h200_fa2"), H200)
    assert model.label == "derived"
    shards = {16: 40, 32: 80, 64: 155, 128: 285, 256: 295, 512: 305, 1024: 308, 2048: 310}
    for rows, published in shards.items():
        contexts = np.arange(max(rows, 128), 16385, 8)
        assert tflops(model, rows, contexts) == pytest.approx(published, rel=0.08)
    for tokens, published in {512: 191, 1024: 260, 2048: 298, 4096: 319, 16384: 335}.items():
        assert tflops(model, tokens, tokens) == pytest.approx(published, rel=0.05)
    # Half the throughput for shards of half a tile; backward 2.7 to 2.9 times on long documents.
    assert tflops(model, 64, 8192) == pytest.approx(tflops(model, 128, 8192) / 2, rel=0.01)
    for tokens in (16384, 65536, 131072):
        ratio = model.task_s(tokens, tokens, HEADS, backward=True) / model.task_s(
            tokens, tokens, HEADS
        )
        assert 2.7 <= ratio <= 2.9
    # 35 and 104 ms of one window: its documents and layers are not published, the ratio is.
    assert pytest.approx(float(ratio), rel=0.10) == 104 / 35


def test_published_throughputs_fa3():
    model = from_csv(shipped("h200_fa3"), DEVICES["h100"])
    for tokens, published in {512: 292, 1024: 423, 2048: 521, 4096: 579, 16384: 616}.items():
        assert tflops(model, tokens, tokens) == pytest.approx(published, rel=0.08)
    for tokens, published in {4096: 462, 8192: 517, 16384: 562, 32768: 585}.items():
        assert tflops(model, tokens, tokens, backward=True) == pytest.approx(published, rel=0.10)


@pytest.mark.parametrize("name", ["h200_fa2", "h200_fa3"])
def test_published_linear_layers(name):
    """Llama-3-8B, tp 8: 43 to 45 ms forward, 82 to 85 backward, of six layers of 64K tokens (the
    number of layers is inferred: it is not published)."""
    model = from_csv(shipped(name), H200)
    for backward, low, high in ((False, 43, 45), (True, 82, 85)):
        seconds = 6 * model.linear_s(MODELS["llama3-8b"], 65536, 8, backward=backward)
        assert low <= 1e3 * seconds <= high


def test_every_shipped_profile_loads_and_names_its_origin():
    assert {"cpu", "h200_fa2", "h200_fa3"} <= set(shipped_profiles())
    for name in shipped_profiles():
        header = load(shipped(name)).header
        device = header.devices.split()[0]
        assert from_csv(shipped(name), DEVICES[device]).label == header.label
        assert header.notes and header.date and header.hardware
    assert load(shipped("cpu")).header.label == "measured"
    with pytest.raises(ValueError, match="profile must be one of cpu, .*, got 'h300'"):
        shipped("h300")


def test_a_profile_comes_back_from_its_file(tmp_path):
    profile = law_profile(notes=("one", "two: with a colon"))
    profile.save(tmp_path / "p.csv")
    again = load(tmp_path / "p.csv")
    assert again.header == profile.header
    for got, want in zip(again.rows, profile.rows, strict=True):
        assert type(got) is type(want)
        for a, b in zip(got, want, strict=True):
            assert a == (pytest.approx(b, rel=1e-5) if isinstance(b, float) else b)


def replaced(old: str, new: str):
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


def without(words: str):
    """Lines that begin so are left out, and not counted."""

    def change(text: str) -> str:
        lines = text.split("\n")
        kept = [line for line in lines if not line.startswith(words)]
        return recounted("\n".join(kept), len(kept) - len(lines))

    return change


def recounted(text: str, more: int) -> str:
    return re.sub("# rows: ([0-9]+)", lambda m: f"# rows: {int(m[1]) + more}", text)


ROW = "attention,4,1,128,512,1280,"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("# tile_rows: 128\n", ""), "must have a line '# tile_rows: ...', got none"),
        (replaced("# tile_rows: 128", "# tile_rows: many"), "tile_rows must be a whole number above 0, got 'many'"),
        (replaced("label: measured", "label: guessed"), "label must be one of measured, derived, got 'guessed'"),
        (replaced("part,", "kind,"), "must have the columns part,.*, got kind,"),
        (replaced("linear,", "lines,"), "line .*: part must be one of attention, .*, got 'lines'"),
        (replaced(ROW, ROW + "x"), "line 17: forward_s must be a number above 0, got 'x"),
        (replaced(ROW, ROW + "-"), "line 17: forward_s must be a number above 0, got '-"),
        (replaced(ROW, ROW + "nan,1,,,,,,,,\n" + ROW), "must be a number above 0, got 'nan'"),
        (replaced(ROW, "attention,4,1,128,512,1.5,"), "key_rows must be a whole number above 0, got '1.5'"),
        (replaced(",within_node,", ",nowhere,"), "link must be one of within_node, between_nodes, got 'nowhere'"),
        (lambda text: text[: text.index(ROW) + len(ROW)], "a row must have 16 cells, got 7"),
        (without(ROW), "grid .* must be complete, got no task of 512 query_rows and 1280 key_rows"),
        (lambda text: recounted(replaced(ROW, ROW + "1,1,,,,,,,,\n" + ROW)(text), 1), "must be there once, got 1 of"),
        (replaced("# tile_rows: 128", "# tile_rows: 256"), r"query_rows must be multiples of tile_rows \(= 256\)"),
        (replaced("devices: toy cpu", "devices: h200"), "is a profile of h200, but the device is toy"),
        (without("attention"), "must have rows of attention, got none"),
        (lambda text: text[: text.index("linear,")], r"must have the \d+ rows that its header counts, got \d+:"),
        (lambda text: text + ROW + "1,1,,,,,,,,\n", r"must have the \d+ rows that its header counts"),
        (replaced(ROW, ROW + "1e308,1,,,,,,,,\n" + ROW), "forward_s must be from 1e-15 to 1e.15, got '1e308'"),
        (replaced("# rows: ", "# lines: "), "must have a line '# rows: ...', got none"),
        (lambda text: "", "must have a line '# label: ...', got none"),
        (replaced(ROW, '"' + ROW), "line 17: a row must have 16 cells, got 1"),
        (lambda text: text + "\n" * 2**18, "must have at most 262144 lines, and has more"),
    ],
)  # fmt: skip
def test_damaged_profiles_are_refused(tmp_path, change, message):
    path = tmp_path / "damaged.csv"
    law_profile().save(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message) as error:
        from_csv(path, TOY)
    assert "cad-jax profile" in str(error.value)


def test_what_has_no_seconds_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a profile cannot be read from .*nowhere\.csv"):
        from_csv(tmp_path / "nowhere.csv", TOY)
    with pytest.raises(ValueError, match="device cpu has no published peak: .*cad-jax profile"):
        analytic(CPU)
    for bad in (0.0, 1.1, (0.5, -1.0)):
        with pytest.raises(ValueError, match="attention_efficiency must be above 0 and at most 1"):
            analytic(TOY, attention_efficiency=bad)
    path = tmp_path / "no_linear.csv"
    profile = law_profile()
    dataclasses.replace(profile, rows=tuple(profile.of(AttentionRow))).save(path)
    assert from_csv(path, TOY).product_s(6e11, 10) == pytest.approx(1.0)  # 0.6 of the peak
    with pytest.raises(ValueError, match="must have rows of linear layers, since device cpu"):
        from_csv(path, CPU)
