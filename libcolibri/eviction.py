"""Which resident expert goes when another needs its slot.

In:  when and how often experts were used, layer by layer (rows); where the pass is
Out: a value for every expert; the resident one with the smallest value goes first

The same policies decide in the expert cache and in the simulator (cache_simulator.py), so a simulated hit rate is the cache's.
"""

from abc import ABC, abstractmethod

import numpy as np

from .errors import ConfigError

DEFAULT_POLICY = "decayed_frequency"
# After so many passes a use counts half. On simulated runs with favourite experts, with changing topics, and with both, 8 is never more
# than 4 points of hit rate below the best half-life; 256 loses up to 17 where topics change.
HALF_LIFE_PASSES = 8.0


class Policy(ABC):
    """Values of the experts of all layers with slots of one size.

    rows      number of such layers, in the order in which a pass visits them
    experts   most experts of one of them
    """

    name: str

    def __init__(self, rows: int, experts: int):
        self.shape = rows, experts

    def note_pass(self, used: np.ndarray, clock: int) -> None:  # noqa: B027  # most policies need the stamps alone
        """Learn which experts a pass used: bool (rows, experts). `clock` is the number of the pass, from 1 up."""

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
    """The expert used least often goes; a use half_life passes ago counts half.

    Kept is heat = log2(score) + time of last use / half_life, which orders experts at any later time as their decayed scores do.
    """

    name = "decayed_frequency"

    def __init__(self, rows: int, experts: int, half_life: float = HALF_LIFE_PASSES):
        super().__init__(rows, experts)
        self.half_life = half_life
        self.heat = np.full((rows, experts), -np.inf)

    def remember(self, rates: np.ndarray) -> None:
        # The score that an expert settles at when every pass uses it with this probability.
        with np.errstate(divide="ignore"):  # never used: -inf
            self.heat = np.log2(rates / (1.0 - np.exp2(-1.0 / self.half_life)))

    def note_pass(self, used: np.ndarray, clock: int) -> None:
        now = clock / self.half_life
        self.heat[used] = np.log2(np.exp2(self.heat[used] - now) + 1.0) + now

    def values(self, stamps: np.ndarray, row: int, clock: int) -> np.ndarray:
        return self.heat


POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (LeastRecent, LeastStale, DecayedFrequency)}


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
