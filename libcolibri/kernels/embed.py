"""Token embeddings: rows of a tiled matrix as float32."""

import numpy as np
from numba.extending import overload

from ..quant.iq4_nl import VALUES as IQ4_VALUES
from ..quant.mxfp4 import VALUES as MXFP4_VALUES
from ..simd.registers import target
from ..simd.scalars import get_bf16, get_f16, get_f32, get_i8, get_i64, get_power_of_two, get_u8, put_f32
from .dots import BF16, F16, F32, IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0
from .jit import inline, kernel

_f = np.float32


def dequantize_row(like, tile, row, blocks, out):
    """Row 0..15 of a row group as float32 at `out`; exists in compiled kernels only."""
    raise TypeError("dequantize_row exists in compiled kernels only")


@overload(dequantize_row, jit_options={"forceinline": True, "error_model": "numpy"})
def _dequantize_row(like, tile, row, blocks, out):
    return _ROWS[like.format]


@inline
def _bits(place, shift, mask):
    """The bits of one byte that `mask` keeps after a shift to the right."""
    return (np.int64(get_u8(place)) >> shift) & mask


@inline
def _nibble(codes, row, c):
    """Column c of a row in consecutive nibble vectors."""
    return _bits(codes + c // 8 * 64 + row * 4 + c % 4, c % 8 // 4 * 4, 15)


@inline
def _five_bits(codes, row, c):
    """Column c < 32 of a row: four nibble vectors, then one of fifth bits."""
    return _nibble(codes, row, c) | _bits(codes + 256 + row * 4 + c % 4, c // 4, 1) << 4


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
            put_f32(out + c * 4, d * _f(_nibble(tile, row, c) - 8))
        tile += 288
        out += 128


def _q4_1(like, tile, row, blocks, out):
    for _ in range(blocks):
        d, m = get_f16(tile + 256 + row * 2), get_f16(tile + 288 + row * 2)
        for c in range(32):
            put_f32(out + c * 4, d * _f(_nibble(tile, row, c)) + m)
        tile += 320
        out += 128


def _q5_0(like, tile, row, blocks, out):
    for _ in range(blocks):
        d = get_f16(tile + 320 + row * 2)
        for c in range(32):
            put_f32(out + c * 4, d * _f(_five_bits(tile, row, c) - 16))
        tile += 352
        out += 128


def _q5_1(like, tile, row, blocks, out):
    for _ in range(blocks):
        d, m = get_f16(tile + 320 + row * 2), get_f16(tile + 352 + row * 2)
        for c in range(32):
            put_f32(out + c * 4, d * _f(_five_bits(tile, row, c)) + m)
        tile += 384
        out += 128


def _q4_k(like, tile, row, blocks, out):
    for _ in range(blocks):
        d, dmin = get_f16(tile + 2304 + row * 2), get_f16(tile + 2336 + row * 2)
        for s in range(8):
            scale = d * _f(get_u8(tile + 2048 + s * 16 + row))
            least = dmin * _f(get_u8(tile + 2176 + s * 16 + row))
            for c in range(32):
                put_f32(out + c * 4, scale * _f(_nibble(tile + s * 256, row, c)) - least)
            out += 128
        tile += 2368


def _q5_k(like, tile, row, blocks, out):
    for _ in range(blocks):
        d, dmin = get_f16(tile + 2816 + row * 2), get_f16(tile + 2848 + row * 2)
        for s in range(8):
            scale = d * _f(get_u8(tile + 2560 + s * 16 + row))
            least = dmin * _f(get_u8(tile + 2688 + s * 16 + row))
            for c in range(32):
                put_f32(out + c * 4, scale * _f(_five_bits(tile + s * 320, row, c)) - least)
            out += 128
        tile += 2880


def _q6_k(like, tile, row, blocks, out):
    for _ in range(blocks):
        d = get_f16(tile + 3328 + row * 2)
        for s in range(16):
            scale = d * _f(get_i8(tile + 3072 + s * 16 + row))
            for c in range(16):
                code = _nibble(tile + s * 192, row, c) | _bits(tile + s * 192 + 128 + row * 4 + c % 4, c // 4 * 2, 3) << 4
                put_f32(out + c * 4, scale * _f(code - 32))
            out += 64
        tile += 3392


def _q2_k(like, tile, row, blocks, out):
    for _ in range(blocks):
        d, dmin = get_f16(tile + 1280 + row * 2), get_f16(tile + 1312 + row * 2)
        for s in range(16):
            scale = d * _f(_bits(tile + 1024 + s * 16 + row, 0, 15))
            least = dmin * _f(_bits(tile + 1024 + s * 16 + row, 4, 15))
            for c in range(16):
                put_f32(out + c * 4, scale * _f(_bits(tile + s * 64 + row * 4 + c % 4, c // 4 * 2, 3)) - least)
            out += 64
        tile += 1344


def _q3_k(like, tile, row, blocks, out):
    for _ in range(blocks):
        d = get_f16(tile + 1792 + row * 2)
        for s in range(16):
            scale = d * _f(np.int64(get_u8(tile + 1536 + s * 16 + row)) - 32)
            pairs, bits = tile + s // 2 * 192 + s % 2 * 64 + row * 4, tile + s // 2 * 192 + 128 + row * 4
            for c in range(16):
                code = _bits(pairs + c % 4, c // 4 * 2, 3) | _bits(bits + c % 4, s % 2 * 4 + c // 4, 1) << 2
                put_f32(out + c * 4, scale * _f(code - 4))
            out += 64
        tile += 1856


def _iq4_nl(like, tile, row, blocks, out):
    for _ in range(blocks):
        d = get_f16(tile + 256 + row * 2)
        for c in range(32):
            put_f32(out + c * 4, d * _f(IQ4_VALUES[_nibble(tile, row, c)]))
        tile += 288
        out += 128


def _iq4_xs(like, tile, row, blocks, out):
    for _ in range(blocks):
        d = get_f16(tile + 2176 + row * 2)
        for s in range(8):
            scale = d * _f(np.int64(get_u8(tile + 2048 + s * 16 + row)) - 32)
            for c in range(32):
                put_f32(out + c * 4, scale * _f(IQ4_VALUES[_nibble(tile + s * 256, row, c)]))
            out += 128
        tile += 2240


def _mxfp4(like, tile, row, blocks, out):
    for _ in range(blocks):
        d = get_power_of_two(tile + 256 + row)
        for c in range(32):
            put_f32(out + c * 4, d * _f(MXFP4_VALUES[_nibble(tile, row, c)]))
        tile += 272
        out += 128


_ROWS = {
    F32: _f32, F16: _f16, BF16: _bf16, Q8_0: _q8_0, Q4_0: _q4_0, Q4_1: _q4_1, Q5_0: _q5_0, Q5_1: _q5_1, Q2_K: _q2_k, Q3_K: _q3_k,
    Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k, IQ4_NL: _iq4_nl, IQ4_XS: _iq4_xs, MXFP4: _mxfp4,
}  # fmt: skip


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
