"""Operations on the residual stream and the logits that only some families have: multipliers and caps."""

import numpy as np

from ..simd.registers import add, div, fma, load_f32, mul, splat, store_f32, sub
from ..simd.scalars import get_f32, get_i64
from .jit import inline, kernel
from .mathlib import exp

ONE, TWO = np.float32(1), np.float32(2)


def make_scale(isa):
    """Kernel: rows[t] *= factor; ranks share rows.

    operands: address of the number of rows, rows, stride, columns padded to 16, address of the factor.
    """

    @kernel
    def scale(operands, rank, threads):
        rows, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        padded, factor = get_i64(operands + 24), splat(get_f32(get_i64(operands + 32)))
        for t in range(rank, rows, threads):
            for i in range(padded // 16):
                at = x0 + t * stride + i * 64
                store_f32(at, mul(load_f32(at), factor))
        return 0

    return scale


def make_add_scaled(isa):
    """Kernel: x[t] += factor * y[t]; ranks share rows.

    operands: address of the number of rows, x, x stride, columns padded to 16, address of the factor, y, y stride.
    """

    @kernel
    def add_scaled(operands, rank, threads):
        rows, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        padded, factor = get_i64(operands + 24), splat(get_f32(get_i64(operands + 32)))
        y0, y_stride = get_i64(operands + 40), get_i64(operands + 48)
        for t in range(rank, rows, threads):
            for i in range(padded // 16):
                at = x0 + t * stride + i * 64
                store_f32(at, fma(factor, load_f32(y0 + t * y_stride + i * 64), load_f32(at)))
        return 0

    return add_scaled


@inline
def tanh(x):
    """16 float32: 1 - 2 / (exp(2 x) + 1); absolute error about 1e-7."""
    return sub(splat(ONE), div(splat(TWO), add(exp(add(x, x)), splat(ONE))))


def make_softcap(isa):
    """Kernel: rows[t] = cap * tanh(rows[t] / cap); ranks share rows.

    operands: address of the number of rows, rows, stride, columns padded to 16, address of the cap.
    """

    @kernel
    def softcap(operands, rank, threads):
        rows, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        padded, cap = get_i64(operands + 24), splat(get_f32(get_i64(operands + 32)))
        for t in range(rank, rows, threads):
            for i in range(padded // 16):
                at = x0 + t * stride + i * 64
                store_f32(at, mul(cap, tanh(div(load_f32(at), cap))))
        return 0

    return softcap
