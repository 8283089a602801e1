"""A dense decoder layer by layer in float64: numpy only, written from the equations and not from the library."""

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """x (T, heads, Dh): pair (i, i + Dh/2) of position t turned by t * theta^(-2i/Dh)."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """Causal; q (T, H, Dh), k and v (T, G, Dh); a position sees itself and window - 1 before it."""
    n, heads = q.shape[:2]
    k, v = (np.repeat(x, heads // x.shape[1], 1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    distance = np.arange(n)[:, None] - np.arange(n)[None]
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    scores = np.where(hidden, -np.inf, scores)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)


def logits(config: dict, tensors: dict[str, np.ndarray], ids: np.ndarray, window: int | None = None) -> np.ndarray:
    """(T, V). config and tensors in Hugging Face names; biases are used where they are there."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    epsilon, theta, n = config["rms_norm_eps"], config.get("rope_theta", 10000.0), len(ids)

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ tensors[name + ".weight"].T + tensors.get(name + ".bias", 0.0)

    x = tensors["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = rms_norm(x, tensors[at + "input_layernorm.weight"], epsilon)
        counts = {"q": heads, "k": kv_heads, "v": kv_heads}
        q, k, v = (linear(f"{at}self_attn.{name}_proj", h).reshape(n, count, -1) for name, count in counts.items())
        x = x + linear(at + "self_attn.o_proj", attention(rotate(q, theta), rotate(k, theta), v, window))
        h = rms_norm(x, tensors[at + "post_attention_layernorm.weight"], epsilon)
        gate = linear(at + "mlp.gate_proj", h)
        x = x + linear(at + "mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(at + "mlp.up_proj", h))
    return rms_norm(x, tensors["model.norm.weight"], epsilon) @ tensors["lm_head.weight"].T
