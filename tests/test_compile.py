"""Programs compiled for GPUs on this machine's CPU: what the report says of schedules that are known, and what the
command line refuses.

What compiles needs jax's CUDA 12 plugin (extra aot; `make test-aot`) and is skipped where that is absent.
"""

import dataclasses
import importlib.util
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cad_jax.__main__ import main
from cad_jax.compile_command import take_strategies
from cad_jax.compile_report import duration, largest_tokens, run, size, with_strategy
from cad_jax.compiled_step import Report, attention_seconds, lower_step, sample_documents
from cad_jax.config import AttentionConfig, MeshConfig, RunConfig, TrainingConfig
from cad_jax.model_config import LlamaConfig
from cad_jax.overlap import Prediction, Timeline
from cad_jax.recipes import llama3_8b_h200
from cad_jax.sharding.clusters import parse_topology
from cad_jax.sharding.cost import DEVICES
from cad_jax.sharding.cost_model import FAST_LINEAR_EFFICIENCY
from cad_jax.thunks import load_dump
from cad_jax.topologies import PLUGINS, compile_only_mesh
from cad_jax.xla_options import GPU_OPTIONS, WITHOUT_GPU, check_options, gpu_options, parse_option
from tests.compile_cases import ROWS, TRIPS, WIDTH, mixed, pingpong, ragged

needs_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(p) for p in PLUGINS), reason="no CUDA plugin"
)
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
TOPOLOGY = parse_topology("h200:2x8")
OPTIONS = {**GPU_OPTIONS, **WITHOUT_GPU}
TINY = RunConfig(
    name="tiny",
    folder="unused",
    model=LlamaConfig(
        vocab_size=256,
        embedding_dim=256,
        num_layers=3,
        num_q_heads=8,
        num_kv_heads=4,
        head_dim=64,
        ffn_dim=512,
    ),
    mesh=MeshConfig(dp=4, tp=2),
    attention=AttentionConfig(capacity_plans=5),
    training=TrainingConfig(tokens_per_microbatch=4 * 1024, microbatches=2),
)


def compiled_collectives(lower, topology=TOPOLOGY, options=OPTIONS, **arguments):
    shape = {"pp": topology.nodes, "dp": 4, "tp": topology.devices_per_node // 4}
    lowered = lower(compile_only_mesh(topology, **shape), **arguments)
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={**options, "xla_dump_to": folder})
        program = load_dump(Path(folder), compiled.as_text(), topology.devices)
    return Timeline(program, topology, {"forward": 1.0}).predict().collectives


@needs_compiler
def test_tied_exchanges_run_beside_products() -> None:
    exchanges = compiled_collectives(pingpong, tied=True)
    assert [c.where for c in exchanges] == [
        f"exchange/{name}_fwd/hop1/all_to_all"
        for name in ("dispatch", "dispatch", "combine", "combine")
    ]
    product_s = 2 * ROWS * WIDTH**2 / (FAST_LINEAR_EFFICIENCY * DEVICES["h200"].peak_flops)
    exchange_s = ROWS * WIDTH * 2 / 2 / 50e9 + DEVICES["h200"].hop_latency_s  # half leaves the node
    for exchange in exchanges:
        assert exchange.asynchronous and exchange.beside_compute and exchange.is_exchange
        assert exchange.bytes == ROWS * WIDTH * 2
        assert (exchange.in_loop, exchange.executions, exchange.phase) == (True, TRIPS, "forward")
        assert exchange.predicted_s == pytest.approx(exchange_s)
        assert exchange.hidden_fraction == pytest.approx(product_s / exchange_s)


@needs_compiler
def test_untied_exchanges_do_not() -> None:
    exchanges = compiled_collectives(pingpong, tied=False)
    assert len(exchanges) == 4
    assert sum(not c.asynchronous for c in exchanges) >= 2
    assert not any(c.beside_compute for c in exchanges)
    assert all(c.hidden_fraction < 0.1 for c in exchanges)


@needs_compiler
def test_each_kind_is_found() -> None:
    found = {c.kind: c for c in compiled_collectives(mixed)}
    assert sorted(found) == ["all-gather", "all-reduce", "all-to-all", "collective-permute"]
    send = found["collective-permute"]
    assert send.asynchronous and send.between[-1] == "attention:forward_kernel"
    assert send.hidden_fraction == 1.0  # beside a second of attention
    assert send.predicted_s == pytest.approx(ROWS * WIDTH * 2 / 50e9, rel=0.2)
    assert not found["all-gather"].asynchronous  # in a branch, where nothing could run beside it


