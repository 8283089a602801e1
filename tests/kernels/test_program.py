"""Recording and replaying: order, barriers, stopping and resuming, more threads than cores."""

import threading

import numpy as np
import pytest

from libcolibri.kernels.jit import kernel
from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.program import Program
from libcolibri.simd.scalars import get_i64, put_i64
from libcolibri.thread_team import Team


def make_count(isa):
    @kernel
    def count(operands, rank, threads):
        """Each rank adds 1 to a word of its own; rank 0 asks to stop while the flag is set, and clears it."""
        words, flag = get_i64(operands) + rank * 64, get_i64(operands + 8)
        put_i64(words, get_i64(words) + 1)
        if rank == 0 and flag != 0 and get_i64(flag) != 0:
            put_i64(flag, get_i64(flag) - 1)
            return 7
        return 0

    return count


def make_sum(isa):
    @kernel
    def total(operands, rank, threads):
        """Rank `threads - 1` adds up the words of all ranks: wrong unless a barrier came before."""
        if rank == threads - 1:
            words, out = get_i64(operands), get_i64(operands + 8)
            found = 0
            for r in range(threads):
                found += get_i64(words + r * 64)
            put_i64(out, found)
        return 0

    return total


KERNELS = KernelSet()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_barriers_order_operations(threads):
    words, out = np.zeros((threads, 8), np.int64), np.zeros(1, np.int64)
    program = Program()
    for _ in range(50):
        program.record("count", KERNELS.get(make_count), [words, 0])
        program.record("sum", KERNELS.get(make_sum), [words, out])
    team = Team(threads)
    for runs in range(1, 21):
        assert team.run(program.finish()) == 100
        assert out[0] == 50 * threads * runs
    team.close()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_stops_and_resumes_where_asked(threads):
    words, flag = np.zeros((threads, 8), np.int64), np.array([3], np.int64)
    program = Program()
    program.record("count", KERNELS.get(make_count), [words, 0], barrier=False)
    program.record("may stop", KERNELS.get(make_count), [words, flag])
    program.record("count", KERNELS.get(make_count), [words, 0])
    team, at, stops = Team(threads), 0, 0
    while (at := team.run(program.finish(), at)) < len(program):
        assert at == 1
        stops += 1
    team.close()
    assert stops == 3
    assert (words[:, 0] == 1 + 4 + 1).all()


def test_stops_race_with_slow_threads():
    """A later stop must not be taken for an earlier one by a thread that is late."""
    words, flag = np.zeros((4, 8), np.int64), np.zeros(1, np.int64)
    program = Program()
    for i in range(40):
        program.record("count", KERNELS.get(make_count), [words, flag if i % 2 else 0])
    program.finish()
    team = Team(4)
    for _ in range(50):
        words[:] = 0
        flag[0] = 5
        at = 0
        while (stopped := team.run(program, at)) < len(program):
            at = stopped + 1
        assert (words[:, 0] == 40).all()
    team.close()


def test_callers_from_many_python_threads_take_turns():
    words = np.zeros((2, 8), np.int64)
    program = Program()
    for _ in range(10):
        program.record("count", KERNELS.get(make_count), [words, 0])
    program.finish()
    team = Team(2)
    callers = [threading.Thread(target=lambda: [team.run(program) for _ in range(50)]) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    team.close()
    assert (words[:, 0] == 4 * 50 * 10).all()
