"""The experts that are in memory: a budget in bytes over all layers; a policy (eviction.py) says who goes first.

In:  an `ExpertStore`, a budget
Out: per layer, a table of addresses that native code reads and stamps of last use that it writes; answers to expert faults

A pass: `begin_pass`; at a fault of a layer `demand` what is missing, maybe `look_ahead` to the next layer, `collect` what has arrived,
until nothing is missing; `end_pass`. A read in flight owns its slot: the expert is not in the table, and nothing else may take the slot.

Counting: a decoder that looks the table up natively counts hits and misses itself.

Sharing: the engine holds one lock during every forward pass, so the cache, its tables and the addresses in them belong to one pass
at a time, whatever number of sessions and threads there are. `stats` may be read at any moment.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np

from .arena import allocate, give_back
from .errors import ConfigError, ExpertReadError, MemoryBudgetError
from .eviction import DEFAULT_POLICY, least, make_policy
from .expert_store import ExpertStore, Reading
from .expert_trace import TraceWriter
from .memory_watch import MemoryWatch
from .stats import ExpertStats
from .usage_history import UsageHistory

Expert = tuple[int, int]  # layer, expert
Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all
_PRELOAD_READS = 8  # experts per read call while preloading: enough to keep the drive busy, few enough for a live progress line


class _SlotClass:
    """Slots for the layers whose experts have the same size. Layers of mixed widths must not be priced at the widest."""

    def __init__(self, layers: Sequence[int], num_experts: int, expert_bytes: int, n_slots: int, policy: str):
        self.layers, self.expert_bytes = tuple(layers), expert_bytes
        self.policy = make_policy(policy, len(layers), num_experts)
        self.memory = allocate(n_slots * expert_bytes, "the expert cache").reshape(n_slots, expert_bytes)
        self.base = self.memory.ctypes.data
        self.addresses = np.zeros((len(layers), num_experts), np.int64)  # 0: not resident
        self.stamps = np.zeros((len(layers), num_experts), np.int64)  # clock of the last use
        self.pinned = np.zeros((len(layers), num_experts), bool)
        self.free = list(range(n_slots - 1, -1, -1))
        self.in_flight = 0  # slots that reads own: neither free nor in the table
        self.withdrawn: list[int] = []  # slots without memory: neither free nor in the table

    @property
    def n_slots(self) -> int:
        """Slots that have memory, or may take it."""
        return len(self.memory) - len(self.withdrawn)

    def withdraw(self, count: int, clock: int) -> int:
        """Give up to `count` slots' memory back, free ones first, then those of least value between two passes; returns experts evicted."""
        slots = [self.free.pop(0) for _ in range(min(count, len(self.free)))]  # the first have most likely never been filled
        evicted = min(count - len(slots), int(np.count_nonzero((self.addresses != 0) & ~self.pinned)))
        if evicted:
            nobody = np.zeros(self.addresses.shape, bool)
            slots += [self.release(*victim) for victim in self.victims(evicted, len(self.layers) - 1, nobody, clock)]
        for first, stop in _runs(sorted(slots)):
            give_back(self.memory[first:stop])
        self.withdrawn += slots
        return evicted

    def restore(self, count: int) -> None:
        """Let `count` withdrawn slots take memory again."""
        self.free += [self.withdrawn.pop() for _ in range(count)]

    def mask(self, row: int, experts: Sequence[int] | np.ndarray) -> np.ndarray:
        """bool (rows, experts): these."""
        found = np.zeros(self.addresses.shape, bool)
        found[row, np.asarray(experts, np.int64)] = True
        return found

    def room(self, protected: np.ndarray) -> int:
        """Slots that are free or can be had, when the protected experts, bool (rows, experts), and the pinned ones stay."""
        stay = (protected | self.pinned) & (self.addresses != 0)
        return max(0, self.n_slots - self.in_flight - int(np.count_nonzero(stay)))

    def victims(self, count: int, row: int, protected: np.ndarray, clock: int) -> list[tuple[int, int]]:
        """The `count` unprotected resident (row, expert) of least value while a pass is at `row`; of equals the lower layer and expert.

        Pinned ones never go. There must be as many (`room`).
        """
        values = np.where((self.addresses != 0) & ~protected & ~self.pinned, self.policy.values(self.stamps, row, clock), np.inf)
        return [divmod(int(at), self.stamps.shape[1]) for at in least(values, count)]

    def release(self, row: int, expert: int) -> int:
        """Make (row, expert) absent; returns its slot."""
        slot = (int(self.addresses[row, expert]) - self.base) // self.expert_bytes
        self.addresses[row, expert] = 0
        return slot


