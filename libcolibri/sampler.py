"""Choice of the next token.

In: logits (V,) float32 and the ids so far. Out: one id.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import ColibriError, ConfigError

# Width and number of the bins in which the nucleus is searched: 1/32 in units of logit / temperature, the last bin takes the rest.
_BINS_PER_UNIT, _BINS = 32, 1024
_NEAR = np.float32(8.0)
_BLOCK = 512
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; raises ConfigError for a value out of range.

    temperature : 0 (or less than 1e-5) takes the most probable token (greedy), 1 samples what the model says
    top_k : only the k most probable; 0 all
    top_p : only the fewest most probable whose probabilities reach p; 1 all
    min_p : only those with at least min_p times the probability of the best; 0 all
    repetition_penalty : logits of ids already there are divided (positive) or multiplied (negative) by it; 1 none
    seed : the same seed, prompt and model give the same answer; None: different each time
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, above=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        if not _is_int(self.top_k) or self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k!r}, expected a whole number of at least 0 (0 = all tokens)")
        if self.seed is not None and (not _is_int(self.seed) or self.seed < 0):
            raise ConfigError(f"seed is {self.seed!r}, expected a whole number of at least 0, or None")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    """Raise ConfigError unless value is a number in [low, high], or in (low, high] when `above`."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    # Comparisons with NaN are false, so NaN is refused too.
    if not number or not (low <= value <= high) or (above and value == low):  # type: ignore[operator]
        bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise ConfigError(f"{name} is {value!r}, expected a number {bounds}")


class Sampler:
    """Picks tokens for one session; its random numbers are its own.

    The order is Hugging Face's: repetition penalty, temperature, top_k, top_p, min_p; each sees the renormalised
    distribution the one before left. Equal logits are ordered by id, so results do not depend on sorting details.
    """

    def __init__(self, params: SamplingParams | None = None):
        self.params = params or SamplingParams()
        self._rng = np.random.default_rng(self.params.seed)

    def pick(self, logits: np.ndarray, history: Sequence[int] = ()) -> int:
        """One token id.

        logits : (V,) float32, -inf for a token that must not come; unchanged
        history : ids of prompt and answer so far, for the repetition penalty

        Raises ColibriError for logits with NaN or +inf, or without any finite value.
        """
        if self.params.repetition_penalty != 1.0 and len(history):
            logits = self._penalized(logits, history)
        best = int(logits.argmax())  # NaN counts as the largest, so the best shows it
        if not np.isfinite(logits[best]):
            raise ColibriError(
                f"the model's output is not usable: logit {best} is {logits[best]}; the weights are damaged or the computation overflowed"
            )
        if self.params.temperature < _GREEDY_BELOW or self.params.top_k == 1:
            return best
        ids, weights = self._candidates(logits, logits[best])
        return int(ids[self._draw(weights)])

    def _draw(self, weights: np.ndarray) -> int:
        """A place, with probabilities in proportion to the weights; never one of weight 0.

        First a block, then a place in it: a float64 running sum over a whole vocabulary takes 2 ms.
        """
        starts = np.arange(0, len(weights), _BLOCK)
        block, rest = _place(np.add.reduceat(weights, starts), self._rng.random())
        start = int(starts[block])
        return start + _place(weights[start : start + _BLOCK], rest)[0]

    def _penalized(self, logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
        ids = np.asarray(history, dtype=np.int64)
        ids = ids[(ids >= 0) & (ids < len(logits))]
        penalty = np.float32(self.params.repetition_penalty)
        logits, seen = logits.copy(), logits[ids]
        logits[ids] = np.where(seen > 0, seen / penalty, seen * penalty)  # an id listed twice gets the same value twice
        return logits

    def _candidates(self, logits: np.ndarray, top: np.float32) -> tuple[np.ndarray, np.ndarray]:
        """(ids, weights float32): the tokens that may be chosen, in no special order; the best one has weight 1."""
        params = self.params
        ids = np.arange(len(logits))
        if 0 < params.top_k < len(logits):
            ids = _largest(logits, params.top_k)
            logits = logits[ids]
        distance = (top - logits) / np.float32(params.temperature)  # (n,), 0 for the best, inf for a forbidden one
        weights = np.exp(-distance)
        if params.top_p < 1.0:
            kept = _nucleus(distance, weights, params.top_p * weights.sum(dtype=np.float64))
            ids, weights = ids[kept], weights[kept]
        if params.min_p > 0.0:
            kept = weights >= params.min_p
            ids, weights = ids[kept], weights[kept]
        return ids, weights


def _place(weights: np.ndarray, fraction: float) -> tuple[int, float]:
    """(the place where the running sum passes fraction * sum, what part of this place's weight lies before that point)."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    target = fraction * cumulative[-1]
    # The product may round up to the sum; the first place that reaches the sum is the last with a weight.
    place = int(min(np.searchsorted(cumulative, target, side="right"), np.searchsorted(cumulative, cumulative[-1])))
    before = cumulative[place - 1] if place else 0.0
    return place, float((target - before) / (cumulative[place] - before))


def _largest(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest logits; the lower id among equals."""
    cut = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > cut)
    return np.concatenate([above, np.flatnonzero(logits == cut)[: count - len(above)]])


def _nucleus(distance: np.ndarray, weights: np.ndarray, target: float) -> np.ndarray:
    """Places of the fewest largest weights whose sum reaches the target; the earlier place among equals.

    Sorting a vocabulary takes 10 ms. Here most of it is put aside when the weights near the best suffice, the rest is
    summed per bin of distance, and only the bin in which the sum is reached gets sorted.
    """
    near = np.flatnonzero(distance < _NEAR)
    if len(near) < len(distance) // 2 and weights[near].sum(dtype=np.float64) >= target:
        return near[_nucleus_by_bins(distance[near], weights[near], target)]
    return _nucleus_by_bins(distance, weights, target)


def _nucleus_by_bins(distance: np.ndarray, weights: np.ndarray, target: float) -> np.ndarray:
    bins = np.minimum(distance * np.float32(_BINS_PER_UNIT), np.float32(_BINS - 1)).astype(np.intp)
    cumulative = np.cumsum(np.bincount(bins, weights, minlength=_BINS))
    edge_bin = int(np.searchsorted(cumulative, min(target, cumulative[-1])))
    edge = np.flatnonzero(bins == edge_bin)
    edge = edge[np.argsort(distance[edge], kind="stable")]
    missing = target - (cumulative[edge_bin - 1] if edge_bin else 0.0)
    count = int(np.searchsorted(np.cumsum(weights[edge], dtype=np.float64), missing)) + 1
    return np.concatenate([np.flatnonzero(bins < edge_bin), edge[:count]])
