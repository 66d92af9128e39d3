"""Profiles of two classes of attention kernels on H200, derived from published throughputs.

    python experiments/h200_profiles.py

A task is given seconds per task, per tile of 128 query rows and per key that a tile visits (all per query head), none
negative, by least squares of relative errors over the published points below. Prints published and fitted throughput
of every point and writes cad_jax/sharding/profiles/h200_{fa2,fa3}.csv. Derived: nothing here was
measured by this project.
"""

from itertools import combinations
from typing import NamedTuple

import numpy as np

from cad_jax.sharding.attention_grid import tiled_shape
from cad_jax.sharding.cost import DEVICES, attention_flops, model_shape
from cad_jax.sharding.cost_model import BACKWARD_FLOPS, PROFILES_DIR, layer_weights
from cad_jax.sharding.profile_table import AttentionRow, LinearRow, Profile, ProfileHeader
from cad_jax.sharding.tasks import TILE_ROWS, HeadShape, causal_pairs

ONE_HEAD = HeadShape(1, 1, 128)
HEADS = HeadShape(4, 1, 128)  # of one device, Llama-3-8B with tp 8
QUERY_ROWS = [128 << i for i in range(10)]  # to 65,536
DOCUMENTS = [128 << i for i in range(11)]  # to 131,072: the longest task with the same keys a tile


class Point(NamedTuple):
    """A published throughput; q_rows and k_rows: int [n], tasks whose mean it is."""

    source: str
    q_rows: np.ndarray
    k_rows: np.ndarray
    tflops_s: float

    @property
    def flops(self) -> float:
        pairs = causal_pairs(self.k_rows - self.q_rows, self.k_rows, 0, self.k_rows)
        return attention_flops(ONE_HEAD, 1) * float(np.mean(pairs))

    @property
    def terms(self) -> np.ndarray:
        """Tasks, tiles and keys that tiles visit."""
        shape = tiled_shape(
            self.k_rows - self.q_rows, self.k_rows, 0 * self.k_rows, self.k_rows, TILE_ROWS
        )
        tiles = shape.rows / TILE_ROWS
        return np.array([1.0, tiles.mean(), (tiles * shape.keys).mean()])


def whole(source: str, points: dict[int, float]) -> list[Point]:
    """Documents of one length."""
    return [Point(source, np.array([n]), np.array([n]), t) for n, t in points.items()]


def shards(source: str, points: dict[int, float]) -> list[Point]:
    """Shards of so many queries with contexts drawn evenly from 128 (or all queries) to 16K keys."""
    keys = {q: np.arange(max(q, 128), 16385, 8) for q in points}
    return [Point(source, np.full(len(keys[q]), q), keys[q], t) for q, t in points.items()]


SHARDS = "arXiv 2510.18121, figure 5: FlashAttention-2 forward on H200, 4 query heads and 1 key head, D 128"
BY_LENGTH = "flash-attention repository, forward causal fp16 D 128 on H100, 16K tokens a batch"
GQA = "MagiAttention's charts (read by eye, 2 to 3%), causal bf16 D 128 on H100, heads 64:8"
FORWARD = {
    "fa2": shards(
        SHARDS, {16: 40, 32: 80, 64: 155, 128: 285, 256: 295, 512: 305, 1024: 308, 2048: 310}
    )
    + whole(BY_LENGTH, {512: 191, 1024: 260, 2048: 298, 4096: 319, 8192: 333, 16384: 335}),
    "fa3": whole(BY_LENGTH, {512: 292, 1024: 423, 2048: 521, 4096: 579, 8192: 602, 16384: 616})
    + whole(GQA, {4096: 662, 8192: 657, 16384: 672, 32768: 680}),
}
# Forward and backward of the same chart: their ratio counts, so that two machines do not mix.
BOTH_WAYS = {
    "fa2": {4096: (328, 266), 8192: (351, 302), 16384: (363, 322), 32768: (366, 330)},
    "fa3": {4096: (662, 462), 8192: (657, 517), 16384: (672, 562), 32768: (680, 585)},
}
LINEAR_NOTE = (
    "linear layers: 0.5 of the peak forward (arXiv 2510.18121, appendix A), backward 1.9 times "
    "the forward's seconds (43 to 45 and 82 to 85 ms in one window of its repository's measurements)"
)
LINEAR_EFFICIENCY, LINEAR_BACKWARD = 0.5, 1.9


