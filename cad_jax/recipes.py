"""Recipes: a run is a Python function that returns its whole configuration.

`cad-jax train RECIPE` starts from one of them and overrides single fields; your own script may call
one, change it with dataclasses.replace, and hand it to cad_jax.launch.launch.
"""

from collections.abc import Callable

from cad_jax.checkpoint import CheckpointConfig
from cad_jax.config import MeshConfig, RunConfig, TrainingConfig
from cad_jax.data import DataConfig
from cad_jax.model_config import LlamaConfig
from cad_jax.optimizer import OptimizerConfig

BYTE_VOCAB = 264  # of the byte tokenizer


def debug_cpu8() -> RunConfig:
    """A tiny model for a few seconds on 8 virtual CPU devices: does everything run?"""
    return RunConfig(
        name="debug_cpu8",
        folder="runs/debug_cpu8",
        model=LlamaConfig(
            vocab_size=BYTE_VOCAB,
            embedding_dim=64,
            num_layers=2,
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=16,
            ffn_dim=128,
            tied_embeddings=True,
            dtype="float32",
        ),
        data=DataConfig(source="stdlib", max_piece_tokens=512),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=5, total_steps=20),
        mesh=MeshConfig(dp=4, tp=2, platform="cpu"),
        training=TrainingConfig(steps=20, tokens_per_microbatch=1024, microbatches=2),
        checkpoint=CheckpointConfig(every_steps=10),
    )


def stdlib_demo() -> RunConfig:
    """5 M parameters on the Python standard library's own source, 8 virtual CPU devices, 6 minutes."""
    return RunConfig(
        name="stdlib_demo",
        folder="runs/stdlib_demo",
        model=LlamaConfig(
            vocab_size=BYTE_VOCAB,
            embedding_dim=320,
            num_layers=4,
            num_q_heads=8,
            num_kv_heads=2,
            head_dim=32,
            ffn_dim=1024,
            rope_theta=10_000.0,
            tied_embeddings=True,
            dtype="float32",
        ),
        data=DataConfig(source="stdlib", max_piece_tokens=1024),
        optimizer=OptimizerConfig(learning_rate=8e-4, warmup_steps=20, total_steps=400),
        mesh=MeshConfig(dp=4, tp=2, platform="cpu"),
        training=TrainingConfig(steps=400, tokens_per_microbatch=2048, max_minutes=6.0),
        checkpoint=CheckpointConfig(every_steps=50),
    )


def text_folder() -> RunConfig:
    """Your own folder of text: --data.paths 'folder/**/*.txt'; the demo's model and mesh."""
    demo = stdlib_demo()
    return RunConfig(
        name="text_folder",
        folder="runs/text_folder",
        model=demo.model,
        data=DataConfig(source="text", max_piece_tokens=1024),
        optimizer=OptimizerConfig(learning_rate=8e-4, warmup_steps=20, total_steps=400),
        mesh=demo.mesh,
        training=TrainingConfig(steps=400, tokens_per_microbatch=2048),
        checkpoint=CheckpointConfig(every_steps=50),
    )


def llama3_8b_h200() -> RunConfig:
    """Llama 3 8B on eight nodes of 8 H200, documents up to 512 Ki tokens.

    A rank is a node: its eight devices split tokens, and heads inside attention; eight ranks share
    attention, and two nano-batches of 64 Ki tokens a rank alternate.

    Give --data.paths (JSON lines) and --data.tokenizer (the model's tokenizer.json); one process per
    node or per GPU with --processes, --coordinator and --process-id.
    """
    return RunConfig(
        name="llama3_8b_h200",
        folder="runs/llama3_8b_h200",
        model=LlamaConfig(
            vocab_size=128_256,
            embedding_dim=4096,
            num_layers=32,
            num_q_heads=32,
            num_kv_heads=8,
            head_dim=128,
            ffn_dim=14_336,
            rope_theta=500_000.0,
        ),
        data=DataConfig(source="jsonl", end_of_document="<|end_of_text|>"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000, total_steps=100_000),
        mesh=MeshConfig(dp=8, tp=8, tp_splits="tokens", platform="cuda"),
        training=TrainingConfig(
            steps=100_000, tokens_per_microbatch=8 * 2 * 65_536, microbatches=4, overlap="pingpong"
        ),
        checkpoint=CheckpointConfig(every_steps=500),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe for recipe in (debug_cpu8, stdlib_demo, text_folder, llama3_8b_h200)
}