@needs_compiler
def test_ragged_exchanges_and_their_metadata() -> None:
    options = {**OPTIONS, **gpu_options({"ragged"})}
    found = compiled_collectives(ragged, parse_topology("h200:1x8"), options)
    exchanges = [c for c in found if c.is_exchange]
    assert [(c.kind, c.phase) for c in exchanges] == [
        ("ragged-all-to-all", "forward"),
        ("ragged-all-to-all", "backward"),
    ]
    assert all(c.bytes == ROWS * WIDTH * 2 and c.executions == TRIPS for c in exchanges)
    assert exchanges[0].asynchronous and exchanges[0].beside_compute
    metadata = [c for c in found if c.is_metadata]
    assert metadata and {c.bytes for c in metadata} == {4 * 4}  # an int32 a rank
    assert len(exchanges) + len(metadata) == len(found)


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "lengths.txt"
    lengths = np.random.default_rng(0).integers(1, 1500, 200)
    path.write_text("\n".join(map(str, [4096, *lengths])))
    return path


@needs_compiler
def test_the_real_step(documents, tmp_path) -> None:
    topology = parse_topology("h100:1x8")
    output = tmp_path / "report.json"
    (report,) = run(
        TINY, topology, ["cad"], lengths=documents, json_path=output, console=Console(quiet=True)
    )
    values = json.loads(output.read_text())
    assert values["topology"] == "h100:1x8" and values["recipe"] == "tiny"
    assert values["device_bytes"] == topology.chip.memory_bytes
    assert values["compile_s"] > 0
    # float32 parameters and two moments: norms whole on every device, the rest cut in dp x tp = 8 parts.
    model = TINY.model
    norms = (2 * model.num_layers + 1) * model.embedding_dim
    state = 3 * 4 * (norms + (model.num_parameters - norms) / 8)
    assert state <= values["argument_bytes"] < state + 2e6  # plan arrays and tokens besides
    assert values["peak_bytes"] >= values["argument_bytes"] + values["temp_bytes"]
    collectives = values["collectives"]
    expected = {"name", "kind", "where", "phase", "in_loop", "asynchronous", "between", "bytes"}
    expected |= {"predicted_s", "hidden_fraction"}
    assert all(set(c) >= expected for c in collectives)
    exchanges = [c for c in collectives if c["where"].startswith("exchange/")]
    names = [c["where"].split("/")[1] for c in exchanges]
    hops = len(names) // 4
    assert sorted(names) == sorted(
        hops * ["combine_bwd", "combine_fwd", "dispatch_bwd", "dispatch_fwd"]
    )
    for exchange in exchanges:
        assert (
            exchange["in_loop"] and exchange["executions"] == model.num_layers * 2
        )  # microbatches
        assert (
            exchange["phase"]
            == {"fwd": "forward", "bwd": "backward"}[
                exchange["where"].split("/")[1].rpartition("_")[2]
            ]
        )
        assert 0.0 <= exchange["hidden_fraction"] <= 1.0
    assert {c["phase"] for c in collectives if c["kind"] == "reduce-scatter"} == {"backward"}
    assert report.prediction.exposed_s == pytest.approx(
        sum(c["exposed_s"] * c["executions"] for c in collectives)
    )


