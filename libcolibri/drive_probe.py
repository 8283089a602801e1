"""How a drive is read fastest: around the system's page cache or through it, with how many reads at a time, of what size.

In:  files of a model on the drive
Out: `DriveProbe`: the settings, and what they reached beside the default. Under half a second of real reads at random places
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from .arena import allocate
from .drive import Drive
from .file_reader import DIRECT_ALIGN, FileReader
from .parallel_reader import PIECE_BYTES, READ_THREADS, ParallelReader, ReadRequest, Reads

LEAST_GAIN = 1.1  # what is no faster than this is the noise of other programs, or will be
_BUDGET_S, _SLICE_S = 0.45, 0.02
_IN_FLIGHT_BYTES = 32 << 20  # at most, of all reads


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """How one is read.

    direct        around the system's page cache, where the file system can do that
    threads       reads at a time
    piece_bytes   of one read, a multiple of DIRECT_ALIGN
    """

    direct: bool = True
    threads: int = READ_THREADS
    piece_bytes: int = PIECE_BYTES


DEFAULT_SETTINGS = DriveSettings()
# What is tried, the likeliest first: one kind of change after the other, each on top of the best so far.
_CHANGES: tuple[list[dict[str, Any]], ...] = (
    [{"direct": False}],
    [{"threads": 8}, {"threads": 2}, {"threads": 16}],
    [{"piece_bytes": 1 << 20}, {"piece_bytes": 4 << 20}, {"piece_bytes": 512 << 10}],
)
_MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class DriveProbe:
    """The best settings, the bytes/s that they reached, and those of the default. Both 0 when nothing could be read."""

    settings: DriveSettings = DEFAULT_SETTINGS
    bytes_s: float = 0.0
    default_bytes_s: float = 0.0


Speed = Callable[[DriveSettings], float]  # bytes/s of one slice of time


def find_settings(speed: Speed, direct_works: bool, clock: Callable[[], float] = time.perf_counter) -> DriveProbe:
    """The settings that are clearly faster than the default, found one after the other: direct or not, then threads, then pieces.

    The winner has to win twice more against the default, in turns: the best of many is often the luckiest. `clock` says when time is up
    for trying others, so that it still can.
    """
    default = DEFAULT_SETTINGS if direct_works else replace(DEFAULT_SETTINGS, direct=False)
    began = clock()
    speed(default)  # the first reads of a file, and of a drive that had rested, take longer
    best, best_speed = default, speed(default)
    longest_s = (clock() - began) / 2
    for alternatives in _CHANGES if direct_works else _CHANGES[1:]:
        for tried in [replace(best, **change) for change in alternatives]:
            started = clock()
            if started + 5 * longest_s > began + _BUDGET_S:  # this one and the last four
                break
            reached, longest_s = speed(tried), max(longest_s, clock() - started)
            if reached > best_speed:
                best, best_speed = tried, reached
    if best == default:
        return DriveProbe(DEFAULT_SETTINGS, best_speed, best_speed)
    rounds = [(speed(best), speed(default)) for _ in range(2)]
    ours, others = (sum(speeds) / 2 for speeds in zip(*rounds, strict=True))
    if all(mine > LEAST_GAIN * other for mine, other in rounds):
        return DriveProbe(best, ours, others)
    return DriveProbe(DEFAULT_SETTINGS, others, others)


def probe_drive(paths: Sequence[Path], read_bytes: int) -> DriveProbe:
    """Test the drive that `paths` lie on with reads of `read_bytes`, a multiple of DIRECT_ALIGN, such as an expert has.

    Raises OSError, or MemoryBudgetError, where that fails.
    """
    count = max(2, min(2 * _MOST_THREADS, _IN_FLIGHT_BYTES // read_bytes))
    block = allocate(count * read_bytes, "testing the drive").reshape(count, read_bytes)
    block.fill(1)  # or the first slice would wait for the system to clear this memory
    targets = list(block)
    with ExitStack() as closing:
        files: dict[bool, list[FileReader]] = {True: [], False: []}
        for direct, path in product(files, paths):
            files[direct].append(FileReader(path, direct=direct))
            closing.callback(files[direct][-1].close)
        direct_works = all(file.direct for file in files[True])
        return find_settings(lambda settings: _slice(files[settings.direct], targets, settings), direct_works)


def _slice(files: Sequence[FileReader], targets: list[np.ndarray], settings: DriveSettings) -> float:
    """bytes/s of random reads for a short time, always as many as keep all threads busy."""
    reader = ParallelReader([Drive("", settings.threads)], settings.piece_bytes)
    pieces = -(-targets[0].nbytes // settings.piece_bytes)  # of one target
    count = min(len(targets), -(-settings.threads // pieces) + 1)
    try:
        started, done, under_way = time.perf_counter(), 0, list[tuple[Reads, ReadRequest]]()
        free = targets[:count]
        while True:
            while free and time.perf_counter() - started < _SLICE_S:
                request = _somewhere(files, free.pop())
                under_way.append((reader.start([request]), request))
            if not under_way:
                return done / (time.perf_counter() - started)
            reads, request = under_way.pop(0)
            for _, error in reads.wait():
                raise error
            _forget(request)  # part of the work where the page cache is in the way
            done += request.target.nbytes
            free.append(request.target)
    finally:
        reader.close()


def _somewhere(files: Sequence[FileReader], target: np.ndarray) -> ReadRequest:
    """A read at a random place that the system's page cache does not have, as far as the system lets go of it."""
    file = random.choice(files)
    offset = random.randrange((file.opened_bytes - target.nbytes) // DIRECT_ALIGN + 1) * DIRECT_ALIGN
    request = ReadRequest((file,), offset, target, "")
    _forget(request)
    return request


def _forget(request: ReadRequest) -> None:
    file = request.files[0]
    assert file is not None, "each has one"
    if not file.direct:
        file.drop_cached(request.offset, request.target.nbytes)
