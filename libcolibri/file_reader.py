"""One file, read at offsets into memory that the caller owns; never through page faults of a memory map.

In: a path, offsets, targets. Out: filled targets, or an OSError. A short read is an error, not zeros.
"""

import errno
import os
import threading
from pathlib import Path

DIRECT_ALIGN = 4096


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

    def _version_now(self) -> tuple[int, int, int]:
        # Who writes may set the time of writing back, but not the time of the last change of anything, where there is one; a new name
        # changes that as well, and then the bytes are compared for nothing.
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns

    @property
    def opened_bytes(self) -> int:
        """The size that the file had when it was opened."""
        return self._version[0]

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
