"""The ragged exchange's self-test: it passes where the collective does what JAX documents, and finds every way
of not doing it; a run uses ragged only then.

CPU has no ragged all-to-all: a stand-in takes its place, right or broken on purpose.
"""

import dataclasses
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cad_jax import ragged_check
from cad_jax.attention.strategies import make_strategy
from cad_jax.attention_config import AttentionConfig
from cad_jax.launch import launch
from cad_jax.ragged_check import check_platform, find_trouble, proven_strategies
from cad_jax.sharding.capacities import default_capacities
from cad_jax.sharding.mesh import make_mesh
from cad_jax.sharding.tasks import DENSE_TRANSPORTS, HeadShape
from tests.sharding import ragged_double
from tests.tiny_runs import tiny_config, with_changes

HEADS = HeadShape(4, 1, 8)
EXACT = ragged_double.ragged_all_to_all


def last_slice_lost(operand, output, first, sizes, lands_at, arriving, *, axis_name):
    """Of the slices of each peer only the first arrives."""
    peers = lax.axis_size(axis_name)
    once = jnp.arange(len(sizes)) % (len(sizes) // peers) == 0
    kept, came = jnp.where(once, sizes, 0), jnp.where(once, arriving, 0)
    return EXACT(operand, output, first, kept, lands_at, came, axis_name=axis_name)


def offsets_of_the_receiver(operand, output, first, sizes, lands_at, arriving, *, axis_name):
    """output_offsets read as the caller's own, a mistake that was made before."""
    local = jnp.cumsum(arriving) - arriving
    return EXACT(operand, output, first, sizes, local, arriving, axis_name=axis_name)


def one_row_short(operand, output, *vectors, axis_name):
    moved = EXACT(operand, output, *vectors, axis_name=axis_name)
    written = (moved != 0).any(axis=1)
    last = jnp.max(jnp.where(written, jnp.arange(len(written)), -1))
    return jnp.where((jnp.arange(len(written)) == last)[:, None], 0, moved)


def slack_left_as_it_was(operand, output, *vectors, axis_name):
    return EXACT(operand, jnp.full_like(output, 7), *vectors, axis_name=axis_name)


def broken_on_one_rank(operand, output, *vectors, axis_name):
    moved = EXACT(operand, output, *vectors, axis_name=axis_name)
    return jnp.where(lax.axis_index(axis_name) == 3, jnp.roll(moved, 1, axis=0), moved)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 2, 2), jnp.bfloat16), ((1, 4, 1), jnp.float32)], ids=str
)
def test_a_collective_as_documented_passes(shape, dtype, monkeypatch) -> None:
    ragged_double.install(monkeypatch)
    assert find_trouble(make_mesh(*shape), HEADS, dtype) is None


@pytest.mark.parametrize(
    "broken",
    [last_slice_lost, offsets_of_the_receiver, one_row_short, broken_on_one_rank],
)
def test_a_broken_collective_is_found(broken, monkeypatch) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", broken)
    trouble = find_trouble(make_mesh(dp=4), HEADS, jnp.bfloat16)
    assert trouble is not None and trouble.endswith("elements differed from the direct exchange's")


def test_slack_of_a_receive_buffer_is_not_read(monkeypatch) -> None:
    """Every place of a server's buffers takes a row that was sent, or zero: not what lies between."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", slack_left_as_it_was)
    assert find_trouble(make_mesh(dp=4), HEADS, jnp.bfloat16) is None


def test_every_round_counts(monkeypatch) -> None:
    """A program that is wrong at its second run only."""
    ragged_double.install(monkeypatch)
    results = iter([0, 5, 0])
    monkeypatch.setattr(jax, "jit", lambda *_, **__: lambda *_: np.int32(next(results)))
    trouble = find_trouble(make_mesh(dp=2), HEADS, jnp.bfloat16)
    assert trouble == "5 elements differed from the direct exchange's"


def test_a_backend_without_it_is_trouble_and_no_crash() -> None:
    trouble = find_trouble(make_mesh(dp=2), HEADS, jnp.bfloat16)
    assert trouble is not None and trouble.startswith("XLA failed (UNIMPLEMENTED: ")


def test_a_hang_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(ragged_check, "_wrong_elements", lambda *_: time.sleep(30))
    with pytest.raises(ValueError, match=r"must end within 0 s and did not: .*transport relay"):
        find_trouble(make_mesh(dp=2), HEADS, jnp.bfloat16, timeout_s=0.05)


def test_a_hang_in_another_process_is_an_error_here_too(monkeypatch) -> None:
    monkeypatch.setattr(ragged_check, "_wrong_elements", lambda *_: 0)
    monkeypatch.setattr(ragged_check, "together", lambda _: time.sleep(30))
    monkeypatch.setattr(ragged_check, "AGREEMENT_S", 0.05)
    with pytest.raises(ValueError, match=r"must end .* and did not in another process: .*relay"):
        find_trouble(make_mesh(dp=2), HEADS, jnp.bfloat16, timeout_s=0.05)


def settle(transport, trouble, platform="gpu", chosen="ragged", kept=None):
    """(the strategies' transport, candidates of each making, what was said, self-tests run)."""
    made, said, tests = [], [], []

    def make(candidates):
        made.append(tuple(candidates))
        best = chosen if chosen in candidates else candidates[-1]
        asked = best if transport == "auto" else transport
        return SimpleNamespace(transport=asked), None

    def run(*_):
        tests.append(1)
        return trouble

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_check, "find_trouble", run)
        strategy, _ = proven_strategies(
            make,
            mesh=make_mesh(dp=2),
            platform=platform,
            attention=AttentionConfig(transport=transport),
            kept=kept,
            heads=HEADS,
            dtype="bfloat16",
            say=said.append,
        )
    return strategy.transport, made, said, len(tests)


