"""Runs small enough for tests: a corpus of a few dozen files and a model of a few thousand weights.

    python -m tests.tiny_runs FOLDER CORPUS STEPS COMPILED

trains one in a process of its own, going on where an earlier one was killed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from cad_jax.checkpoint import CheckpointConfig
from cad_jax.config import AttentionConfig, MeshConfig, RunConfig, TrainingConfig
from cad_jax.data import DataConfig
from cad_jax.launch import launch
from cad_jax.model_config import LlamaConfig
from cad_jax.optimizer import OptimizerConfig
from cad_jax.processes import ProcessConfig, start_devices

WORDS = ("dispatch", "combine", "home", "server", "plan", "task", "tick", "stage", "token", "pool")


@contextmanager
def compile_once(folder: Path) -> Iterator[None]:
    """Programs that were compiled before are read from `folder`, by this and other processes."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> str:
    """Text files with a long tail of lengths, some empty; returns the glob that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for index in range(documents):
        words = int(min(rng.lognormal(2.0, 1.2), 60)) if index % 9 else 0
        text = " ".join(rng.choice(WORDS) for _ in range(words))
        (folder / f"{index:03}.txt").write_text(text)
    return str(folder / "*.txt")


def tiny_config(folder: Path, corpus: str, dp: int = 4, tp: int = 2, **training) -> RunConfig:
    """A run on `corpus` in `folder`/run; `training` overrides TrainingConfig."""
    settings = {"steps": 6, "tokens_per_microbatch": 512, "microbatches": 2} | training
    return RunConfig(
        name="tiny",
        folder=str(folder / "run"),
        model=LlamaConfig(
            vocab_size=264,
            embedding_dim=32,
            num_layers=2,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=8,
            ffn_dim=64,
            tied_embeddings=True,
            dtype="float32",
        ),
        data=DataConfig(
            source="text", paths=(corpus,), window=8, cache_dir=str(Path(corpus).parent / "cache")
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=3, total_steps=40),
        mesh=MeshConfig(dp=dp, tp=tp),
        attention=AttentionConfig(capacity_plans=40, kernel="xla"),
        training=TrainingConfig(**settings),
        checkpoint=CheckpointConfig(every_steps=4),
    )


def with_changes(config: RunConfig, **parts) -> RunConfig:
    """`config` with fields of its parts replaced: with_changes(c, training={"steps": 3})."""
    return replace(config, **{n: replace(getattr(config, n), **v) for n, v in parts.items()})


def main(folder: str, corpus: str, steps: str, compiled: str) -> None:
    config = tiny_config(Path(folder), corpus, steps=int(steps))
    start_devices(ProcessConfig(), config.mesh.devices, "cpu")
    with compile_once(Path(compiled)):
        launch(with_changes(config, checkpoint={"every_steps": 1}), resume=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
