"""One row group (16 rows) of a matrix times one panel of tokens, for every tensor type.

    dot(target, tile, row, blocks, x, x_stride, total) -> total + W[rows] @ x, rows = row .. row + lanes of the target - 1

row       0, or 8 in the second pass of an 8-lane target
tile      address of the row group's first tile; tiles of a group lie one behind the other (FORMAT.md)
blocks    tiles in the row group (float types: columns)
x         quantised types: a panel of `activations.py`, as wide as the target; float types: float32 rows
x_stride  bytes between tokens (float types only)
total     float32 bundle, rows x tokens

Numeric definition (FORMAT.md): per 32 columns the integer P is exact; then, in column order,
total = fma(P * x_scale, D, total), and for types with a minimum total = fma(x_shift, N, total) (q2_k, with two minima in 32
columns: another integer times x_scale in place of x_shift), each operation rounded once to float32. The bits do not depend on
the width of the panel, the instruction set, or the thread.
"""

import numpy as np
from numba.extending import overload

from ..quant.iq4_nl import VALUES as IQ4_VALUES
from ..quant.mxfp4 import VALUES as MXFP4_VALUES
from ..simd.dot import dot2, dot4, dot4_signed, pair_up, signed_correction, table_lookup, widen, widen_scaled, zero_products
from ..simd.registers import (
    add,
    bit_pair,
    broadcast_f32,
    broadcast_i32,
    count_of,
    fma,
    high_nibbles,
    load_bf16_like,
    load_codes_like,
    load_f16_like,
    load_f32_like,
    load_high_nibbles_like,
    load_i8_like,
    load_low_nibbles_like,
    load_power_of_two_like,
    load_u8_like,
    low_nibbles,
    mul,
    negate,
    prefetch,
    splat_i32_like,
    sub,
    to_f32,
    upper_half_bytes,
    with_bit,
    with_high_bits,
    zero_i32,
)
from .activations import BLOCK, HALVES, SCALE, SHIFT, SUM
from .jit import inline

F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q4_K, Q6_K, Q5_1, Q2_K, Q3_K, Q5_K, IQ4_NL, IQ4_XS, MXFP4 = range(16)
IDS = {
    "f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0, "q4_0": Q4_0, "q4_1": Q4_1, "q5_0": Q5_0, "q5_1": Q5_1, "q2_k": Q2_K, "q3_k": Q3_K,
    "q4_k": Q4_K, "q5_k": Q5_K, "q6_k": Q6_K, "iq4_nl": IQ4_NL, "iq4_xs": IQ4_XS, "mxfp4": MXFP4,
}  # fmt: skip
FLOATS = ("f32", "f16", "bf16")
AHEAD = 4096  # bytes that weights are asked for in advance: 60 % more decode speed than without on a Zen 3, 2048 and 8192 less
THIRTY_TWO, MINUS_SIXTEEN, MINUS_TWELVE, EIGHT, FOUR = np.int32(32), np.int32(-16), np.int32(-12), np.int32(8), np.int32(4)
iq4_values = table_lookup(IQ4_VALUES)
mxfp4_values_plus_12 = table_lookup([value + 12 for value in MXFP4_VALUES])  # unsigned, as dot4 wants them


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


@inline
def _five_bit_products(target, codes, row, x, products):
    """products + 32 columns of 5-bit codes, four nibble vectors and one of fifth bits, times one panel block."""
    T = count_of(target)
    bits = load_codes_like(target, codes + 256 + row * 4)
    for half in range(2):  # 5-bit codes: four dot4 an accumulator
        w, at = codes + half * 128 + row * 4, x + half * 16 * T
        high = bits if half == 0 else upper_half_bytes(bits)
        nibbles = load_codes_like(target, w)
        acc = dot4(zero_products(target), with_bit(low_nibbles(nibbles), high, 0, 4), broadcast_i32(at, 4, target))
        acc = dot4(acc, with_bit(high_nibbles(nibbles), high, 1, 4), broadcast_i32(at + 4 * T, 4, target))
        for line in range(3):
            prefetch(target, w + line * 64 + AHEAD)
        nibbles = load_codes_like(target, w + 64)
        acc = dot4(acc, with_bit(low_nibbles(nibbles), high, 2, 4), broadcast_i32(at + 8 * T, 4, target))
        acc = dot4(acc, with_bit(high_nibbles(nibbles), high, 3, 4), broadcast_i32(at + 12 * T, 4, target))
        products = add(products, widen(acc))
    return products


