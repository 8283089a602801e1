"""The expert cache against a model of it: a list of what was used, oldest first."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libcolibri.errors import ExpertReadError, MemoryBudgetError
from libcolibri.expert_cache import ExpertCache, floor_bytes

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
