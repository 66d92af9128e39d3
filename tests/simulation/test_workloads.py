"""Length lists and workloads against what was published about them."""

import numpy as np
import pytest

from cad_jax.simulation.lengths import LIST_DOCUMENTS, length_list
from cad_jax.simulation.workloads import batches, prolong_documents
from tests.generators import REAL_LENGTHS_DIR

KIB = 1024
# Published: smallest, mean, median, 90th, 99th percentile, largest, documents of 64 Ki tokens or more.
STATISTICS = {
    "wlb_llm": (1, 3962, 3227, 5784, 26005, 124_913, 528),
    "prolong": (575, 3052, 1913, 6051, 16262, 340_149, 47),
}


@pytest.mark.parametrize("name", LIST_DOCUMENTS)
def test_lists_have_the_published_statistics(name: str) -> None:
    lengths = length_list(name, seed=3)
    assert len(lengths) == LIST_DOCUMENTS[name]
    smallest, mean, p50, p90, p99, largest, long = STATISTICS[name]
    assert (lengths.min(), lengths.max()) == (smallest, largest)
    assert lengths.mean() == pytest.approx(mean, rel=0.005)
    assert np.percentile(lengths, [50, 90, 99]) == pytest.approx([p50, p90, p99], rel=0.005)
    assert (lengths >= 65_536).sum() == pytest.approx(long, rel=0.01)
    if name == "wlb_llm":
        tokens = lengths[lengths >= 65_536].sum() / lengths.sum()
        squares = (lengths[lengths >= 65_536] ** 2).sum() / (lengths**2).sum()
        assert (tokens, squares) == pytest.approx((0.128, 0.67), rel=0.01)


@pytest.mark.parametrize("name", LIST_DOCUMENTS)
def test_lists_follow_the_real_ones(name: str) -> None:
    path = REAL_LENGTHS_DIR / f"{name}_lengths.txt"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    real, ours = np.sort(np.loadtxt(path, dtype=np.int64)), np.sort(length_list(name, 0))
    far = np.abs(ours - real) > np.maximum(0.15 * real, 64)
    assert not far.any(), "the n-th longest document is within 15%, or 64 tokens"
    assert (ours.astype(float) ** 2).sum() == pytest.approx(
        (real.astype(float) ** 2).sum(), rel=0.01
    )


@pytest.mark.parametrize("longest", [128 * KIB, 512 * KIB])
def test_pretrain_is_as_published(longest: int) -> None:
    """Per chunk 9.8 documents, 16 to 17% of chunks one document, sum l^2 / C^2 of 0.47 on average (0.07
    and 1.0 at the 10th and 90th percentile); over eight chunks the worst has 2.19 times the mean.
    """
    every = batches(
        "pretrain", longest_tokens=longest, nano_tokens=longest, nano_batches=8, number=60
    )
    chunks = [chunk for batch in every for chunk in batch]
    assert all(chunk.sum() == longest for chunk in chunks)
    squares = np.array([(chunk.astype(float) ** 2).sum() / longest**2 for chunk in chunks])
    assert np.mean([len(chunk) for chunk in chunks]) == pytest.approx(9.8, rel=0.07)
    assert np.mean([len(chunk) == 1 for chunk in chunks]) == pytest.approx(0.165, abs=0.03)
    assert squares.mean() == pytest.approx(0.47, rel=0.07)
    assert np.percentile(squares, [10, 90]) == pytest.approx([0.07, 1.0], abs=0.02)
    worst = squares.reshape(-1, 8)
    assert (worst.max(1) / worst.mean(1)).mean() == pytest.approx(2.19, rel=0.07)


def test_prolong_is_as_published() -> None:
    """188 long documents first, then 38,942 short ones; some 196 chunks of 128K, 89 of 512K, are all long."""
    for longest, long_chunks in ((128 * KIB, 196), (512 * KIB, 89)):
        documents = prolong_documents(longest, 42)
        first_short = int(np.argmax(documents < 65_536))
        assert first_short == 188 and len(documents) - 188 == 38_942
        assert (documents[188:] < 65_536).all()
        stretched = documents[:188] == longest
        assert stretched.mean() == pytest.approx(0.3, abs=0.1)
        assert documents[:188].sum() / longest == pytest.approx(long_chunks, rel=0.12)


def test_a_shuffled_mix_mixes() -> None:
    every = batches(
        "mixed", longest_tokens=128 * KIB, nano_tokens=1024 * KIB, nano_batches=2, number=10
    )
    documents = np.concatenate([nano for batch in every for nano in batch])
    assert all(nano.sum() == 1024 * KIB for batch in every for nano in batch)
    share = documents[documents == 128 * KIB].sum() / documents.sum()
    assert share == pytest.approx(
        0.59, abs=0.1
    )  # those cut at the end of a nano-batch do not count
    for batch in every:
        long = np.concatenate(batch) >= 64 * KIB
        assert long.any() and not long.all(), "long and short documents in every batch"


def test_one_long_document_among_short_ones() -> None:
    every = batches(
        "one_long", longest_tokens=512 * KIB, nano_tokens=1024 * KIB, nano_batches=2, number=6
    )
    for batch in every:
        lengths, counts = np.unique(np.concatenate(batch), return_counts=True)
        assert lengths.tolist() == [128, 512 * KIB]
        assert counts.tolist() == [(2048 - 512) * KIB // 128, 1]
    assert len({len(batch[0]) for batch in every}) == 2, "in either nano-batch"


def test_the_same_seed_gives_the_same_batches_and_long_runs_go_on() -> None:
    sizes = {"longest_tokens": 64 * KIB, "nano_tokens": 64 * KIB, "nano_batches": 2, "number": 700}
    first, again = (batches("pretrain", **sizes) for _ in range(2))
    assert all(
        np.array_equal(a, b)
        for x, y in zip(first, again, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    other = batches("pretrain", **sizes, seed=1)
    assert not np.array_equal(first[0][0], other[0][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "webtext"}, "workload must be one of pretrain"),
        ({"longest_tokens": 100_000}, "a multiple of 65536"),
        ({"longest_tokens": 64}, "from 128 to nano_tokens"),
        ({"longest_tokens": 1024 * KIB}, "from 128 to nano_tokens"),
        ({"number": 0}, "number must be at least 1"),
    ],
)
def test_bad_sizes_are_refused(changes: dict, message: str) -> None:
    arguments = {
        "workload": "pretrain", "longest_tokens": 128 * KIB, "nano_tokens": 512 * KIB,
        "nano_batches": 2, "number": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        batches(**(arguments | changes))
