"""SIMD registers for numba: bundles of LLVM vectors as numba types, one intrinsic per operation.

A `Registers` value is `count` vectors of the same kind, an LLVM array of vectors that LLVM takes apart into machine
registers. Every operation maps over the bundle; a bundle of one is broadcast against a larger one. So the same kernel
source serves one token (count 1) and eight. Vectors have 16 lanes (one output row each): a 512-bit machine holds them in
one register, a 256-bit machine in two, a 128-bit machine in four, and LLVM does the splitting.

Addresses are plain int64. A `Target` value (see `target`) carries the instruction set and the bundle width in its type,
so that a helper learns both from an argument and needs no closure: a closure over a compiled function would get a new
key in numba's on-disk cache in every process and never be found again.

Nothing here depends on the order in which a machine adds: results are the same bits on every instruction set.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model


class Registers(types.Type):
    """`count` vectors of `lanes` elements; kind 'i' or 'f', element bits."""

    def __init__(self, kind, bits, lanes, count=1):
        self.kind, self.bits, self.lanes, self.count = kind, bits, lanes, count
        super().__init__(name=f"Registers({kind}{bits}x{lanes}x{count})")


@register_model(Registers)
class RegistersModel(models.PrimitiveModel):
    """An LLVM array of vectors."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.ArrayType(vector_of(fe_type), fe_type.count))


class Target(types.Type):
    """A value without content whose type says: instruction set `isa`, tensor type `format` (a number), bundles of `count`."""

    def __init__(self, isa, format, count):
        self.isa, self.format, self.count = isa, format, count
        super().__init__(name=f"Target({isa}, {format}, {count})")


