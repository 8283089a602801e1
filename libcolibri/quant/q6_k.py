"""q6_k: 256 codes of six bits in 16 sub-blocks with 8-bit scales, w = d * scale * (q - 32)."""

import numpy as np

from ..kernels.jit import on_call
from .base import Field, Format, half, half_fields, halves_at, nibble_column, readonly, reciprocal, round_codes
from .q4_0 import signed_extreme
from .q4_k import lanes

SCALE, D = 3072, 3328


@on_call
def _search(x, extreme, scale):
    """Weighted least-squares scale of 64 symmetric levels for every sub-block: x ~ scale * q, -32 <= q <= 31.

    x        (16, n) float32  column, sub-block; n a multiple of 16; read-only
    extreme  (n,)    float32  the weight of largest magnitude, sign kept; it maps onto about -32, the longer side
    scale    (n,)    float32  written
    Of several spacings the one is kept that explains most: (sum w x q)^2 / sum w q^2 with weights x^2.
    """
    spacing, best = np.empty(16, np.float32), np.empty(16, np.float32)
    sum_qq, sum_xq = np.empty(16, np.float32), np.empty(16, np.float32)
    zero, magic = np.float32(0), np.float32(12582912.0)  # adding and subtracting 1.5 * 2**23 rounds to nearest
    for start in range(0, x.shape[1], 16):
        for r in range(16):
            best[r], scale[start + r] = zero, zero
        for step in range(19):
            levels = np.float32(-32) - np.float32(0.1) * np.float32(step - 9)
            for r in range(16):
                e = extreme[start + r]
                spacing[r] = levels / e if e != zero else zero
                sum_qq[r], sum_xq[r] = zero, zero
            for k in range(16):
                for r in range(16):
                    v = x[k, start + r]
                    q = max(np.float32(-32), min(np.float32(31), (v * spacing[r] + magic) - magic))
                    sum_qq[r] += v * v * q * q
                    sum_xq[r] += v * v * v * q
            for r in range(16):
                if sum_qq[r] > zero and sum_xq[r] * sum_xq[r] > best[r] * sum_qq[r]:
                    scale[start + r] = sum_xq[r] / sum_qq[r]
                    best[r] = sum_xq[r] * scale[start + r]


def _to_blocks(weights: np.ndarray) -> np.ndarray:
    n = len(weights)
    sub_blocks = weights.reshape(n * 16, 16)
    size = np.abs(weights).max(axis=1, keepdims=True)
    columns = lanes((weights * reciprocal(size)).reshape(n * 16, 16))  # normalised: fourth powers of weights would underflow
    extreme, scale = np.zeros(columns.shape[1], np.float32), np.empty(columns.shape[1], np.float32)
    extreme[: n * 16] = signed_extreme(columns.T[: n * 16])
    _search(readonly(columns), readonly(extreme), scale)
    scales = scale[: n * 16].reshape(n, 16)
    largest = signed_extreme(scales)
    codes_of_scale = np.minimum(127, np.rint(scales * (-128 * reciprocal(largest))[:, None])).astype(np.int8)
    d = half(largest / np.float32(-128) * size[:, 0])
    fine = (d.astype(np.float32)[:, None] * codes_of_scale).reshape(-1)
    codes = np.empty((n * 16, 16), np.uint8)
    round_codes(readonly(sub_blocks), readonly(np.zeros_like(fine)), readonly(reciprocal(fine)), np.float32(32.5), np.int32(63), codes)
    return _assemble(codes.reshape(n, 2, 4, 32), codes_of_scale, d)


def _assemble(codes: np.ndarray, scales: np.ndarray, d: np.ndarray) -> np.ndarray:
    """codes (n, half, quarter, 32) as ggml orders them: a byte's nibbles are 64 columns apart, its four bit pairs 32."""
    blocks = np.empty((len(codes), 210), np.uint8)
    blocks[:, :128] = ((codes[:, :, :2] & 15) | (codes[:, :, 2:] << 4)).reshape(-1, 128)
    high = codes >> 4
    blocks[:, 128:192] = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(-1, 64)
    blocks[:, 192:208], blocks[:, 208:] = scales.view(np.uint8), d.reshape(-1, 1).view(np.uint8)
    return blocks


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    codes = np.concatenate([low & 15, low >> 4], axis=2) | ((high & 3) << 4)  # (n, half, quarter, 32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32) * halves_at(blocks, 208)
    return (scales[..., None] * (codes.reshape(-1, 16, 16).astype(np.float32) - np.float32(32))).reshape(-1, 256)


def _fields() -> list[Field]:
    fields = half_fields(208, D)
    for c in range(256):
        upper, column = divmod(c, 128)
        quarter, byte = divmod(column, 32)
        sub, inner = divmod(c, 16)
        tile_byte, shift = nibble_column(inner)
        fields.append(Field(64 * upper + 32 * (quarter % 2) + byte, 4 * (quarter // 2), 4, 192 * sub + tile_byte, shift, 4))
        fields.append(Field(128 + 32 * upper + byte, 2 * quarter, 2, 192 * sub + 128 + inner % 4, 2 * (inner // 4), 4))
    return fields + [Field(192 + sub, 0, 8, SCALE + 16 * sub, 0, 1) for sub in range(16)]


Q6_K = Format("q6_k", 256, 14, 210, _from_blocks, 3392, _fields(), (208,), _to_blocks, 0.05, 4096 * 2**-25)
