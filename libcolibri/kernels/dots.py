"""One row group (16 rows) of a matrix times one panel of tokens, for every tensor type.

    dot(target, tile, row, blocks, x, x_stride, total) -> total + W[rows] @ x, rows = row .. row + lanes of the target - 1

row       0, or 8 in the second pass of an 8-lane target
tile      address of the row group's first tile; tiles of a group lie one behind the other (FORMAT.md)
blocks    tiles in the row group (float types: columns)
x         quantised types: a panel of `activations.py`, as wide as the target; float types: float32 rows
x_stride  bytes between tokens (float types only)
total     float32 bundle, rows x tokens

Numeric definition (FORMAT.md): per 32 columns the integer P is exact; then, in column order,
total = fma(P * x_scale, D, total), and for types with a minimum total = fma(x_shift, N, total), each operation rounded once to
float32. The bits do not depend on the width of the panel, the instruction set, or the thread.
"""

import numpy as np
from numba.extending import overload

from ..simd.dot import dot2, dot4, dot4_signed, pair_up, signed_correction, widen, widen_scaled, zero_products
from ..simd.registers import (
    add,
    broadcast_f32,
    broadcast_i32,
    count_of,
    fma,
    high_nibbles,
    load_bf16_like,
    load_codes_like,
    load_f16_like,
    load_f32_like,
    load_i8_like,
    load_u8_like,
    low_nibbles,
    mul,
    negate,
    prefetch,
    splat_i32_like,
    sub,
    to_f32,
    upper_half_bytes,
    with_high_bit,
    with_high_bits,
    zero_i32,
)
from .activations import BLOCK, HALVES, SCALE, SHIFT, SUM
from .jit import inline

F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q4_K, Q6_K = range(9)
IDS = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0, "q4_0": Q4_0, "q4_1": Q4_1, "q5_0": Q5_0, "q4_k": Q4_K, "q6_k": Q6_K}
FLOATS = ("f32", "f16", "bf16")
AHEAD = 4096  # bytes that weights are asked for in advance: 60 % more decode speed than without on a Zen 3, 2048 and 8192 less
THIRTY_TWO, MINUS_SIXTEEN, EIGHT = np.int32(32), np.int32(-16), np.int32(8)


def dot(target, tile, row, blocks, x, x_stride, total):
    """See the module; compiled code only."""
    raise TypeError("dot exists in compiled kernels only")


@overload(dot, jit_options={"forceinline": True, "error_model": "numpy"})
def _dot(target, tile, row, blocks, x, x_stride, total):
    return _DOTS[target.format]


def _f32(target, tile, row, blocks, x, x_stride, total):
    for c in range(blocks):
        prefetch(target, tile + c * 64 + AHEAD)
        total = fma(load_f32_like(target, tile + c * 64 + row * 4), broadcast_f32(x + c * 4, x_stride, target), total)
    return total


def _f16(target, tile, row, blocks, x, x_stride, total):
    for c in range(blocks):
        prefetch(target, tile + c * 32 + AHEAD)
        total = fma(load_f16_like(target, tile + c * 32 + row * 2), broadcast_f32(x + c * 4, x_stride, target), total)
    return total


def _bf16(target, tile, row, blocks, x, x_stride, total):
    for c in range(blocks):
        prefetch(target, tile + c * 32 + AHEAD)
        total = fma(load_bf16_like(target, tile + c * 32 + row * 2), broadcast_f32(x + c * 4, x_stride, target), total)
    return total


def _q8_0(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        products = signed_correction(target, broadcast_i32(x + SUM * T, 4, target))
        for k in range(8):
            prefetch(target, tile + k * 64 + AHEAD)
            w = load_codes_like(target, tile + k * 64 + row * 4)
            products = dot4_signed(target, products, w, broadcast_i32(x + k * 4 * T, 4, target))
        total = fma(mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target)), load_f16_like(target, tile + 512 + row * 2), total)
        tile += 544
        x += BLOCK * T
    return total


@inline
def _nibble_products(target, codes, row, x):
    """32 columns of 4-bit codes, two column groups in a vector, times one panel block."""
    T = count_of(target)
    acc = zero_products(target)
    for g in range(4):
        prefetch(target, codes + g * 64 + AHEAD)
        w = load_codes_like(target, codes + g * 64 + row * 4)
        acc = dot4(acc, low_nibbles(w), broadcast_i32(x + g * 8 * T, 4, target))
        acc = dot4(acc, high_nibbles(w), broadcast_i32(x + g * 8 * T + 4 * T, 4, target))
    return acc


