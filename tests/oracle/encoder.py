"""A BERT encoder in float64, straight from its equations; numpy only."""

import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x):
    """x * Phi(x), Phi the normal distribution."""
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def layer_norm(x, weight, bias, epsilon):
    """(T, D) -> (T, D)."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * weight + bias


def attention(q, k, v, heads):
    """softmax(q k^T / sqrt(Dh)) v per head, (T, D) each; every position sees all."""
    tokens, width = q.shape
    q, k, v = (a.reshape(tokens, heads, -1).transpose(1, 0, 2) for a in (q, k, v))  # (H, T, Dh)
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(width // heads)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(1, 0, 2).reshape(tokens, width)


def encode(tensors, config, ids, first_position=0):
    """Last hidden states (T, D) of token ids (T,). tensors: Hugging Face names -> arrays; config: Hugging Face keys."""
    t = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    epsilon, heads = config["layer_norm_eps"], config["num_attention_heads"]

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, t[f"{name}.weight"], t[f"{name}.bias"], epsilon)

    positions = first_position + np.arange(len(ids))
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.position_embeddings.weight"][positions]
    x = norm(x + t["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        p = f"encoder.layer.{layer}."
        q, k, v = (linear(x, f"{p}attention.self.{name}") for name in ("query", "key", "value"))
        x = norm(x + linear(attention(q, k, v, heads), p + "attention.output.dense"), p + "attention.output.LayerNorm")
        x = norm(x + linear(gelu(linear(x, p + "intermediate.dense")), p + "output.dense"), p + "output.LayerNorm")
    return x


def mean_embedding(hidden):
    """(T, D) -> (D,) of length 1."""
    pooled = hidden.mean(0)
    return pooled / np.linalg.norm(pooled)
