"""Activations as int8: the right-hand side of every quantised matrix product.

A block covers 32 columns of T tokens (a panel of width T) in 48*T bytes:

    codes   8 x T x 4 int8   columns 4k..4k+3 of token t at 4*(k*T + t): one broadcast feeds 16 rows
    scale   T float32        largest magnitude / 127
    shift   T float32        scale * (sum of the 32 codes): what a constant added to every weight is worth
    sum     T int32          sum of the 32 codes
    halves  T x 2 int16      sums of the first and of the last 16 codes

One scale per 32 columns, not per 256: an outlier then spoils 32 columns only, and one form serves every tensor type.
n tokens lie as n // W panels of width W followed by n % W panels of width 1, so token t always starts at byte
t * 48 * blocks; W is the width that the instruction set likes (`matrix.WIDTHS`).
"""

import numpy as np

from ..simd.registers import absolute, load_f32, maximum, mul, reduce_add_i32, reduce_max, round_f32, splat, store_i8, to_i32
from ..simd.scalars import get_i32, put_f32, put_i16, put_i32
from .jit import inline

COLS, BLOCK = 32, 48  # columns of a block; bytes of a block and token
SCALE, SHIFT, SUM, HALVES = 32, 36, 40, 44  # offsets in a block, times the panel's width
LARGEST, ZERO = np.float32(127), np.float32(0)


@inline
def quantize_block(source, block, width, t, scratch):
    """32 float32 at `source` -> token t of a panel block of `width` tokens. scratch: 32 bytes of this thread.

    code = round_half_even(x * (127 / peak)), scale = peak / 127; an all-zero block gets zeros.
    """
    first, second = load_f32(source), load_f32(source + 64)
    peak = reduce_max(maximum(absolute(first), absolute(second)))
    inverse = splat(LARGEST / peak if peak > ZERO else ZERO)
    first, second = to_i32(round_f32(mul(first, inverse))), to_i32(round_f32(mul(second, inverse)))
    store_i8(scratch, first)
    store_i8(scratch + 16, second)
    for k in range(8):
        put_i32(block + 4 * (k * width + t), get_i32(scratch + k * 4))
    low, high = reduce_add_i32(first), reduce_add_i32(second)
    scale = peak / LARGEST
    total = low + high
    put_f32(block + SCALE * width + 4 * t, scale)
    put_f32(block + SHIFT * width + 4 * t, scale * np.float32(total))
    put_i32(block + SUM * width + 4 * t, np.int32(total))
    put_i16(block + HALVES * width + 4 * t, np.int32(low))
    put_i16(block + HALVES * width + 4 * t + 2, np.int32(high))


@inline
def quantize_row(row, cols, panels, token, tokens, width, scratch):
    """`cols` float32 at `row` -> token number `token` of `tokens` in panels of `width` (see the module)."""
    blocks = cols // COLS
    at, here, t = panels + token * blocks * BLOCK, 1, 0
    if token < tokens // width * width:
        t = token % width
        at, here = panels + (token - t) * blocks * BLOCK, width
    for block in range(blocks):
        quantize_block(row + block * COLS * 4, at + block * BLOCK * here, here, t, scratch)
