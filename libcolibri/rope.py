"""The rotary embedding: its parameters, and its tables, one row per position.

In: `RopeConfig`, the columns of a head that turn, context length. Out: cos and sin, float32 (S, columns/2), computed in float64.
"""

import math
from dataclasses import dataclass

import numpy as np

from .errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional", "ntk_alpha")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base `theta`, and how its frequencies are stretched for longer contexts.

    partial_rotary_factor              share of a head's columns that turn: the first ones, or for "proportional" the first pairs
    factor                             context stretch, at least 1
    original_max_position_embeddings   context length of pre-training (llama3, yarn, longrope)
    low_freq_factor, high_freq_factor  wavelengths that llama3 stretches, keeps, or blends
    beta_fast, beta_slow, truncate     rotations at which yarn's ramp begins and ends; whether its ends are rounded outwards
    attention_factor                   cos and sin are multiplied by it (yarn, longrope); always a number here
    short_factor, long_factor          longrope divides each pair's frequency by the first for contexts of at most the original length, by
                                       the second for longer ones, which also have long_attention_factor
    alpha                              ntk_alpha stretches theta by alpha ** (d / (d - 2))
    """

    type: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    long_attention_factor: float = 1.0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise ConfigError(f"rope_type={self.type!r} is not supported, only {', '.join(ROPE_TYPES)}")
        if not self.theta > 1.0:
            raise ConfigError(f"rope_theta={self.theta}: expected more than 1")
        if not self.factor >= 1.0:
            raise ConfigError(f"rope factor={self.factor}: expected at least 1")
        if not 0.0 < self.partial_rotary_factor <= 1.0:
            raise ConfigError(f"partial_rotary_factor={self.partial_rotary_factor}: expected more than 0 and at most 1")
        if self.type in ("llama3", "yarn", "longrope") and not self.original_max_position_embeddings:
            raise ConfigError(f"rope_type={self.type!r} needs original_max_position_embeddings")
        if self.type == "llama3" and not self.high_freq_factor >= self.low_freq_factor > 0:
            raise ConfigError(
                f"rope high_freq_factor={self.high_freq_factor} must be at least low_freq_factor={self.low_freq_factor}, both positive"
            )
        if not self.alpha > 0.0:
            raise ConfigError(f"rope alpha={self.alpha}: expected a number above 0")

    def columns(self, head_dim: int) -> int:
        """Columns of a head that turn."""
        return head_dim if self.type == "proportional" else int(head_dim * self.partial_rotary_factor)

    def is_long(self, context_length: int) -> bool:
        """Whether longrope takes its factors for long contexts: one choice for a whole timeline, so that keys never need turning again."""
        return self.type == "longrope" and context_length > (self.original_max_position_embeddings or 0)


def rope_tables(rope: RopeConfig, columns: int, context_length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position * frequency, times the attention factor.

    Returns two float32 arrays (context_length, columns / 2), C order. Entry j belongs to the pair (j, j + columns / 2) of a head.
    Raises ConfigError where longrope's factors are not one per pair.
    """
    angles = np.arange(context_length, dtype=np.float64)[:, None] * frequencies(rope, columns, context_length)[None, :]  # (S, columns/2)
    factor = rope.long_attention_factor if rope.is_long(context_length) else rope.attention_factor
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def frequencies(rope: RopeConfig, columns: int, context_length: int = 0) -> np.ndarray:
    """Radians per position of each pair, float64 (columns/2,): theta ** (-2j / columns), stretched as the type says."""
    theta = rope.theta * rope.alpha ** (columns / (columns - 2)) if rope.type == "ntk_alpha" else rope.theta
    plain = theta ** (-np.arange(0, columns, 2, dtype=np.float64) / columns)
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "llama3":
        return _llama3(plain, rope)
    if rope.type == "yarn":
        return _yarn(plain, rope, columns)
    if rope.type == "longrope":
        return _longrope(plain, rope, context_length)
    if rope.type == "proportional":
        turning = np.arange(len(plain)) < int(rope.partial_rotary_factor * columns // 2)
        return np.where(turning, plain / rope.factor, 0.0)
    return plain


def _longrope(plain: np.ndarray, rope: RopeConfig, context_length: int) -> np.ndarray:
    """LongRoPE, arXiv 2402.13753: a searched factor for each pair."""
    name = "long_factor" if rope.is_long(context_length) else "short_factor"
    factors = np.array(getattr(rope, name), np.float64)
    if factors.shape != plain.shape:
        raise ConfigError(f"rope {name} has {len(factors)} numbers, expected one for each of {len(plain)} pairs")
    return plain / factors


def _llama3(plain: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths are divided by factor, short ones kept, those between blended linearly in original length / wavelength."""
    original = rope.original_max_position_embeddings
    assert original is not None
    turns = original * plain / (2.0 * math.pi)  # full turns within the pre-training context
    width = max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)  # nothing lies between where both are equal
    keep = np.clip((turns - rope.low_freq_factor) / width, 0.0, 1.0)
    return (1.0 - keep) * plain / rope.factor + keep * plain


def _yarn(plain: np.ndarray, rope: RopeConfig, columns: int) -> np.ndarray:
    """YaRN, eq. 23 of arXiv 2309.00071: pairs below the ramp keep their frequency, those above are divided by factor."""
    original = rope.original_max_position_embeddings
    assert original is not None

    def pair_with(rotations: float) -> float:
        return columns * math.log(original / (rotations * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, columns - 1.0)
    if low == high:
        # A ramp of no width would divide by zero; the published code widens it by this much.
        high += 0.001
    stretch = np.clip((np.arange(columns // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return stretch * plain / rope.factor + (1.0 - stretch) * plain
