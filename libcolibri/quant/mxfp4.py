"""mxfp4: 32 four-bit floats (sign, two bits of exponent, one of mantissa) and an 8-bit exponent, w = 2^(e - 128) * VALUES[q].

The OCP Microscaling standard's type, with doubled values and half the scale, so that values are whole.
"""

import numpy as np

from .base import Field, Format
from .q4_0 import nibble_fields, split_nibbles

VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
EXPONENT = 256  # 4 nibble vectors


class Mxfp4(Format):
    """Its scale is an exponent, of which 255 says NaN."""

    def are_finite(self, blocks: np.ndarray) -> bool:
        return bool((blocks[..., 0] != 255).all())


def power_of_two(exponents: np.ndarray) -> np.ndarray:
    """2^(e - 128) as float32 for e uint8; the two smallest are subnormal."""
    e = exponents.astype(np.uint32)
    return np.where(e < 2, np.uint32(0x00200000) << e, (e - 1) << 23).astype(np.uint32).view(np.float32)


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    return power_of_two(blocks[:, :1]) * np.array(VALUES, np.float32)[split_nibbles(blocks[:, 1:])]


MXFP4 = Mxfp4("mxfp4", 32, 39, 17, _from_blocks, 272, [*nibble_fields(1), Field(0, 0, 8, EXPONENT, 0, 1)])
