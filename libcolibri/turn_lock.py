"""A lock that is granted in the order of asking.

Two sessions that generate at once ask for the decoder again right after releasing it; an ordinary lock lets the first one starve the other.
"""

import threading
from collections import deque


class TurnLock:
    """Context manager; first come, first served. Not reentrant."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> "TurnLock":
        with self._guard:
            if not self._held:
                self._held = True
                return self
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:
            self._give_up(turn)
            raise
        return self

    def _give_up(self, turn: threading.Lock) -> None:
        """Leave the queue; pass the lock on if it was handed over in the meantime."""
        with self._guard:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return
        self.__exit__()

    def __exit__(self, *exc: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()  # stays held: it now belongs to whoever waited longest
            else:
                self._held = False