@dataclass(slots=True, eq=False)
class _Fetch:
    """An expert on its way into a slot; `ahead` until this pass has asked for it."""

    layer: int
    expert: int
    slot: int
    reading: Reading
    ahead: bool


def floor_bytes(expert_bytes: Mapping[int, int], num_experts_per_tok: int) -> int:
    """The least budget: the experts of one token in one layer, for each size of expert there is. expert_bytes by layer."""
    return num_experts_per_tok * sum(set(expert_bytes.values()))


def check_floor(budget_bytes: int, expert_bytes: Mapping[int, int], num_experts_per_tok: int) -> None:
    """Raises MemoryBudgetError when a budget is below `floor_bytes`."""
    floor = floor_bytes(expert_bytes, num_experts_per_tok)
    if budget_bytes < floor:
        raise MemoryBudgetError(
            f"an expert cache of {budget_bytes:,} bytes cannot hold one token's {num_experts_per_tok} experts of one layer "
            f"({floor:,} bytes): give --expert-cache at least {-(-floor // 1_000_000)}MB"
        )


class ExpertCache:
    """Resident experts of one model.

    budget_bytes          upper bound of all slots together; more than all experts need is not taken
    num_experts_per_tok   experts that one token needs at once in a layer
    policy                name of an eviction policy
    trace, usage          are told of every pass; they are closed by whoever opened them
    watch                 looked at between passes and at expert faults: says when to give memory back

    What `usage` knows already is taken as the past: an eviction policy that counts uses starts from it.
    Raises MemoryBudgetError below `floor_bytes`, ConfigError for an unknown policy.
    """

    def __init__(
        self, store: ExpertStore, budget_bytes: int, num_experts_per_tok: int, *, policy: str = DEFAULT_POLICY,
        trace: TraceWriter | None = None, usage: UsageHistory | None = None, watch: MemoryWatch | None = None,
    ):  # fmt: skip
        self._store, self._policy, self._trace, self._usage, self._watch = store, policy, trace, usage, watch
        self.clock = np.zeros(1, np.int64)  # passes so far, int64 (1,): native code stamps what it uses with it
        self._read_bytes = self._evictions = self._shrinks = self._prefetched = self._prefetch_used = self._unused_bytes = 0
        self._wait_s = 0.0
        self._fetches: dict[Expert, _Fetch] = {}  # oldest first
        self._ahead: set[Expert] = set()  # what this pass has begun to read before it was asked for
        self._told: set[int] = set()  # layers of whose choice the policy was told in this pass
        self._telling = False  # whether the policy saw this pass begin; a cache may shrink in the middle of one
        check_floor(budget_bytes, store.expert_bytes, num_experts_per_tok)
        self._experts_per_tok = num_experts_per_tok
        slots = _divide(store, budget_bytes, num_experts_per_tok)
        self._classes: list[_SlotClass] = []
        self._place: dict[int, tuple[_SlotClass, int]] = {}
        for (size, layers), n_slots in zip(_classes(store), slots, strict=True):
            self._add_class(size, layers, n_slots)
        if usage is not None:
            self._remember(usage.rates())

    def _add_class(self, size: int, layers: list[int], n_slots: int) -> None:
        slot_class = _SlotClass(layers, max(self._store.num_experts[layer] for layer in layers), size, n_slots, self._policy)
        self._classes.append(slot_class)
        self._place |= {layer: (slot_class, row) for row, layer in enumerate(layers)}

    def _remember(self, rates: Mapping[int, np.ndarray]) -> None:
        for slot_class in self._classes:
            past = np.zeros(slot_class.stamps.shape)
            for row, layer in enumerate(slot_class.layers):
                past[row, : len(rates[layer])] = rates[layer]
            slot_class.policy.remember(past)

    @property
    def pinned(self) -> frozenset[Expert]:
        """The experts that never leave once they are resident."""
        return frozenset((c.layers[row], expert) for c in self._classes for row, expert in np.argwhere(c.pinned).tolist())

    def pin(self, experts: Iterable[Expert]) -> None:
        """From now on these (layer, expert), and no others, are never evicted. They come in as others do: preloaded, warmed or asked for.

        Between passes only. Raises ConfigError for an expert that the model does not have, MemoryBudgetError when the slots that are left
        would not hold the experts of one token; then nothing has changed.
        """
        pins = set(experts)
        check_pins(pins, self._store.num_experts)
        for slot_class in self._classes:
            own = sum(layer in slot_class.layers for layer, _ in pins)
            total = sum(self._store.num_experts[layer] for layer in slot_class.layers)
            if slot_class.n_slots - own < min(self._experts_per_tok, total - own):
                raise MemoryBudgetError(
                    f"{own} pinned experts leave {max(0, slot_class.n_slots - own)} of the expert cache's {slot_class.n_slots} slots, "
                    f"one token needs {self._experts_per_tok}: pin fewer, or raise --expert-cache"
                )
        for slot_class in self._classes:
            slot_class.pinned[:] = False
        for layer, expert in pins:
            slot_class, row = self._place[layer]
            slot_class.pinned[row, expert] = True

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots, without those whose memory was given back."""
        return sum(slot_class.n_slots * slot_class.expert_bytes for slot_class in self._classes)

    @property
    def withdrawn_bytes(self) -> int:
        """Bytes of slots whose memory was given back, because the process was short of it."""
        return sum(len(slot_class.withdrawn) * slot_class.expert_bytes for slot_class in self._classes)

    @property
    def idle_bytes(self) -> int:
        """Bytes of slots that no expert is in."""
        return sum(len(slot_class.free) * slot_class.expert_bytes for slot_class in self._classes)

    @property
    def holds_everything(self) -> bool:
        """Whether every expert of every layer has a slot, so that nothing is ever evicted."""
        return self.capacity_bytes == self._store.total_bytes

    @property
    def stats(self) -> ExpertStats:
        """Counters since the start, but hits and misses."""
        return ExpertStats(
            read_bytes=self._read_bytes, evictions=self._evictions, shrinks=self._shrinks, capacity_bytes=self.capacity_bytes,
            prefetched=self._prefetched, prefetch_used=self._prefetch_used, unused_bytes=self._unused_bytes, wait_s=self._wait_s,
            reading_s=self._store.reading_s,
        )  # fmt: skip

    @property
    def drive_bytes_s(self) -> float:
        """What the drive gives at best, in bytes/s; 0 while nothing was read."""
        return self._store.best_bytes_s

    def capacity(self, layer: int) -> int:
        """The most experts of `layer` that can be resident at once."""
        slot_class, _ = self._place[layer]
        return min(slot_class.n_slots, self._store.num_experts[layer])

    def table(self, layer: int) -> np.ndarray:
        """int64 (E,): address of each expert of `layer`, 0 when it is not resident. The same array for the cache's whole life."""
        slot_class, row = self._place[layer]
        return slot_class.addresses[row, : self._store.num_experts[layer]]

    def stamps(self, layer: int) -> np.ndarray:
        """int64 (E,): value of `clock` when each expert of `layer` was last used; policies read them. Always the same array."""
        slot_class, row = self._place[layer]
        return slot_class.stamps[row, : self._store.num_experts[layer]]

    def begin_pass(self, n_tok: int) -> None:
        """A forward pass over `n_tok` tokens begins: from now on uses are newer. What an interrupted pass was reading goes on."""
        self.clock += 1
        self._look_at_memory()
        for fetch in self._fetches.values():
            fetch.ahead = True  # what failed in an earlier pass must not end this one
        self._ahead.clear()
        self._told.clear()
        self._telling = not self.holds_everything
        if self._telling:
            for slot_class in self._classes:
                slot_class.policy.begin_pass(n_tok, slot_class.n_slots)

    def end_pass(self, routed: Mapping[int, np.ndarray]) -> None:
        """A forward pass has ended. routed: by layer, the experts of each token, int64 (T, K)."""
        unused = [layer for layer, expert in self._ahead if expert not in routed[layer]]
        self._prefetch_used += len(self._ahead) - len(unused)
        self._unused_bytes += sum(self._store.expert_bytes[layer] for layer in unused)
        if self._telling:
            for slot_class in self._classes:
                self._tell(slot_class, routed)
        if self._trace is not None:
            layers = sorted(routed)
            self._trace.add(len(routed[layers[0]]), [routed[layer] for layer in layers])
        if self._usage is not None:
            self._usage.note_pass(routed)

    def _tell(self, slot_class: _SlotClass, routed: Mapping[int, np.ndarray]) -> None:
        """Tell the policy what the layers chose of which it does not know yet; all at once where it knows of none."""
        counts = np.zeros(slot_class.addresses.shape, np.int64)
        for row, layer in enumerate(slot_class.layers):
            if layer not in self._told:
                np.add.at(counts[row], routed[layer].ravel(), 1)
        slot_class.policy.note(slice(None), counts)

    def demand(self, layer: int, expert_ids: Sequence[int] | np.ndarray, busy: Sequence[int] | np.ndarray) -> None:
        """Start to read as many of a layer's missing experts as fit beside the `busy` ones, which it needs and has not computed yet.

        Experts that are on their way already become urgent. `collect` makes them resident.
        """
        slot_class, row = self._place[layer]
        absent = []
        for expert in expert_ids:
            fetch = self._fetches.get((layer, int(expert)))
            if fetch is None:
                absent.append(int(expert))
            elif fetch.ahead:
                fetch.ahead = False
                fetch.reading.promote()
        protected = slot_class.mask(row, busy)
        absent = absent[: slot_class.room(protected)]
        self._start(layer, absent, self._take_slots(slot_class, len(absent), row, protected))

    def look_ahead(self, layer: int, expert_ids: Sequence[int], most: int, busy_layer: int, busy: np.ndarray) -> None:
        """Start to read experts that `layer` will probably ask for, the most probable first, when the drive has nothing urgent to do.

        most         at most so many
        busy_layer   the layer that is being computed, with its resident experts `busy` that it still needs

        Slots for one token's experts stay out of it, so that no wrong guess can block a layer.
        """
        slot_class, row = self._place[layer]
        wanted = [int(expert) for expert in expert_ids]
        protected = slot_class.mask(row, wanted)
        if busy_layer in slot_class.layers:
            protected |= slot_class.mask(slot_class.layers.index(busy_layer), busy)
        room = max(0, slot_class.room(protected) - self._experts_per_tok)
        absent = [e for e in wanted if slot_class.addresses[row, e] == 0 and (layer, e) not in self._fetches][: min(room, most)]
        self._start(layer, absent, self._take_slots(slot_class, len(absent), row - 1, protected), ahead=True)
        self._prefetched += len(absent)
        self._ahead.update((layer, expert) for expert in absent)

    def note(self, layer: int, chosen: np.ndarray) -> None:
        """Tell the policy now what a layer chose, int64 (T, K), instead of at the end of the pass."""
        if self._telling and layer not in self._told:
            slot_class, row = self._place[layer]
            slot_class.policy.note(row, np.bincount(chosen.ravel(), minlength=slot_class.addresses.shape[1]))
            self._told.add(layer)

    def collect(self, layer: int, quorum: int = 0, cancel: threading.Event | None = None) -> None:
        """Make resident what has been read, and wait until `quorum` of the experts that `layer` demanded have come, or all of them.

        Where none of them is on its way, any other is waited for, whose slot then can be had. `cancel` ends the waiting after the
        expert that is being waited for: a token's experts take seconds of a slow drive. With a quorum nothing may be computing, and
        no expert is safe that is not computed yet: memory may have to be given back. Raises ExpertReadError when one of them
        cannot be read; then that one is absent and the cache is intact.
        """
        if quorum:
            self._look_at_memory()
        started = time.perf_counter()
        came = sum(1 for fetch in self._install_done(layer) if fetch.layer == layer and not fetch.ahead)
        demanded = [fetch for fetch in self._fetches.values() if fetch.layer == layer and not fetch.ahead]
        for fetch in demanded[: max(0, quorum - came)]:
            if cancel is not None and cancel.is_set():
                break
            self._install(fetch, layer)
        if quorum and not came and not demanded:
            for fetch in list(self._fetches.values())[:1]:
                self._install(fetch, layer)
        self._wait_s += time.perf_counter() - started

    def bring_in(self, layer: int, expert_ids: Iterable[int]) -> None:
        """Make as many of these experts resident as fit, beside those of them that are."""
        table = self.table(layer)
        wanted = [int(expert) for expert in expert_ids]
        absent = [expert for expert in wanted if table[expert] == 0]
        self.demand(layer, absent, [expert for expert in wanted if table[expert] != 0])
        self.collect(layer, len(absent))

    def _look_at_memory(self) -> None:
        """Nothing may be computing: an expert whose slot is given back would become zeros under a kernel's hands."""
        change = 0 if self._watch is None else self._watch.advise(self.idle_bytes, self.withdrawn_bytes)
        if change < 0:
            self.shrink(-change)
        elif change > 0:
            self.grow(change)

    def shrink(self, n_bytes: int) -> int:
        """Give memory back, n_bytes or somewhat more, down to the floor; returns how much. Not while experts are being computed.

        Every size of expert gives its share. Slots that are being filled stay. Needs `arena.can_give_back`.
        """
        before = self.capacity_bytes
        spare = [max(0, self._n_spare(slot_class)) for slot_class in self._classes]
        total = sum(count * slot_class.expert_bytes for count, slot_class in zip(spare, self._classes, strict=True))
        for count, slot_class in zip(spare, self._classes, strict=True):
            wanted = -(-count * n_bytes // total) if n_bytes < total else count
            self._evictions += slot_class.withdraw(wanted, int(self.clock[0]))
        given = before - self.capacity_bytes
        self._shrinks += given > 0
        return given

    def _n_spare(self, slot_class: _SlotClass) -> int:
        """Slots above what one token and the pinned experts need, of those that can be had now."""
        pinned = int(np.count_nonzero(slot_class.pinned))
        above = slot_class.n_slots - pinned - min(self._experts_per_tok, slot_class.stamps.size - pinned)
        return min(above, slot_class.room(np.zeros_like(slot_class.pinned)))

    def grow(self, n_bytes: int) -> int:
        """Take back up to n_bytes of what `shrink` gave away, in whole slots; returns how much."""
        before, withdrawn = self.capacity_bytes, self.withdrawn_bytes
        for slot_class in self._classes:
            share = len(slot_class.withdrawn) * n_bytes // withdrawn if n_bytes < withdrawn else len(slot_class.withdrawn)
            slot_class.restore(share)
        return self.capacity_bytes - before

    def resident(self, layer: int) -> list[int]:
        """The experts of `layer` that are in memory."""
        return np.flatnonzero(self.table(layer)).tolist()

    def _take_slots(self, slot_class: _SlotClass, count: int, row: int, protected: np.ndarray) -> list[int]:
        """`count` slots, free ones first, then those of the unprotected experts of least value to a pass at `row`. There are as many."""
        wanted = count - len(slot_class.free)
        if wanted > 0:
            for victim in slot_class.victims(wanted, row, protected, int(self.clock[0])):
                slot_class.free.append(slot_class.release(*victim))
            self._evictions += wanted
        return [slot_class.free.pop() for _ in range(count)]

    def _start(self, layer: int, expert_ids: Sequence[int], slots: list[int], *, ahead: bool = False) -> None:
        slot_class, _ = self._place[layer]
        slots = slots[::-1]
        try:
            for expert in expert_ids:
                reading = self._store.start(layer, [expert], [slot_class.memory[slots[-1]]], urgent=not ahead)
                self._fetches[layer, expert] = _Fetch(layer, expert, slots.pop(), reading, ahead)
                slot_class.in_flight += 1
        finally:
            slot_class.free.extend(slots)  # none, but where a read could not begin

    def _install_done(self, layer: int) -> list[_Fetch]:
        """Make resident what has been read, and return it."""
        done = [fetch for fetch in self._fetches.values() if fetch.reading.is_done()]
        for fetch in done:
            self._install(fetch, layer)
        return done

    def _install(self, fetch: _Fetch, layer: int) -> None:
        """Wait for the read, then enter the expert into the table, stamped with this pass. Raises what went wrong with one of `layer`."""
        slot_class, row = self._place[fetch.layer]
        try:
            fetch.reading.wait()
        except ExpertReadError:
            self._land(slot_class, fetch)
            slot_class.free.append(fetch.slot)  # a half-filled slot must never be found in the table
            if fetch.layer == layer and not fetch.ahead:
                raise
            return  # whoever asks for the expert reads it again, and is told
        self._land(slot_class, fetch)
        slot_class.addresses[row, fetch.expert] = slot_class.base + fetch.slot * slot_class.expert_bytes
        slot_class.stamps[row, fetch.expert] = self.clock[0]
        self._read_bytes += slot_class.expert_bytes

    def _land(self, slot_class: _SlotClass, fetch: _Fetch) -> None:
        """The read owns its slot no more. Not before it has ended, whatever interrupts the waiting."""
        del self._fetches[fetch.layer, fetch.expert]
        slot_class.in_flight -= 1

    def fill(self, wanted: Iterator[Expert], count: int) -> int:
        """Read the next `count` of `wanted` that are absent and have a free slot; nothing is evicted. Counts bytes, but no misses.

        Between passes only. Returns how many were read: fewer than `count` when no more will fit. Raises ExpertReadError; then some of them
        are absent.
        """
        self._look_at_memory()
        begun = 0
        with ExitStack() as reading:  # each is waited for, whatever happens to the others
            for layer, expert in wanted:
                slot_class, row = self._place[layer]
                if slot_class.free and slot_class.addresses[row, expert] == 0 and (layer, expert) not in self._fetches:
                    self._start(layer, [expert], [slot_class.free.pop()])
                    reading.callback(self._install, self._fetches[layer, expert], layer)
                    begun += 1
                if begun == count or not any(slot_class.free for slot_class in self._classes):
                    break
        return begun

    def preload(self, on_progress: Progress | None = None, first: Iterable[Expert] = ()) -> None:
        """Fill the free slots; nothing is evicted. Counts bytes, but no misses.

        on_progress   called as on_progress("experts", bytes done, bytes in all)
        first         who comes in before all others; of these expert 0 of every layer, then expert 1, and so on
        """
        todo = self._preload_plan(first)
        done, total = 0, sum(self._store.expert_bytes[layer] * len(experts) for layer, experts in todo.items())
        for layer, experts in todo.items():
            slot_class, _ = self._place[layer]
            for start in range(0, len(experts), _PRELOAD_READS):
                batch = experts[start : start + _PRELOAD_READS]
                self._start(layer, batch, [slot_class.free.pop() for _ in batch])
                self.collect(layer, len(batch))
                done += len(batch) * slot_class.expert_bytes
                if on_progress is not None:
                    on_progress("experts", done, total)

    def _preload_plan(self, first: Iterable[Expert]) -> dict[int, list[int]]:
        """Which absent experts of each layer go into the free slots: `first`, then equally many of each layer, as near as may be."""
        plan: dict[int, list[int]] = {layer: [] for layer in self._place}
        left = {id(slot_class): len(slot_class.free) for slot_class in self._classes}
        for layer, expert in dict.fromkeys(chain(first, in_turn(self._store.num_experts))):
            slot_class, row = self._place[layer]
            if left[id(slot_class)] and slot_class.addresses[row, expert] == 0:
                left[id(slot_class)] -= 1
                plan[layer].append(expert)
        return {layer: sorted(experts) for layer, experts in plan.items()}  # the order on the drive: all of them are waited for


def in_turn(num_experts: Mapping[int, int]) -> Iterator[Expert]:
    """Expert 0 of every layer, then expert 1, and so on. num_experts by layer."""
    for expert in range(max(num_experts.values(), default=0)):
        yield from ((layer, expert) for layer, count in num_experts.items() if expert < count)


def check_pins(pins: Iterable[Expert], num_experts: Mapping[int, int]) -> None:
    """Raises ConfigError for a (layer, expert) that is not among num_experts, by layer."""
    for layer, expert in pins:
        if layer not in num_experts:
            raise ConfigError(f"pinned layer {layer}: this model has experts in layers {min(num_experts)} to {max(num_experts)} only")
        if not 0 <= expert < num_experts[layer]:
            raise ConfigError(f"pinned expert {expert} of layer {layer}: expected 0 to {num_experts[layer] - 1}")


def would_hold(sizes: "Sizes", budget_bytes: int, num_experts_per_tok: int, first: Iterable[Expert]) -> set[Expert]:
    """The experts that a cache of `budget_bytes` holds when it is preloaded with `first`. Raises MemoryBudgetError below `floor_bytes`."""
    check_floor(budget_bytes, sizes.expert_bytes, num_experts_per_tok)
    slots = _divide(sizes, budget_bytes, num_experts_per_tok)
    left = {size: n_slots for (size, _), n_slots in zip(_classes(sizes), slots, strict=True)}
    held: set[Expert] = set()
    for layer, expert in dict.fromkeys(chain(first, in_turn(sizes.num_experts))):
        size = sizes.expert_bytes[layer]
        if left[size]:
            left[size] -= 1
            held.add((layer, expert))
    return held


class Sizes(Protocol):
    """Bytes of an expert and number of experts, by layer: an ExpertStore, or what stands for one."""

    expert_bytes: dict[int, int]
    num_experts: dict[int, int]


def _classes(store: Sizes) -> list[tuple[int, list[int]]]:
    """(expert_bytes, layers with that size), smallest first."""
    sizes: dict[int, list[int]] = {}
    for layer, size in store.expert_bytes.items():
        sizes.setdefault(size, []).append(layer)
    return sorted(sizes.items())


def _divide(store: Sizes, budget_bytes: int, num_experts_per_tok: int) -> list[int]:
    """Slots of each class: in proportion to the bytes of its experts, never under a token's need, and no byte more than the budget.

    Every layer is visited once per token, so a class's share of the reads is its share of the experts.
    """
    classes = _classes(store)
    experts = [sum(store.num_experts[layer] for layer in layers) for _, layers in classes]
    sizes = [size for size, _ in classes]
    total = sum(size * count for size, count in zip(sizes, experts, strict=True))
    spare = min(budget_bytes, total)
    slots = [min(num_experts_per_tok, count) for count in experts]
    spare -= sum(size * n for size, n in zip(sizes, slots, strict=True))
    rest = sum(size * (count - n) for size, count, n in zip(sizes, experts, slots, strict=True))
    shares = [spare * (count - n) // rest if rest else 0 for count, n in zip(experts, slots, strict=True)]
    slots = [n + share for n, share in zip(slots, shares, strict=True)]
    left = min(budget_bytes, total) - sum(size * n for size, n in zip(sizes, slots, strict=True))
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # what rounding left over
        more = min(left // sizes[i], experts[i] - slots[i])
        slots[i] += more
        left -= more * sizes[i]
    return slots


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as ranges (first, stop) without gaps."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], numbers[i - 1] + 1
            start = i