def _q5_0(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        start = mul(broadcast_i32(x + SUM * T, 4, target), splat_i32_like(target, MINUS_SIXTEEN))
        products = _five_bit_products(target, tile, row, x, start)
        scaled = mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target))
        total = fma(scaled, load_f16_like(target, tile + 320 + row * 2), total)
        tile += 352
        x += BLOCK * T
    return total


def _q5_1(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        products = _five_bit_products(target, tile, row, x, zero_i32(target))
        scaled = mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target))
        total = fma(scaled, load_f16_like(target, tile + 320 + row * 2), total)
        total = fma(broadcast_f32(x + SHIFT * T, 4, target), load_f16_like(target, tile + 352 + row * 2), total)
        tile += 384
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


def _q5_k(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        d, dmin = load_f16_like(target, tile + 2816 + row * 2), negate(load_f16_like(target, tile + 2848 + row * 2))
        for s in range(8):
            products = _five_bit_products(target, tile + s * 320, row, x, zero_i32(target))
            scale = mul(d, load_u8_like(target, tile + 2560 + s * 16 + row))
            least = mul(dmin, load_u8_like(target, tile + 2688 + s * 16 + row))
            total = fma(mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target)), scale, total)
            total = fma(broadcast_f32(x + SHIFT * T, 4, target), least, total)
            x += BLOCK * T
        tile += 2880
    return total


@inline
def _scaled_sums(target, first, second, x):
    """first * (sum of the block's first 16 codes) + second * (sum of its last 16): what a code's constant offset is worth."""
    return dot2(target, pair_up(first, second), broadcast_i32(x + HALVES * count_of(target), 4, target))


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
            scales = tile + 3072 + s * 32 + row
            offset = _scaled_sums(target, load_i8_like(target, scales), load_i8_like(target, scales + 16), x)
            products = sub(products, mul(offset, splat_i32_like(target, THIRTY_TWO)))
            total = fma(mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target)), d, total)
            x += BLOCK * T
        tile += 3392
    return total


@inline
def _bit_pair_products(target, pairs, x):
    """16 columns of 2-bit codes, all in one vector, times half of a panel block."""
    T = count_of(target)
    acc = dot4(zero_products(target), bit_pair(pairs, 0), broadcast_i32(x, 4, target))
    acc = dot4(acc, bit_pair(pairs, 1), broadcast_i32(x + 4 * T, 4, target))
    acc = dot4(acc, bit_pair(pairs, 2), broadcast_i32(x + 8 * T, 4, target))
    return dot4(acc, bit_pair(pairs, 3), broadcast_i32(x + 12 * T, 4, target))


def _q2_k(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        d, dmin = load_f16_like(target, tile + 1280 + row * 2), negate(load_f16_like(target, tile + 1312 + row * 2))
        for s in range(8):
            products, scales = zero_i32(target), tile + 1024 + s * 32 + row
            for half in range(2):  # 16 columns each, with a scale and a minimum of its own
                w = tile + s * 128 + half * 64
                prefetch(target, w + AHEAD)
                acc = _bit_pair_products(target, load_codes_like(target, w + row * 4), x + half * 16 * T)
                products = add(products, widen_scaled(acc, load_low_nibbles_like(target, scales + half * 16)))
            x_scale = broadcast_f32(x + SCALE * T, 4, target)
            least = _scaled_sums(target, load_high_nibbles_like(target, scales), load_high_nibbles_like(target, scales + 16), x)
            total = fma(mul(to_f32(products), x_scale), d, total)
            total = fma(mul(to_f32(least), x_scale), dmin, total)
            x += BLOCK * T
        tile += 1344
    return total


@inline
def _three_bit_products(target, pairs, bits, x):
    """16 columns of 3-bit codes, low pairs in one vector and third bits in half of another, times half of a panel block."""
    T = count_of(target)
    acc = dot4(zero_products(target), with_bit(bit_pair(pairs, 0), bits, 0, 2), broadcast_i32(x, 4, target))
    acc = dot4(acc, with_bit(bit_pair(pairs, 1), bits, 1, 2), broadcast_i32(x + 4 * T, 4, target))
    acc = dot4(acc, with_bit(bit_pair(pairs, 2), bits, 2, 2), broadcast_i32(x + 8 * T, 4, target))
    return dot4(acc, with_bit(bit_pair(pairs, 3), bits, 3, 2), broadcast_i32(x + 12 * T, 4, target))


def _q3_k(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        d = load_f16_like(target, tile + 1792 + row * 2)
        for s in range(8):
            w, scales = tile + s * 192 + row * 4, tile + 1536 + s * 32 + row
            for line in range(3):
                prefetch(target, w + line * 64 + AHEAD)
            bits = load_codes_like(target, w + 128)
            first = sub(load_i8_like(target, scales), splat_i32_like(target, THIRTY_TWO))
            second = sub(load_i8_like(target, scales + 16), splat_i32_like(target, THIRTY_TWO))
            acc = _three_bit_products(target, load_codes_like(target, w), bits, x)
            products = widen_scaled(acc, first)
            acc = _three_bit_products(target, load_codes_like(target, w + 64), upper_half_bytes(bits), x + 16 * T)
            products = add(products, widen_scaled(acc, second))
            products = sub(products, mul(_scaled_sums(target, first, second, x), splat_i32_like(target, FOUR)))
            total = fma(mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target)), d, total)
            x += BLOCK * T
        tile += 1856
    return total


