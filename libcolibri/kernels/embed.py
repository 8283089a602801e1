"""Token embeddings: rows of a tiled matrix as float32."""

import numpy as np
from numba.extending import overload

from ..simd.registers import target
from ..simd.scalars import get_bf16, get_f16, get_f32, get_i8, get_i64, get_u8, put_f32
from .dots import BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q6_K, Q8_0
from .jit import kernel

_f = np.float32


def dequantize_row(like, tile, row, blocks, out):
    """Row 0..15 of a row group as float32 at `out`; exists in compiled kernels only."""
    raise TypeError("dequantize_row exists in compiled kernels only")


@overload(dequantize_row, jit_options={"forceinline": True, "error_model": "numpy"})
def _dequantize_row(like, tile, row, blocks, out):
    return _ROWS[like.format]


def _f32(like, tile, row, blocks, out):
    for c in range(blocks):
        put_f32(out + c * 4, get_f32(tile + c * 64 + row * 4))


def _f16(like, tile, row, blocks, out):
    for c in range(blocks):
        put_f32(out + c * 4, get_f16(tile + c * 32 + row * 2))


def _bf16(like, tile, row, blocks, out):
    for c in range(blocks):
        put_f32(out + c * 4, get_bf16(tile + c * 32 + row * 2))


def _q8_0(like, tile, row, blocks, out):
    for _ in range(blocks):
        d = get_f16(tile + 512 + row * 2)
        for c in range(32):
            put_f32(out + c * 4, d * _f(get_i8(tile + c // 4 * 64 + row * 4 + c % 4)))
        tile += 544
        out += 128


def _q4_0(like, tile, row, blocks, out):
    for _ in range(blocks):
        d = get_f16(tile + 256 + row * 2)
        for c in range(32):
            code = np.int64(get_u8(tile + c // 8 * 64 + row * 4 + c % 4)) >> (c % 8 // 4 * 4)
            put_f32(out + c * 4, d * _f((code & 15) - 8))
        tile += 288
        out += 128


def _q4_1(like, tile, row, blocks, out):
    for _ in range(blocks):
        d, m = get_f16(tile + 256 + row * 2), get_f16(tile + 288 + row * 2)
        for c in range(32):
            code = np.int64(get_u8(tile + c // 8 * 64 + row * 4 + c % 4)) >> (c % 8 // 4 * 4)
            put_f32(out + c * 4, d * _f(code & 15) + m)
        tile += 320
        out += 128


def _q5_0(like, tile, row, blocks, out):
    for _ in range(blocks):
        d = get_f16(tile + 320 + row * 2)
        for c in range(32):
            low = np.int64(get_u8(tile + c // 8 * 64 + row * 4 + c % 4)) >> (c % 8 // 4 * 4)
            high = np.int64(get_u8(tile + 256 + row * 4 + c % 4)) >> (c // 4)
            put_f32(out + c * 4, d * _f(((low & 15) | (high & 1) << 4) - 16))
        tile += 352
        out += 128


def _q4_k(like, tile, row, blocks, out):
    for _ in range(blocks):
        d, dmin = get_f16(tile + 2304 + row * 2), get_f16(tile + 2336 + row * 2)
        for s in range(8):
            scale = d * _f(get_u8(tile + 2048 + s * 16 + row))
            least = dmin * _f(get_u8(tile + 2176 + s * 16 + row))
            for c in range(32):
                code = np.int64(get_u8(tile + s * 256 + c // 8 * 64 + row * 4 + c % 4)) >> (c % 8 // 4 * 4)
                put_f32(out + c * 4, scale * _f(code & 15) - least)
            out += 128
        tile += 2368


def _q6_k(like, tile, row, blocks, out):
    for _ in range(blocks):
        d = get_f16(tile + 3328 + row * 2)
        for s in range(16):
            scale = d * _f(get_i8(tile + 3072 + s * 16 + row))
            for c in range(16):
                low = np.int64(get_u8(tile + s * 192 + c // 8 * 64 + row * 4 + c % 4)) >> (c % 8 // 4 * 4)
                high = np.int64(get_u8(tile + s * 192 + 128 + row * 4 + c % 4)) >> (c // 4 * 2)
                put_f32(out + c * 4, scale * _f(((low & 15) | (high & 3) << 4) - 32))
            out += 64
        tile += 3392


_ROWS = {F32: _f32, F16: _f16, BF16: _bf16, Q8_0: _q8_0, Q4_0: _q4_0, Q4_1: _q4_1, Q5_0: _q5_0, Q4_K: _q4_k, Q6_K: _q6_k}


def make_embed(isa, format):
    """Kernel: row ids[t] of the matrix as float32, for every token t; ranks share tokens.

    operands: address of the number of tokens, ids (int64), tiles, bytes of a row group, tiles of a row group (float types: columns),
    out, out stride. Ids must have been checked against the vocabulary.
    """

    @kernel
    def embed(operands, rank, threads):
        tokens, ids, tiles = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        group_bytes, blocks, out, stride = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48)
        like = target(isa, format, 1, 16)
        for t in range(rank, tokens, threads):
            token = get_i64(ids + t * 8)
            dequantize_row(like, tiles + token // 16 * group_bytes, token % 16, blocks, out + t * stride)
        return 0

    return embed
