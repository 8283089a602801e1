"""iq4_xs: 256 nibbles that choose from iq4_nl's values, in 8 sub-blocks with 6-bit scales, w = d * (scale - 32) * VALUES[q]."""

import numpy as np

from .base import Field, Format, half_fields, halves_at
from .iq4_nl import look_up
from .q4_0 import nibble_fields, split_nibbles

SCALE, D = 2048, 2176  # after 4 nibble vectors for every sub-block


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(-1, 8) & 3
    scales = halves_at(blocks, 0) * ((low | high << 4).astype(np.float32) - np.float32(32))
    codes = split_nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(-1, 8, 32)
    return (scales[..., None] * look_up(codes)).reshape(-1, 256)


def _fields() -> list[Field]:
    fields = half_fields(0, D)
    for sub in range(8):
        fields += [field._replace(tile_byte=field.tile_byte + 256 * sub) for field in nibble_fields(8 + 16 * sub)]
        fields.append(Field(4 + sub // 2, 4 * (sub % 2), 4, SCALE + 16 * sub, 0, 1))
        fields.append(Field(2 + sub // 4, 2 * (sub % 4), 2, SCALE + 16 * sub, 4, 1))
    return fields


IQ4_XS = Format("iq4_xs", 256, 23, 136, _from_blocks, 2240, _fields(), (0,))
