"""Many reads at once, from one drive or from several with the same files; what somebody waits for goes first.

In:  requests, urgent or not
Out: filled targets, and for each request that could not be read the OSError

A request is cut into pieces. Each drive has threads that take pieces from a common queue, so that the faster drive does more of them. A
drive leaves a piece alone that the others are expected to have sooner, and now and then takes one all the same, because a drive that was
slow may be so no more. A piece that fails is tried once more, on another drive if there is one; so is one that a drive does not answer,
while there are several; it is not asked again before it has answered. Threads of several drives read into memory of their own, so that an
answer that comes too late does no harm.
"""

import errno
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .arena import allocate
from .drive import Drive
from .file_reader import FileReader, WrongBytesError

READ_THREADS = 4
# One piece keeps a device queue busy; smaller ones let several threads share one large expert.
PIECE_BYTES = 2 << 20
ATTEMPTS = 2  # a drive's or a network share's hiccup often passes
HANG_S = 5.0  # after which a drive is taken to hang; one that had rested may need some seconds
_HANG_TIMES = 20.0  # or after so many times what the read was expected to take
_LOOK_S = 0.2
_LEAST_WAIT_S = 1e-3
_TRIAL_SHARE = 0.01  # of the time that is spent on reading, for pieces of drives that are expected to be too slow


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Fill `target` (uint8, contiguous) from `offset` on.

    files   the file as each drive of the reader has it, the same bytes at the same place; None: not on that drive
    name    says in errors what the bytes are
    crc32   their checksum, for `ParallelReader.check`
    """

    files: tuple[FileReader | None, ...]
    offset: int
    target: np.ndarray
    name: str
    crc32: str = ""


class _Piece:
    """A part of a request, the number-th. attempts: how often each drive has failed to read it."""

    __slots__ = ("attempts", "number", "offset", "reads", "request", "view")

    def __init__(self, reads: "Reads", request: ReadRequest, number: int, view: memoryview, offset: int):
        self.reads, self.request, self.number, self.view, self.offset = reads, request, number, view, offset
        self.attempts = [0 if file is not None else ATTEMPTS for file in request.files]


class Reads:
    """Requests under way; their targets belong to them until `wait` returns."""

    def __init__(self, queue: "_Queue", requests: Sequence[ReadRequest], piece_bytes: int):
        self._queue = queue
        self.pieces = [
            _Piece(self, request, number, *piece) for request in requests for number, piece in enumerate(_pieces(request, piece_bytes))
        ]
        self.left, self.urgent = len(self.pieces), True
        self.failed: dict[int, tuple[ReadRequest, OSError]] = {}
        self._errors: dict[int, dict[int, OSError]] = {}
        self._filled: dict[int, dict[int, int]] = {}
        self.broken: BaseException | None = None  # our own bug, not the drive's fault
        self.ended = threading.Event()
        if not self.left:
            self.ended.set()

    def promote(self) -> None:
        """From now on somebody waits for these: what has not begun goes before everything that nobody waits for."""
        self._queue.promote(self)

    def is_done(self) -> bool:
        """Whether every read has ended, well or not. Does not block."""
        return self.ended.is_set()

    def wait(self) -> list[tuple[ReadRequest, OSError]]:
        """The requests that failed, once each, with the error. Every read has ended on return."""
        if not self.ended.is_set():
            self.promote()
            self.ended.wait()
        if self.broken is not None:
            raise self.broken
        return list(self.failed.values())

    def errors(self, request: ReadRequest) -> dict[int, OSError]:
        """By number of the drive, how it last failed at this request. What another drive then gave is not undone by that."""
        return self._errors.get(id(request), {})

    def filled(self, request: ReadRequest) -> dict[int, int]:
        """By number of the drive, which pieces of this request it gave: bit i for the i-th."""
        return self._filled.get(id(request), {})

    def note(self, piece: _Piece, drive: int, error: BaseException | None) -> None:
        """What came of a drive's attempt at a piece; the queue's business."""
        if isinstance(error, OSError):
            self._errors.setdefault(id(piece.request), {})[drive] = error
        elif error is None:
            filled = self._filled.setdefault(id(piece.request), {})
            filled[drive] = filled.get(drive, 0) | 1 << piece.number


class ParallelReader:
    """Threads that read; they wait on the drive, so more of them than cores are fine. Any thread may call any method.

    drives        the drives, in the order of a request's files; None: one, of READ_THREADS
    piece_bytes   what a thread reads at once; None: PIECE_BYTES
    """

    def __init__(self, drives: Sequence[Drive] | None = None, piece_bytes: int | None = None):
        self.drives = tuple(drives) if drives is not None else (Drive("", READ_THREADS),)
        self._piece_bytes = piece_bytes
        self._queue = _Queue(self.drives, self._piece_bytes or PIECE_BYTES)
        self._checks = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="colibri-check")  # starts a thread when there is work for it
        # The threads know the queue only, so that a reader that nobody closed and nobody has any more ends them.
        self._finalizer = weakref.finalize(self, self._queue.stop)
        for number, drive in enumerate(self.drives):
            for _ in range(drive.threads):
                self._queue.add_thread(number)

    def start(self, requests: Iterable[ReadRequest], urgent: bool = True) -> Reads:
        """Begin all requests and return at once. Those that are not urgent are read while no urgent piece waits."""
        reads = Reads(self._queue, list(requests), self._piece_bytes or PIECE_BYTES)
        self._queue.add(reads, urgent)
        return reads

    def read(self, requests: Iterable[ReadRequest]) -> list[tuple[ReadRequest, OSError]]:
        """Carry out all requests; returns those that failed, once each, with the error. Every read has ended on return."""
        return self.start(requests).wait()

    def check(self, requests: Sequence[ReadRequest]) -> list[tuple[ReadRequest, OSError]]:
        """The requests whose targets do not have their checksum, with a WrongBytesError; several at once."""
        sums = self._checks.map(lambda request: f"{zlib.crc32(request.target):08x}", requests)
        return [
            (request, WrongBytesError(f"checksum {found}, expected {request.crc32}"))
            for request, found in zip(requests, sums, strict=True)
            if found != request.crc32
        ]

    @property
    def together(self) -> Drive:
        """All drives as one: bytes read, seconds in which at least one read was under way, the best speed."""
        return self._queue.together

    def close(self) -> None:
        """Wait for reads that have begun and end the threads. Pieces that have not begun fail with ECANCELED.

        Of several drives one that hangs is waited for HANG_S only; its threads end when it answers, and harm nobody until then.
        """
        self._finalizer()
        self._queue.join()
        self._checks.shutdown()


class _Queue:
    """What waits to be read, and the threads that do it."""

    def __init__(self, drives: Sequence[Drive], piece_bytes: int):
        self._drives, self._piece_bytes = drives, piece_bytes
        self.together = Drive("", 0)  # all drives as if they were one: what came of them in what time
        self._urgent: deque[_Piece] = deque()
        self._later: deque[_Piece] = deque()
        self._changed = threading.Condition()  # of a reentrant lock
        self._threads: list[threading.Thread] = []
        self._under_way: dict[tuple[int, _Piece], float] = {}  # by drive and piece, when the drive hangs; only kept for several drives
        self._stuck = [0] * len(drives)  # threads that wait for an answer that nobody waits for any more
        self._clock_s, self._looked_s = 0.0, time.perf_counter()
        self._tried_s = [0.0] * len(drives)  # by drive, what together.busy_s was when it last began to read
        self._stopped = False

    def add_thread(self, number: int) -> None:
        thread = threading.Thread(target=self._run, args=(number,), name=f"colibri-read-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def add(self, reads: Reads, urgent: bool) -> None:
        with self._changed:
            if self._stopped:
                raise ValueError("the reader is closed")
            reads.urgent = urgent
            (self._urgent if urgent else self._later).extend(reads.pieces)
            self._changed.notify_all()

    def promote(self, reads: Reads) -> None:
        with self._changed:
            reads.urgent = True
            moved = [piece for piece in self._later if piece.reads is reads]
            if moved:
                self._later = deque(piece for piece in self._later if piece.reads is not reads)
                self._urgent.extend(moved)
                self._changed.notify_all()

    def stop(self) -> None:
        """End the threads when they have read what they are reading; what waits is not read."""
        with self._changed:
            self._stopped = True
            for piece in (*self._urgent, *self._later):
                self._end(piece, OSError(errno.ECANCELED, "the files were closed meanwhile"))
            self._urgent.clear()
            self._later.clear()
            self._changed.notify_all()

    def join(self) -> None:
        end = time.perf_counter() + HANG_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.perf_counter()) if len(self._drives) > 1 else None)
        with self._changed:
            for number, piece in list(self._under_way):
                self._failed(number, piece, OSError(errno.ETIMEDOUT, "the drive did not answer until the files were closed"))

    def _run(self, number: int) -> None:
        """A thread of drive `number`."""
        own = allocate(self._piece_bytes, "reading from two drives") if len(self._drives) > 1 else None
        while (piece := self._take(number)) is not None:
            file = piece.request.files[number]
            assert file is not None, "a piece that a drive does not have is never taken"
            target = piece.view if own is None else memoryview(own)[: len(piece.view)]  # type: ignore[arg-type]  # as in _pieces
            error: BaseException | None = None
            try:
                file.read_into(target, piece.offset)
            except BaseException as raised:  # whoever waits for the piece gets it
                error = raised
            if own is None:
                self._put(number, piece, error)
            elif self._still_wanted(number, piece):
                if error is None:
                    np.copyto(np.frombuffer(piece.view, np.uint8), own[: len(piece.view)])  # without the interpreter's lock
                self._put(number, piece, error)

    def _still_wanted(self, number: int, piece: _Piece) -> bool:
        """Whether nobody has given up waiting for this read. From now on nobody does."""
        with self._changed:
            wanted = self._under_way.pop((number, piece), None) is not None
            if not wanted:
                self._stuck[number] -= 1
                if not self._stuck[number]:
                    self._drives[number].answers()
            return wanted

    def _take(self, number: int) -> _Piece | None:
        """The next piece for drive `number`, waiting for one; None when the thread shall end."""
        drive = self._drives[number]
        left, left_until = None, 0.0  # the piece that was left to other drives, and how long
        with self._changed:
            while not self._stopped:
                self._give_up_what_hangs()
                line = self._urgent or self._later
                piece, now = self._first_for(number, line), time.perf_counter()
                if piece is None:
                    self._changed.wait(_LOOK_S if self._under_way else None)
                # Another drive that were as quick as expected would have taken the piece in the time that this one would have needed.
                elif (piece is left and now >= left_until) or not self._others_are_sooner(number, piece, line):
                    line.remove(piece)
                    if len(self._drives) > 1:
                        patience_s = max(HANG_S, _HANG_TIMES * drive.seconds_for(len(piece.view)))
                        self._under_way[number, piece] = self._clock_s + patience_s
                    drive.begin(len(piece.view), now)
                    self.together.begin(len(piece.view), now)
                    self._tried_s[number] = self.together.busy_s
                    return piece
                else:
                    if piece is not left:
                        left, left_until = piece, now + drive.seconds_for(len(piece.view))
                    self._changed.wait(max(left_until - now, _LEAST_WAIT_S))
        return None

    def _give_up_what_hangs(self) -> None:
        """Treat reads that a drive does not answer as failed; what it still may say to them is ignored."""
        now = time.perf_counter()
        # A process that was stopped, or a machine that slept, must not take its own rest for the drive's.
        self._clock_s += min(now - self._looked_s, 2 * _LOOK_S)
        self._looked_s = now
        for (number, piece), until_s in list(self._under_way.items()):
            if self._clock_s > until_s:
                self._failed(number, piece, OSError(errno.ETIMEDOUT, "the drive does not answer"))

    def _failed(self, number: int, piece: _Piece, error: OSError) -> None:
        del self._under_way[number, piece]
        self._stuck[number] += 1
        self._put(number, piece, error)

    def _first_for(self, number: int, line: deque[_Piece]) -> _Piece | None:
        return next((piece for piece in line if number in self._candidates(piece)), None)

    def _candidates(self, piece: _Piece) -> list[int]:
        """The drives that may read a piece: those that failed at it least often, and none that was given up while others are left."""
        able = [number for number, count in enumerate(piece.attempts) if count < ATTEMPTS]
        sound = [number for number in able if self._drives[number].fault is None] or able
        least = min((piece.attempts[number] for number in sound), default=0)
        return [number for number in sound if piece.attempts[number] == least]

    def _others_are_sooner(self, number: int, piece: _Piece, line: deque[_Piece]) -> bool:
        """Whether another drive is expected to have read everything in line before drive `number` would have read this piece."""
        drive = self._drives[number]
        if drive.speed <= 0.0:
            return False
        others = [self._drives[other] for other in self._candidates(piece) if other != number and self._drives[other].speed > 0.0]
        limit_s = drive.seconds_for(len(piece.view))
        if limit_s < _TRIAL_SHARE * (self.together.busy_s - self._tried_s[number]):
            return False
        waiting = 0
        for queued in line:
            waiting += len(queued.view)
            others = [other for other in others if other.seconds_for(waiting) < limit_s]
            if not others:
                return False
        return True

    def _put(self, number: int, piece: _Piece, error: BaseException | None) -> None:
        """A piece was read, or could not be."""
        drive = self._drives[number]
        with self._changed:
            fault = error if isinstance(error, OSError) else None
            now = time.perf_counter()
            drive.end(len(piece.view), now, fault)
            self.together.end(len(piece.view), now, fault)
            piece.reads.note(piece, number, error)
            if fault is not None:
                piece.attempts[number] += 1
                if (drive.is_failing or self._stuck[number]) and any(other.fault is None for other in self._drives if other is not drive):
                    drive.fault = drive.fault or fault
            if fault is not None and min(piece.attempts) < ATTEMPTS and not self._stopped:
                (self._urgent if piece.reads.urgent else self._later).append(piece)
                self._changed.notify_all()
            else:
                self._end(piece, error)
                if len(self._drives) > 1 and (self._urgent or self._later):
                    self._changed.notify_all()  # what was left to this drive may no longer be

    @staticmethod
    def _end(piece: _Piece, error: BaseException | None) -> None:
        """Nobody touches the piece's target any more."""
        reads = piece.reads
        if isinstance(error, OSError):
            reads.failed.setdefault(id(piece.request), (piece.request, error))
        elif error is not None:
            reads.broken = error
        reads.left -= 1
        if not reads.left:
            reads.ended.set()


def _pieces(request: ReadRequest, piece_bytes: int) -> Iterable[tuple[memoryview, int]]:
    view = memoryview(request.target)  # type: ignore[arg-type]  # numpy arrays offer the buffer protocol
    for start in range(0, len(view), piece_bytes):
        yield view[start : start + piece_bytes], request.offset + start
