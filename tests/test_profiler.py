"""What the profiler runs and writes, without looking at a clock."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from rich.console import Console

from cad_jax import profile_command
from cad_jax.attention import varlen
from cad_jax.profiler import SIZES as CHOSEN_SIZES
from cad_jax.profiler import (
    KernelNames,
    Kernels,
    Sizes,
    attention_work,
    collect,
    default_model,
    kernel_names,
    kernel_tile_rows,
    linear_work,
    measurements,
    task_batch,
    transfer_work,
)
from cad_jax.sharding.cost import DEVICES, ModelShape
from cad_jax.sharding.cost_model import from_csv, layer_weights
from cad_jax.sharding.mesh import make_mesh
from cad_jax.sharding.profile_table import AttentionRow, LinearRow, SlackRow, TransferRow
from cad_jax.sharding.tasks import HeadShape
from cad_jax.simulate_args import SimulateArgs
from cad_jax.simulate_report import run
from cad_jax.timing import Work, measure

TINY = ModelShape("tiny", 1, 32, 4, 1, 8, 48, 64)
HEADS = HeadShape(4, 1, 8)
SIZES = Sizes((1, 2), (1, 2, 4), 256, (16, 64), (4096,), 1)


def test_a_batch_holds_equal_causal_tasks_with_keys_of_their_own():
    lo, hi, key_rows = task_batch(3, 7, 4)
    assert lo.shape == hi.shape == (12,)
    first = lo.reshape(4, 3)[:, 0]
    assert np.array_equal(lo.reshape(4, 3), np.repeat(first[:, None], 3, axis=1))
    assert np.array_equal(hi.reshape(4, 3) - first[:, None], [[5, 6, 7]] * 4)
    assert np.all(np.diff(first) >= 7) and hi.max() == key_rows


def test_tiles_of_the_cpu_kernel():
    """512 folded rows over the query heads of a key head."""
    xla = KernelNames("xla", "xla")
    assert kernel_tile_rows(xla, HEADS, "float32") == 128
    assert kernel_tile_rows(xla, HeadShape(8, 4, 64), "bfloat16") == 256
    assert kernel_tile_rows(KernelNames("reference", "xla"), HeadShape(8, 4, 64), "float32") == 128


def test_kernels_are_named_by_direction(monkeypatch):
    assert kernel_names("auto", HEADS, "float32") == ("xla", "xla")
    assert kernel_names("reference", HEADS, "float32") == ("reference", "reference")
    candidates = {"forward": ("reference", "xla"), "backward": ("triton", "xla")}
    monkeypatch.setattr(varlen, "_candidates", candidates.__getitem__)
    mixed = kernel_names("auto", HEADS, "float32")  # head dim 8 is not one of triton's
    assert mixed == ("reference", "xla") and str(mixed) == "reference forward, xla backward"
    assert str(KernelNames("xla", "xla")) == "xla"


def test_attention_work_is_ordinary_numbers():
    lo, hi, key_rows = task_batch(128, 192, 2)
    forward, backward = attention_work(lo, hi, key_rows, HEADS, "float32", Kernels.of("xla"))
    out, lse = forward.prepare()()
    assert out.shape == (256, 4, 8) and lse.shape == (256, 4)
    for gradient in backward.prepare()():
        assert np.all(np.isfinite(gradient)) and np.any(np.asarray(gradient) != 0)


def test_linear_work_is_the_block_and_its_gradients():
    forward, both = linear_work(TINY, 16, "float32")
    x, (q, k, v) = forward.prepare()()
    assert x.shape == (16, 32) and q.shape == (16, 4, 8) and k.shape == v.shape == (16, 1, 8)
    result, ((after, before), dx, d_out) = both.prepare()()
    jax.tree.map(np.testing.assert_array_equal, result, (x, (q, k, v)))
    matrices = (after.output, after.gate_up, after.down, before.qkv)
    assert sum(w.size for w in matrices) == layer_weights(TINY)
    assert dx.shape == x.shape and d_out.shape == (16, 4, 8)
    assert all(np.any(np.asarray(w) != 0) for w in matrices)


@pytest.mark.parametrize("hops", [1, 2])
def test_transfers_are_so_many_collectives(hops):
    work = transfer_work(make_mesh(dp=4, devices=jax.devices()[:4]), hops, 3, 1)
    start = work.prepare()
    assert start().shape == (16, 3, 128)
    assert start.func.lower(*start.args).as_text().count("all_to_all") == hops


def test_works_are_timed_in_turn_and_divided_by_their_parts():
    order = []

    def prepare(name):
        return lambda: lambda: order.append(name)

    works = [Work(prepare("a"), 4), Work(prepare("b"), 1)]
    done = []
    measure(works, 3, lambda: done.append(len(order)))
    assert len(done) == 8 and all(len(w.samples) == 3 for w in works)
    changes = [x for i, x in enumerate(order) if i == 0 or order[i - 1] != x]
    assert changes == ["a", "b"] * 4
    works[0].samples = [4.0, 80.0, 8.0]
    assert works[0].seconds == 2.0


@pytest.fixture(scope="module")
def profile():
    timed = measurements(TINY, "float32", "xla", SIZES)
    works = [w for m in timed for w in m.works]
    for number, work in enumerate(works):
        work.samples = [1e-3 * (number + 1)]
    return works, collect(timed, TINY, "float32", "auto", ("seconds are counted, not measured",))


def test_every_part_has_its_rows(profile, tmp_path):
    works, result = profile
    # Tiles of 128 rows: (queries, keys) with as many keys a tile for one tile of queries and two.
    shapes = [(r.query_rows, r.key_rows) for r in result.of(AttentionRow)]
    assert shapes == [(128, 128), (128, 192), (128, 320), (256, 256), (256, 384)]
    forward_s, backward_s = (w.samples[0] / 2 for w in works[:2])  # two tasks fill 256 rows
    assert result.of(AttentionRow)[0] == (4, 1, 8, 128, 128, forward_s, backward_s)
    assert [(r.query_rows, r.key_rows) for r in result.of(SlackRow)] == [(2048, 128), (128, 2048)]
    linear = result.of(LinearRow)
    assert [(r.weights, r.tokens) for r in linear] == [(layer_weights(TINY), n) for n in (16, 64)]
    assert linear[0].backward_s == pytest.approx(linear[0].forward_s / 10)  # at least
    transfers = {t.transport: t for t in result.of(TransferRow)}
    assert transfers["direct"].wire_bytes == 4096 and transfers["direct"].ranks == 8
    assert transfers["relay"].wire_bytes == 2 * 4096 and transfers["relay"].hops == 2
    header = result.header
    assert (header.kernel, header.tile_rows, header.tiles_of) == ("xla", 128, "buffer")
    assert header.devices == "cpu" and header.jax == jax.__version__ and header.hardware


def test_the_cost_model_reads_what_the_profiler_writes(profile, tmp_path):
    works, result = profile
    result.save(tmp_path / "tiny.csv")
    model = from_csv(tmp_path / "tiny.csv", DEVICES["cpu"])
    assert model.label == "measured"
    assert model.task_s(128, 128, HEADS) == pytest.approx(works[0].samples[0] / 2)
    both_s, forward_s = (works[i].samples[0] for i in (15, 14))
    assert model.linear_s(TINY, 16, 1) == pytest.approx(forward_s)
    assert both_s > forward_s


def test_a_quick_cpu_profile_can_be_simulated(tmp_path):
    """The grid of `cad-jax profile --quick` with counted seconds, read by `cad-jax simulate`."""
    model, dtype = default_model()
    timed = measurements(model, dtype, "auto", CHOSEN_SIZES["cpu", True])
    for measurement in timed:
        for number, work in enumerate(measurement.works):
            work.samples = [1e-3 * work.parts * (number + 1)]
    path = tmp_path / "quick.csv"
    collect(timed, model, dtype, "auto", ("seconds are counted, not measured",)).save(path)
    results = run(
        SimulateArgs(
            ranks=4, tokens_per_rank=4096, workload="mixed", longest_tokens=8192, model="llama3-1b",
            tp=1, device="cpu", profile=str(path), steps=1, tolerance=0.05,
        ),
        Console(file=io.StringIO(), width=120),
    )  # fmt: skip
    assert len(results) == 6 and all(0 < r.step_s < np.inf for r in results)
    assert all(np.isnan(r.figures()["mfu"]) for r in results)


def test_the_table_shows_every_part(profile):
    shown = profile_command.table(profile[1])
    parts = list(shown.columns[0].cells)
    assert parts == [
        "attention forward", "attention backward", "linear forward", "linear backward",
        "transport direct", "transport relay",
    ]  # fmt: skip
    row = dataclasses.replace(profile[1], rows=(AttentionRow(4, 1, 8, 128, 128, 1e-3, 1e-3),))
    rates = [column._cells[0] for column in profile_command.table(row).columns[1:3]]
    assert rates == [f"{4 * 4 * 8 * (128 * 129 / 2) / 1e-3 / 1e9:.3g} GFLOP/s"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "fast"], "--kernel must be one of auto, .*, got 'fast'"),
        (["--cpu-devices", "0"], "--cpu-devices must be at least 1 and at most 256, got 0"),
        (["--model", "llama9"], "model must be one of .*, got 'llama9'"),
        (["--out", "nowhere/at/all.csv"], "make the folder nowhere/at first"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(arguments, message, capsys):
    assert profile_command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("cad-jax profile: ")
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)
