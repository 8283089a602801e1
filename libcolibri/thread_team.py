"""A team of threads that replays programs: the caller is rank 0, workers spin briefly for a job and then sleep.

Between operations the threads meet at a spin barrier inside native code (0.1 us on two idle cores; a parallel region
of numba costs 20 to 150 us, and its portable layer aborts when two Python threads enter it).
"""

import threading

import numpy as np

from .kernels.replay import COUNT, JOB, START, TABLE, THREADS, TIMES, replay, serve
from .program import Program


class Team:
    """`threads` threads, the caller of `run` being rank 0. One program runs at a time; `run` holds a lock."""

    def __init__(self, threads: int):
        self.threads = threads
        self._memory = np.zeros(1024, np.uint8)
        offset = -self._memory.ctypes.data % 64
        self._words = self._memory[offset : offset + 512].view(np.int64)
        self._control = self._words.ctypes.data
        self._words[THREADS // 8] = threads
        self._lock = threading.Lock()
        self._wake = [threading.Event() for _ in range(threads)]
        self._workers = [
            threading.Thread(target=self._work, args=(rank,), name=f"colibri-{rank}", daemon=True) for rank in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()

    def _work(self, rank: int) -> None:
        seen = 0
        while seen >= 0:
            seen = serve(self._control, rank, seen)
            if seen >= 0 and self._words[JOB // 8] == seen:
                self._wake[rank].wait()  # set after every post, cleared only here: no wake-up is lost
                self._wake[rank].clear()

    def run(self, program: Program, start: int = 0, times: np.ndarray | None = None) -> int:
        """Replay `program` from operation `start`; returns the operation at which a kernel asked to stop, or its length.

        times, if given, is int64 (operations, 2): cycles spent in the operation and at the barrier after it are added.
        """
        with self._lock:
            self._words[TABLE // 8], self._words[COUNT // 8] = program.table.ctypes.data, len(program.table)
            self._words[START // 8] = start
            self._words[TIMES // 8] = 0 if times is None else times.ctypes.data
            self._post()
            return int(replay(self._control, 0))

    def _post(self) -> None:
        # First the job, then the wake-up: the other way round a worker may consume the wake-up, spin in vain, and sleep before
        # the job is there.
        self._words[JOB // 8] += 1
        for event in self._wake[1:]:
            event.set()

    def close(self) -> None:
        """End the workers; the team cannot run anything afterwards."""
        with self._lock:
            self._words[COUNT // 8] = -1
            self._post()
            for worker in self._workers:
                worker.join()
            self._workers = []
