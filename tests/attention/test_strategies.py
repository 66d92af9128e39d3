"""Strategies on the host: token order, figures, digests, refusals; and what XLA makes of
`native`."""

import importlib.util
import re

import jax
import numpy as np
import pytest
from generators import awkward_lengths, long_tailed_lengths
from strategy_cases import (
    Case,
    divides_keys,
    make_inputs,
    mesh_of,
    run,
    strategy_of,
)

from cad_jax.attention.head_tail import head_tail
from cad_jax.attention.planned import PlannedStrategy
from cad_jax.attention.strategies import STRATEGIES, make_strategy
from cad_jax.sharding.cost import DEVICES, exchange_s
from cad_jax.sharding.cost_model import analytic
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.tasks import HeadShape

HEADS = HeadShape(8, 2, 64)


def documents_of(lengths, tokens: int) -> np.ndarray:
    """Document of each token, -1 for padding."""
    document = np.full(tokens, -1)
    document[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return document


@pytest.mark.parametrize("servers", [1, 2, 3, 8])
def test_head_tail_order(servers: int) -> None:
    tokens_per_server = 151
    tokens = servers * tokens_per_server
    mixes = [long_tailed_lengths(np.random.default_rng(seed), tokens) for seed in range(20)]
    for lengths in [*mixes, *awkward_lengths(tokens).values()]:
        placed = head_tail(lengths, servers, tokens_per_server)
        assert sorted(placed.order) == list(range(tokens))
        ranks = placed.order.reshape(servers, tokens_per_server)
        assert (np.diff(ranks, axis=1) > 0).all()
        document = documents_of(lengths, tokens)
        for token, low, high in zip(*placed, strict=True):
            keys = np.flatnonzero(document[: token + 1] == document[token])
            seen = [] if document[token] < 0 else list(keys)
            assert list(range(low, high)) == seen


def test_head_tail_balances_every_document_by_itself() -> None:
    """Beyond the fewer than 2 S rows that are dealt one by one, all ranks have equal work."""
    lengths, servers = np.array([4000, 96, 1000]), 4
    placed = head_tail(lengths, servers, 1400)
    pairs = (placed.k_hi - placed.k_lo).reshape(servers, -1).sum(axis=1)
    assert pairs.max() - pairs.min() <= sum(2 * lengths)
    home = np.concatenate([np.arange(n) + 1 for n in lengths] + [np.zeros(504, int)])
    assert pairs.sum() == home.sum()
    assert home.reshape(servers, -1).sum(axis=1).max() > 1.5 * pairs.max()


def test_head_tail_refuses_too_many_tokens() -> None:
    with pytest.raises(ValueError, match=r"2 x 8 = 16 tokens\), but they hold 17; pack fewer"):
        head_tail([10, 7], 2, 8)


@pytest.mark.parametrize("name", STRATEGIES)
def test_figures_count_what_really_falls_on_ranks(name: str) -> None:
    servers, tokens_per_server = 4, 512
    lengths = np.array([1500, 0, 30, 200, 7])
    strategy = make_strategy(
        name, servers=servers, tokens_per_server=tokens_per_server, heads=HEADS
    )
    prepared = strategy.prepare(lengths)
    document = documents_of(lengths, servers * tokens_per_server)
    cost = np.concatenate([np.arange(n) + 1 for n in lengths] + [np.zeros((document < 0).sum())])
    home = cost.reshape(servers, -1).sum(axis=1)
    figures = prepared.figures
    assert figures.max_over_mean_home == pytest.approx(home.max() / home.mean())
    assert figures.max_over_mean == pytest.approx(prepared.pairs.max() / prepared.pairs.mean())
    assert prepared.pairs.sum() == home.sum()
    if name in ("home", "native", "native_dense"):
        assert figures.max_over_mean == figures.max_over_mean_home
    else:
        assert figures.max_over_mean < 1.3 < figures.max_over_mean_home
    if name in ("cad", "home"):
        assert 0 < figures.exchange_bytes_mean < figures.exchange_bytes_max < figures.wire_bytes
        assert max(figures.capacity_used.values()) <= 1
    else:
        # Three other ranks' keys and values, bfloat16.
        gathered = 3 * tokens_per_server * 2 * HEADS.num_kv_heads * HEADS.head_dim * 2
        assert figures[3:6] == (gathered, gathered, gathered)
    assert prepared.digest == strategy.prepare(lengths).digest
    assert prepared.digest != strategy.prepare(lengths[::-1]).digest


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_host_may_build_its_own_ranks_alone(name: str) -> None:
    strategy = make_strategy(name, servers=4, tokens_per_server=512, heads=HEADS)
    whole, part = (strategy.prepare(np.array([1500, 40]), ranks) for ranks in (None, [1, 3]))
    for x, y in zip(jax.tree.leaves(whole.arrays), jax.tree.leaves(part.arrays), strict=True):
        np.testing.assert_array_equal(x[[1, 3]], y)
    assert part.digest == whole.digest


@pytest.mark.parametrize("name", ["cad", "home"])
def test_capacities_from_samples(name: str) -> None:
    shape = {"servers": 4, "tokens_per_server": 512, "heads": HEADS, "max_document_tokens": 1500}
    sample = [np.array([1500, 30, 200]), np.array([800, 900, 7])]
    roomy = make_strategy(name, **shape)
    measured = make_strategy(name, sample_lengths=sample, **shape)
    assert (
        measured.prepare(sample[0]).figures.wire_bytes
        <= roomy.prepare(sample[0]).figures.wire_bytes
    )
    for lengths in sample:
        assert measured.prepare(lengths).figures.fallback_tasks == 0


def test_each_transport_divides_keys_its_own_way() -> None:
    """And the choice between transports knows what each would send of its own plans."""
    lengths = np.array([100_000, 3000, 20_000])
    shape = dict(servers=16, tokens_per_server=8192, heads=HeadShape(32, 8, 128), key_ranges=8)
    shape |= dict(max_document_tokens=100_000, sample_lengths=[lengths])
    partials, seconds = {}, {}
    for transport in ("relay", "ragged", "auto"):
        strategy = make_strategy(
            "cad", transport=transport, candidates=("relay", "ragged"), **shape
        )
        partials[transport] = strategy.capacities.partials
        assert divides_keys(strategy, lengths) == (partials[transport] > 1)
        pool = strategy.pool
        seconds[transport] = exchange_s(strategy.capacities, pool.heads, 16, pool.device)
    assert partials["ragged"] > 1
    assert seconds["auto"] == min(seconds.values())


def at_home_where_relayed(lengths, **arguments):
    """A planner of one's own, which looks at the transport it plans for."""
    if arguments["capacities"].transport == "relay":
        arguments["tolerance"] = 1.0
    return plan_documents(lengths, **arguments)


@pytest.mark.parametrize(
    "own",
    [
        {"node": 1},
        {"placement": "searched"},
        {"cost_model": analytic(DEVICES["h200"])},
        {"planner": at_home_where_relayed},
    ],
    ids=lambda own: next(iter(own)),
)
def test_a_transport_that_is_kept_has_the_capacities_it_was_chosen_with(own) -> None:
    """Plans that depend on the transport are sampled as a run makes them. First capacities are of another one."""
    mix = np.array([2048, 1024, 512, 200, 200, 64, 64, 64, 64, 1904])
    shape = dict(servers=6, tokens_per_server=1024, heads=HeadShape(8, 2, 128), **own)
    shape |= dict(sample_lengths=[mix], max_document_tokens=2048)
    chosen = make_strategy("cad", candidates=("direct", "relay", "ragged"), **shape)
    kept = make_strategy("cad", candidates=(str(chosen.transport),), **shape)
    assert isinstance(chosen, PlannedStrategy) and isinstance(kept, PlannedStrategy)
    assert chosen.capacities == kept.capacities


def test_refusals() -> None:
    def make(name, **settings):
        return make_strategy(name, servers=2, tokens_per_server=64, heads=HEADS, **settings)

    with pytest.raises(ValueError, match=r"strategy must be one of cad, home, .*, got 'ulysses'"):
        make("ulysses")
    with pytest.raises(ValueError, match=r"kernel must be one of auto, .*, got 'flash'"):
        make("cad", kernel="flash")
    if importlib.util.find_spec("tokamax") is None:
        with pytest.raises(ValueError, match=r"kernel 'tokamax' needs a package .* pip install"):
            make("cad", kernel="tokamax")
    for name, key_ranges in (("home", 2), ("ring", 4), ("cad", 0)):
        with pytest.raises(
            ValueError, match=rf"key_ranges \(= {key_ranges}\) .* got it for {name}"
        ):
            make(name, key_ranges=key_ranges)
    for name, kernel in (("native", "triton"), ("native_dense", "xla")):
        with pytest.raises(ValueError, match=rf"strategy {name} .* use kernel"):
            make(name, kernel=kernel)


def while_bodies(text: str) -> dict[str, list[str]]:
    """Lines of every computation of an HLO module that runs inside a loop."""
    computations, name = {}, ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            computations[name] = []
        elif name:
            computations[name].append(line)
    todo = re.findall(r"(?:body|condition)=%?([\w.\-]+)", text)
    inside = {}
    while todo:
        name = todo.pop()
        if name in computations and name not in inside:
            inside[name] = computations[name]
            todo += re.findall(r"=%?([\w.\-]+)", "\n".join(inside[name]))
    return inside


def test_native_has_no_collective_inside_a_loop() -> None:
    """All ranks take the same number of steps, known beforehand: nothing to agree on along the
    way."""
    case = Case("native", "xla", 4, 2, (4, 2), 16, "float32")
    strategy = strategy_of(case, 128)
    prepared = strategy.prepare(np.array([300, 50, 100]))
    inputs = make_inputs([450], 512, case.heads, case.head_dim, "float32")
    step = run(strategy, mesh_of(case), *case.heads)
    text = step.lower(*inputs, prepared.arrays).compile().as_text()
    collective = re.compile(
        r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
    )
    inside = while_bodies(text)
    assert len(inside) >= 4
    assert not any(collective.search(line) for lines in inside.values() for line in lines)
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) >= 2


