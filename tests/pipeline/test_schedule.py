"""Schedules against a simulation of what depends on what: it knows the rules of a pipeline and the
order of execution, and nothing of how tables are made."""

import itertools

import numpy as np
import pytest

from cad_jax.pipeline.schedule import IDLE, Schedule, interleaved, one_f_one_b

CASES = [
    (stages, microbatches, virtual_stages)
    for stages, microbatches, virtual_stages in itertools.product(
        range(1, 7), range(1, 15), (1, 2, 3)
    )
    if virtual_stages == 1 or microbatches % stages == 0
]


def executed(schedule: Schedule):
    """The rows of both tables in the order the executor walks them: (phase, tick, rows)."""
    rows = {
        phase: [
            list(zip(*(c[t].tolist() for c in table), strict=True)) for t in range(len(table[0]))
        ]
        for phase, table in (("F", schedule.forward), ("B", schedule.backward))
    }
    walk = [("F", tick) for tick in range(schedule.warmup_ticks)]
    for i in range(schedule.steady_ticks):
        walk += [("B", i), ("F", schedule.warmup_ticks + i)]
    walk += [("B", schedule.steady_ticks + i) for i in range(schedule.drain_ticks)]
    return [(phase, tick, rows[phase][tick]) for phase, tick in walk]


def simulate(schedule: Schedule) -> np.ndarray:
    """Runs the tables with labels for activations; returns the peak of inputs held by each stage."""
    stages, chunks = schedule.stages, schedule.virtual_stages
    arrived: dict[str, list] = {p: [None] * stages for p in "FB"}  # sent in the phase's last tick
    stash = [dict() for _ in range(stages)]  # slot -> label
    finished = None  # what the last stage put out in the F tick before
    done: dict[str, set] = {"F": set(), "B": set()}
    peak, walk = np.zeros(stages, int), executed(schedule)
    for event, (phase, tick, row) in enumerate(walk):
        sent: list = [None] * stages
        if phase == "F":
            finished = None
        for stage, (microbatch, chunk, slot) in enumerate(row):
            if microbatch == IDLE:
                assert (chunk, slot) == (0, 0)
                continue
            assert 0 <= chunk < chunks and 0 <= slot < schedule.slots
            unit = (stage, chunk, microbatch)
            depth = chunk * stages + stage  # virtual stages before this one
            assert unit not in done[phase]
            done[phase].add(unit)
            if phase == "F":
                entering = depth == 0
                assert (schedule.embedded[tick] == microbatch) == (stage == 0 and entering)
                want = None if entering else ("x", depth - 1, microbatch)
                assert entering or arrived["F"][stage] == want
                assert slot not in stash[stage], "overwritten before its backward"
                stash[stage][slot] = unit
                sent[(stage + 1) % stages] = ("x", depth, microbatch)
                if depth == stages * chunks - 1:
                    finished, sent[(stage + 1) % stages] = (event, microbatch), None
            else:
                assert stash[stage].pop(slot) == unit
                if depth == stages * chunks - 1:
                    assert schedule.losses[tick] == microbatch
                    assert walk[event - 1][0] == "F" and finished == (event - 1, microbatch)
                else:
                    assert arrived["B"][stage] == ("dx", depth + 1, microbatch)
                if depth == 0:
                    assert schedule.embedding_gradients[tick] == microbatch
                sent[(stage - 1) % stages] = ("dx", depth, microbatch) if depth else None
        arrived[phase] = sent
        peak = np.maximum(peak, [len(held) for held in stash])
    every = set(itertools.product(range(stages), range(chunks), range(schedule.microbatches)))
    assert done["F"] == done["B"] == every and not any(stash)
    return peak


@pytest.mark.parametrize("stages", range(1, 7))
def test_every_schedule_obeys_the_rules_of_a_pipeline(stages):
    for _, microbatches, virtual_stages in (c for c in CASES if c[0] == stages):
        schedule = interleaved(stages, microbatches, virtual_stages)
        peak = simulate(schedule)
        assert schedule.in_flight.tolist() == peak.tolist()
        assert schedule.slots == peak.max()  # no allocation needs fewer
        units = microbatches * virtual_stages
        assert schedule.ticks == units + stages - 1
        assert schedule.bubble == pytest.approx((stages - 1) / (units + stages - 1))
        for helper in (schedule.embedded, schedule.losses, schedule.embedding_gradients):
            assert helper.dtype == np.int32 and helper.shape == (schedule.ticks,)
            assert sorted(helper[helper != IDLE]) == list(range(microbatches))
        for column in (*schedule.forward, *schedule.backward):
            assert column.dtype == np.int32 and column.shape == (schedule.ticks, stages)
        order = [(phase, tick) for phase, tick, _ in executed(schedule)]
        assert schedule.order == order
        assert sorted(order) == sorted((p, t) for p in "FB" for t in range(schedule.ticks))


@pytest.mark.parametrize(("stages", "microbatches"), [c[:2] for c in CASES if c[2] == 1])
def test_phase_aligned_1f1b_is_what_it_says(stages, microbatches):
    schedule = one_f_one_b(stages, microbatches)
    for tick, stage in itertools.product(range(microbatches + stages - 1), range(stages)):
        forward, backward = tick - stage, tick - (stages - 1 - stage)
        for table, microbatch in ((schedule.forward, forward), (schedule.backward, backward)):
            inside = 0 <= microbatch < microbatches
            slot = microbatch % min(microbatches, 2 * stages - 1) if inside else 0
            assert table.microbatch[tick, stage] == (microbatch if inside else IDLE)
            assert table.slot[tick, stage] == slot and table.chunk[tick, stage] == 0
    want = [min(microbatches, 2 * (stages - s) - 1) for s in range(stages)]
    assert schedule.in_flight.tolist() == want
    assert schedule.slots == min(microbatches, 2 * stages - 1)
    assert schedule.ticks == microbatches + stages - 1
    assert schedule.warmup_ticks == schedule.drain_ticks == stages
    assert schedule.steady_ticks == microbatches - 1
    with_chunks = interleaved(stages, microbatches, 1)
    for ours, theirs in zip(with_chunks.forward, schedule.forward, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_interleaved_runs_groups_chunk_by_chunk():
    """P = 2, M = 4, V = 2 by hand: (microbatch, chunk) of both stages in every tick."""
    schedule = interleaved(2, 4, 2)
    units = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    reverse = [(m, 1 - c) for m, c in units]
    idle = (IDLE, 0)
    want = [[*units, idle], [idle, *units]], [[idle, *reverse], [*reverse, idle]]
    for table, stages in zip((schedule.forward, schedule.backward), want, strict=True):
        for stage, column in enumerate(stages):
            got = zip(table.microbatch[:, stage], table.chunk[:, stage], strict=True)
            assert list(got) == column
    assert (schedule.warmup_ticks, schedule.steady_ticks, schedule.drain_ticks) == (4, 5, 4)


def test_more_virtual_stages_idle_less():
    bubbles = [interleaved(4, 8, v).bubble for v in (1, 2, 4)]
    assert bubbles == pytest.approx([3 / 11, 3 / 19, 3 / 35])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 1), "stages must be at least 1, got 0: give the ranks along pp"),
        ((2, 0, 1), "microbatches must be at least 1, got 0"),
        ((2, 4, 0), "virtual_stages must be at least 1, got 0"),
        ((4, 6, 2), r"multiple of stages \(= 4\), got 6: use 8 microbatches, or one virtual stage"),
        ((4, 3, 3), r"multiple of stages \(= 4\), got 3: use 4 microbatches"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        interleaved(*arguments)
