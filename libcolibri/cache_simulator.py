"""What an expert cache of some size would have done with a recorded trace, under each policy and under Belady's optimum.

In:  a Trace, a policy's name, a budget in bytes
Out: hits, misses and bytes read

A pass visits the layers in order. At a layer the resident ones of its experts are computed, and meanwhile as many of the missing ones are
read as fit beside them; then those are computed, and so on: as the decoder's waves do (kernels/moe.py). Belady's optimum asks for experts
one after the other, a layer's in the order of their numbers, and evicts what is used again last, or never. For that order, and experts of
one size, nobody can read fewer (L. A. Belady, IBM Systems Journal 5, 1966); using what is there first, as the cache does, can save a read
now and then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .eviction import Policy, least, make_policy
from .expert_trace import Trace

OPTIMUM = "belady"
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One policy at one budget."""

    policy: str
    budget_bytes: int
    hits: int
    misses: int
    read_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that were resident, 0 to 1."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0


def simulate(trace: Trace, policy: str, budget_bytes: int, *, warm_up_passes: int = 0) -> SimulatedRun:
    """Replay `trace` on an empty cache.

    policy            a name of eviction.POLICIES, or "belady"
    warm_up_passes    passes at the beginning that fill the cache but are not counted

    Layers whose experts have the same size share slots, as in the cache; the budget is divided in proportion to their bytes.
    """
    hits = misses = read_bytes = 0
    for size in sorted(set(trace.expert_bytes)):
        rows = [i for i, found in enumerate(trace.expert_bytes) if found == size]
        experts = sum(trace.num_experts[i] for i in rows)
        n_slots = min(experts, int(budget_bytes * (size * experts / trace.total_bytes)) // size)
        simulator = _Simulator(trace, rows, n_slots, policy)
        hit, missed = simulator.run(warm_up_passes)
        hits, misses, read_bytes = hits + hit, misses + missed, read_bytes + missed * size
    return SimulatedRun(policy, budget_bytes, hits, misses, read_bytes)


class _Simulator:
    """The layers of one size: who is resident, and who goes."""

    def __init__(self, trace: Trace, rows: list[int], n_slots: int, policy: str):
        self.passes = [[done.experts[i] for i in rows] for done in trace.passes]
        self.counts = [[done.counts[i] for i in rows] for done in trace.passes]
        self.n_tok = [done.n_tok for done in trace.passes]
        shape = len(rows), max(trace.num_experts[i] for i in rows)
        self.n_slots, self.resident = n_slots, np.zeros(shape, bool)
        self.stamps = np.zeros(shape, np.int64)
        self.policy: Policy | None = None if policy == OPTIMUM else make_policy(policy, *shape)
        self.next_use = np.full(shape, _NEVER)
        self.later = _later_uses(self.passes, shape) if policy == OPTIMUM else None

    def run(self, warm_up_passes: int) -> tuple[int, int]:
        hits = misses = 0
        for clock, layers in enumerate(self.passes, 1):
            if self.policy is not None:
                self.policy.begin_pass(self.n_tok[clock - 1], self.n_slots)
            told: set[int] = set()
            for row, used in enumerate(layers):
                hit, missed = self._visit(row, np.array(used, np.int64), clock, told)
                if clock > warm_up_passes:
                    hits, misses = hits + hit, misses + missed
            for row in set(range(len(layers))) - told:
                self._note(row, clock)
        return hits, misses

    def _note(self, row: int, clock: int) -> None:
        counts = np.zeros(self.resident.shape[1], np.int64)
        counts[list(self.passes[clock - 1][row])] = self.counts[clock - 1][row]
        if self.policy is not None:
            self.policy.note(row, counts)

    def _visit(self, row: int, used: np.ndarray, clock: int, told: set[int]) -> tuple[int, int]:
        """(hits, misses) of one layer. In a pass over several tokens, the policy is told of a layer's choice when something is missing."""
        if self.later is not None:
            visits = zip(used, self.later[clock - 1][row], strict=True)
            misses = sum(self._use_once(row, int(expert), next_use, clock) for expert, next_use in visits)
            return len(used) - misses, misses
        here = self.resident[row, used]
        busy, missing = used[here], used[~here]
        if len(missing) and self.n_tok[clock - 1] > 1:
            self._note(row, clock)
            told.add(row)
        while len(missing):
            self.stamps[row, busy] = clock
            batch = missing[: max(0, self.n_slots - len(busy)) or (0 if len(busy) else 1)]
            self._make_room(row, batch, clock, busy)
            self.resident[row, batch] = self.n_slots > 0
            self.stamps[row, batch] = clock
            busy, missing = batch, missing[len(batch) :]
        self.stamps[row, busy] = clock
        return int(here.sum()), int((~here).sum())

    def _use_once(self, row: int, expert: int, next_use: int, clock: int) -> int:
        """Whether the optimum had to read the expert, 0 or 1."""
        missed = not self.resident[row, expert]
        if missed:
            self._make_room(row, np.array([expert]), clock, ())
            self.resident[row, expert] = self.n_slots > 0
        self.next_use[row, expert] = next_use
        return int(missed)

    def _make_room(self, row: int, batch: np.ndarray, clock: int, busy: Sequence[int] | np.ndarray) -> None:
        surplus = int(self.resident.sum()) + len(batch) - self.n_slots
        if surplus <= 0:
            return
        values = -self.next_use.astype(np.float64) if self.policy is None else self.policy.values(self.stamps, row, clock)
        leaving = self.resident.copy()
        leaving[row, busy] = False
        self.resident[np.unravel_index(least(np.where(leaving, values, np.inf), surplus), self.resident.shape)] = False


def _later_uses(passes: list[list[tuple[int, ...]]], shape: tuple[int, int]) -> list[list[np.ndarray]]:
    """For each pass and row, when each of its experts, in the order of their numbers, is used again: place among all uses, or never."""
    upcoming = np.full(shape, _NEVER)
    found: list[list[np.ndarray]] = [[] for _ in passes]
    for clock in range(len(passes) - 1, -1, -1):
        for row in range(shape[0] - 1, -1, -1):
            used = np.array(passes[clock][row], np.int64)
            found[clock].insert(0, upcoming[row, used].copy())
            upcoming[row, used] = (clock * shape[0] + row) * shape[1] + np.arange(len(used))
    return found
