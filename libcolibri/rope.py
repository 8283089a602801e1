"""Tables of the rotary embedding, one row per position.

In: `RopeConfig`, head_dim, context length. Out: cos and sin, float32 (S, Dh/2), computed in float64.
"""

import math

import numpy as np

from .config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, context_length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position * frequency, times yarn's attention factor.

    Returns two float32 arrays (context_length, head_dim / 2), C order. Entry j belongs to the pair (j, j + head_dim / 2) of a head.
    """
    angles = np.arange(context_length, dtype=np.float64)[:, None] * frequencies(rope, head_dim)[None, :]  # (S, Dh/2)
    cos = (np.cos(angles) * rope.attention_factor).astype(np.float32)
    sin = (np.sin(angles) * rope.attention_factor).astype(np.float32)
    return cos, sin


def frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each pair, float64 (Dh/2,): theta ** (-2j / Dh), stretched as the type says."""
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(plain, rope)
    if rope.type == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths are divided by factor, short ones kept, those between blended linearly in original length / wavelength."""
    original = rope.original_max_position_embeddings
    assert original is not None
    turns = original * plain / (2.0 * math.pi)  # full turns within the pre-training context
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return (1.0 - keep) * plain / rope.factor + keep * plain


def _yarn(plain: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """YaRN, eq. 23 of arXiv 2309.00071: pairs below the ramp keep their frequency, those above are divided by factor."""
    original = rope.original_max_position_embeddings
    assert original is not None

    def pair_with(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        # A ramp of no width would divide by zero; the published code widens it by this much.
        high += 0.001
    stretch = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return stretch * plain / rope.factor + (1.0 - stretch) * plain