def fit(points: list[Point], seconds: np.ndarray, used: tuple[int, ...] = (0, 1, 2)) -> np.ndarray:
    """Seconds per task, tile and visited key, none negative, least squares of relative errors; those
    not `used` are 0.
    """
    terms = np.array([p.terms for p in points]) / seconds[:, None]
    best, least = np.zeros(3), np.inf
    for count in range(1, len(used) + 1):
        for kept in map(list, combinations(used, count)):
            found = np.zeros(3)
            found[kept] = np.linalg.lstsq(terms[:, kept], np.ones(len(points)), rcond=None)[0]
            error = float(((terms @ found - 1) ** 2).sum())
            if found.min() >= 0 and error < least:
                best, least = found, error
    return best


def derive(kernel: str) -> Profile:
    """The profile of one class."""
    points = FORWARD[kernel]
    forward = fit(points, np.array([p.flops / (1e12 * p.tflops_s) for p in points]))
    pairs = whole(GQA, {n: 0.0 for n in BOTH_WAYS[kernel]})
    ratio = np.array([BACKWARD_FLOPS * f / b for f, b in BOTH_WAYS[kernel].values()])
    # No published point is short enough to tell a backward cost per task.
    backward = fit(pairs, np.array([p.terms @ forward for p in pairs]) * ratio, (1, 2))
    for p in points:
        got = p.flops / (p.terms @ forward) / 1e12
        print(
            f"{kernel} forward  {p.q_rows[0]:6} rows  {p.tflops_s:4.0f} published  {got:4.0f} fitted  {p.source}"
        )
    for p, r in zip(pairs, ratio, strict=True):
        got = (p.terms @ backward) / (p.terms @ forward)
        print(
            f"{kernel} backward {p.q_rows[0]:6} rows  {r:4.2f} times the forward published  {got:4.2f} fitted"
        )

    rows: list[AttentionRow | LinearRow] = []
    for q in QUERY_ROWS:
        for n in DOCUMENTS:
            if n >= q:
                keys = (n + q) // 2
                terms = Point("", np.array([q]), np.array([keys]), 0.0).terms
                forward_s, backward_s = (
                    HEADS.num_q_heads * float(terms @ w) for w in (forward, backward)
                )
                rows.append(AttentionRow(*HEADS_CELLS, q, keys, forward_s, backward_s))
    weights, tokens = layer_weights(model_shape("llama3-8b")), 65536
    peak = DEVICES["h200"].peak_flops
    assert peak is not None
    linear_s = 2 * weights * tokens / (LINEAR_EFFICIENCY * peak)
    rows.append(LinearRow(weights, tokens, linear_s, LINEAR_BACKWARD * linear_s))
    notes = (
        "derived by experiments/h200_profiles.py; nothing here was measured by this project",
        "forward: " + "; ".join(dict.fromkeys(p.source for p in points)),
        f"backward: its ratio to the forward in {GQA}",
        LINEAR_NOTE,
    )
    header = ProfileHeader(
        "derived", "h100 h200", "H200 SXM, published figures of H100 and H200", "2026-11-29", "none",
        kernel, "bfloat16", TILE_ROWS, "task", notes,
    )  # fmt: skip
    return Profile(header, tuple(rows))


HEADS_CELLS = (HEADS.num_q_heads, HEADS.num_kv_heads, HEADS.head_dim)


def main() -> None:
    for kernel in FORWARD:
        path = PROFILES_DIR / f"h200_{kernel}.csv"
        derive(kernel).save(path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
