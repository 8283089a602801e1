"""q5_1: 32 codes of five bits, a float16 scale and a float16 minimum, w = d * q + m."""

import numpy as np

from .base import Format, half_bytes, half_fields, halves_at, readonly, reciprocal, round_codes
from .q5_0 import five_bit_fields, pair_five_bits, split_five_bits

D, M = 320, 352  # after 4 nibble vectors and one vector of fifth bits


def _to_blocks(weights: np.ndarray) -> np.ndarray:
    low = weights.min(axis=1)
    d = (weights.max(axis=1) - low) / np.float32(31)
    codes = np.empty(weights.shape, np.uint8)
    round_codes(readonly(weights), readonly(low), readonly(reciprocal(d)), np.float32(0.5), np.int32(31), codes)
    return np.concatenate([half_bytes(d), half_bytes(low), pair_five_bits(codes)], axis=1)


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    return halves_at(blocks, 0) * split_five_bits(blocks[:, 4:]).astype(np.float32) + halves_at(blocks, 2)


_FIELDS = five_bit_fields(4, 8) + half_fields(0, D) + half_fields(2, M)
Q5_1 = Format("q5_1", 32, 7, 24, _from_blocks, 384, _FIELDS, (0, 2), _to_blocks, 0.04, 32 * 2**-25)
