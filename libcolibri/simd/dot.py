"""The one operation that depends on the instruction set: dot products of u8 codes and i8 activations.

Contract, the same integers everywhere:

    acc = zero_products(target)              no product yet
    acc = dot4(acc, codes, x)                lane r += sum of 4 products codes[4r+i] * x[i]; codes u8, x i8 in [-127, 127]
    sums = widen(acc)                        int32 per lane (row)
    sums = widen_scaled(acc, scale)          the same times an int32 per row (its value within int16)
    sums = dot4_signed(sums, codes, x)       codes i8; int32 accumulator; see `signed_correction`

How many dot4 may go into one accumulator is bounded by the narrowest path: AVX2 adds pairs of products in 16 bits, so
16 bits must hold n * 2 * max(code) * 127: n = 8 for 4-bit codes, 4 for 5-bit codes, 2 for 6-bit codes.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from .isa import Isa
from .registers import BYTES, I32, U8X64, Registers, Target, call_llvm, constant, each, i32

I16X32, I16X16, I32X8 = (ir.VectorType(ir.IntType(bits), n) for bits, n in ((16, 32), (16, 16), (32, 8)))
I64X4 = ir.VectorType(ir.IntType(64), 4)


class Products(types.Type):
    """Unfinished dot products of `count` tokens: 16 int32 lanes each, or on AVX2 32 int16 lanes (pairs)."""

    def __init__(self, isa, count):
        self.isa, self.count = isa, count
        super().__init__(name=f"Products({isa}, {count})")


@register_model(Products)
class ProductsModel(models.PrimitiveModel):
    """An LLVM array of vectors."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.ArrayType(_lanes(fe_type.isa), fe_type.count))


def _lanes(isa):
    return I16X32 if isa == Isa.AVX2 else I32


def _halves(b, v, half):
    """The two 256-bit halves of a 512-bit vector."""
    index = ir.VectorType(ir.IntType(32), half.count)
    return [b.shuffle_vector(v, v, ir.Constant(index, list(range(start, start + half.count)))) for start in (0, half.count)]


def _join(b, low, high):
    n = low.type.count
    return b.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), 2 * n), list(range(2 * n))))


