"""Named causes, bytes of an element and buffers' empty rows, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from cad_jax.sharding.capacities import default_capacities
from cad_jax.sharding.cost import DEVICES, model_shape
from cad_jax.sharding.cost_model import analytic, from_csv, shipped
from cad_jax.sharding.planner import plan_documents
from cad_jax.sharding.required import required_capacities
from cad_jax.sharding.routing import wire_bytes
from cad_jax.sharding.tasks import HeadShape
from cad_jax.simulation import strategies
from cad_jax.simulation.causes import CAUSES, with_causes
from cad_jax.simulation.setting import Setting
from cad_jax.simulation.step import pooled_works
from cad_jax.simulation.strategies import Pool, planned_work
from cad_jax.simulation.work import Wire
from experiments.figures.common import published_costs
from experiments.figures.window import BOTH_ON, ROW, VARIANTS, heavy, kernel_checks, measured

TOKENS, RANKS = 65_536, 8
DOCUMENTS = np.full(64, 8192)


def setting(model: str = "llama3-8b") -> Setting:
    return Setting(model_shape(model), analytic(DEVICES["h200"]), RANKS, all_remote=True)


@pytest.mark.parametrize(("model", "times"), [("llama3-8b", 1), ("llama-34b", 2)])
def test_copies_are_the_published_milliseconds_of_a_window(model: str, times: int) -> None:
    # Two nano-batches of 64 Ki tokens, tp 8: 5 ms forward and 6 ms backward; 34B has twice the heads.
    def window(at: Setting) -> np.ndarray:
        (work,), _ = pooled_works(
            at, [[DOCUMENTS]], strategy="published", tokens=TOKENS, tolerance=0.1
        )
        return 2e3 * np.array([work.forward_s, work.backward_s])

    added = window(with_causes(setting(model), ("copies",))) - window(setting(model))
    np.testing.assert_allclose(added, times * np.array([[5.0] * RANKS, [6.0] * RANKS]), rtol=1e-6)


def test_slow_gathers_slow_gathers_alone() -> None:
    base = setting()
    slow = with_causes(base, ("slow_gathers",))
    gather, exact = (
        [f(w.wire(RANKS)) for w in (base, slow)]
        for f in (lambda w: w.gather_s(1e9), lambda w: w.exact_s(np.ones((2, 8)), np.ones((2, 8))))
    )
    assert gather[1] == pytest.approx(gather[0] / 0.55, rel=1e-3)
    np.testing.assert_array_equal(exact[0], exact[1])


def test_slow_kernels_slow_attention_alone() -> None:
    base = setting()
    slow = with_causes(base, ("slow_kernels",)).costs
    for backward, times in ((False, 1.31), (True, 1.42)):
        of = [c.task_s(8192, 8192, base.heads, backward=backward) for c in (base.costs, slow)]
        assert of[1] == pytest.approx(times * of[0])
    of = [c.linear_s(base.model, TOKENS, 8) for c in (base.costs, slow)]
    assert of[0] == of[1]


def test_causes_add_up_and_unknown_ones_are_refused() -> None:
    both = with_causes(setting(), ("copies", "slow_gathers"))
    assert both.gather_share == 0.55 and min(both.published_copy_byte_s) > 0
    assert with_causes(both, ()) is both
    assert all(cause.source for cause in CAUSES.values())
    with pytest.raises(ValueError, match=r"one of copies, .*got 'magic'"):
        with_causes(setting(), ("magic",))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="once each, got slow_kernels slow_kernels: leave out"):
        with_causes(setting(), ("slow_kernels", "slow_kernels"))


@pytest.mark.parametrize("transport", ["direct", "relay", "ragged"])
def test_wider_elements_put_more_on_the_wire(transport: strategies.Transport) -> None:
    heads = HeadShape(4, 1, 128)

    def sent(element_bytes: int) -> np.ndarray:
        wire = Wire(analytic(DEVICES["h200"]), 4, 8, element_bytes=element_bytes)
        pool = Pool(wire, 2048, heads, 8192)
        plan = strategies.plan(np.array([6000, 1000, 1192]), pool, 0.0)
        work = planned_work(plan, pool, transport)
        return np.array([work.dispatch.bytes, work.combine_backward.bytes])  # no float32 in these

    np.testing.assert_allclose(sent(4), 2 * sent(2))


@pytest.mark.parametrize(
    ("transport", "key_ranges"), [("direct", 1), ("direct", 4), ("relay", 1), ("relay", 4)]
)
def test_padded_exchanges_put_on_the_wire_what_the_transports_do(transport, key_ranges) -> None:
    """All four exchanges against `routing.wire_bytes`, which counts a rank's block for itself as well."""
    heads, servers = HeadShape(4, 4, 128), 8
    pool = Pool(Wire(analytic(DEVICES["h200"]), servers, 8), 8192, heads, 8 * 8192)
    plan = plan_documents(
        np.array([60_000, 5536]), servers=servers, tokens_per_server=8192, num_q_heads=4,
        num_kv_heads=4, head_dim=128, tolerance=0.05, transport="ragged", key_ranges=key_ranges,
    )  # fmt: skip
    needed = required_capacities(plan, transport)
    assert (needed.partials > 1) == (key_ranges > 1)
    work = planned_work(plan, pool, transport)
    exchanges = work.dispatch, work.combine, work.dispatch_backward, work.combine_backward
    for exchange, sent in zip(exchanges, wire_bytes(needed, servers, heads), strict=True):
        np.testing.assert_allclose(exchange.bytes, sent * (servers - 1) / servers)
        assert min(float(hop.min()) for hop in exchange.hops) > DEVICES["h200"].hop_latency_s


