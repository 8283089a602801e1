"""Giving memory back: when (pretended systems), how much, and that the system really has it again."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from libcolibri.arena import allocate, can_give_back, give_back
from libcolibri.expert_cache import ExpertCache
from libcolibri.memory_plan import MIB, memory_left
from libcolibri.memory_watch import GROW_AFTER_S, LOOK_EVERY_S, LOW_BYTES, TARGET_BYTES, MemoryWatch

GIB = 1 << 30
ROOMY, SHORT = 4 * GIB, LOW_BYTES - 1


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A watch over a number that a test sets; `look` moves the clock to the next look."""

    def __init__(self, left: int):
        self.left, self.clock, self.lookups = left, Clock(), 0
        self.watch = MemoryWatch(self.look_up, self.clock)

    def look_up(self) -> int:
        self.lookups += 1
        return self.left

    def look(self, idle: int = 0, withdrawn: int = 0, after_s: float = LOOK_EVERY_S) -> int:
        self.clock.now += after_s
        return self.watch.advise(idle, withdrawn)


def test_looks_are_rare():
    watched = Watched(SHORT)
    assert watched.look() < 0 and watched.lookups == 1
    assert [watched.look(after_s=LOOK_EVERY_S / 10) for _ in range(5)] == [0] * 5 and watched.lookups == 1


def test_gives_back_up_to_the_target_and_not_before_it_is_short():
    watched = Watched(LOW_BYTES)
    assert watched.look() == 0
    watched.left = LOW_BYTES - 5
    assert watched.look() == LOW_BYTES - 5 - TARGET_BYTES
    watched.left = -7 * MIB  # over a soft limit already
    assert watched.look() == -7 * MIB - TARGET_BYTES


def test_slots_that_will_be_filled_count_as_used():
    watched = Watched(GIB)
    assert watched.look(idle=GIB - LOW_BYTES) == 0
    assert watched.look(idle=GIB - LOW_BYTES + 1) == LOW_BYTES - 1 - TARGET_BYTES


def test_grows_only_after_enough_room_for_long_enough():
    watched = Watched(ROOMY)
    looks = round(GROW_AFTER_S / LOOK_EVERY_S)
    assert [watched.look(withdrawn=GIB) for _ in range(looks)] == [0] * looks
    assert watched.look(withdrawn=GIB) == GIB  # never more than was given back
    assert watched.look(withdrawn=0) == 0
    for _ in range(looks):
        assert watched.look(withdrawn=GIB) == 0
    watched.left = TARGET_BYTES + 1  # the room was not there all the time
    assert watched.look(withdrawn=GIB) == 0
    watched.left = ROOMY
    assert [watched.look(withdrawn=GIB) for _ in range(looks)] == [0] * looks
    watched.left = TARGET_BYTES + 40 * MIB
    assert watched.look(withdrawn=GIB) == 40 * MIB  # as much as there was throughout


