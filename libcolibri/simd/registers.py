"""SIMD registers for numba: bundles of LLVM vectors as numba types, one intrinsic per operation.

A `Registers` value is `count` vectors of the same kind, an LLVM array of vectors that LLVM takes apart into machine
registers. Every operation maps over the bundle; a bundle of one is broadcast against a larger one. So the same kernel
source serves one token (count 1) and eight. Vectors have 16 lanes unless a target says otherwise: a 512-bit machine holds them in
one register, a 256-bit machine in two, and LLVM does the splitting. Where splitting costs spills (wide panels on AVX2), the
target has 8 lanes and the kernel walks the 16 rows of a tile in two passes.

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
    """A value without content whose type says: instruction set, tensor type (a number), bundles of `count` vectors of `lanes`."""

    def __init__(self, isa, format, count, lanes):
        self.isa, self.format, self.count, self.lanes = isa, format, count, lanes
        super().__init__(name=f"Target({isa}, {format}, {count}x{lanes})")


@register_model(Target)
class TargetModel(models.PrimitiveModel):
    """One unused byte."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.IntType(8))


@intrinsic(prefer_literal=True)
def target(typingctx, isa, format, count, lanes):
    """target(ISA, FORMAT, COUNT, LANES) from literals (constants of a closure)."""

    def codegen(ctx, b, sig, args):
        return ir.Constant(ir.IntType(8), 0)

    literals = (isa, format, count, lanes)
    return Target(*(literal.literal_value for literal in literals))(*literals), codegen


def vector_of(registers):
    """The LLVM vector type of one register of a bundle."""
    element = {("f", 32): ir.FloatType(), ("f", 64): ir.DoubleType(), ("f", 16): ir.HalfType()}.get((registers.kind, registers.bits))
    return ir.VectorType(element or ir.IntType(registers.bits), registers.lanes)


def i32(count=1, lanes=16):
    """Bundle type of int32."""
    return Registers("i", 32, lanes, count)


def f32(count=1, lanes=16):
    """Bundle type of float32."""
    return Registers("f", 32, lanes, count)


def codes(lanes=16):
    """One register with four bytes for each of `lanes` rows."""
    return Registers("i", 8, 4 * lanes)


def integers(lanes, bits=32):
    """LLVM vector of integers."""
    return ir.VectorType(ir.IntType(bits), lanes)


def floats(lanes):
    """LLVM vector of float32."""
    return ir.VectorType(ir.FloatType(), lanes)