def test_gathered_keys_count_their_bytes() -> None:
    heads = HeadShape(4, 1, 128)
    pools = [
        Pool(Wire(analytic(DEVICES["h200"]), 4, 8, element_bytes=b), 2048, heads, 8192)
        for b in (2, 4)
    ]
    sent = [
        strategies.gathered_work(np.array([8192]), p, gather_again=True).dispatch.bytes
        for p in pools
    ]
    np.testing.assert_allclose(sent[0], 3 * 2048 * 2 * 128 * 2)
    np.testing.assert_allclose(sent[1], 2 * sent[0])


def test_empty_rows_of_a_run_s_buffers_take_time_where_a_profile_measured_it() -> None:
    costs = from_csv(shipped("cpu"), DEVICES["cpu"])
    heads = costs.grids[0].heads
    wire = Wire(costs, 2, 1)
    pool = Pool(wire, 2048, heads, 4096)
    plan = strategies.plan(np.full(8, 512), pool, 0.1)
    roomy = default_capacities(2, 2048, heads, 4096, "direct")
    larger = replace(roomy, query_rows=roomy.query_rows + 1000, key_rows=roomy.key_rows + 3000)
    tight, loose = (planned_work(plan, pool, "direct", c) for c in (roomy, larger))
    query_s, key_s = costs.grids[0].slack_s.T
    for at, name in enumerate(("forward_s", "backward_s")):
        added = getattr(loose, name) - getattr(tight, name)
        np.testing.assert_allclose(added, 1000 * query_s[at] + 3000 * key_s[at])
    assert (query_s > 0).all()


def test_the_published_window_is_within_10_percent_with_its_causes_switched_on() -> None:
    base = ROW.setting(published_costs())
    points, steps = measured(with_causes(base, BOTH_ON), heavy(base, 3), "", [])
    mean = {name: float(np.mean(values)) for name, values in points.items()}
    for name, low, high in (
        ("attention forward", 35, 35), ("attention backward", 104, 104), ("copies forward", 5, 5),
        ("copies backward", 6, 6), ("linear forward", 43, 45), ("linear backward", 82, 85),
        ("all-gathers forward", 20, 26), ("all-gathers backward", 20, 20),
    ):  # fmt: skip
        assert 0.9 * low <= mean[name] <= 1.1 * high, (name, mean[name])
    assert sum(steps["wlb cp8"]) / sum(steps["pingpong"]) == pytest.approx(1.13, rel=0.1)


def test_other_measurements_of_the_published_system_say_that_its_kernel_is_not_slow() -> None:
    base = ROW.setting(published_costs())
    assert VARIANTS["slow kernels"][0] == ("slow_kernels",)
    steps = {"mean batch": {"pingpong": [7.0]}, "slow kernels": {"pingpong": [8.4]}}
    numbers = list(kernel_checks(base, steps))[:2]
    for what, said, fast, slow in numbers:
        assert abs(float(fast) / float(said) - 1) < 0.12 < 0.35 < float(slow) / float(said) - 1, (
            what
        )
