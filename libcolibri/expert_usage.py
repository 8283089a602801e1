"""How often each expert was used: counts, and what can be read off them.

In:  counts by layer, from a usage history or a trace
Out: rates, the order of heat, facts such as how uneven a layer's use is
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .expert_trace import Trace


@dataclass(frozen=True)
class LayerFacts:
    """One layer's use, or that of all layers together (the means of them, `unused` added up).

    hottest_quarter   share of the uses that went to the quarter of the experts that was used most, 0 to 1
    entropy_bits      of the shares: log2(experts) when all are used alike, 0 when only one is
    unused            experts without a recorded use
    """

    experts: int
    hottest_quarter: float
    entropy_bits: float
    unused: int


@dataclass(frozen=True)
class ExpertUsage:
    """Uses of the experts, by layer: float64 (E,) each. `weight` tokens or passes were looked at, so uses / weight is a rate."""

    uses: Mapping[int, np.ndarray]
    weight: float

    @property
    def num_experts(self) -> dict[int, int]:
        """By layer."""
        return {layer: len(uses) for layer, uses in self.uses.items()}

    def rates(self) -> dict[int, np.ndarray]:
        """By layer float64 (E,): how likely a token (or pass) is to use each expert, 0 to 1."""
        return {layer: np.clip(uses / self.weight, 0.0, 1.0) if self.weight else np.zeros(len(uses)) for layer, uses in self.uses.items()}

    def shares(self) -> dict[int, np.ndarray]:
        """By layer float64 (E,): share of the layer's uses; zeros for a layer without any."""
        return {layer: uses / total if (total := uses.sum()) > 0 else np.zeros(len(uses)) for layer, uses in self.uses.items()}

    def hottest_first(self) -> list[tuple[int, int]]:
        """Every (layer, expert) that was used, by falling rate; of equals the lower layer and expert."""
        found = [(-uses, layer, expert) for layer, row in self.uses.items() for expert, uses in enumerate(row.tolist()) if uses > 0.0]
        return [(layer, expert) for _, layer, expert in sorted(found)]

    def facts(self) -> dict[int, LayerFacts]:
        """By layer."""
        return {layer: _facts(shares) for layer, shares in self.shares().items()}

    def overall(self) -> LayerFacts:
        """All layers together."""
        facts = [found for found in self.facts().values() if found.unused < found.experts] or list(self.facts().values())
        return LayerFacts(
            sum(self.num_experts.values()),
            sum(found.hottest_quarter for found in facts) / len(facts),
            sum(found.entropy_bits for found in facts) / len(facts),
            sum(found.unused for found in self.facts().values()),
        )

    @classmethod
    def of_trace(cls, trace: Trace) -> "ExpertUsage":
        """A recorded run."""
        uses = {layer: np.zeros(count) for layer, count in zip(trace.layers, trace.num_experts, strict=True)}
        for done in trace.passes:
            for layer, used, counts in zip(trace.layers, done.experts, done.counts, strict=True):
                uses[layer][list(used)] += counts
        return cls(uses, float(sum(done.n_tok for done in trace.passes)))


def _facts(shares: np.ndarray) -> LayerFacts:
    used = shares[shares > 0.0]
    quarter = np.sort(shares)[-math.ceil(len(shares) / 4) :]
    return LayerFacts(len(shares), float(quarter.sum()), float(-(used * np.log2(used)).sum()) + 0.0, len(shares) - len(used))
