"""Speed of the blockwise kernel on one CPU core, as a fraction of the core's own matmul rate.

    python experiments/kernel_speed.py [--rounds 9]

Pins itself to one core, which leaves XLA one thread, and counts CPU seconds. Each round times a 2048^3 float32 matmul, a forward and a
backward pass one after the other, so that a busy machine slows all three; a round's fractions are
(causal FLOPs / s) / (matmul FLOPs / s), and the table gives their median and quartiles. Causal FLOPs:
4 H D per (query, key) pair forward, 2.5 times that backward. Writes results/kernel_speed_cpu.csv.
"""

import argparse
import csv
import datetime
import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cad_jax.attention.base import KeyRanges
from cad_jax.attention.varlen import varlen_attention, varlen_attention_bwd

RESULTS = Path(__file__).parent / "results" / "kernel_speed_cpu.csv"
MATMUL_SIZE = 2048


class Case(NamedTuple):
    kernel: str
    lengths: tuple[int, ...]
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"

    @property
    def flops(self) -> float:
        """Causal FLOPs of a forward pass."""
        pairs = sum(n * (n + 1) / 2 for n in self.lengths)
        return 4 * self.num_q_heads * self.head_dim * pairs


CASES = (
    Case("xla", (4096,)),
    Case("xla", (4096,), dtype="bfloat16"),
    Case("xla", (4096,), head_dim=128),
    Case("xla", (4096,), num_kv_heads=8),
    Case("xla", (1024,) * 4),
    Case("xla", (256,) * 16),
    Case("reference", (2048,)),
)


def seconds(run, *operands) -> float:
    start = time.process_time()
    jax.block_until_ready(run(*operands))
    return time.process_time() - start


def prepared(case: Case):
    """Compiled (forward, operands) and (backward, operands)."""
    rng = np.random.default_rng(0)
    tokens = sum(case.lengths)

    def draw(heads):
        return jnp.asarray(rng.normal(size=(tokens, heads, case.head_dim)), case.dtype)

    q, k, v, d_out = (
        draw(n) for n in (case.num_q_heads, case.num_kv_heads, case.num_kv_heads, case.num_q_heads)
    )
    starts = np.cumsum((0, *case.lengths[:-1]), dtype=np.int32)
    k_lo = jnp.asarray(np.repeat(starts, case.lengths))
    ranges = KeyRanges(k_lo, jnp.arange(1, tokens + 1, dtype=jnp.int32))
    forward = jax.jit(lambda *x: varlen_attention(*x, kernel=case.kernel))
    backward = jax.jit(lambda *x: varlen_attention_bwd(*x, kernel=case.kernel))
    out, lse = forward(q, k, v, ranges)
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    return (forward, (q, k, v, ranges)), (backward, (q, k, v, d_out, lse, delta, ranges))


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median and quartiles over rounds of the forward and the forward-plus-backward fraction."""
    matrix = jnp.asarray(np.random.default_rng(1).normal(size=[MATMUL_SIZE] * 2), jnp.float32)
    matmul = jax.jit(jnp.dot)
    (forward, forward_operands), (backward, backward_operands) = prepared(case)
    rows = []
    for _ in range(rounds + 1):
        matmul_s = seconds(matmul, matrix, matrix)
        forward_s = seconds(forward, *forward_operands)
        backward_s = seconds(backward, *backward_operands)
        rate = 2 * MATMUL_SIZE**3 / matmul_s
        both = 3.5 * case.flops / (forward_s + backward_s)
        rows.append((case.flops / forward_s / rate, both / rate, rate / 1e9, forward_s, backward_s))
    low, median, high = np.quantile(np.asarray(rows[1:]), (0.25, 0.5, 0.75), axis=0)
    return {
        "forward_fraction": median[0],
        "forward_fraction_q25": low[0],
        "forward_fraction_q75": high[0],
        "forward_backward_fraction": median[1],
        "forward_backward_fraction_q25": low[1],
        "forward_backward_fraction_q75": high[1],
        "matmul_gflops_per_s": median[2],
        "forward_s": median[3],
        "backward_s": median[4],
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [x for x in info.read_text().splitlines() if x.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0].split(":")[1].strip() if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    os.sched_setaffinity(
        0, {min(os.sched_getaffinity(0))}
    )  # before XLA counts cores for its threads
    rows = []
    for case in CASES:
        lengths = f"{case.lengths[0]} x {len(case.lengths)}"
        heads = f"{case.num_q_heads}/{case.num_kv_heads}"
        figures = {name: f"{value:.4g}" for name, value in measure(case, rounds).items()}
        rows.append(
            {
                "date": datetime.date.today().isoformat(),
                "hardware": f"1 core of {processor()}",
                "jax": jax.__version__,
                "rounds": rounds,
                "kernel": case.kernel,
                "document_tokens": lengths,
                "q_heads/kv_heads": heads,
                "head_dim": case.head_dim,
                "dtype": case.dtype,
                **figures,
            }
        )
        print(
            f"{case.kernel:10} {lengths:9} {heads} D {case.head_dim:3} {case.dtype:8}  forward "
            f"{figures['forward_fraction']}  forward+backward {figures['forward_backward_fraction']}",
            flush=True,
        )
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {RESULTS}")


if __name__ == "__main__":
    main()
