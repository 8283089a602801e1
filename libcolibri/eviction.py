"""Which resident expert goes when another needs its slot.

In:  when and how often experts were used, layer by layer (rows); where the pass is
Out: a value for every expert; the resident one with the smallest value goes first

The same policies decide in the expert cache and in the simulator (cache_simulator.py), so a simulated hit rate is the cache's.
"""

from abc import ABC, abstractmethod

import numpy as np

from .errors import ConfigError

DEFAULT_POLICY = "adaptive_frequency"
HALF_LIFE_TOK = 8.0  # of decayed_frequency: after so many tokens a use counts half
# adaptive_frequency chooses among these: the first is close to the order of last use, the last to plain counts.
HALF_LIVES_TOK = (1.0, 8.0, 64.0, 512.0)
SCORE_HALF_LIFE_TOK = 64.0  # what a half-life would have hit so many tokens ago counts half in that choice


class Policy(ABC):
    """Values of the experts of all layers with slots of one size.

    rows      number of such layers, in the order in which a pass visits them
    experts   most experts of one of them
    """

    name: str

    def __init__(self, rows: int, experts: int):
        self.shape = rows, experts

    def begin_pass(self, n_tok: int, n_slots: int) -> None:  # noqa: B027  # most policies need the stamps alone
        """A pass over `n_tok` tokens begins, of a cache with room for n_slots of these experts."""

    def note(self, rows: int | slice, counts: np.ndarray) -> None:  # noqa: B027
        """Learn what layers of this pass chose. counts: tokens of each expert, int64 (experts,), or (rows, experts) for a slice."""

    def remember(self, rates: np.ndarray) -> None:  # noqa: B027  # most policies look at what this run has used
        """Start from a past: float64 (rows, experts), the share of passes that used each expert. Before the first pass."""

    @abstractmethod
    def values(self, stamps: np.ndarray, row: int, clock: int) -> np.ndarray:
        """float64 (rows, experts): what keeping each expert is worth while pass `clock` is at `row`.

        stamps   int64 (rows, experts): number of the last pass that used an expert, 0 for none
        """


class LeastRecent(Policy):
    """The expert whose last use is longest ago goes; of those used in one pass the lowest layer's, which the pass visited first."""

    name = "lru"

    def values(self, stamps: np.ndarray, row: int, clock: int) -> np.ndarray:
        return stamps.astype(np.float64)


class LeastStale(Policy):
    """Like LeastRecent, but in visits of the expert's own layer, and of equals the one goes whose layer comes again last.

    An expert of a layer further up that the pass before used is not older than one of a layer below that this pass used: both were
    used at their layer's last visit, and the one further up will be asked for sooner.
    """

    name = "least_stale"

    def values(self, stamps: np.ndarray, row: int, clock: int) -> np.ndarray:
        rows = self.shape[0]
        at = np.arange(rows)
        last_visit = np.where(at <= row, clock, clock - 1)[:, None]
        until_next = ((at - row - 1) % rows + 1)[:, None]  # visits of layers until this one comes, 1 to rows
        return (stamps - last_visit) * float(rows + 1) - until_next


