"""The expert cache against a model of it: a list of what was used, oldest first."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libcolibri.errors import ConfigError, ExpertReadError, MemoryBudgetError
from libcolibri.eviction import DecayedFrequency
from libcolibri.expert_cache import ExpertCache, floor_bytes, would_hold

SIZES = {0: 4096, 1: 8192, 2: 4096, 4: 8192}
E, K = 6, 2


class FakeStore:
    """Experts whose bytes are their layer and number; can be told to fail."""

    def __init__(self, sizes=SIZES, num_experts=E):
        self.expert_bytes, self.num_experts = dict(sizes), dict.fromkeys(sizes, num_experts)
        self.total_bytes = sum(size * num_experts for size in sizes.values())
        self.fail = False
        self.reads: list[tuple[int, int]] = []

    def start(self, layer, expert_ids, targets):
        return SimpleNamespace(wait=lambda: self.read(layer, expert_ids, targets))

    def read(self, layer, expert_ids, targets):
        for expert, target in zip(expert_ids, targets, strict=True):
            assert target.nbytes == self.expert_bytes[layer] and target.ctypes.data % 4096 == 0
            self.reads.append((layer, expert))
            target[:] = 99 if self.fail else 10 * layer + expert
        if self.fail:
            raise ExpertReadError("drive gone")


class CacheMachine(RuleBasedStateMachine):
    @initialize(budget=st.integers(2 * (4096 + 8192), E * sum(SIZES.values()) + 9999))
    def start(self, budget):
        self.store = FakeStore()
        self.cache = ExpertCache(self.store, budget, K, policy="lru")
        self.budget = budget
        self.tables = {layer: self.cache.table(layer) for layer in SIZES}
        self.order: dict[int, list[tuple[int, int]]] = {4096: [], 8192: []}  # by size of slot, oldest first
        self.hits = self.misses = self.evictions = 0

    def use(self, layer, expert):
        order = self.order[SIZES[layer]]
        if (layer, expert) in order:
            order.remove((layer, expert))
        order.append((layer, expert))

    @rule(layer=st.sampled_from(sorted(SIZES)), wanted=st.sets(st.integers(0, E - 1), min_size=1), protect=st.sets(st.integers(0, E - 1)))
    def ensure(self, layer, wanted, protect):
        order, capacity = self.order[SIZES[layer]], self.cache.capacity(layer)
        slots = sum(1 for c in self.cache._classes if c.expert_bytes == SIZES[layer] for _ in range(c.n_slots))
        resident = {e for at, e in order if at == layer}
        missing, kept = wanted - resident, wanted | (protect & resident)
        self.hits += len(wanted & resident)
        present = sorted(wanted & resident)
        self.cache.begin_pass()
        if missing and len(kept) > capacity:
            with pytest.raises(MemoryBudgetError, match=f"layer {layer}"):
                self.cache.ensure(layer, wanted, protect)
        else:
            self.cache.ensure(layer, wanted, protect)
            self.misses += len(missing)
            while missing and len(order) + len(missing) > slots:
                # experts used at the same moment leave in order of layer and number
                victim = next(key for key in order if key[0] != layer or key[1] not in kept)
                order.remove(victim)
                self.evictions += 1
            present = sorted(wanted)
        for expert in present:
            self.use(layer, expert)

    @rule(layer=st.sampled_from(sorted(SIZES)), data=st.data())
    def touch(self, layer, data):
        resident = sorted(e for at, e in self.order[SIZES[layer]] if at == layer)
        chosen = data.draw(st.sets(st.sampled_from(resident)) if resident else st.just(set()))
        self.cache.begin_pass()
        self.cache.touch(layer, sorted(chosen))
        self.hits += len(chosen)
        for expert in sorted(chosen):
            self.use(layer, expert)

    @rule(layer=st.sampled_from(sorted(SIZES)), data=st.data())
    def read_while_others_are_busy(self, layer, data):
        """Missing experts come in beside those that are being computed, which never leave."""
        order, resident = self.order[SIZES[layer]], {e for at, e in self.order[SIZES[layer]] if at == layer}
        busy = data.draw(st.sets(st.sampled_from(sorted(resident)))) if resident else set()
        absent = sorted(set(range(E)) - resident)
        slots = sum(c.n_slots for c in self.cache._classes if c.expert_bytes == SIZES[layer])
        wanted = absent[: slots - len(busy)]
        if not wanted:
            return
        self.cache.begin_pass()
        self.cache.begin(layer, absent, sorted(busy))
        assert self.cache.resident(layer) != sorted(resident | set(wanted))  # not before they were waited for
        self.cache.bring_in(layer, absent)
        self.misses += len(wanted)
        while len(order) + len(wanted) > slots:
            order.remove(next(key for key in order if key[0] != layer or key[1] not in busy))
            self.evictions += 1
        for expert in wanted:
            self.use(layer, expert)

    @rule(wanted=st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.integers(0, E - 1)), max_size=9), count=st.integers(1, 5))
    def fill(self, wanted, count):
        """Free slots only, in the order of wishes."""
        free = {size: sum(c.n_slots for c in self.cache._classes if c.expert_bytes == size) - len(o) for size, o in self.order.items()}
        taken: list[tuple[int, int]] = []
        for layer, expert in wanted:
            size = SIZES[layer]
            if len(taken) < count and free[size] and (layer, expert) not in [*self.order[size], *taken]:
                free[size] -= 1
                taken.append((layer, expert))
        self.cache.begin_pass()
        assert self.cache.fill(iter(wanted), count) == len(taken)
        for layer, expert in sorted(taken):
            self.use(layer, expert)

    @precondition(lambda self: any(len(order) < E for order in self.order.values()))
    @rule(layer=st.sampled_from(sorted(SIZES)), expert=st.integers(0, E - 1))
    def fail_to_read(self, layer, expert):
        order = self.order[SIZES[layer]]
        if (layer, expert) in order:
            return
        slots = sum(c.n_slots for c in self.cache._classes if c.expert_bytes == SIZES[layer])
        self.cache.begin_pass()
        self.store.fail = True
        with pytest.raises(ExpertReadError):
            self.cache.ensure(layer, [expert])
        self.store.fail = False
        if len(order) == slots:
            order.pop(0)
            self.evictions += 1

    @rule(n_bytes=st.integers(1, E * sum(SIZES.values())))
    def shrink(self, n_bytes):
        """Down to the floor, what was used longest ago first, free slots before that; the memory is gone."""
        before, spare = self.slots(), self.cache.capacity_bytes - K * (4096 + 8192)
        given = self.cache.shrink(n_bytes)
        assert min(n_bytes, spare) <= given < n_bytes + 4096 + 8192
        assert given == sum(size * (before[size] - count) for size, count in self.slots().items())
        for slot_class in self.cache._classes:
            assert slot_class.n_slots >= K and not slot_class.memory[slot_class.withdrawn].any()
            order = self.order[slot_class.expert_bytes]
            while len(order) > slot_class.n_slots:
                order.pop(0)
                self.evictions += 1

    @rule(n_bytes=st.integers(1, E * sum(SIZES.values())))
    def grow(self, n_bytes):
        before, withdrawn = self.cache.capacity_bytes, self.cache.withdrawn_bytes
        grown = self.cache.grow(n_bytes)
        assert min(n_bytes, withdrawn) - 4096 - 8192 < grown <= n_bytes and self.cache.capacity_bytes == before + grown
        assert self.cache.withdrawn_bytes == withdrawn - grown

    def slots(self):
        return {slot_class.expert_bytes: slot_class.n_slots for slot_class in self.cache._classes}

    @invariant()
    def same_residents_and_bytes(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.capacity_bytes <= self.budget
        for layer, size in SIZES.items():
            table = self.cache.table(layer)
            assert table.ctypes.data == self.tables[layer].ctypes.data
            assert self.cache.resident(layer) == sorted(e for at, e in self.order[size] if at == layer)
            for expert in self.cache.resident(layer):
                assert ctypes.string_at(int(table[expert]), size) == bytes([10 * layer + expert]) * size
        stats = self.cache.stats
        assert (stats.hits, stats.misses, stats.evictions) == (self.hits, self.misses, self.evictions)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def test_floor_is_one_token_of_each_size():
    store = FakeStore()
    assert floor_bytes(store.expert_bytes, K) == 2 * (4096 + 8192)
    with pytest.raises(MemoryBudgetError, match=r"24,575 bytes cannot hold one token's 2 experts .*\(24,576 bytes\): give --expert-cache"):
        ExpertCache(store, 24575, K)
    cache = ExpertCache(store, 24576, K)
    assert [cache.capacity(layer) for layer in SIZES] == [2, 2, 2, 2]
    for layer in SIZES:
        cache.ensure(layer, [0, 5])
        cache.ensure(layer, [1, 2])
        assert cache.resident(layer) == [1, 2]


def test_bring_in_takes_as_many_as_fit():
    cache = ExpertCache(FakeStore({0: 4096, 1: 4096}), 3 * 4096, K)
    cache.ensure(1, [0, 1])
    cache.bring_in(0, np.array([5, 1, 3, 0]))
    assert cache.resident(0) == [1, 3, 5] and cache.resident(1) == []
    cache.bring_in(1, np.array([2]))
    assert len(cache.resident(0)) == 2 and cache.resident(1) == [2]


def test_native_stamps_decide_who_leaves():
    cache = ExpertCache(FakeStore({0: 4096}), 3 * 4096, K, policy="lru")
    cache.ensure(0, [0, 1, 2])
    cache.clock[0] += 1
    cache.stamps(0)[[0, 2]] = cache.clock[0]
    cache.ensure(0, [4])
    assert cache.resident(0) == [0, 2, 4]


def test_waves_keep_what_is_protected():
    cache = ExpertCache(FakeStore({0: 4096}), 3 * 4096, K)
    cache.ensure(0, [0, 1, 2])
    cache.touch(0, [2])
    cache.ensure(0, [3], protect=[0, 1])
    assert cache.resident(0) == [0, 1, 3]
    with pytest.raises(MemoryBudgetError, match="4 experts are needed at once, the expert cache holds 3"):
        cache.ensure(0, [4], protect=[0, 1, 3])


def test_budget_above_all_experts_takes_only_them():
    store = FakeStore()
    cache = ExpertCache(store, 1 << 40, K)
    assert cache.holds_everything and cache.capacity_bytes == store.total_bytes
    seen = []
    cache.preload(lambda *facts: seen.append(facts))
    assert all(cache.resident(layer) == list(range(E)) for layer in SIZES)
    assert seen[-1] == ("experts", store.total_bytes, store.total_bytes) and cache.stats.misses == 0
    assert cache.stats.read_bytes == store.total_bytes
    cache.preload()
    assert len(store.reads) == E * len(SIZES)


def test_preload_spreads_over_layers_and_evicts_nothing():
    cache = ExpertCache(FakeStore(dict.fromkeys(range(4), 4096)), 9 * 4096, K)
    cache.ensure(3, [5])
    cache.preload()
    assert [cache.resident(layer) for layer in range(4)] == [[0, 1], [0, 1], [0, 1], [0, 1, 5]]
    assert cache.stats.evictions == 0


@pytest.mark.parametrize("budget", [24576, 30000, 50000, 77777, 99999, 140000])
def test_budget_is_used_to_the_last_slot(budget):
    store = FakeStore()
    cache = ExpertCache(store, budget, K)
    left = min(budget, store.total_bytes) - cache.capacity_bytes
    assert 0 <= left < 8192
    shares = [cache.capacity(0) / E, cache.capacity(1) / E]
    assert abs(shares[0] - shares[1]) <= 0.5


# --- pins, filling, the past


def one_size(slots: int, **options) -> ExpertCache:
    return ExpertCache(FakeStore({0: 4096, 1: 4096}), slots * 4096, K, **options)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_pinned_experts_never_leave(data):
    slots = data.draw(st.integers(K, 2 * E))
    pairs = st.tuples(st.integers(0, 1), st.integers(0, E - 1))
    pins = data.draw(st.sets(pairs, max_size=slots - K))
    cache = one_size(slots)
    cache.pin(pins)
    seen: set = set()
    for layer, wanted, busy in data.draw(st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, E - 1), min_size=1), st.booleans()))):
        cache.begin_pass()
        left = set(wanted)
        while left:  # as the decoder's waves do
            ready = left & set(cache.resident(layer))
            cache.touch(layer, sorted(ready))
            if busy and ready and left - ready:
                cache.begin(layer, sorted(left - ready), sorted(ready))
            left -= ready
            if left:
                cache.bring_in(layer, np.array(sorted(left)))
                assert left & set(cache.resident(layer))
            seen |= {(at, expert) for at in (0, 1) for expert in cache.resident(at)} & pins
            assert all(expert in cache.resident(at) for at, expert in seen)
    assert cache.pinned == pins


def test_pins_leave_the_floor():
    cache = one_size(5)
    cache.pin([(0, 1), (1, 5)])
    with pytest.raises(MemoryBudgetError, match="4 pinned experts leave 1 of the expert cache's 5 slots, one token needs 2: pin fewer"):
        cache.pin([(0, 1), (1, 5), (1, 4), (1, 3)])
    assert cache.pinned == {(0, 1), (1, 5)}
    for wrong, message in (((2, 0), "pinned layer 2: .* layers 0 to 1 only"), ((0, 6), "pinned expert 6 of layer 0: expected 0 to 5")):
        with pytest.raises(ConfigError, match=message):
            cache.pin([wrong])
    cache.pin([])
    assert not cache.pinned
    everything = one_size(2 * E)
    everything.pin([(layer, expert) for layer in (0, 1) for expert in range(E)])
    everything.ensure(0, range(E))
    everything.ensure(1, range(E))
    assert everything.stats.evictions == 0


def test_ensure_says_when_pins_are_in_the_way():
    cache = one_size(4)
    cache.pin([(1, 0), (1, 1)])
    cache.ensure(1, [0, 1])
    with pytest.raises(MemoryBudgetError, match="3 experts are needed at once, the expert cache holds 2"):
        cache.ensure(0, [0, 1, 2])
    cache.ensure(0, [0, 1])
    assert cache.resident(1) == [0, 1]


def test_fill_takes_free_slots_only():
    cache = one_size(5)
    cache.ensure(0, [3])
    wanted = iter([(0, 3), (1, 2), (1, 2), (0, 0), (0, 1), (1, 0), (1, 1)])
    assert cache.fill(wanted, 2) == 2 and (cache.resident(0), cache.resident(1)) == ([0, 3], [2])
    assert cache.fill(wanted, 5) == 2 and cache.fill(wanted, 1) == 0
    assert (cache.resident(0), cache.resident(1)) == ([0, 1, 3], [0, 2])
    assert (cache.stats.misses, cache.stats.evictions, cache.stats.read_bytes) == (1, 0, 5 * 4096)


def test_fill_waits_for_what_an_interrupted_pass_was_reading():
    cache = one_size(4)
    cache.ensure(0, [0])
    cache.begin(0, [1, 2], [0])  # and the pass is cancelled
    assert cache.fill(iter([(0, 1), (0, 2), (0, 3)]), 3) == 1
    assert cache.resident(0) == [0, 1, 2, 3] and cache.stats.read_bytes == 4 * 4096


@pytest.mark.parametrize("broken", ["read", "start"])
def test_a_failed_fill_gives_its_slots_back(broken):
    cache = one_size(4)
    store, start = cache._store, cache._store.start

    def refuse(*arguments):
        raise ExpertReadError("no thread")

    if broken == "start":
        store.start = refuse
    store.fail = True
    with pytest.raises(ExpertReadError):
        cache.fill(iter([(0, 0), (1, 1), (0, 2)]), 3)
    store.fail, store.start = False, start
    assert cache.resident(0) == cache.resident(1) == []
    cache.ensure(0, [0, 1, 2, 3])
    assert cache.stats.evictions == 0


def test_preload_takes_the_first_first():
    cache = one_size(5)
    cache.preload(first=[(1, 5), (0, 4), (1, 5), (1, 3)])
    assert (cache.resident(0), cache.resident(1)) == ([0, 4], [0, 3, 5])
    mixed, store = ExpertCache(FakeStore(), 4 * 4096 + 3 * 8192, K), FakeStore()
    first = [(1, 5), (4, 4), (1, 3), (4, 2), (0, 5)]  # more of the large ones than there are slots
    mixed.preload(first=first)
    held = {(layer, expert) for layer in SIZES for expert in mixed.resident(layer)}
    assert held == would_hold(store, 4 * 4096 + 3 * 8192, K, first) == {(1, 5), (4, 4), (1, 3), (0, 5), (0, 0), (2, 0), (0, 1)}
    with pytest.raises(MemoryBudgetError, match="cannot hold"):
        would_hold(store, 4096, K, first)


class Past:
    """A usage history that knows rates."""

    def __init__(self, **rates):
        self._rates, self.passes = rates, []

    def rates(self):
        return {int(layer[1:]): np.array(rates) for layer, rates in self._rates.items()}

    def note_pass(self, routed):
        self.passes.append({layer: ids.tolist() for layer, ids in routed.items()})


def test_what_was_hot_in_the_past_stays_longest():
    past = Past(l0=[0.9, 0.05, 0, 0, 0, 0], l1=[0.5, 0.02, 0, 0, 0, 0])
    cache = one_size(4, usage=past)
    cache.fill(iter([(0, 0), (0, 1), (1, 0), (1, 1)]), 4)
    cache.begin_pass()
    cache.ensure(0, [5])
    assert (cache.resident(0), cache.resident(1)) == ([0, 1, 5], [0])
    cache.end_pass({0: np.array([[5]]), 1: np.array([[0]])})
    assert past.passes == [{0: [[5]], 1: [[0]]}]
    cache.begin_pass()
    cache.ensure(1, [3])
    assert (cache.resident(0), cache.resident(1)) == ([0, 5], [0, 3])  # a use just now counts more than one in twenty


def test_a_remembered_score_is_where_a_run_would_settle():
    policy, past = DecayedFrequency(1, 3), DecayedFrequency(1, 3)
    for clock in range(1, 400):
        policy.note_pass(np.array([[True, clock % 2 == 0, clock % 4 == 0]]), clock)
    past.remember(np.array([[1.0, 0.5, 0.25]]))
    assert np.abs(policy.heat - 399 / policy.half_life - past.heat).max() < 0.3
    past.remember(np.zeros((1, 3)))
    assert np.isneginf(past.heat).all()
