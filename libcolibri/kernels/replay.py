"""The native loop that runs a program's operations, and the barrier at which threads meet."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..simd.atomics import atomic_add, atomic_load, atomic_store, spin_hint, yield_core
from ..simd.scalars import cycles, get_i64, put_i64
from .jit import inline, native

# Byte offsets in a team's control block; words that threads write stand on cache lines of their own.
BARRIER, JOB, STATUS, TABLE, COUNT, TIMES, THREADS, START = 0, 128, 192, 256, 264, 272, 280, 288
SPINS_BEFORE_PARKING = 20000  # about 1 ms
SPINS_BEFORE_YIELDING = 2000


@intrinsic
def call_kernel(typingctx, address, operands, rank, threads):
    """Call the machine code at `address`."""

    def codegen(ctx, b, sig, args):
        i64 = ir.IntType(64)
        function = b.inttoptr(args[0], ir.FunctionType(i64, [i64, i64, i64]).as_pointer())
        return b.call(function, args[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@inline
def barrier(control, threads):
    """Wait for all threads. control: address of arrivals, and 64 bytes further a generation.

    Spins a bounded number of times and then gives the core away: more threads than idle cores must be slow, not hang.
    """
    generation = atomic_load(control + 64)
    if atomic_add(control, 1) == threads - 1:
        atomic_store(control, 0)
        atomic_store(control + 64, generation + 1)
        return
    spins = 0
    while atomic_load(control + 64) == generation:
        spin_hint()
        spins += 1
        if spins > SPINS_BEFORE_YIELDING:
            yield_core()


@native("int64(int64, int64)")
def replay(control, rank):
    """Run the posted program; returns the operation after which it stopped, or the number of operations.

    A status from rank 0 of an operation with a barrier stops every thread at that operation.
    """
    table, count, times = get_i64(control + TABLE), get_i64(control + COUNT), get_i64(control + TIMES)
    threads, stopped = get_i64(control + THREADS), -1
    for step in range(get_i64(control + START), count):
        entry = table + step * 32
        started = cycles()
        status = call_kernel(get_i64(entry), get_i64(entry + 8), rank, threads)
        finished = cycles()
        if get_i64(entry + 16):
            if status != 0 and rank == 0:
                atomic_store(control + STATUS, step + 1)
            if threads > 1:
                barrier(control + BARRIER, threads)
            if atomic_load(control + STATUS) == step + 1:  # a slow thread may already see a later operation's stop
                stopped = step
                break
        if times != 0 and rank == 0:
            put_i64(times + step * 16, get_i64(times + step * 16) + finished - started)
            put_i64(times + step * 16 + 8, get_i64(times + step * 16 + 8) + cycles() - finished)
    if threads > 1:  # nobody may read the next job's words, or clear the status, before all have left the program
        barrier(control + BARRIER, threads)
    if stopped >= 0:
        if rank == 0:
            atomic_store(control + STATUS, 0)
        return stopped
    return count


@native("int64(int64, int64, int64)")
def serve(control, rank, seen):
    """A worker's life: wait for a job newer than `seen`, run it, wait again.

    Returns the last job seen when it is time to sleep, or -1 when told to end.
    """
    while True:
        spins = 0
        while atomic_load(control + JOB) == seen:
            spin_hint()
            spins += 1
            if spins > SPINS_BEFORE_PARKING:
                return seen
        seen = atomic_load(control + JOB)
        if get_i64(control + COUNT) < 0:
            return -1
        replay(control, rank)
