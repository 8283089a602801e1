"""q4_k: 256 nibbles in 8 sub-blocks with 6-bit scales and minima, w = d * scale * q - dmin * min."""

import numpy as np

from ..kernels.jit import on_call
from .base import Field, Format, half, half_fields, halves_at, nibble_column, readonly, reciprocal, round_codes

SCALE, MIN, D, DMIN = 2048, 2176, 2304, 2336
LANES = 16  # sub-blocks searched at once: each lane sums alone, so results do not depend on the vector width
STEPS = 25


@on_call
def _search(x, highest, scale, low):
    """Weighted least-squares fit of the levels 0..highest to every sub-block: x ~ scale * q + low, low <= 0.

    x        (32, n) float32  column, sub-block; n a multiple of 16; read-only
    highest  float32
    scale    (n,)    float32  written
    low      (n,)    float32  written
    Several spacings of the levels are tried; for each the codes follow by rounding, and scale and low from the normal equations
    with weights rms(x) + |x|, which favour the large weights as outputs do. The residual is evaluated from the same sums.
    """
    weight = np.empty((32, 16), np.float32)
    top, bottom, rms, spacing = np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.float32)
    sum_w, sum_x, sum_xx = np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.float32)
    sum_q, sum_qq, sum_xq, best = np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.float32), np.empty(16, np.float32)
    zero, half_, two = np.float32(0), np.float32(0.5), np.float32(2)
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
            levels = highest + np.float32(0.1) * np.float32(step - STEPS // 2)
            for r in range(16):
                span = top[r] - bottom[r]
                spacing[r] = levels / span if span > zero else zero
                sum_q[r], sum_qq[r], sum_xq[r] = zero, zero, zero
            for k in range(32):
                for r in range(16):
                    v, w = x[k, start + r], weight[k, r]
                    q = np.float32(np.int32(min(highest, (v - bottom[r]) * spacing[r] + half_)))
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


def fit(weights: np.ndarray, highest: int) -> tuple[np.ndarray, np.ndarray]:
    """weights (n, 256) -> (codes (n, 8, 32) uint8 of 0..highest, header (n, 16) uint8 as `header_of` makes it)."""
    n = len(weights)
    sub_blocks = weights.reshape(n * 8, 32)
    columns = lanes(sub_blocks)
    scale, low = np.empty(columns.shape[1], np.float32), np.empty(columns.shape[1], np.float32)
    _search(readonly(columns), np.float32(highest), scale, low)
    scales, d = _six_bits(np.maximum(scale[: n * 8], 0).reshape(n, 8))
    minima, dmin = _six_bits(-low[: n * 8].reshape(n, 8))
    fine = (d.astype(np.float32)[:, None] * scales).reshape(-1)
    offset = -(dmin.astype(np.float32)[:, None] * minima).reshape(-1)
    codes = np.empty((n * 8, 32), np.uint8)
    round_codes(readonly(sub_blocks), readonly(offset), readonly(reciprocal(fine)), np.float32(0.5), np.int32(highest), codes)
    return codes.reshape(n, 8, 32), header_of(scales, minima, d, dmin)


def header_of(scales: np.ndarray, minima: np.ndarray, d: np.ndarray, dmin: np.ndarray) -> np.ndarray:
    """The 16 bytes that begin a block: d, dmin (float16, (n,)), then scales and minima, (n, 8) uint8 of six bits."""
    header = np.empty((len(scales), 16), np.uint8)
    header[:, 0:2], header[:, 2:4] = d.reshape(-1, 1).view(np.uint8), dmin.reshape(-1, 1).view(np.uint8)
    header[:, 4:8] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    header[:, 8:12] = minima[:, :4] | (minima[:, 4:] >> 4 << 6)
    header[:, 12:16] = (scales[:, 4:] & 15) | (minima[:, 4:] << 4)
    return header


def read_header(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a block's first 16 bytes say: d * scale and dmin * min of every sub-block, float32 (n, 8, 1)."""
    packed = blocks[:, 4:16]
    scales = np.concatenate([packed[:, :4] & 63, (packed[:, 8:] & 15) | (packed[:, :4] >> 6 << 4)], axis=1)
    minima = np.concatenate([packed[:, 4:8] & 63, (packed[:, 8:] >> 4) | (packed[:, 4:8] >> 6 << 4)], axis=1)
    return (halves_at(blocks, 0) * scales.astype(np.float32))[..., None], (halves_at(blocks, 2) * minima.astype(np.float32))[..., None]


def pair_sub_blocks(codes: np.ndarray) -> np.ndarray:
    """codes (n, 8, 32) -> (n, 128): sub-blocks 2j and 2j + 1 share the bytes 32j to 32j + 31, the even one in the low nibbles."""
    return ((codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)).reshape(-1, 128)


def split_sub_blocks(packed: np.ndarray) -> np.ndarray:
    """The inverse of pair_sub_blocks, for codes of four bits."""
    pairs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _to_blocks(weights: np.ndarray) -> np.ndarray:
    codes, header = fit(weights, 15)
    return np.concatenate([header, pair_sub_blocks(codes)], axis=1)


def _from_blocks(blocks: np.ndarray) -> np.ndarray:
    scale, low = read_header(blocks)
    return (scale * split_sub_blocks(blocks[:, 16:]).astype(np.float32) - low).reshape(-1, 256)


def nibble_fields(first_byte: int, sub_block_bytes: int) -> list[Field]:
    """The 256 nibbles of a block whose ggml nibbles start at first_byte, in sub-blocks of so many bytes of the tile."""
    fields = []
    for c in range(256):
        sub, column = divmod(c, 32)
        byte, shift = nibble_column(column)
        fields.append(Field(first_byte + 32 * (sub // 2) + column, 4 * (sub % 2), 4, sub_block_bytes * sub + byte, shift, 4))
    return fields


def header_fields(scale: int, low: int, d: int, dmin: int) -> list[Field]:
    """The 16 bytes that begin a block, to these bytes of the tile."""
    fields = half_fields(0, d) + half_fields(2, dmin)
    for start, first in ((4, scale), (8, low)):  # ggml: byte 4+j / 8+j = 6 bits of sub-block j, above them bits 4-5 of sub-block 4+j
        for j in range(4):
            fields.append(Field(start + j, 0, 6, first + 16 * j, 0, 1))
            fields.append(Field(start + j, 6, 2, first + 16 * (4 + j), 4, 1))
            fields.append(Field(12 + j, 0 if first == scale else 4, 4, first + 16 * (4 + j), 0, 1))
    return fields


_FIELDS = header_fields(SCALE, MIN, D, DMIN) + nibble_fields(16, 256)
Q4_K = Format("q4_k", 256, 12, 144, _from_blocks, 2368, _FIELDS, (0, 2), _to_blocks, 0.3, 1024 * 2**-25)
