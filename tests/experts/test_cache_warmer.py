"""The warmer beside passes: it fills free slots, waits for its turn, and ends quietly whatever happens."""

import gc
import threading
import time

import numpy as np
from test_expert_cache import E, FakeStore, one_size

from libcolibri.cache_warmer import LARGEST_BATCH, CacheWarmer
from libcolibri.errors import ExpertReadError
from libcolibri.turn_lock import TurnLock

ALL = [(layer, expert) for expert in range(E) for layer in (0, 1)]
WAIT_S = 20


def test_it_fills_the_free_slots_in_order_and_ends():
    cache = one_size(5)
    cache.bring_in(1, [5])
    warmer = CacheWarmer(TurnLock(), cache, [(0, 4), (1, 5), (1, 1), (0, 0), (1, 0), (0, 1)])
    assert warmer.join(WAIT_S) and warmer.error is None
    assert (cache.resident(0), cache.resident(1)) == ([0, 4], [0, 1, 5])
    assert cache.stats.evictions == 0


def test_it_ends_when_there_is_no_more_to_read():
    cache = one_size(2 * E)
    assert CacheWarmer(TurnLock(), cache, [(0, 4)]).join(WAIT_S) and cache.resident(0) == [4]


def test_it_works_only_with_the_lock_in_hand():
    cache, lock, held = one_size(2 * E), TurnLock(), []
    fill = cache.fill
    cache.fill = lambda *arguments: held.append(lock._held) or fill(*arguments)
    with lock:
        warmer = CacheWarmer(lock, cache, ALL)
        assert not warmer.join(0.05) and cache.resident(0) == []
    assert warmer.join(WAIT_S) and cache.resident(1) == list(range(E)) and all(held)


def test_passes_go_on_between_its_batches():
    """A pass that asks while a batch is read comes next, so that it waits for one batch at most."""
    cache, lock, order, reading, enough = one_size(2 * E), TurnLock(), [], threading.Event(), threading.Event()
    fill = cache.fill

    def slow(*arguments):
        order.append("batch")
        reading.set()
        limit = time.monotonic() + WAIT_S
        while not (lock._waiting or enough.is_set()) and time.monotonic() < limit:
            time.sleep(0.001)
        return fill(*arguments)

    cache.fill = slow
    warmer = CacheWarmer(lock, cache, ALL)
    for _ in range(3):
        assert reading.wait(WAIT_S)
        with lock:
            order.append("pass")
            reading.clear()
    enough.set()
    assert warmer.join(WAIT_S) and order[:6] == ["batch", "pass"] * 3 and cache.resident(0) == list(range(E))


def test_batches_grow_where_reads_are_quick(monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr("libcolibri.cache_warmer.time.perf_counter", lambda: now[0])

    class Drive:
        def fill(self, wanted, count):
            asked.append(count)
            now[0] += 0.0002 * count
            return count if len(asked) < 20 else 0

    drive = Drive()
    assert CacheWarmer(TurnLock(), drive, []).join(WAIT_S)
    assert asked[:6] == [1, 2, 4, 8, 16, 32] and max(asked) == 32 <= LARGEST_BATCH  # 6.4 ms: neither quick nor slow
    asked.clear()

    def slower(wanted, count):
        asked.append(count)
        now[0] += 0.004 * count
        return count if len(asked) < 20 else 0

    drive.fill = slower
    assert CacheWarmer(TurnLock(), drive, []).join(WAIT_S)
    assert asked[:4] == [1, 2, 2, 2]


def test_stop_ends_it_before_the_next_batch():
    cache, lock = one_size(2 * E), TurnLock()
    with lock:
        warmer = CacheWarmer(lock, cache, ALL)
        warmer.stop()
    assert warmer.join(WAIT_S) and cache.resident(0) == cache.resident(1) == []


def test_a_read_error_ends_it_and_is_raised_where_the_expert_is_needed(recwarn):
    cache = one_size(2 * E)
    cache._store.bad = set(ALL)
    warmer = CacheWarmer(TurnLock(), cache, ALL)
    assert warmer.join(WAIT_S) and isinstance(warmer.error, ExpertReadError) and not recwarn.list
    assert cache.resident(0) == []
    try:
        cache.bring_in(0, np.array([0]))
        raised = None
    except ExpertReadError as error:
        raised = error
    assert raised is not None
    cache._store.bad = set()
    cache.bring_in(0, range(E))
    cache.bring_in(1, range(E))
    assert cache.stats.evictions == 0  # no slot was lost


def test_it_does_not_keep_a_dropped_cache():
    cache, lock = one_size(2 * E), TurnLock()
    store: FakeStore = cache._store
    with lock:
        warmer = CacheWarmer(lock, cache, ALL)
        del cache
        gc.collect()
    assert warmer.join(WAIT_S) and store.reads == []
