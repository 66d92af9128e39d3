"""Packing against a plain simulation of its rules, and cutting against a count token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cad_jax.sharding.packing import cut_documents, cut_pieces, pack, pack_step
from tests.generators import REAL_LENGTH_LISTS, REAL_LENGTHS_DIR

LENGTHS = st.lists(st.integers(0, 60) | st.integers(0, 3), max_size=60)


def simulate(lengths: list[int], tokens: int, window: int) -> list[list[int]]:
    """The rules word by word: an always full window, its oldest document first, then again and
    again the oldest that fits, until none does."""
    arrivals, held, steps = list(range(len(lengths))), [], []
    while arrivals or held:
        placed, room = [], tokens
        while True:
            while arrivals and len(held) < window:
                held.append(arrivals.pop(0))
            fitting = [document for document in held if lengths[document] <= room]
            if not fitting or room == 0:
                break
            placed.append(fitting[0])
            held.remove(fitting[0])
            room -= lengths[fitting[0]]
        steps.append(placed)
    return steps


@settings(derandomize=True, max_examples=300, deadline=None)
@given(LENGTHS, st.integers(60, 100), st.integers(1, 9))
def test_packing_follows_its_rules(lengths, tokens, window):
    steps = list(pack(lengths, tokens, window=window))
    assert [step.keys for step in steps] == simulate(lengths, tokens, window)
    for step in steps:
        assert step.lengths == [lengths[key] for key in step.keys]
        assert sum(step.lengths) + step.padding_tokens == tokens


@settings(derandomize=True, max_examples=300, deadline=None)
@given(LENGTHS, st.integers(60, 100), st.integers(1, 9))
def test_no_document_is_lost_starved_or_cut(lengths, tokens, window):
    unplaced = list(range(len(lengths)))
    for step in pack(lengths, tokens, window=window):
        assert step.keys[0] == unplaced[0], "the oldest goes first"
        for key in step.keys:
            assert unplaced.index(key) < window, "nothing beyond the window is placed"
            unplaced.remove(key)
        in_window = [lengths[key] for key in unplaced[:window]]
        assert step.padding_tokens == 0 or all(step.padding_tokens < n for n in in_window)
    assert not unplaced


def test_arrivals_are_drawn_only_as_the_window_needs_them():
    arrivals = iter(enumerate([5, 5, 5, 1, 1]))
    step, pending = pack_step([], arrivals, 10, window=2)
    assert (step.keys, step.padding_tokens, pending) == ([0, 1], 0, [])
    step, pending = pack_step([(9, 8), (10, 9)], arrivals, 10, window=2)
    assert (step.keys, step.padding_tokens) == ([9], 2), "5 does not fit and fills the window"
    assert pending == [(10, 9), (2, 5)]
    assert list(arrivals) == [(3, 1), (4, 1)]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 15))
def test_split_counts_what_a_count_by_token_finds(lengths, tokens):
    pieces = cut_documents(lengths, tokens, max_context_loss=1.0)
    seen = [[-1] * n for n in lengths]  # per token, where the piece that holds it begins
    for document, start, stop in zip(pieces.documents, pieces.starts, pieces.stops, strict=True):
        assert stop - start <= tokens
        for at in range(start, stop):
            assert seen[document][at] == -1, "a token is in one piece"
            seen[document][at] = start
    assert all(start >= 0 for document in seen for start in document), "and every token is"
    targets = [start for document in seen for start in document[1:]]
    assert pieces.target_tokens == len(targets)
    assert pieces.context_lost_tokens == sum(start > 0 for start in targets)
    assert pieces.document_tokens == sum(lengths) == pieces.lengths.sum()
    assert set(pieces.documents) == set(range(len(lengths))), "empty documents stay"
    whole = [n for n in lengths if n <= tokens]
    assert sorted(whole) == sorted(
        n for d, n in zip(pieces.documents, pieces.lengths, strict=True) if lengths[d] <= tokens
    ), "what fits is not cut"


def test_a_document_of_three_steps_under_each_policy():
    lengths = [4, 30, 0, 10, 1]
    split = cut_documents(lengths, 10, max_context_loss=1.0)
    rows = zip(split.documents, split.starts, split.stops, strict=True)
    assert [tuple(map(int, row)) for row in rows] == [
        (0, 0, 4),
        (1, 0, 10),
        (1, 10, 20),
        (1, 20, 30),
        (2, 0, 0),
        (3, 0, 10),
        (4, 0, 1),
    ]
    assert (split.target_tokens, split.context_lost_tokens) == (3 + 29 + 9, 20)
    truncated = cut_documents(lengths, 10, long_documents="truncate")
    assert truncated.lengths.tolist() == [4, 10, 0, 10, 1]
    assert (truncated.document_tokens, truncated.truncated_tokens) == (45, 20)
    assert (truncated.target_tokens, truncated.context_lost_tokens) == (41, 0)
    with pytest.raises(ValueError, match=r"1 of 5 documents.*step of 10.*document 1, has 30") as e:
        cut_documents(lengths, 10, long_documents="refuse")
    assert "use more tokens per step, or long_documents='split' or 'truncate'" in str(e.value)
    assert cut_documents([10, 3], 10, long_documents="refuse").lengths.tolist() == [10, 3]


def test_split_is_refused_above_the_allowed_loss_of_context():
    lengths = [100] * 10 + [110]  # 10 of 1099 target tokens lose context
    assert cut_documents(lengths, 100).context_lost_tokens == 10
    lengths = [100] * 10 + [111]  # 11 of 1100: exactly 1%
    assert cut_documents(lengths, 100).context_loss == 0.01
    lengths = [100] * 10 + [112]
    with pytest.raises(ValueError, match=r"max_context_loss=1\.00%.*12 of 1101 target tokens"):
        cut_documents(lengths, 100)
    assert cut_documents(lengths, 100, max_context_loss=0.02).context_lost_tokens == 12


@pytest.mark.parametrize(
    ("lengths", "tokens", "text"),
    [
        ([3, -1], 10, "document 1 has -1: correct it"),
        ([3.5], 10, "float64.*pass tokens per document"),
        ([[1, 2]], 10, r"shape \(1, 2\)"),
        ([3], 0, "tokens_per_step must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(lengths, tokens, text):
    with pytest.raises(ValueError, match=text):
        cut_documents(lengths, tokens)
    with pytest.raises(ValueError, match=text):
        list(pack(lengths, tokens))


def test_other_bad_arguments_are_named():
    with pytest.raises(ValueError, match="window must hold at least 1 document, got 0"):
        list(pack([1], 10, window=0))
    with pytest.raises(ValueError, match="piece 1 has 11: cut the documents first"):
        list(pack([1, 11], 10))
    with pytest.raises(ValueError, match="one of split, truncate, refuse, got 'drop'"):
        cut_documents([1], 10, long_documents="drop")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_piece_tokens must be at least 1, got 0"):
        cut_pieces([1], 0)


@pytest.mark.skipif(not REAL_LENGTHS_DIR.is_dir(), reason="the real length lists are not here")
@pytest.mark.parametrize("name", REAL_LENGTH_LISTS)
def test_real_lists_are_packed_almost_without_padding(name):
    lengths = np.loadtxt(REAL_LENGTHS_DIR / f"{name}.txt", dtype=np.int64)
    steps = list(pack(lengths, 8 * 65536))
    assert sorted(key for step in steps for key in step.keys) == list(range(lengths.size))
    assert sum(step.padding_tokens for step in steps[:-1]) < 0.002 * (len(steps) - 1) * 8 * 65536
