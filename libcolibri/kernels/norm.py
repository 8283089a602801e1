"""RMS norm and LayerNorm, and rounding activations to int8 panels."""

import numpy as np

from ..simd.registers import (
    add,
    fma,
    keep_lanes,
    load_f32,
    load_f32s,
    mul,
    reduce_add,
    splat,
    store_f32,
    store_f32s,
    sub,
    zero_f32,
)
from ..simd.scalars import get_f32, get_i64
from .activations import quantize_row
from .jit import inline, kernel
from .matrix import share

ONE, ZERO = np.float32(1), np.float32(0)


@inline
def sum_of_squares(x, cols):
    """Of `cols` float32 (a multiple of 16), in 64 lanes that are added by one fixed tree. scratch-free."""
    squares, rest = zero_f32(4), zero_f32(1)
    slices = cols // 16
    for i in range(slices // 4):
        v = load_f32s(x + i * 256, 64, 4)
        squares = fma(v, v, squares)
    for i in range(slices // 4 * 4, slices):
        v = load_f32(x + i * 64)
        rest = fma(v, v, rest)
    return squares, rest


def make_norm(isa, width):
    """Kernel: y = x / sqrt(mean(x^2) + epsilon) * weight, written as float32 rows, as int8 panels, or both.

    operands: address of the number of tokens, x, x stride, columns (true count), columns padded to 16, weight (0: no norm), address of
    epsilon, float32 rows out or 0, their stride, their bytes per rank (0: shared, ranks share tokens), panels out or 0, their bytes per
    rank (0: shared), scratch, scratch bytes per rank (at least 4 * padded columns + 512).
    weight is padded with zeros like x. With bytes per rank every rank does all tokens into its own copy: no barrier is needed after.
    """

    @kernel
    def norm(operands, rank, threads):
        return _norm(operands, rank, threads, width, 0)

    return norm


def make_layer_norm(isa, width):
    """Kernel: y = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias; otherwise as make_norm.

    operands: those of make_norm, then bias (padded with zeros).
    """

    @kernel
    def layer_norm(operands, rank, threads):
        return _norm(operands, rank, threads, width, get_i64(operands + 112))

    return layer_norm


@inline
def _norm(operands, rank, threads, width, bias):
    """See make_norm; a bias makes it LayerNorm."""
    tokens, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
    cols, padded, weight = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
    epsilon, rows, rows_stride = get_f32(get_i64(operands + 48)), get_i64(operands + 56), get_i64(operands + 64)
    rows_private, panels, panels_private = get_i64(operands + 72), get_i64(operands + 80), get_i64(operands + 88)
    scratch = get_i64(operands + 96) + rank * get_i64(operands + 104)
    first, last = share(tokens, rank, threads)
    if rows_private + panels_private != 0:
        first, last = 0, tokens
        rows, panels = rows + rank * rows_private, panels + rank * panels_private
    for t in range(first, last):
        x = x0 + t * stride
        y = x
        if weight != 0:
            y = scratch + 512
            if rows != 0:
                y = rows + t * rows_stride
            if bias != 0:
                layer_normalize(x, 0, cols, weight, bias, epsilon, y, scratch)
            else:
                normalize(x, cols, padded, weight, epsilon, y, scratch)
        if panels != 0:
            quantize_row(y, padded, panels, t, tokens, width, scratch)
    return 0


@inline
def _sum_lanes(four, rest, scratch):
    """The sum of all lanes of four registers and one, by a fixed tree. scratch: 256 bytes."""
    store_f32s(scratch, 64, four)
    low, high = add(load_f32(scratch), load_f32(scratch + 64)), add(load_f32(scratch + 128), load_f32(scratch + 192))
    return reduce_add(add(add(low, high), rest))


@inline
def normalize(x, cols, padded, weight, epsilon, y, scratch):
    """y = x / rms(x) * weight over `cols` columns; x, weight, y padded to a multiple of 16. scratch: 256 bytes."""
    squares, rest = sum_of_squares(x, padded)
    total = _sum_lanes(squares, rest, scratch)
    inverse = splat(ONE / np.sqrt(total / np.float32(cols) + epsilon))
    for i in range(padded // 16):
        store_f32(y + i * 64, mul(mul(load_f32(x + i * 64), inverse), load_f32(weight + i * 64)))


@inline
def layer_normalize(x, residual, cols, weight, bias, epsilon, out, scratch):
    """out = (z - mean(z)) / sqrt(var(z) + epsilon) * weight + bias over `cols` columns, z = x + residual (no residual: 0).

    Rows and vectors are padded with zeros to a multiple of 16. out may be x or the residual. scratch: 256 bytes.
    """
    slices, fours = (cols + 15) // 16, cols // 64
    for i in range(slices):
        z = load_f32(x + i * 64)
        if residual != 0:
            z = add(z, load_f32(residual + i * 64))
        store_f32(out + i * 64, z)
    total, rest = zero_f32(4), zero_f32(1)
    for i in range(fours):
        total = add(total, load_f32s(out + i * 256, 64, 4))
    for i in range(fours * 4, slices):
        rest = add(rest, load_f32(out + i * 64))
    mean = splat(_sum_lanes(total, rest, scratch) / np.float32(cols))
    total, rest = zero_f32(4), zero_f32(1)
    for i in range(fours):
        d = sub(load_f32s(out + i * 256, 64, 4), mean)
        total = fma(d, d, total)
    for i in range(fours * 4, slices):
        d = keep_lanes(sub(load_f32(out + i * 64), mean), cols - i * 16, ZERO)  # the padding is no value
        rest = fma(d, d, rest)
    inverse = splat(ONE / np.sqrt(_sum_lanes(total, rest, scratch) / np.float32(cols) + epsilon))
    for i in range(slices):
        at = i * 64
        normal = mul(sub(load_f32(out + at), mean), inverse)
        store_f32(out + at, fma(normal, load_f32(weight + at), load_f32(bias + at)))
