"""Small operations on float32 rows."""

from ..simd.registers import add, load_f32, maximum, minimum, splat, store_f32
from ..simd.scalars import get_f32, get_i64
from .ffn import activate_row
from .jit import kernel
from .matrix import shifted


def make_clip(isa):
    """Kernel: every element of the rows to [-limit, limit]; ranks share rows.

    operands: address of the number of rows, rows, stride, columns padded to 16, address of the limit.
    """

    @kernel
    def clip(operands, rank, threads):
        rows, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        padded, limit = get_i64(operands + 24), get_f32(get_i64(operands + 32))
        high, low = splat(limit), splat(-limit)
        for t in range(rank, rows, threads):
            for i in range(padded // 16):
                at = x0 + t * stride + i * 64
                store_f32(at, maximum(minimum(load_f32(at), high), low))
        return 0

    return clip


def make_activate(isa, kind):
    """Kernel: gate[t] = opened(gate[t]) * passed(up[t]) of ffn.py, ranks share rows.

    operands: address of the number of rows, gate, its stride, up (0: no such matrix), its stride, columns padded to 16, address of the
    limit.
    """

    @kernel
    def activate(operands, rank, threads):
        rows, gate, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        up, up_stride = get_i64(operands + 24), get_i64(operands + 32)
        padded, limit = get_i64(operands + 40), get_f32(get_i64(operands + 48))
        for t in range(rank, rows, threads):
            activate_row(kind, gate + t * stride, shifted(up, t * up_stride), padded, limit)
        return 0

    return activate


def make_add_vector(isa):
    """Kernel: rows[t] += vector; ranks share rows.

    operands: address of the number of rows, rows, stride, columns padded to 16, vector (padded with zeros).
    """

    @kernel
    def add_vector(operands, rank, threads):
        rows, x0, stride = get_i64(get_i64(operands)), get_i64(operands + 8), get_i64(operands + 16)
        padded, vector = get_i64(operands + 24), get_i64(operands + 32)
        for t in range(rank, rows, threads):
            for i in range(padded // 16):
                at = x0 + t * stride + i * 64
                store_f32(at, add(load_f32(at), load_f32(vector + i * 64)))
        return 0

    return add_vector
