"""The operations that depend on the instruction set: dot products of u8 codes and i8 activations, and table lookups.

Contract, the same integers everywhere:

    acc = zero_products(target)              no product yet
    acc = dot4(acc, codes, x)                lane r += sum of 4 products codes[4r+i] * x[i]; codes u8, x i8 in [-127, 127]
    sums = widen(acc)                        int32 per lane (row)
    sums = widen_scaled(acc, scale)          the same times an int32 per row (its value within int16)
    sums = dot4_signed(sums, codes, x)       codes i8; int32 accumulator; see `signed_correction`
    values = table_lookup(TABLE)(target, nibbles)    TABLE[nibble] for every byte

How many dot4 may go into one accumulator is bounded by the narrowest path: AVX2 adds pairs of products in 16 bits, so
16 bits must hold n * 2 * max(code) * 127: n = 8 for 4-bit codes, 4 for 5-bit codes, 2 for 6-bit codes.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from .isa import Isa
from .registers import Registers, Target, call_llvm, constant, each, i32, integers


class Products(types.Type):
    """Unfinished dot products of `count` tokens: int32 lanes, or on AVX2 twice as many int16 lanes (pairs)."""

    def __init__(self, isa, count, lanes):
        self.isa, self.count, self.lanes = isa, count, lanes
        super().__init__(name=f"Products({isa}, {count}x{lanes})")


@register_model(Products)
class ProductsModel(models.PrimitiveModel):
    """An LLVM array of vectors."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.ArrayType(_vector(fe_type), fe_type.count))


def _vector(products):
    return integers(2 * products.lanes, 16) if products.isa == Isa.AVX2 else integers(products.lanes)


def _slice(b, v, start, count):
    return b.shuffle_vector(v, v, ir.Constant(integers(count), list(range(start, start + count))))