def test_ragged_is_used_only_after_its_self_test() -> None:
    everything = ("direct", "relay", "ragged")
    used, made, said, tests = settle("auto", None)
    assert (used, made, tests) == ("ragged", [everything], 1)
    assert settle("ragged", None)[0] == "ragged"
    used, made, said, tests = settle("auto", "7 elements differed")
    assert (used, made, tests) == ("relay", [everything, DENSE_TRANSPORTS], 1)
    assert said[-1] == "no ragged exchange: 7 elements differed"
    with pytest.raises(
        ValueError, match=r"transport \(=ragged\) must pass .*, and 7 .*; use .* relay"
    ):
        settle("ragged", "7 elements differed")


def test_what_a_run_came_to_before_is_taken_again_where_it_works() -> None:
    used, made, said, tests = settle("auto", None, chosen="relay", kept="ragged")
    assert (used, made, tests) == ("ragged", [("ragged",)], 1)
    used, made, said, tests = settle("auto", "7 elements differed", kept="ragged")
    assert (used, made, tests) == ("relay", [("ragged",), DENSE_TRANSPORTS], 1)
    used, made, said, tests = settle("auto", None, kept="direct")
    assert (used, made, said, tests) == ("direct", [("direct",)], [], 0)
    used, made, said, tests = settle("auto", None, platform="cpu", kept="ragged")
    assert (used, made, tests) == ("relay", [DENSE_TRANSPORTS], 0)
    assert said == ["the run used ragged exchanges, which 'cpu' does not have: choosing anew"]


def test_nobody_tests_what_is_not_used() -> None:
    assert settle("relay", None)[3] == settle("auto", None, chosen="direct")[3] == 0
    used, made, _, tests = settle("auto", None, platform="cpu")
    assert (used, made, tests) == ("relay", [DENSE_TRANSPORTS], 0)


def test_auto_never_takes_ragged_of_itself() -> None:
    """With the lengths of a plan for which ragged sends least; it is taken where it is a candidate."""
    rng = np.random.default_rng(0)
    shape = {"servers": 32, "tokens_per_server": 1024, "heads": HEADS, "tp": 8}
    lengths = [rng.integers(1, 1500, 30) for _ in range(3)]
    dense = make_strategy("cad", sample_lengths=lengths, max_document_tokens=1500, **shape)
    either = make_strategy(
        "cad",
        sample_lengths=lengths,
        max_document_tokens=1500,
        candidates=("direct", "relay", "ragged"),
        **shape,
    )
    assert dense.transport in DENSE_TRANSPORTS and either.transport == "ragged"


def test_a_run_on_cpu_is_refused_before_anything_is_read(tmp_path) -> None:
    config = tiny_config(tmp_path, "/no/such/data/*.txt")
    refusal = r"transport \(=ragged\) needs GPUs: .*'cpu' has no .*; use --attention.transport auto"
    with pytest.raises(ValueError, match=refusal):
        launch(with_changes(config, attention={"transport": "ragged"}))
    capacities = default_capacities(4, 128, HeadShape(2, 1, 8), transport="ragged")
    of_capacities = (
        r"capacities.transport \(=ragged\) needs GPUs: .*; leave attention.capacities out"
    )
    with pytest.raises(ValueError, match=of_capacities):
        launch(with_changes(config, attention={"capacities": capacities}))
    assert not (tmp_path / "run").exists()
    check_platform(AttentionConfig(transport="ragged"), "gpu")
    check_platform(AttentionConfig(), "cpu")


def test_capacities_of_ragged_are_saved_with_a_run(tmp_path) -> None:
    capacities = default_capacities(4, 128, HeadShape(2, 1, 8), transport="ragged")
    config = with_changes(tiny_config(tmp_path, "*.txt"), attention={"capacities": capacities})
    assert config.attention.asked_transport == "ragged"
    assert dataclasses.replace(config.attention, capacities=None).asked_transport == "auto"