@inline
def _iq4_products(target, codes, row, x):
    """32 columns of nibbles that stand for iq4_nl's values, times one panel block."""
    T = count_of(target)
    products = signed_correction(target, broadcast_i32(x + SUM * T, 4, target))
    for g in range(4):
        prefetch(target, codes + g * 64 + AHEAD)
        nibbles = load_codes_like(target, codes + g * 64 + row * 4)
        low, high = iq4_values(target, low_nibbles(nibbles)), iq4_values(target, high_nibbles(nibbles))
        products = dot4_signed(target, products, low, broadcast_i32(x + g * 8 * T, 4, target))
        products = dot4_signed(target, products, high, broadcast_i32(x + g * 8 * T + 4 * T, 4, target))
    return products


def _iq4_nl(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        scaled = mul(to_f32(_iq4_products(target, tile, row, x)), broadcast_f32(x + SCALE * T, 4, target))
        total = fma(scaled, load_f16_like(target, tile + 256 + row * 2), total)
        tile += 288
        x += BLOCK * T
    return total


def _iq4_xs(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        d = load_f16_like(target, tile + 2176 + row * 2)
        for s in range(8):
            scale = mul(d, to_f32(sub(load_i8_like(target, tile + 2048 + s * 16 + row), splat_i32_like(target, THIRTY_TWO))))
            products = _iq4_products(target, tile + s * 256, row, x)
            total = fma(mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target)), scale, total)
            x += BLOCK * T
        tile += 2240
    return total


def _mxfp4(target, tile, row, blocks, x, x_stride, total):
    T = count_of(target)
    for _ in range(blocks):
        products = mul(broadcast_i32(x + SUM * T, 4, target), splat_i32_like(target, MINUS_TWELVE))
        for half in range(2):  # looked up, codes are 0 to 24: four dot4 an accumulator
            acc = zero_products(target)
            for pair in range(2):
                w, at = tile + half * 128 + pair * 64, x + half * 16 * T + pair * 8 * T
                prefetch(target, w + AHEAD)
                nibbles = load_codes_like(target, w + row * 4)
                acc = dot4(acc, mxfp4_values_plus_12(target, low_nibbles(nibbles)), broadcast_i32(at, 4, target))
                acc = dot4(acc, mxfp4_values_plus_12(target, high_nibbles(nibbles)), broadcast_i32(at + 4 * T, 4, target))
            products = add(products, widen(acc))
        scaled = mul(to_f32(products), broadcast_f32(x + SCALE * T, 4, target))
        total = fma(scaled, load_power_of_two_like(target, tile + 256 + row), total)
        tile += 272
        x += BLOCK * T
    return total


_DOTS = {
    F32: _f32, F16: _f16, BF16: _bf16, Q8_0: _q8_0, Q4_0: _q4_0, Q4_1: _q4_1, Q5_0: _q5_0, Q5_1: _q5_1, Q2_K: _q2_k, Q3_K: _q3_k,
    Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k, IQ4_NL: _iq4_nl, IQ4_XS: _iq4_xs, MXFP4: _mxfp4,
}  # fmt: skip
