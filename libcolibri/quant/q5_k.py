"""q5_k: 256 codes of five bits in 8 sub-blocks with 6-bit scales and minima, w = d * scale * q - dmin * min."""

import numpy as np

from .base import Field, Format
from .q4_k import fit, header_fields, nibble_fields, pair_sub_blocks, read_header, split_sub_blocks

SUB_BLOCK, HIGH = 320, 256  # bytes of a sub-block: 4 nibble vectors, then one vector of fifth bits
SCALE, MIN, D, DMIN = 2560, 2688, 2816, 2848


def _to_blocks(weights: np.ndarray) -> np.ndarray:
    codes, header = fit(weights, 31)
    high = np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0]  # byte j has column j of all sub-blocks
    return np.concatenate([header, high, pair_sub_blocks(codes)], axis=1)


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    scale, low = read_header(blocks)
    high = np.unpackbits(blocks[:, None, 16:48], axis=1, bitorder="little")
    codes = split_sub_blocks(blocks[:, 48:]) | (high << 4)
    return (scale * codes.astype(np.float32) - low).reshape(-1, 256)


def _fields() -> list[Field]:
    fields = header_fields(SCALE, MIN, D, DMIN) + nibble_fields(48, SUB_BLOCK)
    for c in range(256):
        sub, column = divmod(c, 32)
        fields.append(Field(16 + column, sub, 1, SUB_BLOCK * sub + HIGH + column % 4, column // 4, 4))
    return fields


Q5_K = Format("q5_k", 256, 13, 176, _from_blocks, 2880, _fields(), (0, 2), _to_blocks, 0.3, 2048 * 2**-25)
