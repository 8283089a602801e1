"""Whether the expert cache should give memory back, or may take some again, while a model runs.

In:  the memory that is left, looked up now and then; what the cache holds idle and what it gave back
Out: bytes to give back or to take again

A control group's limit may be lowered under a running process, and other programs take memory as they please. The system kills whoever
is over a limit without asking; whoever looks in time gives up its least useful experts instead, and is only slower.
"""

import time
from collections.abc import Callable

from .memory_plan import MIB, memory_left

LOOK_EVERY_S = 0.25  # a look takes up to 1 ms: some small files of the system
LOW_BYTES = 48 * MIB  # less than this left: give back; below what a plan never gives away
TARGET_BYTES = 96 * MIB  # as much that so much is left
GROW_AFTER_S = 5.0  # of enough room at every look; what comes and goes faster is not worth reading experts for
GROW_LEAST_BYTES = 32 * MIB


class MemoryWatch:
    """Looks at the memory that is left, at most every `every_s` seconds.

    left    () -> bytes that this process may still take
    clock   () -> seconds
    """

    def __init__(
        self, left: Callable[[], int] = memory_left, clock: Callable[[], float] = time.monotonic, every_s: float = LOOK_EVERY_S
    ):  # fmt: skip
        self._left, self._clock, self._every_s = left, clock, every_s
        self._next_look = clock()
        self._roomy_since: float | None = None
        self._least_room = 0  # the least seen since then

    def advise(self, idle_bytes: int, withdrawn_bytes: int) -> int:
        """Bytes by which the cache should change: below zero to give back, above to take again, 0 for no change or when it is too early.

        idle_bytes        slots that have no expert yet: memory that the cache will take without asking
        withdrawn_bytes   what it gave back before, the most it may take again
        """
        now = self._clock()
        if now < self._next_look:
            return 0
        self._next_look = now + self._every_s
        left = self._left() - idle_bytes
        if left < LOW_BYTES:
            self._roomy_since = None
            return left - TARGET_BYTES
        room = left - TARGET_BYTES
        if withdrawn_bytes == 0 or room < GROW_LEAST_BYTES:
            self._roomy_since = None
            return 0
        return self._growth(now, min(room, withdrawn_bytes))

    def _growth(self, now: float, room: int) -> int:
        """Bytes to take again once there was room for long enough."""
        if self._roomy_since is None:
            self._roomy_since, self._least_room = now, room
        self._least_room = min(self._least_room, room)
        if now - self._roomy_since < GROW_AFTER_S:
            return 0
        self._roomy_since = None
        return self._least_room
