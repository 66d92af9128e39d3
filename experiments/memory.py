"""Temporary memory of the compiled training step, per device, by strategy, servers and tokens.

    python experiments/memory.py [--out experiments/results/memory_cpu.csv]

Compiles the real step on virtual CPU devices and reads XLA's memory analysis: nothing runs. The
documents are long-tailed, at most two servers' tokens long (the ratio of 128K documents to 64K
tokens per server); cad's capacities hold all but one in a thousand of 200 plans of them.
"""

import argparse
import csv
import datetime
from pathlib import Path

import jax
import numpy as np

from cad_jax.attention.strategies import make_strategy
from cad_jax.model_config import LlamaConfig
from cad_jax.optimizer import OptimizerConfig
from cad_jax.sharding.mesh import make_mesh
from cad_jax.train_step import TrainStep

MODEL = LlamaConfig(
    vocab_size=264,
    embedding_dim=256,
    num_layers=2,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=32,
    ffn_dim=768,
    tied_embeddings=True,
    dtype="float32",
)
CASES = (
    ("all_gather", 8, 16_384),
    ("ring", 8, 16_384),
    ("home", 8, 16_384),
    ("cad", 4, 16_384),
    ("cad", 8, 16_384),
    ("cad", 8, 32_768),
)


def sample_lengths(servers: int, tokens_per_server: int, batches: int) -> list[np.ndarray]:
    """Log-normal lengths, at most two servers' tokens each, the last of a batch cut."""
    rng = np.random.default_rng(0)
    total, longest = servers * tokens_per_server, 2 * tokens_per_server
    drawn = []
    for _ in range(batches):
        lengths = rng.lognormal(np.log(tokens_per_server / 10), 1.5, 40 * servers)
        lengths = np.clip(lengths.astype(np.int64), 1, longest)
        ends = np.cumsum(lengths)
        last = int(np.searchsorted(ends, total))
        lengths = lengths[: last + 1]
        lengths[-1] -= max(ends[last] - total, 0)
        drawn.append(lengths)
    return drawn


def temporary_bytes(name: str, servers: int, tokens_per_server: int) -> int:
    """Bytes of temporaries of one device's compiled step."""
    samples = sample_lengths(servers, tokens_per_server, 200)
    strategy = make_strategy(
        name,
        servers=servers,
        tokens_per_server=tokens_per_server,
        heads=MODEL.head_shape(1),
        sample_lengths=samples,
        kernel="xla",
        max_document_tokens=2 * tokens_per_server,
    )
    mesh = make_mesh(dp=servers, devices=jax.devices()[:servers])
    step = TrainStep(MODEL, mesh, strategy, OptimizerConfig())
    arrays = jax.tree.map(lambda x: x[None, None], strategy.prepare(samples[0]).arrays)
    traced = step.trace(1, servers * tokens_per_server, arrays)
    return int(traced.lower().compile().memory_analysis().temp_size_in_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", default="experiments/results/memory_cpu.csv")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    date = datetime.date.today().isoformat()
    rows = [(date, *case, temporary_bytes(*case)) for case in CASES]
    with Path(args.out).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("date", "strategy", "servers", "tokens_per_server", "temporary_bytes"))
        writer.writerows(rows)
    for _, name, servers, tokens, size in rows:
        print(f"{name:>10} {servers} servers x {tokens} tokens: {size / 2**20:8.1f} MiB")


if __name__ == "__main__":
    main()
