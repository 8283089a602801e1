"""Explicit parallel reads into memory that the caller owns; never through page faults of a memory map.

In: files, offsets, targets. Out: filled targets, or the first OSError. A short read is an error, not zeros.
"""

import errno
import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DIRECT_ALIGN = 4096
# One piece keeps a device queue busy; smaller ones let several threads share one large expert.
PIECE_BYTES = 2 << 20


class ShortReadError(OSError):
    """The file ended before the bytes that were asked for."""


class WrongBytesError(OSError):
    """What was read is not what its checksum says."""


class FileReader:
    """One open file, read at offsets by several threads at once.

    direct   go around the system's page cache where that is possible: offsets, sizes and targets are then multiples of DIRECT_ALIGN.
             A copy that is read once costs time and memory, and the system reads ahead what nobody wants.
    """

    def __init__(self, path: Path, *, direct: bool = False):
        self.path = path
        self.direct = direct and hasattr(os, "O_DIRECT") and hasattr(os, "preadv")
        self._fd = self._open()
        self._version = self._version_now()
        self._seek_lock = threading.Lock()

    def _open(self) -> int:
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        if self.direct:
            try:
                return os.open(self.path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # tmpfs and some network file systems know no direct access
                    raise
                self.direct = False
        return os.open(self.path, flags)

    def _version_now(self) -> tuple[int, int]:
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns

    @property
    def changed(self) -> bool:
        """Whether the file was written to, or cut, since it was opened: its bytes may be another model's."""
        return self._version_now() != self._version

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on; OSError, or ShortReadError at the end of the file."""
        done = 0
        while done < len(target):
            count = found = self._read_some(target[done:], offset + done)
            if self.direct:
                count -= count % DIRECT_ALIGN  # the next direct read has to begin at an aligned place
            if count == 0:
                raise ShortReadError(f"ends at byte {offset + done + found}, {len(target) - done - found} bytes too early")
            done += count

    def _read_some(self, target: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [target], offset)
        with self._seek_lock:  # Windows has no positioned read: seek and read must not be torn apart
            os.lseek(self._fd, offset, os.SEEK_SET)
            piece = os.read(self._fd, len(target))
        target[: len(piece)] = piece
        return len(piece)

    def drop_cached(self, offset: int, n_bytes: int) -> None:
        """Let the system forget its own copy of these bytes, where it offers that."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Fill `target` (uint8, contiguous) from `file` at `offset`.

    name    says in errors what the bytes are
    crc32   their checksum, for `ParallelReader.check`
    """

    file: FileReader
    offset: int
    target: np.ndarray
    name: str
    crc32: str = ""


class ParallelReader:
    """A few threads that read; the threads wait on the drive, so more of them than cores are fine."""

    def __init__(self, threads: int = 4):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="colibri-read")

    def start(self, requests: Iterable[ReadRequest]) -> "Reads":
        """Begin all requests and return at once."""
        pieces = [(request, *piece) for request in requests for piece in _pieces(request)]
        return Reads([(self._pool.submit(request.file.read_into, view, offset), request) for request, view, offset in pieces])

    def read(self, requests: Iterable[ReadRequest]) -> list[tuple[ReadRequest, OSError]]:
        """Carry out all requests; returns those that failed, once each, with the error. Every read has ended on return."""
        return self.start(requests).wait()

    def check(self, requests: Sequence[ReadRequest]) -> list[tuple[ReadRequest, OSError]]:
        """The requests whose targets do not have their checksum, with a WrongBytesError; several at once."""
        sums = self._pool.map(lambda request: f"{zlib.crc32(request.target):08x}", requests)
        return [
            (request, WrongBytesError(f"checksum {found}, expected {request.crc32}"))
            for request, found in zip(requests, sums, strict=True)
            if found != request.crc32
        ]

    def close(self) -> None:
        """Wait for reads in flight and end the threads."""
        self._pool.shutdown(wait=True)


class Reads:
    """Requests in flight; their targets belong to them until `wait` returns."""

    def __init__(self, pieces: list[tuple[Future, ReadRequest]]):
        self._pieces = pieces

    def is_done(self) -> bool:
        """Whether every read has ended."""
        return all(future.done() for future, _ in self._pieces)

    def wait(self) -> list[tuple[ReadRequest, OSError]]:
        """The requests that failed, once each, with the error. Every read has ended on return."""
        wait([future for future, _ in self._pieces])
        failed: dict[int, tuple[ReadRequest, OSError]] = {}
        for future, request in self._pieces:
            error = _os_error(future)
            if error is not None:
                failed.setdefault(id(request), (request, error))
        return list(failed.values())


def _pieces(request: ReadRequest) -> Iterable[tuple[memoryview, int]]:
    view = memoryview(request.target)  # type: ignore[arg-type]  # numpy arrays offer the buffer protocol
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES], request.offset + start


def _os_error(future: Future) -> OSError | None:
    error = future.exception()
    if error is None or isinstance(error, OSError):
        return error
    raise error
