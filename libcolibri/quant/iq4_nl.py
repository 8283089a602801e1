"""iq4_nl: 32 nibbles that choose from 16 fixed values, and one float16 scale, w = d * VALUES[q]."""

import numpy as np

from .base import Format, half_fields, halves_at
from .q4_0 import nibble_fields, split_nibbles

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
D = 256  # 4 nibble vectors


def look_up(codes: np.ndarray) -> np.ndarray:
    """codes uint8 -> the values that they choose, float32."""
    return np.array(VALUES, np.float32)[codes]


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    return halves_at(blocks, 0) * look_up(split_nibbles(blocks[:, 2:]))


IQ4_NL = Format("iq4_nl", 32, 20, 18, _from_blocks, 288, nibble_fields(2) + half_fields(0, D), (0,))
