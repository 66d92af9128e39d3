"""Timelines by hand, and where every rank's time goes."""

import numpy as np

from cad_jax.simulation.timeline import Timeline, intervals


def test_two_ranks_by_hand() -> None:
    line = Timeline(2)
    done = line.compute("linear", "a", np.array([2.0, 3.0]), np.zeros(2))
    came = line.collective("x", 1.0, done, group_ranks=2)
    assert came.tolist() == [4.0, 4.0], "a collective starts when the last of its group has come"
    end = line.compute("attention", "b", np.array([1.0, 2.0]), came)
    assert end.tolist() == [5.0, 6.0] and line.makespan_s == 6.0
    accounts = line.accounts()
    assert accounts.linear_s.tolist() == [2.0, 3.0]
    assert accounts.attention_s.tolist() == [1.0, 2.0]
    assert accounts.exposed_s.tolist() == [1.0, 1.0]
    assert accounts.waiting_s.tolist() == [2.0, 0.0]  # 2 to 3, and 5 to 6
    assert accounts.idle_s.tolist() == [3.0, 1.0]


def test_what_overlaps_compute_is_not_exposed() -> None:
    line = Timeline(1)
    line.collective("x", 3.0, np.zeros(1), group_ranks=1)
    line.compute("linear", "a", 2.0, np.zeros(1))
    line.compute("linear", "b", 1.0, np.array([4.0]))
    accounts = line.accounts()
    assert accounts.exposed_s.tolist() == [1.0]  # 2 to 3
    assert accounts.waiting_s.tolist() == [1.0]  # 3 to 4


def test_groups_do_not_wait_for_each_other() -> None:
    line = Timeline(4)
    done = line.compute("linear", "a", np.array([1.0, 2.0, 5.0, 3.0]), np.zeros(4))
    assert line.collective("x", 1.0, done, group_ranks=2).tolist() == [3.0, 3.0, 6.0, 6.0]


def test_streams_run_one_thing_at_a_time() -> None:
    line = Timeline(1)
    zero = np.zeros(1)
    assert line.compute("linear", "a", 2.0, zero).tolist() == [2.0]
    assert line.compute("linear", "b", 2.0, zero).tolist() == [4.0]
    assert line.collective("x", 1.0, zero, group_ranks=1).tolist() == [1.0]
    assert line.collective("y", 1.0, zero, group_ranks=1).tolist() == [2.0]


def test_busy_and_idle_make_the_makespan() -> None:
    """Exposed time against a brute-force sweep over moments, for random programs."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        ranks = int(rng.integers(1, 4)) * 2
        line, ready = Timeline(ranks), np.zeros(ranks)
        for _ in range(int(rng.integers(1, 15))):
            seconds = rng.integers(0, 5, ranks).astype(float)
            after = ready - rng.integers(0, 3)
            if rng.random() < 0.5:
                ready = line.compute(
                    str(rng.choice(["linear", "head", "masked", "attention"])), "", seconds, after
                )
            else:
                came = line.collective(
                    "", seconds, after, group_ranks=int(rng.choice([1, 2, ranks]))
                )
                ready = np.maximum(ready, came) if rng.random() < 0.5 else ready
        makespan, events = line.makespan_s, list(line.events)
        accounts = line.accounts()
        np.testing.assert_allclose(sum(accounts), makespan)
        for rank in range(ranks):
            moments = np.arange(0, makespan) + 0.5  # all times are whole
            busy, network = np.zeros((2, len(moments)), bool)
            for event, start, stop in intervals(events, rank):
                inside = (moments > start) & (moments < stop)
                if event.stream == "compute":
                    assert not (busy & inside).any(), "two computations at once"
                    busy |= inside
                else:
                    network |= inside
            assert accounts.exposed_s[rank] == (network & ~busy).sum()
