"""q2_k: 256 codes of two bits in 16 sub-blocks with 4-bit scales and minima, w = d * scale * q - dmin * min."""

import numpy as np

from .base import Field, Format, half_fields, halves_at

SCALE, D, DMIN = 1024, 1280, 1312  # after a vector of bit pairs for every sub-block


def split_bit_pairs(packed: np.ndarray) -> np.ndarray:
    """ggml's (n, 64) bytes -> codes (n, 16, 16): the four bit pairs of a byte are 32 columns apart."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 16, 16)


def bit_pair_fields(first_byte: int) -> list[list[Field]]:
    """The bit pairs of every sub-block, as one vector at byte 0: byte 4r + i has columns i, 4 + i, 8 + i, 12 + i, low bits first."""
    fields = []
    for sub in range(16):
        half, quarter, start = sub // 8, sub % 8 // 2, 16 * (sub % 2)
        fields.append([Field(first_byte + 32 * half + start + c, 2 * quarter, 2, c % 4, 2 * (c // 4), 4) for c in range(16)])
    return fields


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    scale = (halves_at(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32))[..., None]  # (n, 16, 1)
    low = (halves_at(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32))[..., None]
    return (scale * split_bit_pairs(blocks[:, 16:80]).astype(np.float32) - low).reshape(-1, 256)


def _fields() -> list[Field]:
    fields = half_fields(80, D) + half_fields(82, DMIN)
    for sub, sub_fields in enumerate(bit_pair_fields(16)):
        fields += [field._replace(tile_byte=field.tile_byte + 64 * sub) for field in sub_fields]
    return fields + [Field(sub, 0, 8, SCALE + 16 * sub, 0, 1) for sub in range(16)]


Q2_K = Format("q2_k", 256, 10, 84, _from_blocks, 1344, _fields(), (80, 82))