def _map_halves(b, name, result, *operands):
    """Call a 256-bit intrinsic on both halves of 512-bit operands."""
    pairs = [_halves(b, v, ir.VectorType(v.type.element, v.type.count // 2)) for v in operands]
    return _join(b, *(call_llvm(b, name, result, [pair[side] for pair in pairs]) for side in (0, 1)))


def _pair_products(b, codes, x):
    """u8 * i8, adjacent products added in int16 (vpmaddubsw)."""
    return _map_halves(b, "llvm.x86.avx2.pmadd.ub.sw", I16X16, codes, b.bitcast(x, U8X64))


def _pairs_to_i32(b, pairs, factors):
    """int16 * int16, adjacent products added in int32 (vpmaddwd)."""
    return _map_halves(b, "llvm.x86.avx2.pmadd.wd", I32X8, pairs, factors)


def _plain_dot4(b, acc, codes, x, signed):
    """Four products per lane in plain integer arithmetic, for any machine."""
    codes, x = b.bitcast(codes, I32), x
    for i in range(4):
        left = constant(I32, 24 - 8 * i)
        down = constant(I32, 24)
        code = b.shl(codes, left)
        code = b.ashr(code, down) if signed else b.lshr(code, down)
        acc = b.add(acc, b.mul(code, b.ashr(b.shl(x, left), down)))
    return acc


@intrinsic
def zero_products(typingctx, like):
    """No product yet, for a target."""
    result = Products(like.isa, like.count)

    def codegen(ctx, b, sig, args):
        one = constant(_lanes(result.isa), 0)
        return ir.Constant(ir.ArrayType(one.type, result.count), [one] * result.count)

    return result(like), codegen


def _each_product(b, acc, kind, emit):
    """Replace every vector of a Products value by emit(index, vector)."""
    for t in range(kind.count):
        acc = b.insert_value(acc, emit(t, b.extract_value(acc, t)), t)
    return acc


@intrinsic
def dot4(typingctx, acc, codes, x):
    """acc + the products of 64 u8 codes with four i8 activations per token (x: int32 lanes, broadcast)."""
    isa = acc.isa

    def codegen(ctx, b, sig, args):
        codes = b.extract_value(args[1], 0)

        def emit(t, total):
            signed = b.extract_value(args[2], t if sig.args[2].count > 1 else 0)
            if isa == Isa.AVX512_VNNI:
                return call_llvm(b, "llvm.x86.avx512.vpdpbusd.512", I32, [total, b.bitcast(codes, I32), signed])
            if isa == Isa.AVX2:
                return b.add(total, _pair_products(b, codes, signed))
            return _plain_dot4(b, total, codes, signed, signed=False)

        return _each_product(b, args[0], acc, emit)

    return acc(acc, codes, x), codegen


@intrinsic
def widen(typingctx, acc):
    """The finished dot products, int32 per lane."""
    result = i32(acc.count)

    def codegen(ctx, b, sig, args):
        def emit(b, t):
            total = b.extract_value(args[0], t)
            return _pairs_to_i32(b, total, constant(I16X32, 1)) if acc.isa == Isa.AVX2 else total

        return each(b, result(), [], emit)

    return result(acc), codegen


@intrinsic
def widen_scaled(typingctx, acc, scale):
    """The finished dot products times one factor per lane (int32 lanes whose value fits int16)."""
    result = i32(acc.count)

    def codegen(ctx, b, sig, args):
        factor = b.extract_value(args[1], 0)
        if acc.isa == Isa.AVX2:  # once for all tokens: the factor beside itself, for both pairs of a lane
            low = b.and_(factor, constant(I32, 0xFFFF))
            factor = b.bitcast(b.or_(low, b.shl(factor, constant(I32, 16))), I16X32)

        def emit(b, t):
            total = b.extract_value(args[0], t)
            return _pairs_to_i32(b, total, factor) if acc.isa == Isa.AVX2 else b.mul(total, factor)

        return each(b, result(), [], emit)

    return result(acc, scale), codegen


def _signed_emitter(isa):
    def emit(b, total, codes, x):
        if isa == Isa.AVX512_VNNI:  # the instruction wants unsigned codes: code + 128; corrected by signed_correction
            shifted = b.xor(codes, constant(U8X64, -128))
            return call_llvm(b, "llvm.x86.avx512.vpdpbusd.512", I32, [total, b.bitcast(shifted, I32), x])
        if isa == Isa.AVX2:  # |code| * (x with the code's sign); |-128| = 128 is right as unsigned
            size = call_llvm(b, "llvm.abs.v64i8", BYTES[64], [codes, ir.Constant(ir.IntType(1), 0)])
            moved = _map_halves(b, "llvm.x86.avx2.psign.b", BYTES[32], b.bitcast(x, U8X64), codes)
            return b.add(total, _pairs_to_i32(b, _pair_products(b, size, b.bitcast(moved, I32)), constant(I16X32, 1)))
        return _plain_dot4(b, total, codes, x, signed=True)

    return emit


@intrinsic
def dot4_signed(typingctx, like, total, codes, x):
    """total (int32 lanes) + products of 64 i8 codes with four i8 activations per token; `like` is the target."""
    assert isinstance(like, Target) and isinstance(total, Registers)
    emit = _signed_emitter(like.isa)

    def codegen(ctx, b, sig, args):
        return each(b, total(total, codes, x), args[1:], lambda b, t, total, codes, x: emit(b, total, codes, x))

    return total(like, total, codes, x), codegen


@intrinsic
def pair_up(typingctx, first, second):
    """Two int32 lanes whose values fit int16 as the int16 halves of one lane."""

    def codegen(ctx, b, sig, args):
        def emit(b, t, low, high):
            return b.or_(b.and_(low, constant(I32, 0xFFFF)), b.shl(high, constant(I32, 16)))

        return each(b, sig, args, emit)

    return first(first, second), codegen


@intrinsic
def dot2(typingctx, like, pairs, x):
    """Two products int16 * int16 per int32 lane, added; one register of pairs, one per token of x."""
    isa = like.isa

    def codegen(ctx, b, sig, args):
        def emit(b, t, pairs, x):
            if isa == Isa.AVX512_VNNI:
                return call_llvm(b, "llvm.x86.avx512.pmaddw.d.512", I32, [b.bitcast(pairs, I16X32), b.bitcast(x, I16X32)])
            if isa == Isa.AVX2:
                return _pairs_to_i32(b, b.bitcast(pairs, I16X32), b.bitcast(x, I16X32))
            up = constant(I32, 16)
            low = b.mul(b.ashr(b.shl(pairs, up), up), b.ashr(b.shl(x, up), up))
            return b.add(low, b.mul(b.ashr(pairs, up), b.ashr(x, up)))

        return each(b, x(pairs, x), args[1:], emit)

    return x(like, pairs, x), codegen


@intrinsic
def signed_correction(typingctx, like, sums):
    """What dot4_signed's accumulator must start at: 0, or -128 * sum(x) where codes are shifted to unsigned."""

    def codegen(ctx, b, sig, args):
        factor = -128 if like.isa == Isa.AVX512_VNNI else 0
        return each(b, sums(sums), [args[1]], lambda b, t, s: b.mul(s, constant(I32, factor)))

    return sums(like, sums), codegen
