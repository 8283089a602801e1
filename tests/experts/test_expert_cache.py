"""The expert cache against what must always be true of it, with reads that end when a test says so."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from libcolibri.errors import ConfigError, ExpertReadError, MemoryBudgetError
from libcolibri.eviction import DecayedFrequency
from libcolibri.expert_cache import ExpertCache, floor_bytes, would_hold

SIZES = {0: 4096, 1: 8192, 2: 4096, 4: 8192}
E, K = 6, 2


class FakeReading:
    def __init__(self, store, layer, expert, target, urgent):
        self.store, self.layer, self.expert, self.target, self.urgent = store, layer, expert, target, urgent
        self.done = store.at_once
        target[:] = 99  # a read in flight may have written anything

    def is_done(self):
        return self.done

    def promote(self):
        self.urgent = True

    def wait(self):
        self.done = True
        self.store.in_flight.remove(self)
        if (self.layer, self.expert) in self.store.bad:
            raise ExpertReadError("drive gone")
        self.target[:] = 10 * self.layer + self.expert


class FakeStore:
    """Experts whose bytes are their layer and number; those in `bad` cannot be read."""

    reading_s = best_bytes_s = 0.0

    def __init__(self, sizes=SIZES, num_experts=E, *, at_once=True):
        self.expert_bytes, self.num_experts = dict(sizes), dict.fromkeys(sizes, num_experts)
        self.total_bytes = sum(size * num_experts for size in sizes.values())
        self.at_once, self.bad = at_once, set()
        self.reads: list[tuple[int, int]] = []
        self.in_flight: list[FakeReading] = []

    def start(self, layer, expert_ids, targets, *, urgent=True):
        ((expert, target),) = zip(expert_ids, targets, strict=True)
        assert target.nbytes == self.expert_bytes[layer] and target.ctypes.data % 4096 == 0
        self.reads.append((layer, expert))
        self.in_flight.append(FakeReading(self, layer, expert, target, urgent))
        return self.in_flight[-1]


class CacheMachine(RuleBasedStateMachine):
    @initialize(budget=st.integers(24576, E * sum(SIZES.values()) + 9999), policy=st.sampled_from(["lru", "adaptive_frequency"]))
    def start(self, budget, policy):
        self.store, self.budget = FakeStore(at_once=False), budget
        self.cache = ExpertCache(self.store, budget, K, policy=policy)
        self.tables = {layer: self.cache.table(layer) for layer in SIZES}
        self.used: dict[int, list[int]] = {}
        self.cache.begin_pass(1)

    def slots(self, layer):
        return next(c for c in self.cache._classes if c.expert_bytes == SIZES[layer])

    def flying(self, layer):
        return {r.expert for r in self.store.in_flight if r.layer == layer}

    def draw_resident(self, data, layer):
        resident = self.cache.resident(layer)
        return sorted(data.draw(st.sets(st.sampled_from(resident)))) if resident else []

    @rule(n_tok=st.sampled_from([1, 1, 7]), data=st.data())
    def next_pass(self, n_tok, data):
        chosen = {layer: data.draw(st.lists(st.integers(0, E - 1), min_size=K, max_size=K, unique=True)) for layer in SIZES}
        self.cache.end_pass({layer: np.array([ids]) for layer, ids in chosen.items()})
        self.cache.begin_pass(n_tok)

    @rule(layer=st.sampled_from(sorted(SIZES)), ids=st.lists(st.integers(0, E - 1), min_size=1))
    def note(self, layer, ids):
        self.cache.note(layer, np.array([ids]))

    @rule(layer=st.sampled_from(sorted(SIZES)), data=st.data())
    def demand(self, layer, data):
        """Missing experts are begun as far as there is room; those being computed stay; those on their way become urgent."""
        absent = sorted(set(range(E)) - set(self.cache.resident(layer)))
        if not absent:
            return
        missing = data.draw(st.lists(st.sampled_from(absent), min_size=1, unique=True))
        busy = self.draw_resident(data, layer)
        before, slots = self.flying(layer), self.slots(layer)
        room = max(0, slots.n_slots - len(busy) - slots.in_flight)
        self.cache.demand(layer, missing, busy)
        wanted = [e for e in missing if e not in before]
        assert self.flying(layer) == before | set(wanted[:room])
        assert set(busy) <= set(self.cache.resident(layer))
        assert all(r.urgent for r in self.store.in_flight if r.layer == layer and r.expert in missing)

    @rule(layer=st.sampled_from(sorted(SIZES)[1:]), most=st.integers(0, E), data=st.data())
    def look_ahead(self, layer, most, data):
        """Guesses never take the last slots, nor those of experts that are needed now or guessed."""
        current = data.draw(st.sampled_from([at for at in SIZES if at < layer]))
        busy, likely = self.draw_resident(data, current), data.draw(st.lists(st.integers(0, E - 1), unique=True))
        before, guessed = len(self.store.in_flight), set(likely) & set(self.cache.resident(layer))
        begun = self.cache.stats.prefetched
        self.cache.look_ahead(layer, likely, most, current, np.array(busy, np.int64))
        new = self.store.in_flight[before:]
        assert len(new) <= most and not any(r.urgent for r in new) and self.cache.stats.prefetched == begun + len(new)
        assert set(busy) <= set(self.cache.resident(current)) and guessed <= set(self.cache.resident(layer))
        assert not new or self.slots(layer).in_flight <= self.slots(layer).n_slots - K

    @rule(data=st.data())
    def drive_finishes(self, data):
        for reading in self.store.in_flight:
            reading.done = reading.done or data.draw(st.booleans())

    @rule(wanted=st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.integers(0, E - 1)), max_size=9), count=st.integers(1, 5))
    def fill(self, wanted, count):
        """Free slots only, in the order of wishes."""
        before = {layer: set(self.cache.resident(layer)) for layer in SIZES}
        free = {size: len(c.free) for c in self.cache._classes for size in [c.expert_bytes]}
        taken: list[tuple[int, int]] = []
        for layer, expert in wanted:
            known = expert in before[layer] or expert in self.flying(layer) or (layer, expert) in taken
            if len(taken) < count and free[SIZES[layer]] and not known:
                free[SIZES[layer]] -= 1
                taken.append((layer, expert))
        try:
            assert self.cache.fill(iter(wanted), count) == len(taken)
        except ExpertReadError:
            assert set(taken) & self.store.bad
        for layer in SIZES:
            read = {e for at, e in taken if at == layer and (at, e) not in self.store.bad}
            assert set(self.cache.resident(layer)) == before[layer] | read

    @rule(layer=st.sampled_from(sorted(SIZES)), expert=st.integers(0, E - 1))
    def drive_changes(self, layer, expert):
        self.store.bad ^= {(layer, expert)}

    @rule(layer=st.sampled_from(sorted(SIZES)), quorum=st.integers(0, E))
    def collect(self, layer, quorum):
        before, flying, in_all = set(self.cache.resident(layer)), self.flying(layer), len(self.store.in_flight)
        demanded = flying - {e for (at, e), fetch in self.cache._fetches.items() if at == layer and fetch.ahead}
        try:
            self.cache.collect(layer, quorum)
        except ExpertReadError:
            assert any((layer, e) in self.store.bad for e in demanded)
            return
        arrived = set(self.cache.resident(layer)) - before
        assert arrived <= flying and len(arrived & demanded) >= min(quorum, len(demanded))
        if quorum and in_all:
            assert len(self.store.in_flight) < in_all  # waiting always gets on

    @rule(n_bytes=st.integers(1, E * sum(SIZES.values())))
    def shrink(self, n_bytes):
        """Down to the floor, free slots first; what is being read keeps its slot; the memory is gone."""
        before = self.cache.capacity_bytes
        given = self.cache.shrink(n_bytes)
        assert given == before - self.cache.capacity_bytes < n_bytes + 4096 + 8192
        for slot_class in self.cache._classes:
            assert slot_class.n_slots >= K and not slot_class.memory[slot_class.withdrawn].any()
            assert given >= n_bytes or slot_class.n_slots == K or slot_class.in_flight

    @rule(n_bytes=st.integers(1, E * sum(SIZES.values())))
    def grow(self, n_bytes):
        before, withdrawn = self.cache.capacity_bytes, self.cache.withdrawn_bytes
        grown = self.cache.grow(n_bytes)
        assert min(n_bytes, withdrawn) - 4096 - 8192 < grown <= n_bytes and self.cache.capacity_bytes == before + grown
        assert self.cache.withdrawn_bytes == withdrawn - grown

    @invariant()
    def every_slot_has_one_owner(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.capacity_bytes <= self.budget
        for slots in self.cache._classes:
            resident = slots.addresses[slots.addresses != 0].tolist()
            flying = [r.target.ctypes.data for r in self.store.in_flight if r.layer in slots.layers]
            free = [slots.base + slot * slots.expert_bytes for slot in slots.free]
            assert len(flying) == slots.in_flight
            withdrawn = [slots.base + slot * slots.expert_bytes for slot in slots.withdrawn]
            everything = [slots.base + i * slots.expert_bytes for i in range(len(slots.memory))]
            assert sorted(resident + flying + free + withdrawn) == everything
        for layer, size in SIZES.items():
            assert self.cache.table(layer).ctypes.data == self.tables[layer].ctypes.data
            for expert in self.cache.resident(layer):
                assert ctypes.string_at(int(self.tables[layer][expert]), size) == bytes([10 * layer + expert]) * size


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase


def test_floor_is_one_token_of_each_size():
    store = FakeStore()
    assert floor_bytes(store.expert_bytes, K) == 2 * (4096 + 8192)
    with pytest.raises(MemoryBudgetError, match=r"24,575 bytes cannot hold one token's 2 experts .*\(24,576 bytes\): give --expert-cache"):
        ExpertCache(store, 24575, K)
    cache = ExpertCache(store, 24576, K)
    assert [cache.capacity(layer) for layer in SIZES] == [2, 2, 2, 2]
    for layer in SIZES:
        cache.bring_in(layer, [0, 5])
        cache.bring_in(layer, [1, 2])
        assert cache.resident(layer) == [1, 2]


def test_bring_in_takes_as_many_as_fit():
    cache = ExpertCache(FakeStore({0: 4096, 1: 4096}), 3 * 4096, K)
    cache.bring_in(1, [0, 1])
    cache.bring_in(0, np.array([5, 1, 3, 0]))
    assert cache.resident(0) == [1, 3, 5] and cache.resident(1) == []
    cache.bring_in(1, np.array([2]))
    assert len(cache.resident(0)) == 2 and cache.resident(1) == [2]


def test_native_stamps_decide_who_leaves():
    cache = ExpertCache(FakeStore({0: 4096}), 3 * 4096, K, policy="lru")
    cache.bring_in(0, [0, 1, 2])
    cache.clock[0] += 1
    cache.stamps(0)[[0, 2]] = cache.clock[0]
    cache.bring_in(0, [4])
    assert cache.resident(0) == [0, 2, 4]


def test_guesses_are_judged_at_the_end_of_the_pass():
    store = FakeStore({0: 4096, 1: 4096}, at_once=False)
    cache = ExpertCache(store, 8 * 4096, K)
    cache.begin_pass(1)
    cache.demand(0, [0, 1], [])
    cache.look_ahead(1, [4, 2, 0], 2, 0, np.array([], np.int64))
    assert [(r.layer, r.expert, r.urgent) for r in store.in_flight] == [(0, 0, True), (0, 1, True), (1, 4, False), (1, 2, False)]
    cache.collect(0, 2)
    assert cache.resident(0) == [0, 1] and cache.resident(1) == []
    cache.demand(1, [4, 5], [])
    cache.collect(1, 2)
    assert cache.resident(1) == [4, 5]  # the wrong guess is not waited for
    cache.end_pass({0: np.array([[0, 1]]), 1: np.array([[4, 5]])})
    assert (cache.stats.prefetched, cache.stats.prefetch_used, cache.stats.prefetch_accuracy) == (2, 1, 0.5)
    assert cache.stats.unused_bytes == 4096  # counted before it has come
    cache.collect(1)
    assert cache.resident(1) == [4, 5]
    store.in_flight[0].done = True
    cache.collect(0)
    assert cache.resident(1) == [2, 4, 5]  # once read, it is there all the same


def test_a_guess_that_cannot_be_read_is_the_askers_affair():
    store = FakeStore({0: 4096, 1: 4096})
    store.bad = {(1, 3)}
    cache = ExpertCache(store, 8 * 4096, K)
    cache.begin_pass(1)
    cache.look_ahead(1, [3], 1, 0, np.array([], np.int64))
    cache.collect(1)
    assert cache.resident(1) == [] and store.in_flight == []
    with pytest.raises(ExpertReadError):
        cache.bring_in(1, [3])
    store.bad.clear()
    cache.bring_in(1, [3])
    assert cache.resident(1) == [3]


def test_what_failed_in_an_earlier_pass_is_read_again():
    store = FakeStore({0: 4096})
    store.bad = {(0, 1), (0, 2)}
    cache = ExpertCache(store, 4 * 4096, K)
    cache.begin_pass(1)
    with pytest.raises(ExpertReadError):
        cache.bring_in(0, [1, 2])
    assert len(store.in_flight) == 1  # the pass ended before it learned of the second
    cache.begin_pass(1)
    cache.collect(0)
    store.bad.clear()
    cache.bring_in(0, [1, 2])
    assert cache.resident(0) == [1, 2]


def test_an_interrupt_while_waiting_frees_no_slot():
    store = FakeStore({0: 4096})
    cache = ExpertCache(store, 3 * 4096, K)
    cache.demand(0, [1], [])
    reading = store.in_flight[0]
    reading.wait, wait = lambda: (_ for _ in ()).throw(KeyboardInterrupt), reading.wait
    with pytest.raises(KeyboardInterrupt):
        cache.collect(0, 1)
    assert cache.resident(0) == []
    reading.wait = wait
    cache.begin_pass(1)
    cache.bring_in(0, [0, 2])
    assert cache.resident(0) == [0, 1, 2]


def test_budget_above_all_experts_takes_only_them():
    store = FakeStore()
    cache = ExpertCache(store, 1 << 40, K)
    assert cache.holds_everything and cache.capacity_bytes == store.total_bytes
    seen = []
    cache.preload(lambda *facts: seen.append(facts))
    assert all(cache.resident(layer) == list(range(E)) for layer in SIZES)
    assert seen[-1] == ("experts", store.total_bytes, store.total_bytes)
    assert cache.stats.read_bytes == store.total_bytes
    cache.preload()
    assert len(store.reads) == E * len(SIZES)


def test_preload_spreads_over_layers_and_evicts_nothing():
    cache = ExpertCache(FakeStore(dict.fromkeys(range(4), 4096)), 9 * 4096, K)
    cache.bring_in(3, [5])
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


def test_a_policy_is_not_told_of_a_pass_that_it_did_not_see_begin():
    """A cache that held everything shrinks while a pass is under way."""
    cache = ExpertCache(FakeStore(), 1 << 40, K)
    cache.preload()
    routed = {layer: np.array([[0, 1]]) for layer in SIZES}
    calls = []
    for slot_class in cache._classes:
        slot_class.policy.begin_pass = lambda *facts: calls.append("begin")
        slot_class.policy.note = lambda *facts: calls.append("note")
    cache.begin_pass(1)
    cache.shrink(1)
    assert not cache.holds_everything
    cache.note(0, routed[0])
    cache.end_pass(routed)
    assert not calls
    cache.begin_pass(1)
    cache.end_pass(routed)
    assert calls[0] == "begin" and "note" in calls


def test_others_give_what_slots_that_are_being_filled_cannot():
    cache = ExpertCache(FakeStore(at_once=False), 45056, K)
    cache.begin_pass(1)
    cache.demand(0, np.array([0, 1, 2]), np.array([], np.int64))
    assert cache.shrink(8193) >= 8193


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
    for layer, wanted in data.draw(st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, E - 1), min_size=1)))):
        cache.begin_pass(1)
        left = set(wanted)
        while left:  # as the decoder's waves do
            ready = left & set(cache.resident(layer))
            left -= ready
            if left:
                cache.demand(layer, sorted(left), sorted(ready))
                assert ready <= set(cache.resident(layer))
                cache.collect(layer, 1)
                assert ready or left & set(cache.resident(layer))
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
    everything.bring_in(0, range(E))
    everything.bring_in(1, range(E))
    assert everything.stats.evictions == 0


def test_fill_takes_free_slots_only():
    cache = one_size(5)
    cache.bring_in(0, [3])
    wanted = iter([(0, 3), (1, 2), (1, 2), (0, 0), (0, 1), (1, 0), (1, 1)])
    assert cache.fill(wanted, 2) == 2 and (cache.resident(0), cache.resident(1)) == ([0, 3], [2])
    assert cache.fill(wanted, 5) == 2 and cache.fill(wanted, 1) == 0
    assert (cache.resident(0), cache.resident(1)) == ([0, 1, 3], [0, 2])
    assert (cache.stats.evictions, cache.stats.read_bytes) == (0, 5 * 4096)


def test_fill_leaves_alone_what_is_being_read():
    cache = one_size(4)
    cache.bring_in(0, [0])
    cache.demand(0, [1, 2], [0])  # and the pass is cancelled
    assert cache.fill(iter([(0, 1), (0, 2), (0, 3)]), 3) == 1
    cache.collect(0)
    assert cache.resident(0) == [0, 1, 2, 3] and cache.stats.read_bytes == 4 * 4096


@pytest.mark.parametrize("broken", ["read", "start"])
def test_a_failed_fill_gives_its_slots_back(broken):
    cache = one_size(4)
    store, start = cache._store, cache._store.start

    def refuse(*arguments, **options):
        raise ExpertReadError("no thread")

    if broken == "start":
        store.start = refuse
    store.bad = {(0, 0), (1, 1), (0, 2)}
    with pytest.raises(ExpertReadError):
        cache.fill(iter([(0, 0), (1, 1), (0, 2)]), 3)
    store.bad, store.start = set(), start
    assert cache.resident(0) == cache.resident(1) == []
    cache.bring_in(0, [0, 1, 2, 3])
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
    cache = one_size(4, usage=past, policy="decayed_frequency")
    cache.fill(iter([(0, 0), (0, 1), (1, 0), (1, 1)]), 4)
    cache.begin_pass(1)
    cache.bring_in(0, [5])
    assert (cache.resident(0), cache.resident(1)) == ([0, 1, 5], [0])
    cache.end_pass({0: np.array([[5]]), 1: np.array([[0]])})
    assert past.passes == [{0: [[5]], 1: [[0]]}]
    cache.begin_pass(1)
    cache.bring_in(1, [3])
    assert (cache.resident(0), cache.resident(1)) == ([0, 5], [0, 3])  # a use just now counts more than one in twenty


def test_a_remembered_score_is_where_a_run_would_settle():
    policy, past = DecayedFrequency(1, 3), DecayedFrequency(1, 3)
    for clock in range(1, 400):
        policy.begin_pass(1, 2)
        policy.note(0, np.array([1, clock % 2 == 0, clock % 4 == 0]))
    past.remember(np.array([[1.0, 0.5, 0.25]]))
    assert np.abs(policy.heat - 399 / policy.half_life_tok - past.heat).max() < 0.3
    past.remember(np.zeros((1, 3)))
    assert np.isneginf(past.heat).all()
