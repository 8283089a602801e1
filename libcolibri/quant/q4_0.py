"""q4_0: 32 nibbles and one float16 scale, w = d * (q - 8)."""

import numpy as np

from .base import Field, Format, half_bytes, half_fields, halves_at, nibble_column, readonly, reciprocal, round_codes

D = 256  # 4 nibble vectors


def signed_extreme(weights: np.ndarray) -> np.ndarray:
    """The weight of largest magnitude of every row (n, k), sign kept (n,)."""
    return weights[np.arange(len(weights)), np.abs(weights).argmax(axis=1)]


def pair_nibbles(codes: np.ndarray) -> np.ndarray:
    """codes (n, 32) -> (n, 16): column j in the low nibble, 16 + j in the high one, as in ggml."""
    return (codes[:, :16] & 15) | (codes[:, 16:] << 4)


def split_nibbles(packed: np.ndarray) -> np.ndarray:
    """The inverse of pair_nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def nibble_fields(first_byte: int) -> list[Field]:
    """The 32 nibbles of a block whose ggml nibbles start at first_byte."""
    return [Field(first_byte + c % 16, 4 * (c // 16), 4, *nibble_column(c), 4) for c in range(32)]


def _to_blocks(weights: np.ndarray) -> np.ndarray:
    d = signed_extreme(weights) / np.float32(-8)
    codes = np.empty(weights.shape, np.uint8)
    round_codes(readonly(weights), readonly(np.zeros_like(d)), readonly(reciprocal(d)), np.float32(8.5), np.int32(15), codes)
    return np.concatenate([half_bytes(d), pair_nibbles(codes)], axis=1)


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    return halves_at(blocks, 0) * (split_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


Q4_0 = Format("q4_0", 32, 2, 18, _from_blocks, 288, nibble_fields(2) + half_fields(0, D), (0,), _to_blocks, 0.13, 8 * 2**-25)
