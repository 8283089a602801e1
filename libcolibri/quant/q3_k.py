"""q3_k: 256 codes of three bits in 16 sub-blocks with 6-bit scales, w = d * (scale - 32) * (q - 4)."""

import numpy as np

from .base import Field, Format, half_fields, halves_at
from .q2_k import bit_pair_fields, split_bit_pairs

PAIR, HIGH = 192, 128  # bytes of two sub-blocks: a vector of low bit pairs each, then one vector of third bits
SCALE, D = 1536, 1792


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)).reshape(-1, 16) & 3
    scales = halves_at(blocks, 108) * ((low | high << 4).astype(np.float32) - np.float32(32))
    third = np.unpackbits(blocks[:, None, :32], axis=1, bitorder="little").reshape(-1, 16, 16)
    codes = split_bit_pairs(blocks[:, 32:96]) | (third << 2)
    return (scales[..., None] * (codes.astype(np.float32) - np.float32(4))).reshape(-1, 256)


def _fields() -> list[Field]:
    fields = half_fields(108, D)
    for sub, sub_fields in enumerate(bit_pair_fields(32)):
        fields += [field._replace(tile_byte=field.tile_byte + PAIR * (sub // 2) + 64 * (sub % 2)) for field in sub_fields]
    for c in range(256):
        column = c % 32
        fields.append(Field(column, c // 32, 1, PAIR * (c // 32) + HIGH + column % 4, column // 4, 4))
    for sub in range(16):
        fields.append(Field(96 + sub % 8, 4 * (sub // 8), 4, SCALE + 16 * sub, 0, 1))
        fields.append(Field(104 + sub % 4, 2 * (sub // 4), 2, SCALE + 16 * sub, 4, 1))
    return fields


Q3_K = Format("q3_k", 256, 11, 110, _from_blocks, 1856, _fields(), (108,))