def figures_of(name: str, lengths, **settings):
    shape = {"servers": 4, "tokens_per_server": 512, "heads": HEADS}
    return make_strategy(name, **shape, **settings).prepare(np.array(lengths)).figures


@pytest.mark.parametrize("name", ["cad", "ring"])
def test_wire_bytes_count_turning_tokens_into_heads(name: str) -> None:
    """A device of tp 4 holds 128 of a rank's 512 tokens with all 32 query and 8 key heads, bfloat16: q, k and v
    leave for one slice of the heads each, out comes back."""
    plain = figures_of(name, [1500, 0, 30], tp=4)
    turned = figures_of(name, [1500, 0, 30], tp=4, head_axis="tp")
    sent = 128 * (2 * 32 + 2 * 8) * 64 * 2
    assert turned.wire_bytes - plain.wire_bytes == sent
    assert turned._replace(wire_bytes=0, plan_s=0) == plain._replace(wire_bytes=0, plan_s=0)


def test_ragged_figures_are_a_plans_own() -> None:
    """Dense transports put their capacity on the wire, ragged what the plan needs: no more than a rank takes in
    or gives out of q, k, v (dispatch) and of out with its lse (combine)."""
    shape = {"servers": 4, "tokens_per_server": 512, "heads": HEADS}
    for lengths in ([1500, 0, 30], [2048], [200, 200, 200]):
        strategy = make_strategy("cad", transport="ragged", **shape)
        figures = strategy.prepare(np.array(lengths)).figures
        rows = strategy.plan(np.array(lengths)).travelling_rows()
        query = rows.query_rows_in.max() * (8 * 64 * 2 + 8 * 4)
        keys = max(rows.key_rows_in.max(), rows.key_rows_out.max()) * 2 * 2 * 64 * 2
        assert figures.exchange_bytes_max <= figures.wire_bytes <= 2 * query + keys
        assert figures_of("cad", lengths, transport="direct").wire_bytes > figures.wire_bytes
    # At home the third document's 112 keys on rank 0 go to rank 1, which holds its end: nothing else moves.
    home = figures_of("home", [200, 200, 200], transport="ragged")
    assert home.wire_bytes == home.exchange_bytes_max == 112 * 2 * 2 * 64 * 2


def test_ragged_is_described_as_a_bound() -> None:
    shape = {"servers": 4, "tokens_per_server": 512, "heads": HEADS}
    text = make_strategy("cad", transport="ragged", head_axis="tp", tp=4, **shape).describe()
    assert text.startswith("ragged transport: at most ") and "; tokens to heads and back: " in text


def test_exchanges_are_described_in_the_elements_of_the_run() -> None:
    """Padding and latency aside, float32 takes twice the bytes of bfloat16, and twice the seconds."""
    shape = {"servers": 4, "tokens_per_server": 16_384, "heads": HEADS}
    figures = []
    for element_bytes in (2, 4):
        strategy = make_strategy("cad", transport="direct", element_bytes=element_bytes, **shape)
        figures.append(
            [float(x) for x in re.findall(r"([0-9.]+) (?:MiB|ms) ", strategy.describe())]
        )
    (bytes_2, ms_2), (bytes_4, ms_4) = figures
    latency_ms = 2e3 * DEVICES["h200"].hop_latency_s
    assert bytes_4 == pytest.approx(2 * bytes_2, rel=0.05)
    assert ms_4 - latency_ms == pytest.approx(2 * (ms_2 - latency_ms), rel=0.05)
