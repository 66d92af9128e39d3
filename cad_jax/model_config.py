"""What a Llama is: its sizes, what they must satisfy, and how they split over a mesh. Host only.

Shape letters: E embedding, H query heads, K key/value heads, D head dim, F ffn, V vocabulary, L layers.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cad_jax.sharding.tasks import HeadShape

COMPUTE_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of Llama 3.1: wavelengths beyond the original context are stretched by `factor`."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ValueError(
                f"RopeScaling.factor (={self.factor}) must be at least 1: it stretches wavelengths; "
                "use rope_scaling=None for no scaling"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"RopeScaling needs 0 < low_freq_factor (={self.low_freq_factor}) < high_freq_factor "
                f"(={self.high_freq_factor}): the band between them is interpolated; Llama 3.1 uses 1, 4"
            )
        if self.original_context_tokens < 1:
            raise ValueError(
                f"RopeScaling.original_context_tokens (={self.original_context_tokens}) must be "
                "positive: give the context length of pretraining (8192 for Llama 3.1)"
            )


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama 2 or 3. Parameters are float32, compute runs in `dtype`.

    The stored vocabulary is padded to a multiple of `vocab_multiple`, so that shapes (and
    checkpoints) are the same on every mesh; the padded rows are zero and never take part.

    Raises:
        ValueError: a size breaks a rule; the text names the rule, the value and the cure.
    """

    vocab_size: int
    embedding_dim: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "embedding_dim",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_dim",
            "vocab_multiple",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} (={getattr(self, name)}) must be positive: give the model's size"
                )
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads (={self.num_q_heads}) must be a multiple of num_kv_heads "
                f"(={self.num_kv_heads}): each key head serves the same number of query heads; "
                f"use num_kv_heads={math.gcd(self.num_q_heads, self.num_kv_heads)}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim (={self.head_dim}) must be even: rotary embedding turns pairs of lanes; "
                f"use {self.head_dim + 1}"
            )
        if self.dtype not in COMPUTE_DTYPES:
            raise ValueError(
                f"dtype (={self.dtype!r}) must be one of {COMPUTE_DTYPES}: parameters are float32 "
                "in any case; bfloat16 computes faster"
            )
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name} (={getattr(self, name)}) must be positive: "
                    "Llama uses rope_theta 10000 or 500000 and norm_eps 1e-5 or 1e-6"
                )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the stored embedding and head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, padding rows of the vocabulary not counted."""
        attention = self.embedding_dim * self.head_dim * 2 * (self.num_q_heads + self.num_kv_heads)
        layer = attention + 3 * self.embedding_dim * self.ffn_dim + 2 * self.embedding_dim
        tables = self.vocab_size * self.embedding_dim * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + tables + self.embedding_dim

    def head_shape(self, tp: int = 1) -> HeadShape:
        """Heads of one device of `tp`: key heads are replicated where there are fewer than devices.

        Raises:
            ValueError: the heads do not divide over tp.
        """
        if self.num_q_heads % tp:
            raise ValueError(
                f"num_q_heads (={self.num_q_heads}) must be divisible by tp (={tp}): query heads are "
                f"split evenly over tensor parallelism; use a tp that divides {self.num_q_heads}"
            )
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads (={self.num_kv_heads}) and tp (={tp}) must divide one another: key "
                "heads are either split evenly or each replicated over the same number of devices; "
                f"use tp={math.gcd(self.num_kv_heads, tp)} or a multiple of {self.num_kv_heads}"
            )
        return HeadShape(self.num_q_heads // tp, max(1, self.num_kv_heads // tp), self.head_dim)

    def check_mesh(self, pp: int, tp: int, tokens_over_tp: bool = False) -> None:
        """Refuse a mesh over which the model's tensors do not split.

        tokens_over_tp: tp splits tokens instead of the layers' products.

        Raises:
            ValueError: layers, heads, ffn or vocabulary do not divide.
        """
        self.head_shape(tp)
        if self.num_layers % pp:
            raise ValueError(
                f"num_layers (={self.num_layers}) must be divisible by pp (={pp}): every pipeline "
                f"stage holds as many; use pp={math.gcd(self.num_layers, pp)} or "
                f"num_layers={-(-self.num_layers // pp) * pp}"
            )
        if self.ffn_dim % tp and not tokens_over_tp:
            raise ValueError(
                f"ffn_dim (={self.ffn_dim}) must be divisible by tp (={tp}): its columns are split "
                f"over tensor parallelism; use tp={math.gcd(self.ffn_dim, tp)} or "
                f"ffn_dim={-(-self.ffn_dim // tp) * tp}"
            )
        if self.padded_vocab_size % (pp * tp):
            raise ValueError(
                f"the stored vocabulary (={self.padded_vocab_size}, vocab_size {self.vocab_size} "
                f"padded to a multiple of {self.vocab_multiple}) must be divisible by pp x tp "
                f"(={pp} x {tp}): embedding and head are split over both; "
                f"use vocab_multiple={math.lcm(self.vocab_multiple, pp * tp)}"
            )

    def rope_frequencies(self) -> np.ndarray:
        """Angular frequency of each pair of lanes, float32 [D/2], in radians a token.

        Llama 3.1 scaling: with wavelength w and context C, w > C/low is divided by the factor,
        w < C/high is kept, and what lies between is interpolated linearly in C/w.
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        frequencies = self.rope_theta**-exponents
        if self.rope_scaling is not None:
            scaling = self.rope_scaling
            turns = scaling.original_context_tokens * frequencies / (2 * math.pi)
            band = scaling.high_freq_factor - scaling.low_freq_factor
            kept = np.clip((turns - scaling.low_freq_factor) / band, 0.0, 1.0)
            frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
        return frequencies.astype(np.float32)