def _map_256(b, name, result, *operands):
    """Call a 256-bit intrinsic on every 256-bit part of operands of equal width."""
    parts = operands[0].type.count * operands[0].type.element.width // 256
    if parts == 1:
        return call_llvm(b, name, result, list(operands))
    done = []
    for part in range(parts):
        slices = [_slice(b, v, part * v.type.count // parts, v.type.count // parts) for v in operands]
        done.append(call_llvm(b, name, result, slices))
    low, high = done
    return b.shuffle_vector(low, high, ir.Constant(integers(2 * low.type.count), list(range(2 * low.type.count))))


def _as(b, v, bits):
    """The same bits as lanes of another size."""
    return b.bitcast(v, integers(v.type.count * v.type.element.width // bits, bits))


def _pair_products(b, codes, x):
    """u8 * i8, adjacent products added in int16 (vpmaddubsw)."""
    return _map_256(b, "llvm.x86.avx2.pmadd.ub.sw", integers(16, 16), codes, _as(b, x, 8))


def _pairs_to_i32(b, pairs, factors):
    """int16 * int16, adjacent products added in int32 (vpmaddwd)."""
    return _map_256(b, "llvm.x86.avx2.pmadd.wd", integers(8), pairs, factors)


def _vnni(b, total, codes, x):
    """total + four products u8 * i8 per lane (vpdpbusd)."""
    return call_llvm(b, "llvm.x86.avx512.vpdpbusd.512", total.type, [total, _as(b, codes, 32), x])


def _pairs_to_i32_512(b, pairs, x):
    """int16 * int16, adjacent products added in int32 (vpmaddwd on 512 bits)."""
    return call_llvm(b, "llvm.x86.avx512.pmaddw.d.512", x.type, [_as(b, pairs, 16), _as(b, x, 16)])


def _plain_dot2(b, pairs, x):
    """Two products per lane in plain integer arithmetic, for any machine."""
    up = constant(x.type, 16)
    low = b.mul(b.ashr(b.shl(pairs, up), up), b.ashr(b.shl(x, up), up))
    return b.add(low, b.mul(b.ashr(pairs, up), b.ashr(x, up)))


def _plain_dot4(b, acc, codes, x, signed):
    """Four products per lane in plain integer arithmetic, for any machine."""
    codes, down = _as(b, codes, 32), constant(acc.type, 24)
    for i in range(4):
        left = constant(acc.type, 24 - 8 * i)
        code = b.shl(codes, left)
        code = b.ashr(code, down) if signed else b.lshr(code, down)
        acc = b.add(acc, b.mul(code, b.ashr(b.shl(x, left), down)))
    return acc


@intrinsic
def zero_products(typingctx, like):
    """No product yet, for a target."""
    result = Products(like.isa, like.count, like.lanes)

    def codegen(ctx, b, sig, args):
        one = constant(_vector(result), 0)
        return ir.Constant(ir.ArrayType(one.type, result.count), [one] * result.count)

    return result(like), codegen


def _each_product(b, acc, kind, emit):
    """Replace every vector of a Products value by emit(index, vector)."""
    for t in range(kind.count):
        acc = b.insert_value(acc, emit(t, b.extract_value(acc, t)), t)
    return acc


@intrinsic
def dot4(typingctx, acc, codes, x):
    """acc + the products of four u8 codes per lane with four i8 activations per token (x: int32 lanes, broadcast)."""
    isa = acc.isa

    def codegen(ctx, b, sig, args):
        codes = b.extract_value(args[1], 0)

        def emit(t, total):
            signed = b.extract_value(args[2], t if sig.args[2].count > 1 else 0)
            if isa == Isa.AVX512_VNNI:
                return _vnni(b, total, codes, signed)
            if isa == Isa.AVX2:
                return b.add(total, _pair_products(b, codes, signed))
            return _plain_dot4(b, total, codes, signed, signed=False)

        return _each_product(b, args[0], acc, emit)

    return acc(acc, codes, x), codegen


@intrinsic
def widen(typingctx, acc):
    """The finished dot products, int32 per lane."""
    result = i32(acc.count, acc.lanes)

    def codegen(ctx, b, sig, args):
        def emit(b, t):
            total = b.extract_value(args[0], t)
            return _pairs_to_i32(b, total, constant(total.type, 1)) if acc.isa == Isa.AVX2 else total

        return each(b, result(), [], emit)

    return result(acc), codegen


@intrinsic
def widen_scaled(typingctx, acc, scale):
    """The finished dot products times one factor per lane (int32 lanes whose value fits int16)."""
    result = i32(acc.count, acc.lanes)

    def codegen(ctx, b, sig, args):
        factor = b.extract_value(args[1], 0)
        if acc.isa == Isa.AVX2:  # once for all tokens: the factor beside itself, for both pairs of a lane
            low = b.and_(factor, constant(factor.type, 0xFFFF))
            factor = _as(b, b.or_(low, b.shl(factor, constant(factor.type, 16))), 16)

        def emit(b, t):
            total = b.extract_value(args[0], t)
            return _pairs_to_i32(b, total, factor) if acc.isa == Isa.AVX2 else b.mul(total, factor)

        return each(b, result(), [], emit)

    return result(acc, scale), codegen


def _signed_emitter(isa):
    def emit(b, total, codes, x):
        if isa == Isa.AVX512_VNNI:  # the instruction wants unsigned codes: code + 128; corrected by signed_correction
            return _vnni(b, total, b.xor(codes, constant(codes.type, -128)), x)
        if isa == Isa.AVX2:  # |code| * (x with the code's sign); |-128| = 128 is right as unsigned
            size = call_llvm(b, f"llvm.abs.v{codes.type.count}i8", codes.type, [codes, ir.Constant(ir.IntType(1), 0)])
            moved = _map_256(b, "llvm.x86.avx2.psign.b", integers(32, 8), _as(b, x, 8), codes)
            pairs = _pair_products(b, size, moved)
            return b.add(total, _pairs_to_i32(b, pairs, constant(pairs.type, 1)))
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
            return b.or_(b.and_(low, constant(low.type, 0xFFFF)), b.shl(high, constant(high.type, 16)))

        return each(b, sig, args, emit)

    return first(first, second), codegen


@intrinsic
def dot2(typingctx, like, pairs, x):
    """Two products int16 * int16 per int32 lane, added; one register of pairs, one per token of x."""
    isa = like.isa

    def codegen(ctx, b, sig, args):
        def emit(b, t, pairs, x):
            if isa == Isa.AVX512_VNNI:
                return _pairs_to_i32_512(b, pairs, x)
            if isa == Isa.AVX2:
                return _pairs_to_i32(b, _as(b, pairs, 16), _as(b, x, 16))
            return _plain_dot2(b, pairs, x)

        return each(b, x(pairs, x), args[1:], emit)

    return x(like, pairs, x), codegen


def _shuffle_bytes(b, table, indices, name, bits):
    """A byte shuffle that works within 128 bits: every such part gets the table."""
    part = integers(bits // 8, 8)
    return call_llvm(b, name, part, [ir.Constant(part, table * (bits // 128)), indices])


def _select_bytes(b, table, indices):
    """A tree of selections by the four bits of the index, for any machine."""
    values = [constant(indices.type, value) for value in table]
    for bit in range(4):
        chosen = b.icmp_unsigned("!=", b.and_(indices, constant(indices.type, 1 << bit)), constant(indices.type, 0))
        values = [b.select(chosen, odd, even) for even, odd in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def table_lookup(table):
    """An intrinsic (target, nibbles) -> table[nibble], byte by byte; table: 16 integers of one byte, nibbles: bytes 0..15."""
    table = [int(value) for value in table]

    def emit(isa, b, indices):
        if isa == Isa.AVX512_VNNI:
            return _shuffle_bytes(b, table, indices, "llvm.x86.avx512.pshuf.b.512", 512)
        if isa == Isa.AVX2:
            halves = [_slice(b, indices, start, 32) for start in range(0, indices.type.count, 32)]
            found = [_shuffle_bytes(b, table, half, "llvm.x86.avx2.pshuf.b", 256) for half in halves]
            return found[0] if len(found) == 1 else b.shuffle_vector(*found, ir.Constant(integers(64), list(range(64))))
        return _select_bytes(b, table, indices)

    def typer(typingctx, like, nibbles):
        isa = like.isa

        def codegen(ctx, b, sig, args):
            return each(b, nibbles(nibbles), [args[1]], lambda b, t, indices: emit(isa, b, indices))

        return nibbles(like, nibbles), codegen

    return intrinsic(typer)


@intrinsic
def signed_correction(typingctx, like, sums):
    """What dot4_signed's accumulator must start at: 0, or -128 * sum(x) where codes are shifted to unsigned."""

    def codegen(ctx, b, sig, args):
        factor = -128 if like.isa == Isa.AVX512_VNNI else 0
        return each(b, sums(sums), [args[1]], lambda b, t, s: b.mul(s, constant(s.type, factor)))

    return sums(like, sums), codegen
