"""Fills the free slots of an expert cache while nobody computes, the experts first that were used most in earlier runs.

In:  the engine's lock, the expert cache, experts in the order of their heat
Out: resident experts, sooner than they are asked for; nothing is evicted, and nothing that is computed changes
"""

import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager

from .expert_cache import Expert, ExpertCache

BATCH_S = 0.01  # a pass that waits for a batch waits twice that at worst, or for one expert, whichever is longer
LARGEST_BATCH = 64


class CacheWarmer:
    """A thread that takes the engine's lock for a batch of reads at a time, so that passes go on between them.

    It ends when no expert of `wanted` fits, at `stop`, when the cache is gone, and when a read fails: `error` says why, and the pass that
    needs the expert raises.
    """

    def __init__(self, lock: AbstractContextManager, experts: ExpertCache, wanted: Iterable[Expert]):
        # Weak: an engine that its owner dropped without closing it must not live on until its cache is full.
        self._lock, self._experts, self._wanted = lock, weakref.ref(experts), iter(wanted)
        self._stopped = threading.Event()
        self._batch = 1
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="colibri-warm", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No batch begins after this."""
        self._stopped.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end, `timeout` seconds at most; whether it has ended. Not with the lock in hand."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._warm():
                pass
        except Exception as error:  # nobody calls this thread who could be told
            self.error = error

    def _warm(self) -> bool:
        """Read a batch; whether there may be more to do."""
        with self._lock:
            experts = self._experts()
            if experts is None or self._stopped.is_set():
                return False
            started, count = time.perf_counter(), self._batch
            more = experts.fill(self._wanted, count) == count
            took = time.perf_counter() - started
        if took > BATCH_S:
            self._batch = max(1, count // 2)
        elif took < BATCH_S / 2:
            self._batch = min(LARGEST_BATCH, count * 2)
        return more