def _q4_0(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        acc = _nibble_products(target, tile, row, x)
        products = sub(widen(acc), mul(broadcast_i32(x + SUM * T, 4, target), splat_i32_like(target, EIGHT)))
        total = fma(mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target)), load_f16_like(target, tile + 256 + row * 2), total)
        tile += 288
        x += BLOCK * T
    return total


def _q4_1(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        acc = _nibble_products(target, tile, row, x)
        total = fma(mul(to_f32(widen(acc)), broadcast_f32(x + SCALE * T, 4, target)), load_f16_like(target, tile + 256 + row * 2), total)
        total = fma(broadcast_f32(x + SHIFT * T, 4, target), load_f16_like(target, tile + 288 + row * 2), total)
        tile += 320
        x += BLOCK * T
    return total


def _q5_0(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        bits = load_codes_like(target, tile + 256 + row * 4)
        products = mul(broadcast_i32(x + SUM * T, 4, target), splat_i32_like(target, MINUS_SIXTEEN))
        for half in range(2):  # 5-bit codes: four dot4 an accumulator
            w, at = tile + half * 128 + row * 4, x + half * 16 * T
            high = bits if half == 0 else upper_half_bytes(bits)
            nibbles = load_codes_like(target, w)
            acc = dot4(zero_products(target), with_high_bit(low_nibbles(nibbles), high, 0), broadcast_i32(at, 4, target))
            acc = dot4(acc, with_high_bit(high_nibbles(nibbles), high, 1), broadcast_i32(at + 4 * T, 4, target))
            for line in range(3):
                prefetch(target, w + line * 64 + AHEAD)
            nibbles = load_codes_like(target, w + 64)
            acc = dot4(acc, with_high_bit(low_nibbles(nibbles), high, 2), broadcast_i32(at + 8 * T, 4, target))
            acc = dot4(acc, with_high_bit(high_nibbles(nibbles), high, 3), broadcast_i32(at + 12 * T, 4, target))
            products = add(products, widen(acc))
        scaled = mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target))
        total = fma(scaled, load_f16_like(target, tile + 320 + row * 2), total)
        tile += 352
        x += BLOCK * T
    return total


def _q4_k(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        d, dmin = load_f16_like(target, tile + 2304 + row * 2), negate(load_f16_like(target, tile + 2336 + row * 2))
        for s in range(8):
            acc = _nibble_products(target, tile + s * 256, row, x)
            scale = mul(d, load_u8_like(target, tile + 2048 + s * 16 + row))
            least = mul(dmin, load_u8_like(target, tile + 2176 + s * 16 + row))
            total = fma(mul(to_f32(widen(acc)), broadcast_f32(x + SCALE * T, 4, target)), scale, total)
            total = fma(broadcast_f32(x + SHIFT * T, 4, target), least, total)
            x += BLOCK * T
        tile += 2368
    return total


def _q6_k(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        d = load_f16_like(target, tile + 3328 + row * 2)
        for s in range(8):
            products = zero_i32(target)
            for half in range(2):  # 16 columns each, with a scale of its own
                w, at = tile + s * 384 + half * 192 + row * 4, x + half * 16 * T
                scale = load_i8_like(target, tile + 3072 + s * 32 + half * 16 + row)
                high = load_codes_like(target, w + 128)
                for line in range(3):
                    prefetch(target, w + line * 64 + AHEAD)
                for pair in range(2):  # 6-bit codes: two dot4 an accumulator
                    nibbles = load_codes_like(target, w + pair * 64)
                    bits = high if pair == 0 else upper_half_bytes(high)
                    acc = dot4(zero_products(target), with_high_bits(low_nibbles(nibbles), bits, 0), broadcast_i32(at, 4, target))
                    acc = dot4(acc, with_high_bits(high_nibbles(nibbles), bits, 1), broadcast_i32(at + 4 * T, 4, target))
                    products = add(products, widen_scaled(acc, scale))
                    at += 8 * T
            scales = tile + 3072 + s * 32
            pairs = pair_up(load_i8_like(target, scales + row), load_i8_like(target, scales + 16 + row))
            halves = dot2(target, pairs, broadcast_i32(x + HALVES * T, 4, target))
            products = sub(products, mul(halves, splat_i32_like(target, THIRTY_TWO)))
            total = fma(mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target)), d, total)
            x += BLOCK * T
        tile += 3392
    return total


_DOTS = {F32: _f32, F16: _f16, BF16: _bf16, Q8_0: _q8_0, Q4_0: _q4_0, Q4_1: _q4_1, Q5_0: _q5_0, Q4_K: _q4_k, Q6_K: _q6_k}
