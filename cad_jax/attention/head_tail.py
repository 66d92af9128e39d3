"""Head-tail token order (host): of every document's 2S chunks, rank r holds r and 2S-1-r.

Under a causal mask the two chunks of one rank cost the same whatever the rank, so each document is
balanced by itself.
Letters: T tokens per rank, S ranks, N documents.
"""

from typing import NamedTuple

import numpy as np

from cad_jax.sharding.tasks import document_starts


class HeadTail(NamedTuple):
    """Where the tokens of one step live.

    order: int64 [S * T], position in the new order -> global token; rank r holds rows [r T, (r + 1)
    T), ascending.
    k_lo: int64 [S * T], first global token that the query at this position sees.
    k_hi: int64 [S * T], one past the last; equal to k_lo on padding.
    """

    order: np.ndarray
    k_lo: np.ndarray
    k_hi: np.ndarray


def causal_ranges(lengths: np.ndarray, total_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Global key range [lo, hi) of every global token, int64 [total_tokens]; lo = hi on padding."""
    lengths = np.asarray(lengths, np.int64)
    token = np.arange(total_tokens, dtype=np.int64)
    real_tokens = int(lengths.sum())
    lo = token.copy()
    lo[:real_tokens] = np.repeat(document_starts(lengths), lengths)
    hi = np.where(token < real_tokens, token + 1, lo)
    return lo, hi


def rank_pairs(lengths: np.ndarray, order: np.ndarray, servers: int) -> np.ndarray:
    """(query, key) pairs of each rank when it attends all keys of its queries, int64 [S]."""
    lo, hi = causal_ranges(lengths, len(order))
    return (hi - lo)[order].reshape(servers, -1).sum(axis=1)


def head_tail(lengths: np.ndarray, servers: int, tokens_per_server: int) -> HeadTail:
    """Order for documents laid end to end, padding last.

    A document of n tokens gives every rank two chunks of n // 2S tokens. The fewer than 2S tokens
    that remain at its end, short documents and the padding are dealt one by one, rank after rank,
    so every rank holds exactly T tokens. A rank's tokens ascend, so the keys that any query sees
    within any rank's tokens are always contiguous.

    Args:
      lengths: [N] tokens of each document; zero is legal.
      servers: S.
      tokens_per_server: T.

    Raises:
      ValueError: the documents hold more than S * T tokens.
    """
    lengths = np.asarray(lengths, np.int64)
    total_tokens = servers * tokens_per_server
    real_tokens = int(lengths.sum())
    if real_tokens > total_tokens:
        raise ValueError(
            f"documents must fit servers x tokens_per_server (= {servers} x {tokens_per_server} = "
            f"{total_tokens} tokens), but they hold {real_tokens}; pack fewer documents or raise "
            "tokens_per_server"
        )
    starts = document_starts(lengths)
    chunk_tokens = lengths // (2 * servers)
    token = np.arange(total_tokens, dtype=np.int64)
    document = np.full(total_tokens, len(lengths), np.int64)
    document[:real_tokens] = np.repeat(np.arange(len(lengths)), lengths)
    # One more entry for the padding: no chunks, so all of it is dealt.
    start_of = np.append(starts, real_tokens)[document]
    chunk_of = np.append(chunk_tokens, 0)[document]
    position = token - start_of
    even = position < 2 * servers * chunk_of
    chunk = position // np.maximum(chunk_of, 1)
    rank = np.minimum(chunk, 2 * servers - 1 - chunk)
    rank[~even] = np.arange(total_tokens - int(even.sum())) % servers
    order = np.argsort(rank.astype(np.uint16), kind="stable")  # a radix sort for 16 bits
    lo, hi = causal_ranges(lengths, total_tokens)
    return HeadTail(order, lo[order], hi[order])
