"""Rows of a microbatch: targets and positions by brute force, and halves put together again."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cad_jax.packed_batch import PackedBatch, document_positions, next_token_targets

LENGTHS = st.lists(st.integers(0, 9), max_size=12)


def laid(lengths: list[int], tokens: int, first_id: int) -> list[list[int]]:
    """Ids, positions, targets and weights of documents with ascending ids, row by row."""
    rows = []
    for length in lengths:
        for position in range(length):
            token, follows = first_id + len(rows), position + 1 < length
            rows.append((token, position, token + 1 if follows else 0, int(follows)))
    rows += [(0, 0, 0, 0)] * (tokens - sum(lengths))
    return [[row[field] for row in rows] for field in range(4)]


def test_targets_end_with_their_document():
    ids = np.arange(1, 14, dtype=np.int32)
    targets, weights = next_token_targets(ids, np.array([7, 3, 1]))
    assert weights.tolist() == [1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    assert targets.tolist() == [2, 3, 4, 5, 6, 7, 0, 9, 10, 0, 0, 0, 0]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(LENGTHS, st.integers(0, 9))
def test_targets_by_brute_force(lengths, padding):
    tokens = sum(lengths) + padding
    ids = np.arange(100, 100 + tokens, dtype=np.int32)
    targets, weights = next_token_targets(ids, np.asarray(lengths, np.int64))
    assert (
        document_positions(np.asarray(lengths, np.int64), tokens).tolist()
        == (laid(lengths, tokens, 100)[1])
    )
    owner = [document for document, n in enumerate(lengths) for _ in range(n)]
    owner += [-1] * (padding + 1)
    for row in range(tokens):
        has_target = owner[row] >= 0 and owner[row] == owner[row + 1]
        assert (targets[row], weights[row]) == ((ids[row] + 1, 1) if has_target else (0, 0))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(LENGTHS, LENGTHS, st.integers(0, 9))
def test_halves_put_together_lie_end_to_end(ping, pong, padding):
    half = max(sum(ping), sum(pong)) + padding
    parts = [laid(ping, half, 100), laid(pong, half, 100 + sum(ping))]
    fields = [np.asarray(a + b, np.int32) for a, b in zip(*parts, strict=True)]
    lengths = np.asarray(ping + pong, np.int64)
    batch = PackedBatch(
        lengths,
        np.arange(lengths.size),
        np.zeros_like(lengths),
        *fields,
        padding_tokens=2 * half - int(lengths.sum()),
        target_tokens=int(np.maximum(lengths - 1, 0).sum()),
        context_lost_tokens=0,
        nano_lengths=(lengths[: len(ping)], lengths[len(ping) :]),
    )
    whole = batch.undivided()
    found = [whole.ids, whole.positions, whole.targets, whole.weights]
    assert [field.tolist() for field in found] == laid(ping + pong, 2 * half, 100)
    assert [part.tolist() for part in whole.nano_lengths] == [ping + pong]
    assert whole[:3] == batch[:3] and whole[7:10] == batch[7:10]
    again = whole.undivided()
    assert [a.tolist() for a in again[3:7]] == [field.tolist() for field in found]
