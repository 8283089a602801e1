"""q5_0: 32 codes of five bits and one float16 scale, w = d * (q - 16)."""

import numpy as np

from .base import Field, Format, half_bytes, half_fields, halves_at, readonly, reciprocal, round_codes
from .q4_0 import nibble_fields, pair_nibbles, signed_extreme, split_nibbles

HIGH, D = 256, 320  # 4 nibble vectors, then one vector of fifth bits


def pair_five_bits(codes: np.ndarray) -> np.ndarray:
    """codes (n, 32) -> (n, 20): 32 fifth bits, then the nibbles."""
    return np.concatenate([np.packbits(codes >> 4, axis=1, bitorder="little"), pair_nibbles(codes)], axis=1)


def split_five_bits(packed: np.ndarray) -> np.ndarray:
    """The inverse of pair_five_bits."""
    return split_nibbles(packed[:, 4:]) | (np.unpackbits(packed[:, :4], axis=1, bitorder="little") << 4)


def five_bit_fields(bits_byte: int, nibbles_byte: int) -> list[Field]:
    """The codes of a block whose ggml fifth bits and nibbles start at these bytes."""
    return nibble_fields(nibbles_byte) + [Field(bits_byte + c // 8, c % 8, 1, HIGH + c % 4, c // 4, 4) for c in range(32)]


def _to_blocks(weights: np.ndarray) -> np.ndarray:
    d = signed_extreme(weights) / np.float32(-16)
    codes = np.empty(weights.shape, np.uint8)
    round_codes(readonly(weights), readonly(np.zeros_like(d)), readonly(reciprocal(d)), np.float32(16.5), np.int32(31), codes)
    return np.concatenate([half_bytes(d), pair_five_bits(codes)], axis=1)


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    return halves_at(blocks, 0) * (split_five_bits(blocks[:, 2:]).astype(np.float32) - np.float32(16))


Q5_0 = Format("q5_0", 32, 6, 22, _from_blocks, 352, five_bit_fields(2, 6) + half_fields(0, D), (0,), _to_blocks, 0.065, 16 * 2**-25)
