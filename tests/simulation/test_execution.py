"""Layers of a stage against sums and maxima written down by hand."""

from dataclasses import replace

import numpy as np
import pytest

from cad_jax.simulation.execution import Stage
from cad_jax.simulation.timeline import Timeline
from cad_jax.simulation.work import AttentionWork, Exchange, LinearWork

NAMES = ("dispatch", "combine", "dispatch_backward", "combine_backward")


def work(rng: np.random.Generator, ranks: int, hops: int, latency: float = 0.0) -> AttentionWork:
    def exchange() -> Exchange:
        return Exchange(
            tuple(np.full(ranks, latency + rng.uniform(0, 3)) for _ in range(hops)), np.ones(ranks)
        )

    forward, backward = rng.uniform(0, 4, (2, ranks))
    out, home, out_back, home_back = (exchange() for _ in NAMES)
    return AttentionWork(forward, backward, out, home, out_back, home_back, ranks, 1, 1)


def linear(rng: np.random.Generator, ranks: int, again: float) -> LinearWork:
    before, after = rng.uniform(0, 1, 2)
    return LinearWork(np.full(ranks, before), np.full(ranks, after), 2.0, again)


def seconds(nanos, lins, layers: int, mode, phase: str) -> float:
    ranks = len(nanos[0].forward_s)
    line = Timeline(ranks)
    getattr(Stage(line, 0, np.zeros(ranks)), phase)(nanos, lins, layers, mode)
    accounts = line.accounts()
    total = accounts.linear_s + accounts.attention_s + accounts.exposed_s + accounts.waiting_s
    np.testing.assert_allclose(total, line.makespan_s)
    return line.makespan_s


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
def test_pingpong_forward_is_a_sum_of_maxima(hops: int, layers: int) -> None:
    rng = np.random.default_rng(hops)
    ping, pong = (work(rng, 1, hops) for _ in range(2))
    lin = linear(rng, 1, 0.0)

    def beside(exchange: Exchange, compute: float) -> float:
        return sum(max(float(hop[0]), compute / hops) for hop in exchange.hops)

    before, after = float(lin.before_s[0]), float(lin.after_s[0])
    expected = before + beside(ping.dispatch, before)
    for layer in range(layers):
        block = after if layer == layers - 1 else before + after
        expected += beside(pong.dispatch, float(ping.forward_s[0]))
        expected += beside(ping.combine, float(pong.forward_s[0]))
        expected += beside(pong.combine, block)
        expected += block if layer == layers - 1 else beside(ping.dispatch, block)
    assert seconds([ping, pong], [lin] * 2, layers, "pingpong", "forward") == pytest.approx(
        expected
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("again", [0.0, 1.0])
def test_pingpong_backward_is_a_sum_of_maxima(again: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ping, pong = (work(rng, 1, 1) for _ in range(2))
    lin, layers = linear(rng, 1, again), 3

    def beside(exchange: Exchange, compute: float) -> float:
        return max(float(exchange.hops[0][0]), compute)

    before, after = float(lin.before_s[0]), float(lin.after_s[0])
    top = after * (2 + again)
    expected = top + (top if again else beside(ping.dispatch_backward, top))
    for layer in (2, 1, 0):
        block = before + after if layer else before
        if again:
            expected += block * again + beside(ping.dispatch_backward, block * again)
        expected += beside(pong.dispatch_backward, float(ping.backward_s[0]))
        expected += beside(ping.combine_backward, float(pong.backward_s[0]))
        expected += beside(pong.combine_backward, 2 * block)
        mirrored = not again and layer
        expected += beside(ping.dispatch_backward, 2 * block) if mirrored else 2 * block
    assert seconds([ping, pong], [lin] * 2, layers, "pingpong", "backward") == pytest.approx(
        expected
    )


def test_single_stream_is_a_plain_sum() -> None:
    rng = np.random.default_rng(2)
    nanos, lin = [work(rng, 1, 2) for _ in range(2)], linear(rng, 1, 0.5)
    exchanges = {
        name: sum(float(h[0]) for n in nanos for h in getattr(n, name).hops) for name in NAMES
    }
    block = float(lin.block_s[0])
    forward = 2 * block + sum(float(n.forward_s[0]) for n in nanos)
    forward += exchanges["dispatch"] + exchanges["combine"]
    backward = 2 * 2.5 * block + sum(float(n.backward_s[0]) for n in nanos)
    backward += exchanges["dispatch_backward"] + exchanges["combine_backward"]
    assert seconds(nanos, [lin] * 2, 3, "single_stream", "forward") == pytest.approx(3 * forward)
    assert seconds(nanos, [lin] * 2, 3, "single_stream", "backward") == pytest.approx(3 * backward)


def test_signal_is_fastest_and_single_stream_slowest() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        nanos = [work(rng, 4, int(rng.integers(1, 3))) for _ in range(1)]
        nanos.append(
            replace(nanos[0], forward_s=rng.uniform(0, 4, 4), backward_s=rng.uniform(0, 4, 4))
        )
        lins = [linear(rng, 4, float(rng.integers(2)))] * 2
        free = [
            replace(
                n,
                **{
                    x: Exchange(tuple(0 * h for h in getattr(n, x).hops), np.ones(4)) for x in NAMES
                },
            )
            for n in nanos
        ]
        for phase in ("forward", "backward"):
            signal = seconds(free, lins, 3, "pingpong", phase)
            pingpong = seconds(nanos, lins, 3, "pingpong", phase)
            assert signal <= pingpong + 1e-9
            assert pingpong <= seconds(nanos, lins, 3, "single_stream", phase) + 1e-9


def test_a_ring_hides_each_pass_behind_its_own_step() -> None:
    steps = tuple(np.array([x]) for x in (2.0, 1.0, 4.0))
    nothing = Exchange((), np.zeros(1))
    hops = Exchange((np.array([1.0]), np.array([3.0])), np.zeros(1))
    ring = AttentionWork(
        np.array([7.0]), np.array([7.0]), hops, nothing, hops, nothing, 1, 1, 1, steps, steps
    )
    lin = LinearWork(np.zeros(1), np.zeros(1), 2.0, 0.0)
    assert seconds([ring], [lin], 1, "single_stream", "forward") == 2 + 3 + 4
