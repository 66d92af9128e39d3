"""A Llama written the plain way: one device, dense masks, float64. Shares no code with cad_jax."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.llama_cases import jit


def rope_angles(config, positions):
    half = config.head_dim // 2
    frequencies = []
    for i in range(half):
        f = config.rope_theta ** (-2 * i / config.head_dim)
        s = config.rope_scaling
        if s is not None:
            wavelength = 2 * math.pi / f
            low = s.original_context_tokens / s.low_freq_factor
            high = s.original_context_tokens / s.high_freq_factor
            if wavelength > low:
                f = f / s.factor
            elif wavelength >= high:
                smooth = (s.original_context_tokens / wavelength - s.low_freq_factor) / (
                    s.high_freq_factor - s.low_freq_factor
                )
                f = (1 - smooth) * f / s.factor + smooth * f
        frequencies.append(f)
    return positions[:, None] * np.array(frequencies)[None, :]


def rope(x, angles):
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def norm(x, weight, eps):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight[None, :]


def hidden(params, config, ids, positions, documents):
    """[N, E]; a token attends to earlier tokens (and itself) of its own document; -1 attends nothing."""
    angles = rope_angles(config, positions)
    order = np.arange(len(ids))
    mask = (documents[:, None] == documents[None, :]) & (order[:, None] >= order[None, :])
    mask = mask & (documents >= 0)[:, None]
    group = config.num_q_heads // config.num_kv_heads
    x = params["embedding"][ids]
    for layer in range(config.num_layers):
        w = {name: value[layer] for name, value in params["layers"].items()}
        h = norm(x, w["attention_norm"], config.norm_eps)
        q = rope((h @ w["query"]).reshape(len(ids), -1, config.head_dim), angles)
        k = rope((h @ w["key"]).reshape(len(ids), -1, config.head_dim), angles)
        v = (h @ w["value"]).reshape(len(ids), -1, config.head_dim)
        key_head = np.arange(config.num_q_heads) // group
        scores = jnp.einsum("qhd,khd->hqk", q, k[:, key_head]) / math.sqrt(config.head_dim)
        exps = jnp.where(mask[None], jnp.exp(scores), 0.0)
        shares = exps / jnp.maximum(exps.sum(-1, keepdims=True), 1e-300)
        out = jnp.einsum("hqk,khd->qhd", shares, v[:, key_head]).reshape(len(ids), -1)
        x = x + out @ w["attention_output"].T
        h = norm(x, w["ffn_norm"], config.norm_eps)
        gate = h @ w["ffn_gate"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ w["ffn_up"])) @ w["ffn_down"].T
    return norm(x, params["final_norm"], config.norm_eps)


def logits(params, config, ids, positions, documents):
    head = params["embedding"] if config.tied_embeddings else params["head"]
    return (hidden(params, config, ids, positions, documents) @ head.T)[:, : config.vocab_size]


def nats(params, config, ids, positions, documents, targets, weights):
    """Summed cross-entropy of the weighted targets."""
    scores = logits(params, config, ids, positions, documents)
    log_p = scores - jax.scipy.special.logsumexp(scores, axis=-1, keepdims=True)
    return -(log_p[np.arange(len(ids)), targets] * weights).sum()


@functools.partial(jit, static_argnames="config")
def _mean_and_gradients(params, config, microbatches, count):
    def mean(params):
        each = jax.vmap(functools.partial(nats, params, config))
        return each(*microbatches).sum() / count

    return jax.value_and_grad(mean)(params)


def loss_and_gradients(params, config, batch, documents):
    """Mean over all target tokens of [M, N] microbatches, and its gradients, float64 numpy."""
    weights = np.asarray(batch.weights, np.float64)
    fields = (batch.ids, batch.positions, documents, batch.targets, weights)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
        loss, gradients = _mean_and_gradients(params, config, fields, weights.sum())
        return float(loss), jax.tree.map(np.asarray, gradients)


def relative_errors(actual, expected):
    """Frobenius norm of the difference over that of the expected, per parameter name."""
    flat = jax.tree_util.tree_leaves_with_path(expected)
    errors = {}
    for (path, want), got in zip(flat, jax.tree.leaves(actual), strict=True):
        size = np.linalg.norm(want)
        difference = np.linalg.norm(np.asarray(got, np.float64) - want)
        # A NaN would pass for the smaller one in a maximum.
        assert np.isfinite(difference), jax.tree_util.keystr(path)
        errors[jax.tree_util.keystr(path)] = difference / size if size else difference
    return errors
