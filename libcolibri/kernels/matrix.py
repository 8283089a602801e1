"""Matrix products: W @ x + base, and the fused gate and up products of a SwiGLU."""

from ..simd.isa import Isa
from ..simd.registers import add, count_of, lanes_of, load_f32s, mul, store_f32s, target, zero_f32
from ..simd.scalars import get_i64
from .dots import dot
from .jit import inline, kernel
from .mathlib import silu

# Tokens that a prefill panel holds, and rows of one pass over it: as many accumulators as the instruction set's registers
# take beside the weights. With 16 rows on AVX2, LLVM spills the broadcast activations that both halves use.
WIDTHS = {Isa.GENERIC: 4, Isa.AVX2: 8, Isa.AVX512_VNNI: 8}
LANES = {Isa.GENERIC: 16, Isa.AVX2: 8, Isa.AVX512_VNNI: 16}


@inline
def share(total, rank, threads):
    """This thread's part of `total` units: first and last + 1."""
    return total * rank // threads, total * (rank + 1) // threads


@inline
def _product_of(like, tile, blocks, x, x_stride, out, out_stride, base, base_stride):
    for row in range(0, 16, lanes_of(like)):
        total = dot(like, tile, row, blocks, x, x_stride, zero_f32(like))
        if base != 0:
            total = add(total, load_f32s(base + row * 4, base_stride, like))
        store_f32s(out + row * 4, out_stride, total)


@inline
def product_run(wide, one, tile, blocks, x, x_stride, tokens, out, out_stride, base, base_stride):
    """One row group times a run of tokens: whole panels, then the rest one by one. base: 0, or where the first token's base is."""
    width, t = count_of(wide), 0
    while t + width <= tokens:
        _product_of(wide, tile, blocks, x + t * x_stride, x_stride, out + t * out_stride, out_stride, base, base_stride)
        if base != 0:
            base += width * base_stride
        t += width
    while t < tokens:
        _product_of(one, tile, blocks, x + t * x_stride, x_stride, out + t * out_stride, out_stride, base, base_stride)
        if base != 0:
            base += base_stride
        t += 1


@inline
def product(operands, rank, threads, wide, one):
    """out[t] = W @ x[t] + base[t] for every token t; see make_product."""
    tiles, groups, group_bytes, blocks = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
    x, x_stride = get_i64(operands + 32) + rank * get_i64(operands + 48), get_i64(operands + 40)
    tokens, out0, out_stride = get_i64(get_i64(operands + 56)), get_i64(operands + 64), get_i64(operands + 72)
    base0, base_stride = get_i64(operands + 80), get_i64(operands + 88)
    first, last = share(groups, rank, threads)
    for group in range(first, last):
        base = base0
        if base != 0:
            base += group * 64
        tile = tiles + group * group_bytes
        product_run(wide, one, tile, blocks, x, x_stride, tokens, out0 + group * 64, out_stride, base, base_stride)
    return 0


@inline
def _gate_up_of(like, gate, up, blocks, x, x_stride, out, out_stride):
    # One loop over both matrices: the dot product's code, which is large, is there once.
    for row in range(0, 16, lanes_of(like)):
        for part in range(2):
            total = dot(like, gate if part == 0 else up, row, blocks, x, x_stride, zero_f32(like))
            if part == 0:
                store_f32s(out + row * 4, out_stride, silu(total))
            else:
                store_f32s(out + row * 4, out_stride, mul(load_f32s(out + row * 4, out_stride, like), total))


@inline
def gate_up_run(wide, one, gate, up, blocks, x, x_stride, tokens, out, out_stride):
    """One row group of gate and up times a run of tokens: whole panels, then the rest one by one."""
    width, t = count_of(wide), 0
    while t + width <= tokens:
        _gate_up_of(wide, gate, up, blocks, x + t * x_stride, x_stride, out + t * out_stride, out_stride)
        t += width
    while t < tokens:
        _gate_up_of(one, gate, up, blocks, x + t * x_stride, x_stride, out + t * out_stride, out_stride)
        t += 1


@inline
def gate_up(operands, rank, threads, wide, one):
    """out[t] = silu(gate @ x[t]) * (up @ x[t]) for every token t; see make_gate_up."""
    gate0, up0 = get_i64(operands), get_i64(operands + 8)
    groups, group_bytes, blocks = get_i64(operands + 16), get_i64(operands + 24), get_i64(operands + 32)
    x, x_stride = get_i64(operands + 40) + rank * get_i64(operands + 56), get_i64(operands + 48)
    tokens, out0, out_stride = get_i64(get_i64(operands + 64)), get_i64(operands + 72), get_i64(operands + 80)
    first, last = share(groups, rank, threads)
    for group in range(first, last):
        gate, up = gate0 + group * group_bytes, up0 + group * group_bytes
        gate_up_run(wide, one, gate, up, blocks, x, x_stride, tokens, out0 + group * 64, out_stride)
    return 0


def make_product(isa, format, width, lanes):
    """Kernel: out[t] = W @ x[t] + base[t].

    operands: tiles, row groups, bytes of a row group, tiles of a row group (float types: columns), x (panels of
    activations.py, or float32 rows), bytes of x per token, bytes of x per rank (0: shared), address of the number of tokens,
    out, out stride, base or 0, base stride (0: one base for all tokens, a bias). out may be base (a residual), never x.
    out has 16 float32 per row group and token; rows beyond the matrix get zeros.
    """

    @kernel
    def matrix_product(operands, rank, threads):
        return product(operands, rank, threads, target(isa, format, width, lanes), target(isa, format, 1, 16))

    return matrix_product


def make_gate_up(isa, format, width, lanes):
    """Kernel: out[t] = silu(gate @ x[t]) * (up @ x[t]); both matrices of one shape and tensor type.

    operands: gate tiles, up tiles, row groups, bytes of a row group, tiles of a row group, x, bytes of x per token, bytes of x per
    rank, address of the number of tokens, out, out stride.
    """

    @kernel
    def matrix_gate_up(operands, rank, threads):
        return gate_up(operands, rank, threads, target(isa, format, width, lanes), target(isa, format, 1, 16))

    return matrix_gate_up