INT = ir.IntType(64)
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
    return b.shuffle_vector(first, undef, constant(integers(llvm.count), 0))


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
    """Shift bytes as 16-bit lanes (x86 shifts no bytes); the caller masks what crossed over."""
    as_bytes, words = v.type, integers(v.type.count // 2, 16)
    v = b.bitcast(v, words)
    if left:
        v = (b.shl if left > 0 else b.lshr)(v, constant(words, abs(left)))
    return b.bitcast(v, as_bytes)


def _and_bytes(b, v, mask):
    return b.and_(v, constant(v.type, mask))


def _call_f32(b, name, *vectors):
    """A float32 LLVM intrinsic for this many lanes."""
    kind = vectors[0].type
    return call_llvm(b, f"llvm.{name}.v{kind.count}f32", kind, list(vectors))


def _greater_select(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


low_nibbles = unary(lambda b, v: _and_bytes(b, v, 15))
upper_half_bytes = unary(lambda b, v: _shift_bytes(b, v, -4))  # bits 4..7 come down; what crossed over stays in bits 4..7
high_nibbles = unary(lambda b, v: _and_bytes(b, _shift_bytes(b, v, -4), 15))
add = binary(lambda b, x, y: b.fadd(x, y) if _is_float(x) else b.add(x, y))
sub = binary(lambda b, x, y: b.fsub(x, y) if _is_float(x) else b.sub(x, y))
mul = binary(lambda b, x, y: b.fmul(x, y) if _is_float(x) else b.mul(x, y))
div = binary(lambda b, x, y: b.fdiv(x, y))
maximum = binary(_greater_select)
minimum = binary(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
fma = ternary(lambda b, x, y, z: _call_f32(b, "fma", x, y, z))
fnma = ternary(lambda b, x, y, z: _call_f32(b, "fma", b.fneg(x), y, z))
absolute = unary(lambda b, x: _call_f32(b, "fabs", x))
negate = unary(lambda b, x: b.fneg(x))
to_f32 = unary(lambda b, x: b.sitofp(x, floats(x.type.count)), lambda x: f32(x.count, x.lanes))
round_f32 = unary(lambda b, x: _call_f32(b, "rint", x))
to_i32 = unary(lambda b, x: b.fptosi(x, integers(x.type.count)), lambda x: i32(x.count, x.lanes))


def _times_power_of_two(b, x, n):
    """x * 2**n by adding n to the exponent; the caller keeps the result normal."""
    shifted = b.shl(n, constant(n.type, 23))
    return b.bitcast(b.add(b.bitcast(x, n.type), shifted), x.type)


times_power_of_two = binary(_times_power_of_two, lambda x, n: f32(x.count, x.lanes))


@intrinsic(prefer_literal=True)
def with_high_bits(typingctx, nibbles, pairs, k):
    """6-bit codes: nibbles | (bits 2k, 2k+1 of pairs) << 4; k literal."""
    position = k.literal_value

    def codegen(ctx, b, sig, args):
        return each(b, sig, args, lambda b, t, low, high, _: b.or_(low, _and_bytes(b, _shift_bytes(b, high, 4 - 2 * position), 0x30)))

    return nibbles(nibbles, pairs, k), codegen


@intrinsic(prefer_literal=True)
def with_bit(typingctx, codes, bits, k, place):
    """codes | (bit k of bits) << place; k and place literal."""
    left, mask = place.literal_value - k.literal_value, 1 << place.literal_value

    def codegen(ctx, b, sig, args):
        return each(b, codes(codes, bits), args[:2], lambda b, t, low, high: b.or_(low, _and_bytes(b, _shift_bytes(b, high, left), mask)))

    return codes(codes, bits, k, place), codegen


@intrinsic(prefer_literal=True)
def bit_pair(typingctx, pairs, k):
    """2-bit codes: bits 2k, 2k+1 of every byte; k literal."""
    right = 2 * k.literal_value

    def codegen(ctx, b, sig, args):
        return each(b, pairs(pairs), args[:1], lambda b, t, v: _and_bytes(b, _shift_bytes(b, v, -right), 3))

    return pairs(pairs, k), codegen


def _shape(like):
    """Bundle width and lanes of a bundle, a target, or a literal width."""
    return (like.literal_value, 16) if isinstance(like, types.Literal) else (like.count, like.lanes)


def _constant(kind, value):
    def typer(typingctx, like):
        result = kind(*_shape(like))

        def codegen(ctx, b, sig, args):
            return each(b, result(), [], lambda b, t: constant(vector_of(result), value))

        return result(like), codegen

    return intrinsic(prefer_literal=True)(typer)


zero_i32, zero_f32 = _constant(i32, 0), _constant(f32, 0.0)


def _splatter(kind, scalar_type):
    """An intrinsic (like, scalar) -> one register with as many lanes as `like`."""

    def typer(typingctx, like, scalar):
        result = kind(1, _shape(like)[1])

        def codegen(ctx, b, sig, args):
            value = ctx.cast(b, args[1], sig.args[1], scalar_type)
            return each(b, result(), [], lambda b, t: splat_value(b, value, vector_of(result)))

        return result(like, scalar_type), codegen

    return intrinsic(prefer_literal=True)(typer)


splat_like, splat_i32_like = _splatter(f32, types.float32), _splatter(i32, types.int32)


@intrinsic
def splat(typingctx, scalar):
    """One float32 to 16 lanes."""
    return f32()(types.float32), lambda ctx, b, sig, args: each(b, sig, args, lambda b, t, x: splat_value(b, x, floats(16)))


@intrinsic
def count_of(typingctx, like):
    """The bundle width of a bundle or target, as a constant."""
    return types.int64(like), lambda ctx, b, sig, args: ir.Constant(INT, sig.args[0].count)


@intrinsic
def lanes_of(typingctx, like):
    """The lanes of a bundle or target, as a constant."""
    return types.int64(like), lambda ctx, b, sig, args: ir.Constant(INT, sig.args[0].lanes)


def _loader_like(kind, memory, convert):
    """An intrinsic (like, place): one register of as many lanes as `like`; memory(lanes) is the LLVM type in memory."""

    def typer(typingctx, like, place):
        lanes = like.lanes
        result = codes(lanes) if kind is codes else kind(1, lanes)

        def codegen(ctx, b, sig, args):
            return each(b, result(), [], lambda b, t: convert(b, load_value(b, args[1], memory(lanes)), lanes))

        return result(like, address), codegen

    return intrinsic(typer)


def _loader(kind, memory, convert):
    """An intrinsic (place): one register of 16 lanes."""

    def typer(typingctx, place):
        def codegen(ctx, b, sig, args):
            return each(b, sig, args, lambda b, t, place: convert(b, load_value(b, place, memory(16)), 16))

        return kind()(address), codegen

    return intrinsic(typer)


def _bytes(lanes):
    return integers(lanes, 8)


def power_of_two(b, v, lanes):
    """2^(e - 128) of unsigned bytes e; the two smallest are subnormal float32."""
    e = b.zext(v, integers(lanes))
    normal = b.shl(b.sub(e, constant(e.type, 1)), constant(e.type, 23))
    subnormal = b.shl(constant(e.type, 0x00200000), b.and_(e, constant(e.type, 1)))
    return b.bitcast(b.select(b.icmp_unsigned("<", e, constant(e.type, 2)), subnormal, normal), floats(lanes))


def _halves(lanes):
    return ir.VectorType(ir.HalfType(), lanes)


def _widen_half(b, v, lanes):
    return b.fpext(v, floats(lanes))


def _widen_bfloat(b, v, lanes):
    return b.bitcast(b.shl(b.zext(v, integers(lanes)), constant(integers(lanes), 16)), floats(lanes))


load_codes_like = _loader_like(codes, lambda lanes: integers(4 * lanes, 8), lambda b, v, lanes: v)
load_i8_like = _loader_like(i32, _bytes, lambda b, v, lanes: b.sext(v, integers(lanes)))
load_low_nibbles_like = _loader_like(i32, _bytes, lambda b, v, lanes: b.zext(b.and_(v, constant(v.type, 15)), integers(lanes)))
load_high_nibbles_like = _loader_like(i32, _bytes, lambda b, v, lanes: b.zext(b.lshr(v, constant(v.type, 4)), integers(lanes)))
load_power_of_two_like = _loader_like(f32, _bytes, power_of_two)
load_u8_like = _loader_like(f32, _bytes, lambda b, v, lanes: b.uitofp(b.zext(v, integers(lanes)), floats(lanes)))
load_f16_like = _loader_like(f32, _halves, _widen_half)
load_bf16_like = _loader_like(f32, lambda lanes: integers(lanes, 16), _widen_bfloat)
load_f32_like = _loader_like(f32, floats, lambda b, v, lanes: v)
load_f16 = _loader(f32, _halves, _widen_half)
load_f32 = _loader(f32, floats, lambda b, v, lanes: v)


def _strided(kind, element):
    """Load a bundle, `stride` bytes apart: one element to all lanes, or (element None) whole vectors."""

    def typer(typingctx, place, stride, like):
        result = kind(*_shape(like))
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
store_f16 = _storer(f32(), lambda b, v: b.fptrunc(v, _halves(16)))
store_i8 = _storer(i32(), lambda b, v: b.trunc(v, integers(16, 8)))


def _reduction(kind, result, combine):
    """Combine the 16 lanes by halves, 8 + 8, 4 + 4, ...: the same tree on every machine."""

    def typer(typingctx, x):
        def codegen(ctx, b, sig, args):
            vector = b.extract_value(args[0], 0)
            for half in (8, 4, 2, 1):
                index = integers(half)
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
def sum_registers(typingctx, bundle):
    """The registers of a bundle (a power of two of them) added lane by lane, first half to second half, to one register."""
    result = f32(1, bundle.lanes)

    def codegen(ctx, b, sig, args):
        registers = [b.extract_value(args[0], t) for t in range(bundle.count)]
        while len(registers) > 1:
            half = len(registers) // 2
            registers = [b.fadd(low, high) for low, high in zip(registers[:half], registers[half:], strict=True)]
        return each(b, result(), [], lambda b, t: registers[0])

    return result(bundle), codegen


@intrinsic
def add_registers(typingctx, x):
    """The registers of a bundle (a power of two) added in pairs, neighbours first: one register."""

    def codegen(ctx, b, sig, args):
        registers = [b.extract_value(args[0], t) for t in range(sig.args[0].count)]
        while len(registers) > 1:
            registers = [b.fadd(left, right) for left, right in zip(registers[::2], registers[1::2], strict=True)]
        return b.insert_value(ir.Constant(ir.ArrayType(registers[0].type, 1), ir.Undefined), registers[0], 0)

    return f32(1, x.lanes)(x), codegen


@intrinsic
def keep_lanes(typingctx, x, count, other):
    """Lanes 0..count-1 of x, the scalar `other` elsewhere."""

    def codegen(ctx, b, sig, args):
        def emit(b, t, x, count, other):
            limit = splat_value(b, b.trunc(count, ir.IntType(32)), integers(16))
            inside = b.icmp_signed("<", ir.Constant(integers(16), list(range(16))), limit)
            return b.select(inside, x, splat_value(b, other, floats(16)))

        return each(b, sig, args, emit)

    return f32()(f32(), types.int64, types.float32), codegen


@intrinsic
def keep_from(typingctx, x, first, other):
    """Lanes first..15 of x, the scalar `other` below."""

    def codegen(ctx, b, sig, args):
        def emit(b, t, x, first, other):
            limit = splat_value(b, b.trunc(first, ir.IntType(32)), integers(16))
            inside = b.icmp_signed(">=", ir.Constant(integers(16), list(range(16))), limit)
            return b.select(inside, x, splat_value(b, other, floats(16)))

        return each(b, sig, args, emit)

    return f32()(f32(), types.int64, types.float32), codegen


@intrinsic
def select_greater(typingctx, x, y, a, c):
    """Lane by lane a where x > y, else c."""

    def codegen(ctx, b, sig, args):
        return each(b, sig, args, lambda b, t, x, y, a, c: b.select(b.fcmp_ordered(">", x, y), a, c))

    return max((x, y, a, c), key=lambda k: k.count)(x, y, a, c), codegen


@intrinsic
def prefetch(typingctx, like, place):
    """Ask for the cache line at `place`, which may be past the end of memory; for targets of one token only.

    One token reads weights once, at memory speed, and a core that computes on every line runs into the limit of what the
    hardware prefetcher asks for by itself. A panel of tokens reads them from the caches.
    """
    alone = like.count == 1

    def codegen(ctx, b, sig, args):
        if alone:
            pointer = b.inttoptr(args[1], ir.IntType(8).as_pointer())
            numbers = [ir.Constant(ir.IntType(32), n) for n in (0, 3, 1)]  # read, keep in all caches, data
            name, kinds = "llvm.prefetch.p0", [pointer.type, *(n.type for n in numbers)]
            b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.VoidType(), kinds), name), [pointer, *numbers])
        return ctx.get_dummy_value()

    return types.void(like, address), codegen
