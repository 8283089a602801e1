"""The rotary embedding: its parameters, and its tables, one row per position.

In: `RopeConfig`, head_dim, context length. Out: cos and sin, float32 (S, Dh/2), computed in float64.
"""

import math
from dataclasses import dataclass

import numpy as np

from .errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta`, and how its frequencies are stretched for longer contexts.

    factor                             context stretch, at least 1 (all types but default)
    original_max_position_embeddings   context length of pre-training (llama3, yarn)
    low_freq_factor, high_freq_factor  wavelengths that llama3 stretches, keeps, or blends
    beta_fast, beta_slow, truncate     rotations at which yarn's ramp begins and ends; whether its ends are rounded outwards
    attention_factor                   yarn multiplies cos and sin by it; always a number here
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise ConfigError(f"rope_type={self.type!r} is not supported, only {', '.join(ROPE_TYPES)}")
        if not self.theta > 1.0:
            raise ConfigError(f"rope_theta={self.theta}: expected more than 1")
        if not self.factor >= 1.0:
            raise ConfigError(f"rope factor={self.factor}: expected at least 1")
        if self.type in ("llama3", "yarn") and not self.original_max_position_embeddings:
            raise ConfigError(f"rope_type={self.type!r} needs original_max_position_embeddings")
        if self.type == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ConfigError(
                f"rope high_freq_factor={self.high_freq_factor} must be larger than low_freq_factor={self.low_freq_factor}, both positive"
            )


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
