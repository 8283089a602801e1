"""q5_0: 32 codes of five bits and one float16 scale, w = d * (q - 16)."""

import numpy as np

from .base import Field, Format, half_bytes, half_fields, halves_at, readonly, reciprocal, round_codes
from .q4_0 import nibble_fields, pair_nibbles, signed_extreme, split_nibbles

HIGH, D = 256, 320  # 4 nibble vectors, then one vector of fifth bits


def _to_blocks(weights: np.ndarray) -> np.ndarray:
    d = signed_extreme(weights) / np.float32(-16)
    codes = np.empty(weights.shape, np.uint8)
    round_codes(readonly(weights), readonly(np.zeros_like(d)), readonly(reciprocal(d)), np.float32(16.5), np.int32(31), codes)
    return np.concatenate([half_bytes(d), np.packbits(codes >> 4, axis=1, bitorder="little"), pair_nibbles(codes)], axis=1)


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    codes = split_nibbles(blocks[:, 6:]) | (high << 4)
    return halves_at(blocks, 0) * (codes.astype(np.float32) - np.float32(16))


def _fields() -> list[Field]:
    high = [Field(2 + c // 8, c % 8, 1, HIGH + c % 4, c // 4, 4) for c in range(32)]
    return nibble_fields(6) + high + half_fields(0, D)


Q5_0 = Format("q5_0", 32, 352, 6, 22, _fields(), _from_blocks, _to_blocks, 0.065, 16 * 2**-25)
