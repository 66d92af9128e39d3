"""The step's loss and every gradient are exact, however it runs: a pairwise cover of meshes, numbers of
microbatches, schedules, overlap, strategies and dtypes against a float64 model of one device."""

import itertools

import numpy as np
import pytest

from tests.pipeline.step_cases import FACTORS, NANO_TOKENS, Case, lengths_of, measure, product
from tests.strategy_cases import pairwise_cover

CASES = product()
# Ping-pong compiles longest: there is no more of it than the pairs need.
COVER = pairwise_cover(sorted(CASES, key=lambda case: case.overlap == "pingpong"))


@pytest.mark.parametrize("case", COVER, ids=str)
def test_matches_float64(case: Case) -> None:
    measured = measure(case)
    assert measured.fraction_of_allowed <= 1, measured


def test_cover_holds_every_pair() -> None:
    def pairs(cases):
        places = itertools.combinations(range(len(FACTORS)), 2)
        return {(i, j, case[i], case[j]) for i, j in places for case in cases}

    assert pairs(COVER) == pairs(CASES)
    assert len(COVER) < 30
    for place, values in enumerate(FACTORS.values()):
        assert {case[place] for case in COVER} == set(values)


def test_documents_fit_nano_batches_and_are_of_every_kind() -> None:
    for nano_tokens in NANO_TOKENS.values():
        nanos = [nano for number in range(7) for nano in lengths_of(nano_tokens, number)]
        lengths = np.concatenate(nanos)
        assert max(nano.sum() for nano in nanos) == max(lengths) == nano_tokens
        assert {0, 1} <= set(lengths.tolist()) and any((nano <= 1).all() for nano in nanos)
