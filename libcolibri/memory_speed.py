"""How fast memory is, measured: what reading weights once through with every thread allows.

In: arrays that are in memory already, a number of threads. Out: bytes/s
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .kernels.jit import on_call

SAMPLE_BYTES = 128 << 20  # beyond most processors' caches, and read in a few hundredths of a second
LEAST_BYTES = 32 << 20  # what is smaller is read several times over, or starting the threads would be measured
PART_BYTES = 1 << 20
ROUNDS = 3


@on_call
def _read(words):
    """The exclusive or of all words: as little arithmetic as keeps a compiler from leaving the reading out."""
    total = np.uint64(0)
    for i in range(len(words)):
        total ^= words[i]
    return total


def memory_speed(arrays: Sequence[np.ndarray], threads: int) -> float:
    """Bytes/s at which `threads` threads together read these arrays, the largest first, 128 MB at most; the best of three times.

    arrays   uint8, C order, filled: memory that was never written is not there and reads faster than any

    Weights that fit into the processor's caches are read from there, here as when a model runs. 0.0 for no bytes.
    """
    parts = _parts(arrays)
    total = sum(part.nbytes for part in parts)
    if not total:
        return 0.0
    passes = -(-LEAST_BYTES // total)
    shares = [[part for part in parts[rank::threads] for _ in range(passes)] for rank in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        best = min(_seconds(pool, shares) for _ in range(1 + ROUNDS))  # the first one compiles and starts the threads
    return passes * total / best


def _seconds(pool: ThreadPoolExecutor, shares: list[list[np.ndarray]]) -> float:
    started = time.perf_counter()
    list(pool.map(lambda share: [_read(part) for part in share], shares))
    return time.perf_counter() - started


def _parts(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """uint64 views of the sample, in parts that threads can share."""
    parts: list[np.ndarray] = []
    left = SAMPLE_BYTES
    for array in sorted(arrays, key=lambda array: -array.nbytes):
        words = array.reshape(-1)[: min(array.nbytes, left) // 8 * 8].view(np.uint64)
        parts += [words[at : at + PART_BYTES // 8] for at in range(0, len(words), PART_BYTES // 8)]
        left -= words.nbytes
        if left < 8:
            break
    return parts
