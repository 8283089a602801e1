"""Router rules family by family in float64: numpy only. Each returns (ids (T, K), best first; weights (T, K)) of logits (T, E)."""

import numpy as np


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def top(x: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-x, axis=-1, kind="stable")[:, :k]


def take(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, ids, axis=-1)


def normalised(w: np.ndarray, eps: float = 0.0) -> np.ndarray:
    return w / (w.sum(-1, keepdims=True) + eps)


def within_groups(x: np.ndarray, groups: int, kept: int, best: int) -> np.ndarray:
    """x, -inf outside of the `kept` groups whose greatest `best` values have the greatest sum."""
    grouped = x.reshape(len(x), groups, -1)
    scores = np.sort(grouped, axis=-1)[..., -best:].sum(-1)
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, top(scores, kept), True, axis=-1)
    return np.where(mask[..., None], grouped, -np.inf).reshape(x.shape)


def qwen3_moe(x, k, normalise):
    p = softmax(x)
    ids = top(p, k)
    return ids, normalised(take(p, ids)) if normalise else take(p, ids)


def gpt_oss(x, k, bias):
    ids = top(x + bias, k)
    return ids, softmax(take(x + bias, ids))


def deepseek_v3(x, k, bias, groups, kept, scale):
    p = sigmoid(x)
    ids = top(within_groups(p + bias, groups, kept, best=2), k)
    return ids, normalised(take(p, ids), 1e-20) * scale


def lfm2_moe(x, k, bias):
    p = sigmoid(x)
    ids = top(p + bias, k)
    return ids, normalised(take(p, ids), 1e-6)


def laguna(x, k, bias, cap, scale):
    p = sigmoid(np.tanh(x / cap) * cap)
    ids = top(p + bias, k)
    return ids, normalised(take(p, ids)) * scale


def deepseek_v2(x, k, groups, kept, scale):
    p = softmax(x)
    ids = top(within_groups(p, groups, kept, best=1), k)
    return ids, take(p, ids) * scale


def mistral4(x, k, groups, kept, scale):
    p = softmax(x)
    ids = top(within_groups(p, groups, kept, best=2), k)
    return ids, normalised(take(p, ids), 1e-20) * scale


def gemma4(x, k, per_expert):
    p = softmax(x)
    ids = top(p, k)
    return ids, normalised(take(p, ids)) * per_expert[ids]


def ernie4_5_moe(x, k, bias, least):
    p = softmax(x)
    ids = top(p + bias, k)
    w = take(p, ids)
    return ids, w / np.maximum(w.sum(-1, keepdims=True), least)


def phimoe(x, k, jitter):
    left, ids, weights = x.copy(), [], []
    for _ in range(k):
        peak = left.max(-1, keepdims=True)
        near = (peak - x) / np.maximum(np.abs(x), peak) <= 2 * jitter
        chosen = top(left, 1)
        ids.append(chosen)
        weights.append(take(softmax(np.where(near, left, -np.inf)), chosen))
        np.put_along_axis(left, chosen, -np.inf, axis=-1)
    return np.concatenate(ids, -1), np.concatenate(weights, -1)


def llama4(x, k):
    ids = top(x, k)
    return ids, sigmoid(take(x, ids))