@register_model(Target)
class TargetModel(models.PrimitiveModel):
    """One unused byte."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.IntType(8))


@intrinsic(prefer_literal=True)
def target(typingctx, isa, format, count):
    """target(ISA, FORMAT, COUNT) from three literals (constants of a closure)."""

    def codegen(ctx, b, sig, args):
        return ir.Constant(ir.IntType(8), 0)

    return Target(isa.literal_value, format.literal_value, count.literal_value)(isa, format, count), codegen


def vector_of(registers):
    """The LLVM vector type of one register of a bundle."""
    element = {("f", 32): ir.FloatType(), ("f", 64): ir.DoubleType(), ("f", 16): ir.HalfType()}.get((registers.kind, registers.bits))
    return ir.VectorType(element or ir.IntType(registers.bits), registers.lanes)


def i32(count=1):
    """Bundle type of int32 x 16."""
    return Registers("i", 32, 16, count)


def f32(count=1):
    """Bundle type of float32 x 16."""
    return Registers("f", 32, 16, count)


u8x64 = Registers("i", 8, 64)
I32, F32, U8X64 = vector_of(i32()), vector_of(f32()), vector_of(u8x64)
INT = ir.IntType(64)
BYTES = {n: ir.VectorType(ir.IntType(8), n) for n in (16, 32, 64)}
address = types.int64


def each(b, sig, args, emit):
    """Build the result bundle by emit(builder, index, *registers) for each of its registers."""
    result = ir.Constant(ir.ArrayType(vector_of(sig.return_type), sig.return_type.count), ir.Undefined)
    for t in range(sig.return_type.count):
        registers = [
            b.extract_value(value, t if kind.count > 1 else 0) if isinstance(kind, Registers) else value
            for value, kind in zip(args, sig.args, strict=True)
        ]
        result = b.insert_value(result, emit(b, t, *registers), t)
    return result


def load_value(b, place, llvm):
    """Unaligned load of one `llvm` value from an integer address."""
    value = b.load(b.inttoptr(place, llvm.as_pointer()))
    value.align = 1
    return value


def store_value(b, value, place):
    """Unaligned store to an integer address."""
    b.store(value, b.inttoptr(place, value.type.as_pointer())).align = 1


def constant(llvm, value):
    """A vector with `value` in every lane."""
    return ir.Constant(llvm, [value] * llvm.count)


def splat_value(b, scalar, llvm):
    """A scalar to every lane."""
    undef = ir.Constant(llvm, ir.Undefined)
    first = b.insert_element(undef, scalar, ir.Constant(ir.IntType(32), 0))
    return b.shuffle_vector(first, undef, constant(ir.VectorType(ir.IntType(32), llvm.count), 0))


def call_llvm(b, name, result, arguments):
    """Call an LLVM intrinsic by name."""
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return b.call(function, arguments)


def _operation(emit, result=None):
    """Signature and code of an operation over bundles; result maps argument types to the result type (default: the widest)."""

    def signature(kinds):
        kind = result(*kinds) if result else max(kinds, key=lambda k: k.count)
        return kind(*kinds)

    def codegen(ctx, b, sig, args):
        return each(b, sig, args, lambda b, t, *registers: emit(b, *registers))

    return signature, codegen


def unary(emit, result=None):
    """An intrinsic of one bundle."""
    signature, codegen = _operation(emit, result)
    return intrinsic(lambda typingctx, x: (signature((x,)), codegen))


def binary(emit, result=None):
    """An intrinsic of two bundles."""
    signature, codegen = _operation(emit, result)
    return intrinsic(lambda typingctx, x, y: (signature((x, y)), codegen))


def ternary(emit, result=None):
    """An intrinsic of three bundles."""
    signature, codegen = _operation(emit, result)
    return intrinsic(lambda typingctx, x, y, z: (signature((x, y, z)), codegen))


def _is_float(value):
    return isinstance(value.type.element, (ir.FloatType, ir.HalfType, ir.DoubleType))


def _shift_bytes(b, v, left):
    """Shift 64 bytes as 16-bit lanes (x86 shifts no bytes); the caller masks what crossed over."""
    words = ir.VectorType(ir.IntType(16), 32)
    v = b.bitcast(v, words)
    if left:
        v = (b.shl if left > 0 else b.lshr)(v, constant(words, abs(left)))
    return b.bitcast(v, U8X64)


def _and_bytes(b, v, mask):
    return b.and_(v, constant(U8X64, mask))


def _greater_select(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


low_nibbles = unary(lambda b, v: _and_bytes(b, v, 15))
high_nibbles = unary(lambda b, v: _and_bytes(b, _shift_bytes(b, v, -4), 15))
add = binary(lambda b, x, y: b.fadd(x, y) if _is_float(x) else b.add(x, y))
sub = binary(lambda b, x, y: b.fsub(x, y) if _is_float(x) else b.sub(x, y))
mul = binary(lambda b, x, y: b.fmul(x, y) if _is_float(x) else b.mul(x, y))
div = binary(lambda b, x, y: b.fdiv(x, y))
maximum = binary(_greater_select)
minimum = binary(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
fma = ternary(lambda b, x, y, z: call_llvm(b, "llvm.fma.v16f32", F32, [x, y, z]))
fnma = ternary(lambda b, x, y, z: call_llvm(b, "llvm.fma.v16f32", F32, [b.fneg(x), y, z]))
absolute = unary(lambda b, x: call_llvm(b, "llvm.fabs.v16f32", F32, [x]))
negate = unary(lambda b, x: b.fneg(x))
to_f32 = unary(lambda b, x: b.sitofp(x, F32), lambda x: f32(x.count))
round_f32 = unary(lambda b, x: call_llvm(b, "llvm.rint.v16f32", F32, [x]))
to_i32 = unary(lambda b, x: b.fptosi(x, I32), lambda x: i32(x.count))


def _times_power_of_two(b, x, n):
    """x * 2**n by adding n to the exponent; the caller keeps the result normal."""
    shifted = b.shl(n, constant(I32, 23))
    return b.bitcast(b.add(b.bitcast(x, I32), shifted), F32)


times_power_of_two = binary(_times_power_of_two, lambda x, n: f32(x.count))


@intrinsic(prefer_literal=True)
def with_high_bits(typingctx, nibbles, pairs, k):
    """6-bit codes: nibbles | (bits 2k, 2k+1 of pairs) << 4; k literal."""
    position = k.literal_value

    def codegen(ctx, b, sig, args):
        return each(b, sig, args, lambda b, t, low, high, _: b.or_(low, _and_bytes(b, _shift_bytes(b, high, 4 - 2 * position), 0x30)))

    return u8x64(u8x64, u8x64, k), codegen


@intrinsic(prefer_literal=True)
def with_high_bit(typingctx, nibbles, bits, k):
    """5-bit codes: nibbles | (bit k of bits) << 4; k literal."""
    position = k.literal_value

    def codegen(ctx, b, sig, args):
        return each(b, sig, args, lambda b, t, low, high, _: b.or_(low, _and_bytes(b, _shift_bytes(b, high, 4 - position), 0x10)))

    return u8x64(u8x64, u8x64, k), codegen


def _count(kind):
    return kind.literal_value if isinstance(kind, types.Literal) else kind.count


def _constant(kind, value):
    def typer(typingctx, like):
        result = kind(_count(like))

        def codegen(ctx, b, sig, args):
            return each(b, sig, [], lambda b, t: constant(vector_of(result), value))

        def emit(ctx, b, sig, args):
            return codegen(ctx, b, result(), [])

        return result(like), emit

    return intrinsic(prefer_literal=True)(typer)


zero_i32, zero_f32 = _constant(i32, 0), _constant(f32, 0.0)


@intrinsic
def count_of(typingctx, like):
    """The bundle width of a bundle or target, as a constant."""
    return types.int64(like), lambda ctx, b, sig, args: ir.Constant(INT, sig.args[0].count)


def _loader(kind, memory, convert):
    """Load one register: `memory` is the LLVM type in memory, convert(builder, value) widens it."""

    def typer(typingctx, place):
        def codegen(ctx, b, sig, args):
            return each(b, sig, args, lambda b, t, place: convert(b, load_value(b, place, memory)))

        return kind(address), codegen

    return intrinsic(typer)


def _bf16_to_f32(b, v):
    return b.bitcast(b.shl(b.zext(v, I32), constant(I32, 16)), F32)


load_u8x64 = _loader(u8x64, BYTES[64], lambda b, v: v)
load_u8_as_i32 = _loader(i32(), BYTES[16], lambda b, v: b.zext(v, I32))
load_i8_as_i32 = _loader(i32(), BYTES[16], lambda b, v: b.sext(v, I32))
load_u8_as_f32 = _loader(f32(), BYTES[16], lambda b, v: b.uitofp(b.zext(v, I32), F32))
load_f16 = _loader(f32(), ir.VectorType(ir.HalfType(), 16), lambda b, v: b.fpext(v, F32))
load_bf16 = _loader(f32(), ir.VectorType(ir.IntType(16), 16), _bf16_to_f32)
load_f32 = _loader(f32(), F32, lambda b, v: v)


def _strided(kind, element):
    """Load a bundle, `stride` bytes apart: one element to all lanes, or (element None) whole vectors."""

    def typer(typingctx, place, stride, like):
        result = kind(_count(like))
        vector = vector_of(result)

        def codegen(ctx, b, sig, args):
            place, stride = args[0], ctx.cast(b, args[1], sig.args[1], types.int64)

            def emit(b, t):
                here = b.add(place, b.mul(stride, ir.Constant(INT, t)))
                return load_value(b, here, vector) if element is None else splat_value(b, load_value(b, here, element), vector)

            return each(b, result(), [], emit)

        return result(address, stride, like), codegen

    return intrinsic(prefer_literal=True)(typer)


broadcast_i32 = _strided(i32, ir.IntType(32))
broadcast_f32 = _strided(f32, ir.FloatType())
load_f32s = _strided(f32, None)


@intrinsic
def splat(typingctx, scalar):
    """One float32 to all lanes."""
    return f32()(types.float32), lambda ctx, b, sig, args: each(b, sig, args, lambda b, t, x: splat_value(b, x, F32))


@intrinsic
def splat_i32(typingctx, scalar):
    """One int32 to all lanes."""
    return i32()(types.int32), lambda ctx, b, sig, args: each(b, sig, args, lambda b, t, x: splat_value(b, x, I32))


@intrinsic
def store_f32s(typingctx, place, stride, value):
    """Store every register of the bundle, `stride` bytes apart."""

    def codegen(ctx, b, sig, args):
        for t in range(sig.args[2].count):
            store_value(b, b.extract_value(args[2], t), b.add(args[0], b.mul(args[1], ir.Constant(INT, t))))
        return ctx.get_dummy_value()

    return types.void(address, types.int64, value), codegen


def _storer(kind, convert):
    def typer(typingctx, place, value):
        def codegen(ctx, b, sig, args):
            store_value(b, convert(b, b.extract_value(args[1], 0)), args[0])
            return ctx.get_dummy_value()

        return types.void(address, kind), codegen

    return intrinsic(typer)


store_f32 = _storer(f32(), lambda b, v: v)
store_f16 = _storer(f32(), lambda b, v: b.fptrunc(v, ir.VectorType(ir.HalfType(), 16)))
store_i8 = _storer(i32(), lambda b, v: b.trunc(v, BYTES[16]))


def _reduction(kind, result, combine):
    """Combine the 16 lanes by halves, 8 + 8, 4 + 4, ...: the same tree on every machine."""

    def typer(typingctx, x):
        def codegen(ctx, b, sig, args):
            vector = b.extract_value(args[0], 0)
            for half in (8, 4, 2, 1):
                index = ir.VectorType(ir.IntType(32), half)
                low = b.shuffle_vector(vector, vector, ir.Constant(index, list(range(half))))
                high = b.shuffle_vector(vector, vector, ir.Constant(index, list(range(half, 2 * half))))
                vector = combine(b, low, high)
            return b.extract_element(vector, ir.Constant(ir.IntType(32), 0))

        return result(kind), codegen

    return intrinsic(typer)


reduce_max = _reduction(f32(), types.float32, _greater_select)
reduce_add = _reduction(f32(), types.float32, lambda b, x, y: b.fadd(x, y))
reduce_add_i32 = _reduction(i32(), types.int32, lambda b, x, y: b.add(x, y))


@intrinsic
def keep_lanes(typingctx, x, count, other):
    """Lanes 0..count-1 of x, the scalar `other` elsewhere."""

    def codegen(ctx, b, sig, args):
        def emit(b, t, x, count, other):
            limit = splat_value(b, b.trunc(count, ir.IntType(32)), I32)
            inside = b.icmp_signed("<", ir.Constant(I32, list(range(16))), limit)
            return b.select(inside, x, splat_value(b, other, F32))

        return each(b, sig, args, emit)

    return f32()(f32(), types.int64, types.float32), codegen


@intrinsic
def keep_from(typingctx, x, first, other):
    """Lanes first..15 of x, the scalar `other` below."""

    def codegen(ctx, b, sig, args):
        def emit(b, t, x, first, other):
            limit = splat_value(b, b.trunc(first, ir.IntType(32)), I32)
            inside = b.icmp_signed(">=", ir.Constant(I32, list(range(16))), limit)
            return b.select(inside, x, splat_value(b, other, F32))

        return each(b, sig, args, emit)

    return f32()(f32(), types.int64, types.float32), codegen


@intrinsic
def select_greater(typingctx, x, y, a, c):
    """Lane by lane a where x > y, else c."""

    def codegen(ctx, b, sig, args):
        return each(b, sig, args, lambda b, t, x, y, a, c: b.select(b.fcmp_ordered(">", x, y), a, c))

    return max((x, y, a, c), key=lambda k: k.count)(x, y, a, c), codegen
