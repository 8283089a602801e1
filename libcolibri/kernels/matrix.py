"""Matrix products: W @ x + base, and the fused gate and up products of a feed-forward block."""

from ..simd.isa import Isa
from ..simd.registers import add, count_of, lanes_of, load_f32s, mul, store_f32s, target, zero_f32
from ..simd.scalars import get_f32, get_i64
from .dots import dot
from .ffn import opened, passed
from .jit import inline, kernel

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
        base = shifted(base, width * base_stride)
        t += width
    while t < tokens:
        _product_of(one, tile, blocks, x + t * x_stride, x_stride, out + t * out_stride, out_stride, base, base_stride)
        base = shifted(base, base_stride)
        t += 1


@inline
def shifted(place, offset):
    """place + offset; 0, which stands for nothing, stays 0."""
    if place != 0:
        place += offset
    return place


@inline
def product(operands, rank, threads, wide, one):
    """out[t] = W @ x[t] + base[t] for every token t; see make_product."""
    tiles, groups, group_bytes, blocks = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
    x, x_stride = get_i64(operands + 32) + rank * get_i64(operands + 48), get_i64(operands + 40)
    tokens, out0, out_stride = get_i64(get_i64(operands + 56)), get_i64(operands + 64), get_i64(operands + 72)
    base0, base_stride = get_i64(operands + 80), get_i64(operands + 88)
    first, last = share(groups, rank, threads)
    for group in range(first, last):
        tile, base = tiles + group * group_bytes, shifted(base0, group * 64)
        product_run(wide, one, tile, blocks, x, x_stride, tokens, out0 + group * 64, out_stride, base, base_stride)
    return 0


@inline
def _gate_up_of(like, kind, weights, blocks, x, x_stride, out, out_stride, biases, limit):
    # One loop over both matrices: the dot product's code, which is large, is there once.
    for row in range(0, 16, lanes_of(like)):
        for part in range(2):
            tile, bias = (weights[0], biases[0]) if part == 0 else (weights[1], biases[1])
            total = dot(like, tile, row, blocks, x, x_stride, zero_f32(like))
            if bias != 0:
                total = add(total, load_f32s(bias + row * 4, 0, like))
            if part == 0:
                store_f32s(out + row * 4, out_stride, opened(kind, total, limit))
            else:
                store_f32s(out + row * 4, out_stride, mul(load_f32s(out + row * 4, out_stride, like), passed(kind, total, limit)))


@inline
def gate_up_run(wide, one, kind, weights, blocks, x, x_stride, tokens, out, out_stride, biases, limit):
    """One row group of gate and up times a run of tokens: whole panels, then the rest one by one.

    weights: addresses of gate's and up's tiles; biases: of their values for these rows, or 0.
    """
    width, t = count_of(wide), 0
    while t + width <= tokens:
        _gate_up_of(wide, kind, weights, blocks, x + t * x_stride, x_stride, out + t * out_stride, out_stride, biases, limit)
        t += width
    while t < tokens:
        _gate_up_of(one, kind, weights, blocks, x + t * x_stride, x_stride, out + t * out_stride, out_stride, biases, limit)
        t += 1


@inline
def gate_up(operands, rank, threads, wide, one, kind):
    """out[t] = opened(gate @ x[t]) * passed(up @ x[t]) for every token t; see make_gate_up."""
    gate, up = get_i64(operands), get_i64(operands + 8)
    groups, group_bytes, blocks = get_i64(operands + 16), get_i64(operands + 24), get_i64(operands + 32)
    x, x_stride = get_i64(operands + 40) + rank * get_i64(operands + 56), get_i64(operands + 48)
    tokens, out, out_stride = get_i64(get_i64(operands + 64)), get_i64(operands + 72), get_i64(operands + 80)
    gate_bias, up_bias, limit = get_i64(operands + 88), get_i64(operands + 96), get_f32(get_i64(operands + 104))
    first, last = share(groups, rank, threads)
    for group in range(first, last):
        weights = gate + group * group_bytes, up + group * group_bytes
        biases = shifted(gate_bias, group * 64), shifted(up_bias, group * 64)
        gate_up_run(wide, one, kind, weights, blocks, x, x_stride, tokens, out + group * 64, out_stride, biases, limit)
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


def make_head_product(isa, format, width, lanes):
    """Kernel: out[t][head] = W[head] @ x[t][head]: the rows of every head times that head's own input.

    operands: tiles, row groups, bytes of a row group, tiles of a row group (float types: columns), row groups of a head, x, bytes of x per
    token, bytes of x between heads, address of the number of tokens, out, out stride, bytes of out between heads.
    x of a head is float32 rows, or a panel run of its own (activations.py). Ranks share row groups.
    """

    @kernel
    def head_product(operands, rank, threads):
        tiles, groups, group_bytes, blocks = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16), get_i64(operands + 24)
        head_groups, x0, x_stride, x_head = get_i64(operands + 32), get_i64(operands + 40), get_i64(operands + 48), get_i64(operands + 56)
        tokens, out0 = get_i64(get_i64(operands + 64)), get_i64(operands + 72)
        out_stride, out_head = get_i64(operands + 80), get_i64(operands + 88)
        wide, one = target(isa, format, width, lanes), target(isa, format, 1, 16)
        first, last = share(groups, rank, threads)
        for group in range(first, last):
            head = group // head_groups
            x, out = x0 + head * x_head, out0 + head * out_head + group % head_groups * 64
            product_run(wide, one, tiles + group * group_bytes, blocks, x, x_stride, tokens, out, out_stride, 0, 0)
        return 0

    return head_product


def make_gate_up(isa, format, width, lanes, kind):
    """Kernel: out[t] = opened(gate @ x[t] + gate bias) * passed(up @ x[t] + up bias) of ffn.py; both matrices of one shape and tensor type.

    operands: gate tiles, up tiles, row groups, bytes of a row group, tiles of a row group, x, bytes of x per token, bytes of x per
    rank, address of the number of tokens, out, out stride, gate bias or 0, up bias or 0, address of the limit.
    """

    @kernel
    def matrix_gate_up(operands, rank, threads):
        return gate_up(operands, rank, threads, target(isa, format, width, lanes), target(isa, format, 1, 16), kind)

    return matrix_gate_up
