"""Every strategy computes causal attention within documents, exactly: a pairwise cover of
strategies, transports, kernels, meshes, heads and dtypes against a float64 oracle, per tensor and
per document."""

import itertools

import pytest
from strategy_cases import FACTORS, Case, allowed_errors, measure, pairwise_cover, product

from tests.sharding import ragged_double

CASES = product(devices=8, ragged=True)
COVER = pairwise_cover(CASES)


def check(case: Case) -> None:
    errors = measure(case)
    assert (errors <= allowed_errors(case)).all(), errors


@pytest.mark.parametrize("case", COVER, ids=str)
def test_matches_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if "ragged" in case.way:
        ragged_double.install(monkeypatch)
    check(case)


def test_triton_kernel() -> None:
    check(Case("cad/relay", "triton", 2, 1, (4, 2), 32, "float32"))


def test_cover_holds_every_pair() -> None:
    def pairs(cases):
        places = itertools.combinations(range(len(FACTORS)), 2)
        return {(i, j, case[i], case[j]) for i, j in places for case in cases}

    assert pairs(COVER) == pairs(CASES)
    assert len(COVER) < 50
    assert {value for case in COVER for value in case} == set(itertools.chain(*FACTORS.values()))
