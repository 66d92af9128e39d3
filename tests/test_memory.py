"""Temporary memory of the compiled step: cad against gathering every key, and as the pool grows."""

from experiments.memory import temporary_bytes

TOKENS = 16_384  # per server; documents are two servers' tokens long at most


def test_memory_of_cad() -> None:
    eight = temporary_bytes("cad", 8, TOKENS)
    assert eight <= temporary_bytes("all_gather", 8, TOKENS)
    assert eight <= 1.2 * temporary_bytes("cad", 4, TOKENS)
    assert temporary_bytes("cad", 8, 2 * TOKENS) <= 2.2 * eight