def worst_pairs(lengths: np.ndarray, ranks: int, tokens: int) -> int:
    """(query, key) pairs of the busiest of `ranks` ranks of `tokens` tokens that all stay at home."""
    positions = np.concatenate([np.arange(length) for length in lengths])
    per_rank = np.zeros(ranks, np.int64)
    np.add.at(per_rank, np.arange(len(positions)) // tokens, positions + 1)
    return int(per_rank.max())


AT_HOME = dataclasses.replace(TINY, attention=AttentionConfig("home", capacity_plans=5))
FLOPS_OF_A_PAIR = 4 * 2 * 2 * 64  # 4 heads of a device, two products of 2 x head_dim


@needs_compiler
def test_attention_is_counted_by_the_plans(documents) -> None:
    """At home every rank attends its own tokens: count the worst one's pairs token by token."""
    sampled = sample_documents(AT_HOME, documents)
    step = lower_step(AT_HOME, parse_topology("h200:1x8"), sampled, "triton")
    pairs = sum(worst_pairs(lengths, 4, 1024) for (lengths,) in sampled.samples[:2])
    assert step.attention_flops == 3 * pairs * FLOPS_OF_A_PAIR  # 3 layers


@needs_compiler
def test_attention_of_a_pipeline_is_counted_by_ticks(documents) -> None:
    """Two stages, two microbatches of two nano-batches: ticks 0; 1 and 0; 1, two layers each."""
    config = dataclasses.replace(
        AT_HOME,
        model=dataclasses.replace(TINY.model, num_layers=4),
        mesh=MeshConfig(pp=2, dp=2, tp=2),
        training=TrainingConfig(tokens_per_microbatch=2 * 8192, microbatches=2, overlap="pingpong"),
    )
    sampled = sample_documents(config, documents)
    step = lower_step(config, parse_topology("h200:1x8"), sampled, "triton")
    first, second = (
        np.array([worst_pairs(nano, 2, 4096) for nano in m]) for m in sampled.samples[:2]
    )
    ticks = [first, np.maximum(first, second), second]
    assert step.attention_flops == 2 * sum(map(sum, ticks)) * FLOPS_OF_A_PAIR


def test_attention_seconds() -> None:
    seconds = attention_seconds(10**15, "triton", DEVICES["h200"])
    assert seconds["forward"] == pytest.approx(1e15 / (0.42 * 989.4e12))
    assert seconds["backward"] == pytest.approx(2.5e15 / (0.35 * 989.4e12))


def test_documents_are_reshuffled_for_every_plan(documents) -> None:
    sampled = sample_documents(TINY, documents)
    assert len(sampled.samples) == 5 and sampled.max_tokens == 4096
    assert len({tuple(lengths.tolist()) for (lengths,) in sampled.samples}) == 5
    known = set(map(int, documents.read_text().split()))
    for (lengths,) in sampled.samples:
        assert set(lengths.tolist()) <= known
        assert 0.9 * 4096 < lengths.sum() <= 4096
    again = sample_documents(TINY, documents)
    assert str(sampled) == str(again)


def test_documents_that_repeat_within_a_microbatch_are_said_to(documents, tmp_path) -> None:
    assert sample_documents(TINY, documents).repetition is None
    path = tmp_path / "few.txt"
    path.write_text("1000\n24\n")
    said = sample_documents(TINY, path).repetition
    assert said is not None and said.startswith(f"{path} holds 1,024 tokens")
    assert "the 4,096 of a microbatch: every document comes 4.00 times in each" in said


def test_nano_batches_are_halves(documents) -> None:
    training = TrainingConfig(tokens_per_microbatch=8192, overlap="pingpong")
    sampled = sample_documents(dataclasses.replace(TINY, training=training), documents)
    for ping, pong in sampled.samples:
        assert all(0.9 * 4096 < half.sum() <= 4096 for half in (ping, pong))


def report(tokens: int, peak_bytes: int) -> Report:
    nothing = Prediction([], 0.0, 0.0, 0.0)
    sizes = {"argument_bytes": 0, "temp_bytes": 0, "peak_bytes": peak_bytes, "compile_s": 0.0}
    return Report(TOPOLOGY, "r", "cad", "pingpong", "triton", tokens, "", nothing, **sizes)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (3e-10, "0.3 ns"), (4.567e-7, "457 ns"), (9.996e-4, "1 ms"), (0.0123, "12.3 ms"),
     (0.9999, "1 s"), (1234.5, "1230 s")],
)  # fmt: skip
def test_durations_have_the_unit_they_are_read_in(seconds, text) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30 - 1, "1024 MiB"), (2**30, "1 GiB"),
     (151_397_597_184, "141 GiB"), (5000 * 2**30, "5000 GiB")],
)  # fmt: skip
def test_sizes_have_the_unit_they_are_read_in(count, text) -> None:
    assert size(count) == text


