"""Tiny Llama checkpoints and their logits, written by the transformers library.

Run in an environment of its own (torch is not a dependency of this project):

    python -m venv golden && golden/bin/pip install torch==2.13.0 transformers==5.24.0
    golden/bin/python tests/golden/make_golden.py

Each folder then holds config.json, safetensors as transformers writes them, and golden.npz: ids [N], logits float32 [N, V] of one
document. llama2_tiny is one file with untied head and H = K; llama31_tiny is cut into shards with an index, tied head, grouped
key heads, head_dim apart from E/H, and rope scaling with lanes on both sides of the interpolated band.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent

LLAMA2 = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
LLAMA31 = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    rope_theta=500000.0,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    tie_word_embeddings=True,
)


def make(name: str, config: LlamaConfig, seed: int, tokens: int, shard: str) -> None:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in parameter_name else 0.2 * noise)
        ids = torch.randint(0, config.vocab_size, (1, tokens))
        logits = model(ids).logits[0]
    folder = HERE / name
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "golden.npz", ids=ids[0].numpy(), logits=logits.numpy())


if __name__ == "__main__":
    make("llama2_tiny", LLAMA2, seed=2, tokens=48, shard="1GB")
    make("llama31_tiny", LLAMA31, seed=31, tokens=200, shard="60KB")
