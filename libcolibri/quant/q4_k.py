"""q4_k: 256 nibbles in 8 sub-blocks with 6-bit scales and minima, w = d * scale * q - dmin * min."""

import numpy as np

from ..kernels.jit import on_call
from .base import Field, Format, half, half_fields, halves_at, nibble_column, readonly, reciprocal, round_codes

SCALE, MIN, D, DMIN = 2048, 2176, 2304, 2336
LANES = 16  # sub-blocks searched at once: each lane sums alone, so results do not depend on the vector width
STEPS = 25


@on_call
def _search(x, scale, low):
    """Weighted least-squares fit of 16 levels to every sub-block: x ~ scale * q + low, low <= 0.

    x      (32, n) float32  column, sub-block; n a multiple of 16; read-only
    scale  (n,)    float32  written
    low    (n,)    float32  written
    Several spacings of the levels are tried; for each the codes follow by rounding, and scale and low from the normal equations
    with weights rms(x) + |x|, which favour the large weights as outputs do. The residual is evaluated from the same sums.
    """
    weight = np.empty((32, 16), np.float32)
    top, bottom, rms, spacing = np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.float32)
    sum_w, sum_x, sum_xx = np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.float32)
    sum_q, sum_qq, sum_xq, best = np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.float32)
    zero, half_, two, fifteen = np.float32(0), np.float32(0.5), np.float32(2), np.float32(15)
    degenerate = np.float32(1e-5)
    for start in range(0, x.shape[1], 16):
        for r in range(16):
            top[r], bottom[r], rms[r] = x[0, start + r], zero, zero
            sum_w[r], sum_x[r], sum_xx[r] = zero, zero, zero
        for k in range(32):
            for r in range(16):
                v = x[k, start + r]
                top[r], bottom[r] = max(top[r], v), min(bottom[r], v)
                rms[r] += v * v
        for r in range(16):
            rms[r] = np.sqrt(rms[r] / np.float32(32))
        for k in range(32):
            for r in range(16):
                v = x[k, start + r]
                w = rms[r] + np.abs(v)
                weight[k, r] = w
                sum_w[r] += w
                sum_x[r] += w * v
                sum_xx[r] += w * v * v
        for r in range(16):
            best[r], scale[start + r], low[start + r] = np.float32(np.inf), zero, bottom[r]
        for step in range(STEPS):
            levels = fifteen + np.float32(0.1) * np.float32(step - STEPS // 2)
            for r in range(16):
                span = top[r] - bottom[r]
                spacing[r] = levels / span if span > zero else zero
                sum_q[r], sum_qq[r], sum_xq[r] = zero, zero, zero
            for k in range(32):
                for r in range(16):
                    v, w = x[k, start + r], weight[k, r]
                    q = np.float32(np.int32(min(fifteen, (v - bottom[r]) * spacing[r] + half_)))
                    sum_q[r] += w * q
                    sum_qq[r] += w * q * q
                    sum_xq[r] += w * v * q
            for r in range(16):
                determinant = sum_w[r] * sum_qq[r] - sum_q[r] * sum_q[r]
                if sum_qq[r] > zero:
                    a, b = sum_xq[r] / sum_qq[r], zero
                    if determinant > degenerate * sum_w[r] * sum_qq[r]:  # else all codes are alike, and only a scale can be fitted
                        shift = (sum_qq[r] * sum_x[r] - sum_q[r] * sum_xq[r]) / determinant
                        if shift <= zero:
                            a, b = (sum_w[r] * sum_xq[r] - sum_x[r] * sum_q[r]) / determinant, shift
                    from_a = a * (a * sum_qq[r] + two * (b * sum_q[r] - sum_xq[r]))
                    error = sum_xx[r] + from_a + b * (b * sum_w[r] - two * sum_x[r])
                    if error < best[r]:
                        best[r], scale[start + r], low[start + r] = error, a, b


def lanes(sub_blocks: np.ndarray) -> np.ndarray:
    """Sub-blocks (n, k) as (k, n rounded up to LANES), zero-filled: neighbouring sub-blocks are neighbours in memory."""
    count, width = sub_blocks.shape
    out = np.zeros((width, -(-count // LANES) * LANES), np.float32)
    out[:, :count] = sub_blocks.T
    return out


def _six_bits(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """values (n, 8) >= 0 -> codes (n, 8) uint8 of six bits and float16 d (n,), values ~ d * codes."""
    largest = values.max(axis=1)
    codes = np.rint(values * (63 * reciprocal(largest))[:, None]).astype(np.uint8)
    return codes, half(largest / np.float32(63))


def _to_blocks(weights: np.ndarray) -> np.ndarray:
    n = len(weights)
    sub_blocks = weights.reshape(n * 8, 32)
    columns = lanes(sub_blocks)
    scale, low = np.empty(columns.shape[1], np.float32), np.empty(columns.shape[1], np.float32)
    _search(readonly(columns), scale, low)
    scales, d = _six_bits(np.maximum(scale[: n * 8], 0).reshape(n, 8))
    minima, dmin = _six_bits(-low[: n * 8].reshape(n, 8))
    fine = (d.astype(np.float32)[:, None] * scales).reshape(-1)
    offset = -(dmin.astype(np.float32)[:, None] * minima).reshape(-1)
    codes = np.empty((n * 8, 32), np.uint8)
    round_codes(readonly(sub_blocks), readonly(offset), readonly(reciprocal(fine)), np.float32(0.5), np.int32(15), codes)
    return _assemble(codes.reshape(n, 4, 2, 32), scales, minima, d, dmin)


def _assemble(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray, d: np.ndarray, dmin: np.ndarray) -> np.ndarray:
    blocks = np.empty((len(codes), 144), np.uint8)
    blocks[:, 0:2], blocks[:, 2:4] = d.reshape(-1, 1).view(np.uint8), dmin.reshape(-1, 1).view(np.uint8)
    blocks[:, 4:8] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    blocks[:, 8:12] = minima[:, :4] | (minima[:, 4:] >> 4 << 6)
    blocks[:, 12:16] = (scales[:, 4:] & 15) | (minima[:, 4:] << 4)
    blocks[:, 16:] = (codes[:, :, 0] | (codes[:, :, 1] << 4)).reshape(-1, 128)
    return blocks


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    packed = blocks[:, 4:16]
    scales = np.concatenate([packed[:, :4] & 63, (packed[:, 8:] & 15) | (packed[:, :4] >> 6 << 4)], axis=1)
    minima = np.concatenate([packed[:, 4:8] & 63, (packed[:, 8:] >> 4) | (packed[:, 4:8] >> 6 << 4)], axis=1)
    scale = (halves_at(blocks, 0) * scales.astype(np.float32))[..., None]  # (n, 8, 1)
    low = (halves_at(blocks, 2) * minima.astype(np.float32))[..., None]
    pairs = blocks[:, 16:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)
    return (scale * codes.astype(np.float32) - low).reshape(-1, 256)


def _fields() -> list[Field]:
    fields = half_fields(0, D) + half_fields(2, DMIN)
    for c in range(256):
        sub, column = divmod(c, 32)
        byte, shift = nibble_column(column)
        fields.append(Field(16 + 32 * (sub // 2) + column, 4 * (sub % 2), 4, 256 * sub + byte, shift, 4))
    for start, first in ((4, SCALE), (8, MIN)):  # ggml: byte 4+j / 8+j = 6 bits of sub-block j, above them bits 4-5 of sub-block 4+j
        for j in range(4):
            fields.append(Field(start + j, 0, 6, first + 16 * j, 0, 1))
            fields.append(Field(start + j, 6, 2, first + 16 * (4 + j), 4, 1))
            fields.append(Field(12 + j, 0 if first == SCALE else 4, 4, first + 16 * (4 + j), 0, 1))
    return fields


Q4_K = Format("q4_k", 256, 2368, 12, 144, _fields(), _from_blocks, _to_blocks, 0.3, 1024 * 2**-25)
