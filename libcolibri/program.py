"""One step of a model as a flat program: recorded by readable Python, replayed natively by a thread team.

Every kernel has the signature kernel(operands, rank, threads) -> status, where operands is the address of int64 slots. What
changes from step to step (number of tokens, position, token ids) lives in small arrays that slots point at. A status other
than 0 stops the replay after that operation; the caller serves the reason and resumes at the operation it chooses.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


class Program:
    """A list of operations: (kernel, operands, whether all threads meet after it)."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.table = np.zeros((0, 4), np.int64)
        self._entries: list[list[int]] = []
        self._kept: list[object] = []

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, name: str, kernel, slots: Sequence[Any], *, barrier: bool = True) -> int:
        """Append an operation; slots are integers, or arrays, which stand for their addresses and are kept alive. Returns its index."""
        operands = np.array([s.ctypes.data if isinstance(s, np.ndarray) else int(s) for s in slots], np.int64)
        self._kept += [kernel, operands, *[s for s in slots if isinstance(s, np.ndarray)]]
        self._entries.append([kernel.address, operands.ctypes.data, int(barrier), 0])
        self.names.append(name)
        return len(self._entries) - 1

    @property
    def is_settled(self) -> bool:
        """Whether all threads meet after the last operation recorded, so that each may read what any other has written."""
        return bool(self._entries) and self._entries[-1][2] == 1

    def finish(self) -> "Program":
        """Make the program runnable."""
        self.table = np.array(self._entries, np.int64)
        return self
