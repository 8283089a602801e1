"""Gemma's inputs of every layer: what a token's own table says, and what its embedding projects to."""

from ..simd.registers import fma, load_f32, mul, splat, store_f32
from ..simd.scalars import get_f32, get_i64
from .jit import kernel
from .norm import normalize


def make_per_layer_inputs(isa):
    """Kernel: x[t, l] = (rms_norm(x[t, l] * a) * weight + b * table[t, l]) * c; ranks share (token, layer) units.

    operands: address of the number of tokens, x (a row holds layers * columns), its stride, table, its stride, layers, columns (a multiple
    of 16), weight, numbers (float32: a, b, c, epsilon), scratch, scratch bytes per rank (at least 256).
    """

    @kernel
    def per_layer_inputs(operands, rank, threads):
        tokens, x0, x_stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        table, table_stride, layers = get_i64(operands + 24), get_i64(operands + 32), get_i64(operands + 40)
        cols, weight, numbers = get_i64(operands + 48), get_i64(operands + 56), get_i64(operands + 64)
        before, share, after = splat(get_f32(numbers)), splat(get_f32(numbers + 4)), splat(get_f32(numbers + 8))
        epsilon, scratch = get_f32(numbers + 12), get_i64(operands + 72) + rank * get_i64(operands + 80)
        for unit in range(rank, tokens * layers, threads):
            t, at = unit // layers, unit % layers * cols * 4
            x, own = x0 + t * x_stride + at, table + t * table_stride + at
            for i in range(cols // 16):
                store_f32(x + i * 64, mul(load_f32(x + i * 64), before))
            normalize(x, cols, cols, weight, epsilon, x, scratch)
            for i in range(cols // 16):
                store_f32(x + i * 64, mul(fma(share, load_f32(own + i * 64), load_f32(x + i * 64)), after))
        return 0

    return per_layer_inputs