@pytest.mark.parametrize("version", [1, 2, "2 high"])
def test_a_limit_that_is_lowered_under_the_process(tmp_path, version):
    """The watch over a pretended /proc and /sys/fs/cgroup: the group's limit moves, its parent has another."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
    limit, usage = names.get(version, ("memory.high", "memory.current"))
    root = tmp_path / "cgroup" / ("memory" if version == 1 else "")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (root / "job" / "step").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 16777216 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/job/step\n0::/\n" if version == 1 else "0::/job/step\n")
    (root / "job" / "step" / usage).write_text(f"{GIB}\n")
    (root / "job" / "step" / limit).write_text(f"{2 * GIB}\n")
    (root / "job" / "step" / "memory.stat").write_text(f"inactive_file {30 * MIB}\nactive_file {10 * MIB}\n")
    clock = Clock()
    watch = MemoryWatch(lambda: memory_left(tmp_path / "proc", tmp_path / "cgroup"), clock)

    def look() -> int:
        clock.now += LOOK_EVERY_S
        return watch.advise(0, 0)

    assert look() == 0
    (root / "job" / "step" / limit).write_text(f"{GIB}\n")
    assert look() == 40 * MIB - TARGET_BYTES  # its page cache would be given up
    (root / "job" / "step" / limit).write_text(f"{2 * GIB}\n")
    assert look() == 0
    (root / "job" / usage).write_text(f"{3 * GIB}\n")
    (root / "job" / limit).write_text(f"{3 * GIB - 10 * MIB}\n")
    assert look() == -10 * MIB - TARGET_BYTES


class NumberedStore:
    """Experts whose bytes are their number plus one."""

    reading_s = best_bytes_s = 0.0

    def __init__(self, expert_bytes: int, num_experts: int):
        self.expert_bytes, self.num_experts = {0: expert_bytes}, {0: num_experts}
        self.total_bytes = expert_bytes * num_experts

    def start(self, layer, expert_ids, targets, *, urgent=True):
        return NumberedReading(expert_ids, targets)


class NumberedReading:
    def __init__(self, expert_ids, targets):
        self.work = list(zip(expert_ids, targets, strict=True))

    def is_done(self):
        return False

    def wait(self):
        for expert, target in self.work:
            target[:] = expert + 1


def test_a_cache_under_pressure_shrinks_at_a_fault_and_grows_again():
    """The slots that are being filled stay theirs; addresses of everybody else too."""
    watched = Watched(ROOMY)
    size, count = MIB + 4096, 20
    cache = ExpertCache(NumberedStore(size, count), count * size, 2, watch=watched.watch)
    watched.clock.now += 1
    cache.begin_pass(1)
    cache.bring_in(0, np.arange(18))
    at = cache.table(0).copy()
    watched.left, watched.clock.now = TARGET_BYTES - 9 * size - LOW_BYTES, watched.clock.now + 1  # short, with what idle slots would take
    cache.demand(0, np.array([18, 19]), np.array([0, 1]))
    cache.collect(0, 2)
    assert cache.stats.shrinks == 1 and cache.capacity_bytes < 11 * size and cache.stats.capacity_bytes == cache.capacity_bytes
    left = cache.resident(0)
    assert {18, 19} <= set(left) and len(left) * size == cache.capacity_bytes
    assert all(cache.table(0)[e] == at[e] for e in left if e < 18)
    table = cache.table(0)
    for expert in left:
        slot = (int(table[expert]) - cache._classes[0].base) // size
        assert (cache._classes[0].memory[slot] == expert + 1).all()
    watched.left = ROOMY
    for _ in range(round(GROW_AFTER_S / LOOK_EVERY_S) + 2):
        watched.clock.now += LOOK_EVERY_S
        cache.begin_pass(1)
    assert cache.holds_everything and cache.resident(0) == left
    cache.bring_in(0, np.arange(count))
    assert cache.resident(0) == list(range(count))


def test_the_smallest_cache_stays():
    watched = Watched(-GIB)
    cache = ExpertCache(NumberedStore(4096, 8), 8 * 4096, 2, watch=watched.watch)
    watched.clock.now += 1
    cache.begin_pass(1)
    assert cache.capacity(0) == 2 and cache.stats.shrinks == 1
    watched.clock.now += 1
    cache.begin_pass(1)
    assert cache.stats.shrinks == 1
    cache.bring_in(0, np.array([5, 6]))
    assert cache.resident(0) == [5, 6]


def test_pinned_experts_stay():
    cache = ExpertCache(NumberedStore(4096, 8), 8 * 4096, 2)
    cache.pin([(0, 3), (0, 7), (0, 0)])
    cache.preload()
    cache.shrink(1 << 40)
    assert cache.capacity(0) == 5 and {0, 3, 7} <= set(cache.resident(0))
    cache.bring_in(0, np.array([1, 2, 4]))
    assert {0, 3, 7} <= set(cache.resident(0)) and len(cache.resident(0)) == 5


if can_give_back():

    def test_pages_that_are_given_back_are_zero_and_free():
        block = allocate(64 * MIB, "a test")
        block[:] = 7
        before = resident_bytes()
        for start in range(0, 64 * MIB, 2 * MIB):  # half of every huge page, as slots of experts are
            give_back(block[start : start + MIB])
        assert before - resident_bytes() > 30 * MIB
        parts = block.reshape(-1, MIB)
        assert not parts[::2].any() and (parts[1::2] == 7).all()
        give_back(block[100:200])  # no whole page in it
        give_back(block[MIB + 100 : MIB + 3 * mmap.PAGESIZE])
        assert (block[MIB : MIB + mmap.PAGESIZE] == 7).all() and not block[MIB + mmap.PAGESIZE : MIB + 3 * mmap.PAGESIZE].any()
