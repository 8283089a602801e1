"""Words that threads share: atomic access, a spin hint, and giving the core away."""

import platform
import sys

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .registers import call_llvm

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686", "x86")
_YIELD = "SwitchToThread" if sys.platform == "win32" else "sched_yield"


def _pointer(builder, place):
    return builder.inttoptr(place, ir.IntType(64).as_pointer())


@intrinsic
def atomic_add(typingctx, place, value):
    """Add to an int64; returns what was there before."""
    return types.int64(types.intp, types.int64), lambda ctx, b, sig, args: b.atomic_rmw("add", _pointer(b, args[0]), args[1], "acq_rel")


@intrinsic
def atomic_load(typingctx, place):
    """Read an int64, and see everything written before it was stored."""
    return types.int64(types.intp), lambda ctx, b, sig, args: b.load_atomic(_pointer(b, args[0]), "acquire", 8)


@intrinsic
def atomic_store(typingctx, place, value):
    """Write an int64 after everything written before."""

    def codegen(ctx, b, sig, args):
        b.store_atomic(args[1], _pointer(b, args[0]), "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def spin_hint(typingctx):
    """Tell the processor that this thread spins."""

    def codegen(ctx, b, sig, args):
        if _IS_X86:
            call_llvm(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return ctx.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Let another thread run; found among the process's symbols, since a ctypes pointer would forbid caching."""

    def codegen(ctx, b, sig, args):
        return call_llvm(b, _YIELD, ir.IntType(32), [])

    return types.int32(), codegen
