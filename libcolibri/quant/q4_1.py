"""q4_1: 32 nibbles, a float16 scale and a float16 minimum, w = d * q + m."""

import numpy as np

from .base import Format, half_bytes, half_fields, halves_at, readonly, reciprocal, round_codes
from .q4_0 import nibble_fields, pair_nibbles, split_nibbles

D, M = 256, 288  # after 4 nibble vectors


def _to_blocks(weights: np.ndarray) -> np.ndarray:
    low = weights.min(axis=1)
    d = (weights.max(axis=1) - low) / np.float32(15)
    codes = np.empty(weights.shape, np.uint8)
    round_codes(readonly(weights), readonly(low), readonly(reciprocal(d)), np.float32(0.5), np.int32(15), codes)
    return np.concatenate([half_bytes(d), half_bytes(low), pair_nibbles(codes)], axis=1)


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    return halves_at(blocks, 0) * split_nibbles(blocks[:, 4:]).astype(np.float32) + halves_at(blocks, 2)


_FIELDS = nibble_fields(4) + half_fields(0, D) + half_fields(2, M)
Q4_1 = Format("q4_1", 32, 3, 20, _from_blocks, 320, _FIELDS, (0, 2), _to_blocks, 0.08, 16 * 2**-25)
