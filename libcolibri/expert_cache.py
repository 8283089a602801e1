"""The experts that are in memory: a budget in bytes over all layers; a policy (eviction.py) says who goes first.

In:  an `ExpertStore`, a budget
Out: per layer, a table of addresses that native code reads and stamps of last use that it writes; `bring_in` answers an expert fault

Counting: `ensure` and `touch` count hits and misses; a decoder that looks the table up natively keeps those two counts itself.

Sharing: the engine holds one lock during every forward pass, so the cache, its tables and the addresses in them belong to one pass
at a time, whatever number of sessions and threads there are. `stats` may be read at any moment.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .arena import allocate
from .errors import MemoryBudgetError
from .eviction import DEFAULT_POLICY, least, make_policy
from .expert_store import ExpertStore
from .expert_trace import TraceWriter
from .stats import ExpertStats

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
        self.free = list(range(n_slots - 1, -1, -1))

    @property
    def n_slots(self) -> int:
        return len(self.memory)

    def victims(self, count: int, row: int, protected: np.ndarray, clock: int) -> list[tuple[int, int]]:
        """The `count` unprotected resident (row, expert) of least value while a pass is at `row`; of equals the lower layer and expert.

        There must be as many.
        """
        values = np.where((self.addresses != 0) & ~protected, self.policy.values(self.stamps, row, clock), np.inf)
        return [divmod(int(at), self.stamps.shape[1]) for at in least(values, count)]

    def note_pass(self, routed: Mapping[int, np.ndarray], clock: int) -> None:
        """Tell the policy which experts of these layers a pass used."""
        used = np.zeros(self.stamps.shape, bool)
        for row, layer in enumerate(self.layers):
            if layer in routed:
                used[row, routed[layer].reshape(-1)] = True
        self.policy.note_pass(used, clock)

    def release(self, row: int, expert: int) -> int:
        """Make (row, expert) absent; returns its slot."""
        slot = (int(self.addresses[row, expert]) - self.base) // self.expert_bytes
        self.addresses[row, expert] = 0
        return slot


@dataclass(frozen=True, slots=True)
class _Reading:
    """Experts of a layer on their way into slots; `wait` ends it."""

    layer: int
    expert_ids: list[int]
    slots: list[int]
    wait: Callable[[], None]


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
    trace                 every pass is written to it; it is closed by whoever opened it

    Raises MemoryBudgetError below `floor_bytes`, ConfigError for an unknown policy.
    """

    def __init__(
        self, store: ExpertStore, budget_bytes: int, num_experts_per_tok: int, *, policy: str = DEFAULT_POLICY,
        trace: TraceWriter | None = None,
    ):  # fmt: skip
        self._store, self._policy, self._trace = store, policy, trace
        self.clock = np.zeros(1, np.int64)  # passes so far, int64 (1,): native code stamps what it uses with it
        self._hits = self._misses = self._read_bytes = self._evictions = 0
        self._reading: _Reading | None = None
        check_floor(budget_bytes, store.expert_bytes, num_experts_per_tok)
        slots = _divide(store, budget_bytes, num_experts_per_tok)
        self._classes: list[_SlotClass] = []
        self._place: dict[int, tuple[_SlotClass, int]] = {}
        for (size, layers), n_slots in zip(_classes(store), slots, strict=True):
            self._add_class(size, layers, n_slots)

    def _add_class(self, size: int, layers: list[int], n_slots: int) -> None:
        slot_class = _SlotClass(layers, max(self._store.num_experts[layer] for layer in layers), size, n_slots, self._policy)
        self._classes.append(slot_class)
        self._place |= {layer: (slot_class, row) for row, layer in enumerate(layers)}

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot_class.memory.nbytes for slot_class in self._classes)

    @property
    def holds_everything(self) -> bool:
        """Whether every expert of every layer has a slot, so that nothing is ever evicted."""
        return self.capacity_bytes == self._store.total_bytes

    @property
    def stats(self) -> ExpertStats:
        """Counters since the start."""
        return ExpertStats(self._hits, self._misses, self._read_bytes, self._evictions)

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

    def begin(self, layer: int, expert_ids: Sequence[int] | np.ndarray, busy: Sequence[int] | np.ndarray) -> None:
        """Start to read as many of the missing experts as fit beside the `busy` ones of the layer, which are being computed.

        They become resident at the next `bring_in` of this layer, which must follow.
        """
        assert self._reading is None, "one layer is computed at a time"
        slot_class, row = self._place[layer]
        room = slot_class.n_slots - len(busy)
        wanted = [int(expert) for expert in expert_ids[:room]]
        if wanted:
            slots = self._take_slots(slot_class, row, {int(expert) for expert in busy}, len(wanted))
            reading = self._store.start(layer, wanted, [slot_class.memory[slot] for slot in slots])
            self._reading = _Reading(layer, wanted, slots, reading.wait)

    def bring_in(self, layer: int, expert_ids: Sequence[int] | np.ndarray) -> None:
        """Answer an expert fault: make as many of the missing experts resident as fit, at least one; any other may be evicted.

        Where reads have begun, it is those experts, and nothing more. The decoder computes them and faults again for the rest, so the
        smallest cache serves the longest prompt. Raises ExpertReadError; then the missing ones are absent and the cache is intact.
        """
        reading, self._reading = self._reading, None
        if reading is None:
            self.ensure(layer, expert_ids[: self.capacity(layer)])
            return
        assert reading.layer == layer, "a layer whose reads have begun is brought in before another"
        self._install(reading)
        self._misses += len(reading.expert_ids)

    def begin_pass(self) -> None:
        """A forward pass begins: from now on uses are newer. What an interrupted one was reading is waited for."""
        self.clock += 1
        if self._reading is not None:
            reading, self._reading = self._reading, None
            self._install(reading)

    def end_pass(self, routed: Mapping[int, np.ndarray]) -> None:
        """A forward pass has ended. routed: by layer, the experts of each token, int64 (T, K)."""
        for slot_class in self._classes:
            slot_class.note_pass(routed, int(self.clock[0]))
        if self._trace is not None:
            layers = sorted(routed)
            self._trace.add(len(routed[layers[0]]), [routed[layer] for layer in layers])

    def resident(self, layer: int) -> list[int]:
        """The experts of `layer` that are in memory."""
        return np.flatnonzero(self.table(layer)).tolist()

    def touch(self, layer: int, expert_ids: Sequence[int] | np.ndarray) -> None:
        """Note that resident experts were used: counts a hit each and stamps them with this pass."""
        slot_class, row = self._place[layer]
        slot_class.stamps[row, np.asarray(expert_ids, np.int64)] = self.clock[0]
        self._hits += len(expert_ids)

    def ensure(self, layer: int, expert_ids: Iterable[int], protect: Iterable[int] = ()) -> None:
        """Make experts of `layer` resident, reading those that are not, all in parallel.

        protect   experts of the same layer that must stay as well, because the pass will still use them

        Resident ones among expert_ids count as hits, the others as misses. Experts of expert_ids and of protect are never evicted here.
        Raises MemoryBudgetError when all of them together exceed `capacity(layer)`, ExpertReadError when reading fails; then the
        missing ones are absent and the cache is otherwise intact.
        """
        slot_class, row = self._place[layer]
        table = self.table(layer)
        wanted = sorted({int(expert) for expert in expert_ids})
        missing = [expert for expert in wanted if table[expert] == 0]
        self.touch(layer, [expert for expert in wanted if table[expert] != 0])
        if missing:
            kept = {*wanted, *(int(expert) for expert in protect if table[int(expert)] != 0)}
            if len(kept) > self.capacity(layer):
                raise MemoryBudgetError(
                    f"layer {layer}: {len(kept)} experts are needed at once, the expert cache holds {self.capacity(layer)}: "
                    "raise --expert-cache"
                )
            self._load(layer, missing, self._take_slots(slot_class, row, kept, len(missing)))
            self._misses += len(missing)

    def _take_slots(self, slot_class: _SlotClass, row: int, kept: set[int], count: int) -> list[int]:
        """`count` slots, free ones first, then those of the experts of least value; `capacity` was checked, so there are as many."""
        protected = np.zeros(slot_class.addresses.shape, bool)
        protected[row, list(kept)] = True
        wanted = count - len(slot_class.free)
        if wanted > 0:
            for victim in slot_class.victims(wanted, row, protected, int(self.clock[0])):
                slot_class.free.append(slot_class.release(*victim))
            self._evictions += wanted
        return [slot_class.free.pop() for _ in range(count)]

    def _load(self, layer: int, expert_ids: list[int], slots: list[int]) -> None:
        memory = self._place[layer][0].memory
        self._install(_Reading(layer, expert_ids, slots, self._store.start(layer, expert_ids, [memory[slot] for slot in slots]).wait))

    def _install(self, reading: "_Reading") -> None:
        """Wait for the reads, then enter the experts into the table, stamped with this pass."""
        slot_class, row = self._place[reading.layer]
        try:
            reading.wait()
        except BaseException:
            # Half-filled slots must never be found in the table.
            slot_class.free.extend(reversed(reading.slots))
            raise
        slot_class.addresses[row, reading.expert_ids] = [slot_class.base + slot * slot_class.expert_bytes for slot in reading.slots]
        slot_class.stamps[row, reading.expert_ids] = self.clock[0]
        self._read_bytes += len(reading.expert_ids) * slot_class.expert_bytes

    def preload(self, on_progress: Progress | None = None) -> None:
        """Fill the free slots, expert 0 of every layer, then expert 1, and so on; nothing is evicted. Counts bytes, but no misses.

        on_progress   called as on_progress("experts", bytes done, bytes in all)
        """
        todo = self._preload_plan()
        done, total = 0, sum(self._store.expert_bytes[layer] * len(experts) for layer, experts in todo.items())
        for layer, experts in todo.items():
            slot_class, _ = self._place[layer]
            for start in range(0, len(experts), _PRELOAD_READS):
                batch = experts[start : start + _PRELOAD_READS]
                self._load(layer, batch, [slot_class.free.pop() for _ in batch])
                done += len(batch) * slot_class.expert_bytes
                if on_progress is not None:
                    on_progress("experts", done, total)

    def _preload_plan(self) -> dict[int, list[int]]:
        """Which absent experts of each layer go into the free slots: equally many of each layer, as near as may be."""
        plan: dict[int, list[int]] = {layer: [] for layer in self._place}
        for slot_class in self._classes:
            pairs = ((expert, row) for expert in range(slot_class.addresses.shape[1]) for row in range(len(slot_class.layers)))
            absent = [
                (slot_class.layers[row], expert)
                for expert, row in pairs
                if expert < self._store.num_experts[slot_class.layers[row]] and slot_class.addresses[row, expert] == 0
            ]
            for layer, expert in absent[: len(slot_class.free)]:
                plan[layer].append(expert)
        return plan


def _classes(store: ExpertStore) -> list[tuple[int, list[int]]]:
    """(expert_bytes, layers with that size), smallest first."""
    sizes: dict[int, list[int]] = {}
    for layer, size in store.expert_bytes.items():
        sizes.setdefault(size, []).append(layer)
    return sorted(sizes.items())


def _divide(store: ExpertStore, budget_bytes: int, num_experts_per_tok: int) -> list[int]:
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
