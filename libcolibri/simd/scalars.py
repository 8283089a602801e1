"""Single values at integer addresses, as kernels read their operands and write their results."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .registers import INT, address, call_llvm, integers, load_value, power_of_two, store_value


def _load(result, element, convert=lambda b, v: v):
    def typer(typingctx, place):
        return result(address), lambda ctx, b, sig, args: convert(b, load_value(b, args[0], element))

    return intrinsic(typer)


def _store(argument, convert=lambda b, v: v):
    def typer(typingctx, place, value):
        def codegen(ctx, b, sig, args):
            store_value(b, convert(b, args[1]), args[0])
            return ctx.get_dummy_value()

        return types.void(address, argument), codegen

    return intrinsic(typer)


get_i64 = _load(types.int64, ir.IntType(64))
get_i32 = _load(types.int32, ir.IntType(32))
get_u8 = _load(types.uint8, ir.IntType(8))
get_i8 = _load(types.int8, ir.IntType(8))
get_f64 = _load(types.float64, ir.DoubleType())
get_f32 = _load(types.float32, ir.FloatType())
get_f16 = _load(types.float32, ir.HalfType(), lambda b, v: b.fpext(v, ir.FloatType()))
get_bf16 = _load(
    types.float32,
    ir.IntType(16),
    lambda b, v: b.bitcast(b.shl(b.zext(v, ir.IntType(32)), ir.Constant(ir.IntType(32), 16)), ir.FloatType()),
)
get_power_of_two = _load(
    types.float32, integers(1, 8), lambda b, v: b.extract_element(power_of_two(b, v, 1), ir.Constant(ir.IntType(32), 0))
)
put_i64, put_i32, put_f32, put_f64 = _store(types.int64), _store(types.int32), _store(types.float32), _store(types.float64)
put_u8 = _store(types.uint8)
put_i16 = _store(types.int32, lambda b, v: b.trunc(v, ir.IntType(16)))
put_f16 = _store(types.float32, lambda b, v: b.fptrunc(v, ir.HalfType()))


@intrinsic
def fma_scalar(typingctx, x, y, z):
    """x * y + z, rounded once."""

    def codegen(ctx, b, sig, args):
        return call_llvm(b, "llvm.fma.f32", ir.FloatType(), list(args))

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def cycles(typingctx):
    """The processor's time stamp counter."""
    return types.int64(), lambda ctx, b, sig, args: call_llvm(b, "llvm.readcyclecounter", INT, [])
