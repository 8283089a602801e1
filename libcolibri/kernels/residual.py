"""Operations on the residual stream and the logits that only some families have: multipliers and caps."""

from ..simd.registers import div, fma, load_f32, mul, splat, store_f32
from ..simd.scalars import get_f32, get_i64
from .jit import kernel
from .mathlib import tanh


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
