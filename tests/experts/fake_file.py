"""A file in memory in place of a drive's: it can be slow, stop, and fail as told, and notes what was asked of it."""

import errno
import threading
import time
from pathlib import Path


class FakeFile:
    """Stands in for a FileReader.

    fails      offset -> how often a read from there fails; `broken` fails all of them
    gate       reads wait until it is set
    delay_s    of every read
    """

    direct = False

    def __init__(self, content: bytes, path: str = "a.safetensors"):
        self.content, self.path = content, Path(path)
        self.fails: dict[int, int] = {}
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.delay_s = 0.0
        self.log: list[int] = []
        self.running = 0
        self._lock = threading.Lock()

    def read_into(self, target: memoryview, offset: int) -> None:
        with self._lock:
            self.log.append(offset)
            self.running += 1
            fails, self.fails[offset] = self.fails.get(offset, 0), self.fails.get(offset, 0) - 1
        self.gate.wait()
        time.sleep(self.delay_s)
        with self._lock:
            self.running -= 1
        if self.broken or fails > 0:
            raise OSError(errno.EIO, "Input/output error")
        target[:] = self.content[offset : offset + len(target)]
