"""Dense float64 attention in numpy: what every kernel and strategy is compared with.

Shape letters: CQ query rows, CK key rows, N tokens, H query heads, K key/value heads, G = H / K,
D head dim.
"""

from typing import NamedTuple

import numpy as np


class Attention(NamedTuple):
    """Outputs and gradients, float64; gradients are None where no d_out was given."""

    out: np.ndarray  # [CQ, H, D]
    lse: np.ndarray  # [CQ, H]
    dq: np.ndarray | None = None  # [CQ, H, D]
    dk: np.ndarray | None = None  # [CK, K, D]
    dv: np.ndarray | None = None  # [CK, K, D]


def _as_float64(x) -> np.ndarray:
    """Any float array, bfloat16 included, without loss."""
    return np.asarray(x).astype(np.float64)


def dense_varlen(q, k, v, k_lo, k_hi, d_out=None, scale: float | None = None) -> Attention:
    """Attention where query row r sees key rows [k_lo[r], k_hi[r]); a row without keys has out 0, lse -inf.

    q [CQ, H, D]; k, v [CK, K, D], any float dtype; with d_out [CQ, H, D] also dq, dk, dv. Rows that no range
    touches may hold NaN: they are left out, not multiplied by zero.
    """
    k_lo, k_hi = np.asarray(k_lo), np.asarray(k_hi)
    keys_ix = np.arange(np.shape(k)[0])
    mask = (keys_ix >= k_lo[:, None]) & (keys_ix < k_hi[:, None])
    rows, cols = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    mask = mask[np.ix_(rows, cols)]
    queries = _as_float64(q)[rows]
    keys, values = (_as_float64(x)[cols] for x in (k, v))
    group = queries.shape[1] // keys.shape[1]
    scale = queries.shape[2] ** -0.5 if scale is None else scale
    upstream = None if d_out is None else _as_float64(d_out)[rows]

    out, dq = np.zeros(np.shape(q)), np.zeros(np.shape(q))
    dk, dv = np.zeros(np.shape(k)), np.zeros(np.shape(v))
    lse = np.full(np.shape(q)[:2], -np.inf)
    for head in range(queries.shape[1]) if rows.size else ():
        kv_head = head // group
        scores = queries[:, head] @ keys[:, kv_head].T * scale
        scores = np.where(mask, scores, -np.inf)
        peak = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - peak)
        total = weights.sum(axis=1, keepdims=True)
        weights /= total
        out[rows, head] = weights @ values[:, kv_head]
        lse[rows, head] = (peak + np.log(total))[:, 0]
        if upstream is None:
            continue
        d_weights = upstream[:, head] @ values[:, kv_head].T
        delta = (weights * d_weights).sum(axis=1, keepdims=True)
        d_scores = weights * (d_weights - delta) * scale
        dq[rows, head] = d_scores @ keys[:, kv_head]
        dk[cols, kv_head] += d_scores.T @ queries[:, head]
        dv[cols, kv_head] += weights.T @ upstream[:, head]
    return Attention(out, lse) if upstream is None else Attention(out, lse, dq, dk, dv)


def causal_ranges(lengths, total_rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """k_lo, k_hi (int32 [total_rows]) of whole documents laid end to end; padding rows see nothing."""
    lengths = np.asarray(lengths, np.int64)
    tokens = int(lengths.sum())
    total_rows = tokens if total_rows is None else total_rows
    k_lo, k_hi = np.zeros(total_rows, np.int32), np.zeros(total_rows, np.int32)
    k_lo[:tokens] = np.repeat(np.cumsum(lengths) - lengths, lengths)
    k_hi[:tokens] = np.arange(1, tokens + 1)
    return k_lo, k_hi


def causal_documents(q, k, v, lengths, d_out=None) -> Attention:
    """Causal attention within each document of a step; q [N, H, D], k, v [N, K, D], padding last.

    Document by document, so memory follows the longest one. Padding gets zeros and lse -inf.
    """
    out, dq = np.zeros(np.shape(q)), np.zeros(np.shape(q))
    dk, dv = np.zeros(np.shape(k)), np.zeros(np.shape(v))
    lse = np.full(np.shape(q)[:2], -np.inf)
    start = 0
    for length in (int(n) for n in lengths):
        part = slice(start, start + length)
        start += length
        upstream = None if d_out is None else np.asarray(d_out)[part]
        one = dense_varlen(
            np.asarray(q)[part], np.asarray(k)[part], np.asarray(v)[part],
            *causal_ranges([length]), d_out=upstream,
        )  # fmt: skip
        out[part], lse[part] = one.out, one.lse
        if upstream is not None:
            dq[part], dk[part], dv[part] = one.dq, one.dk, one.dv
    return Attention(out, lse) if d_out is None else Attention(out, lse, dq, dk, dv)


def relative_error(actual, expected) -> float:
    """Frobenius norm of the difference over that of `expected`; 0 where both are zero."""
    expected = _as_float64(expected)
    difference = np.linalg.norm((_as_float64(actual) - expected).ravel())
    norm = np.linalg.norm(expected.ravel())
    return float(difference / norm) if norm else float(difference)