class DecayedFrequency(Policy):
    """The expert used least often goes; a use half_life_tok tokens ago counts half.

    Kept is heat = log2(score) + time of last use / half_life_tok, which orders experts at any later time as their decayed scores do.
    In a pass over many tokens, experts of layers still to come that it will probably use stay before all others.
    """

    name = "decayed_frequency"

    def __init__(self, rows: int, experts: int, half_life_tok: float = HALF_LIFE_TOK):
        super().__init__(rows, experts)
        self.half_life_tok = half_life_tok
        self.heat = np.full((rows, experts), -np.inf)
        self._n_tok = self._time_tok = 0

    def remember(self, rates: np.ndarray) -> None:
        # The score that an expert settles at when every token uses it with this probability.
        with np.errstate(divide="ignore"):  # never used: -inf
            self.heat = np.log2(rates / self._use_weight)

    @property
    def _now(self) -> float:
        return self._time_tok / self.half_life_tok

    def begin_pass(self, n_tok: int, n_slots: int) -> None:
        self._n_tok = n_tok
        self._time_tok += n_tok

    def note(self, rows: int | slice, counts: np.ndarray) -> None:
        heat, used = self.heat[rows], counts > 0
        # Uses are spread evenly over the tokens of a pass.
        weight = (1 - 0.5 ** (self._n_tok / self.half_life_tok)) / self._use_weight / self._n_tok
        heat[used] = np.log2(np.exp2(heat[used] - self._now) + counts[used] * weight) + self._now

    @property
    def _use_weight(self) -> float:
        """The share of a single use in the score of an expert that every token uses."""
        return 1 - 0.5 ** (1 / self.half_life_tok)

    def values(self, stamps: np.ndarray, row: int, clock: int) -> np.ndarray:
        if self._n_tok <= 1:
            return self.heat
        before = (self._time_tok - self._n_tok) / self.half_life_tok
        expected_tok = np.exp2(self.heat[row + 1 :] - before) * self._use_weight * self._n_tok
        values = self.heat.copy()
        values[row + 1 :][expected_tok >= 1.0] += 64.0  # above every other: scores are 2**-10 to 2**10 here
        return values


class AdaptiveFrequency(Policy):
    """DecayedFrequency with that half-life which would have had most hits lately.

    Before every token, each half-life names the experts that a cache of this size would hold by its heat; the hits of these count.
    """

    name = "adaptive_frequency"

    def __init__(self, rows: int, experts: int):
        super().__init__(rows, experts)
        self.members = [DecayedFrequency(rows, experts, half_life) for half_life in HALF_LIVES_TOK]
        self.scores = np.zeros(len(self.members))
        self._held: list[np.ndarray] = []

    @property
    def chosen(self) -> DecayedFrequency:
        """The member that decides now; the longest half-life at the beginning."""
        return self.members[len(self.scores) - 1 - int(np.argmax(self.scores[::-1]))]

    def remember(self, rates: np.ndarray) -> None:
        for member in self.members:
            member.remember(rates)

    def begin_pass(self, n_tok: int, n_slots: int) -> None:
        # A pass over a prompt uses nearly every expert and tells nothing about the half-life.
        self._held = [_hottest(member.heat, n_slots) for member in self.members] if n_tok == 1 else []
        self.scores *= 0.5 ** (1 / SCORE_HALF_LIFE_TOK)
        for member in self.members:
            member.begin_pass(n_tok, n_slots)

    def note(self, rows: int | slice, counts: np.ndarray) -> None:
        for member in self.members:
            member.note(rows, counts)
        for i, held in enumerate(self._held):
            self.scores[i] += np.count_nonzero(held[rows] & (counts > 0))

    def values(self, stamps: np.ndarray, row: int, clock: int) -> np.ndarray:
        return self.chosen.values(stamps, row, clock)


def _hottest(heat: np.ndarray, count: int) -> np.ndarray:
    """Where the `count` greatest values are, equals of the least of them included; never where nothing was used."""
    flat = heat.ravel()
    limit = np.partition(flat, -count)[-count] if count < len(flat) else -np.inf
    return (heat >= limit) & (heat > -np.inf)


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (AdaptiveFrequency, LeastRecent, LeastStale, DecayedFrequency)}


def make_policy(name: str, rows: int, experts: int) -> Policy:
    """The policy called `name`. Raises ConfigError for an unknown one."""
    if name not in POLICIES:
        raise ConfigError(f"expert cache policy {name!r} is unknown, only {', '.join(POLICIES)}")
    return POLICIES[name](rows, experts)


def least(values: np.ndarray, count: int) -> np.ndarray:
    """Flat indices of the `count` smallest values; of equal ones the first. A fifth of the time of sorting them all."""
    flat = values.ravel()
    limit = np.partition(flat, count - 1)[count - 1]
    below = np.flatnonzero(flat < limit)
    return np.concatenate([below, np.flatnonzero(flat == limit)[: count - len(below)]])