def test_largest_tokens() -> None:
    """0.8 x 151,397,597,184 bytes of an H200, 1e9 of them taken whatever the tokens, 1e6 a token."""
    fits = (0.8 * 151_397_597_184 - 1e9) / 1e6
    found = largest_tokens(report(1000, 2 * 10**9), report(2000, 3 * 10**9))
    assert found is not None and fits - 128 < found <= fits and found % 128 == 0
    assert largest_tokens(report(1000, 10**12), report(2000, 15 * 10**11)) == 0
    assert largest_tokens(report(1000, 10**9), report(2000, 10**9)) is None


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--topology", "v100:2x8"], "must be one of h100, h200, b200, got 'v100'"),
        (["--topology", "h200:2x8"], "dp 4 x tp 2 are 8, h200:2x8 has 16; .*h200:1x8"),
        (["--topology", "h200:1x8", "--json", "/no/such/folder/x"], "make the folder"),
        (["--topology", "h200:1x8", "--attention", "cad,best"], "with commas between, got 'best'"),
        (["--topology", "h200:1x8", "--attention", "cad,cad"], "each strategy once, got cad,cad"),
        (["--topology", "h200:1x8", "--xla", "fast"], "NAME=VALUE.*got 'fast'"),
    ],
)
def test_refused_before_anything_compiles(arguments, complaint, capsys) -> None:
    assert main(["compile", "debug_cpu8", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("cad-jax compile: ")
    assert re.search(complaint, message)


def test_a_missing_compiler_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["compile", "debug_cpu8", "--topology", "h200:1x8"]) == 2
    assert "pip install -c constraints.txt -e '.[aot]'" in capsys.readouterr().err


def test_documents_that_fit_no_batch_are_refused(tmp_path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("100\n4097\n")
    with pytest.raises(
        ValueError,
        match=r"fit a microbatch .*\(4096 tokens\).* has 4097: raise .*or use shorter documents",
    ):
        sample_documents(TINY, path)
    training = TrainingConfig(tokens_per_microbatch=8192, overlap="pingpong")
    with pytest.raises(ValueError, match=r"fit half a microbatch .*\(4096 tokens\).*single_stream"):
        sample_documents(dataclasses.replace(TINY, training=training), path)
    path.write_text("0\n0\n")
    with pytest.raises(ValueError, match="holds empty documents only"):
        sample_documents(TINY, path)


def test_recipes_without_data_are_told_of_lengths() -> None:
    with pytest.raises(ValueError, match="or give document lengths alone with --lengths FILE"):
        sample_documents(llama3_8b_h200(), None)


def test_baselines_are_compared_as_a_single_stream() -> None:
    training = TrainingConfig(tokens_per_microbatch=8192, overlap="pingpong")
    config = dataclasses.replace(TINY, training=training)
    assert with_strategy(config, "home").training.overlap == "pingpong"
    ring = with_strategy(config, "ring")
    assert (ring.attention.strategy, ring.training.overlap) == ("ring", "single_stream")
    ring.check()


def test_baselines_are_compared_without_what_is_of_cad() -> None:
    told = AttentionConfig(
        planner="a:b", server_speeds=(1.0, 2.0), node=2, profile="p.csv", key_ranges=2,
        placement="searched",
    )  # fmt: skip
    config = dataclasses.replace(TINY, attention=told)
    assert with_strategy(config, "cad").attention == told
    plain = AttentionConfig(strategy="ring")
    assert with_strategy(config, "ring").attention == plain
    assert with_strategy(config, "home").attention == AttentionConfig(strategy="home")
    aligned = dataclasses.replace(TINY, attention=AttentionConfig(placement="aligned"))
    assert with_strategy(aligned, "home").attention.placement == "aligned"


def test_strategies_on_the_command_line() -> None:
    assert take_strategies(["r", "--attention", "cad,ring", "--x"]) == (
        ["r", "--x"],
        ("cad", "ring"),
    )
    assert take_strategies(["--attention.strategy=native"]) == ([], ("native",))
    assert take_strategies(["r"]) == (["r"], ())


def test_options_are_checked_against_the_installed_xla() -> None:
    check_options({**OPTIONS, **gpu_options({"ragged"})})
    assert gpu_options({"relay", None}) == GPU_OPTIONS
    with pytest.raises(
        ValueError, match=r"XLA of jaxlib .* option xla_gpu_enable_async_collectives=True"
    ):
        check_options({**OPTIONS, "xla_gpu_enable_async_collectives": True})  # removed years ago
    with pytest.raises(ValueError, match="overlap_limit='two'.*not a valid int32"):
        check_options({"xla_gpu_experimental_parallel_collective_overlap_limit": "two"})
    assert parse_option("xla_a=true") == ("xla_a", True)
    assert parse_option("--xla_b=-3") == ("xla_b", -3)
    assert parse_option("xla_c=a=b") == ("xla_c", "a=b")
