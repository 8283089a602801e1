"""q8_0: 32 signed bytes and one float16 scale, w = d * q."""

import numpy as np

from ..kernels.jit import on_call
from .base import Field, Format, half_bytes, half_fields, halves_at, readonly, reciprocal

D = 512  # 8 vectors of int8


@on_call
def _round_half_away(x, inverse, codes):
    """codes = x * inverse rounded to nearest, halves away from zero. x (n, 32) float32, inverse (n,) float32, codes (n, 32) int8."""
    for n in range(x.shape[0]):
        for k in range(x.shape[1]):
            value = x[n, k] * inverse[n]
            size = np.abs(value)
            whole = np.floor(size)
            if size - whole >= np.float32(0.5):
                whole += np.float32(1)
            codes[n, k] = np.int8(whole if value >= 0 else -whole)


def _to_blocks(weights: np.ndarray) -> np.ndarray:
    d = np.abs(weights).max(axis=1) / np.float32(127)
    codes = np.empty(weights.shape, np.int8)
    _round_half_away(readonly(weights), readonly(reciprocal(d)), codes)
    return np.concatenate([half_bytes(d), codes.view(np.uint8)], axis=1)


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * halves_at(blocks, 0)


def _fields() -> list[Field]:
    codes = [Field(2 + c, 0, 8, 64 * (c // 4) + c % 4, 0, 4) for c in range(32)]
    return codes + half_fields(0, D)


Q8_0 = Format("q8_0", 32, 8, 34, _from_blocks, 544, _fields(), (0,), _to_blocks, 0.0045, 128 * 2**-25)
