"""A memory control group for tests: made, limited, filled with one process, removed.

In: /sys/fs/cgroup, version 1 or 2, writable. Out: `MemoryGroup`; `writable()` says why not in one line.
"""

import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


def _parent() -> Path | None:
    """The folder in which groups with a memory controller may be made."""
    if (ROOT / "memory" / V1[0]).is_file():
        return ROOT / "memory"
    for root in (ROOT, ROOT / "unified"):
        control = root / "cgroup.subtree_control"
        if control.is_file() and "memory" in control.read_text().split():
            return root
    return None


def writable() -> str | None:
    """None where a group can be made; otherwise why not."""
    parent = _parent()
    if parent is None:
        return "no memory control group here"
    probe = parent / f"colibri-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return f"{parent}: {error.strerror}"
    return None


class MemoryGroup:
    """A context manager: a new group, removed at the end."""

    def __init__(self, name: str):
        parent = _parent()
        assert parent is not None
        self.path = parent / f"colibri-{name}-{os.getpid()}"
        self.limit_name, self.usage_name = V1 if (parent / V1[0]).is_file() else V2

    def __enter__(self) -> "MemoryGroup":
        self.path.mkdir()
        return self

    def join(self) -> None:
        """Move the calling process into the group."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def __exit__(self, *exc: object) -> None:
        for _ in range(100):  # a process that was killed leaves a little later
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"{self.path} is still in use")
