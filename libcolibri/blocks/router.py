"""Which experts a token goes to: the rule of a family as data, and its recording (kernels/router.py has the equations)."""

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..kernels.router import GROUP_SCORES, SCORES, make_route
from ..recorder import Recorder, padded_vector
from .base import TensorSpec
from .moe_state import RoutingState
from .site import Site


@dataclass(frozen=True, slots=True)
class Router:
    """How the logits gate(x) of all experts become the chosen experts and their weights.

    score          softmax or sigmoid of all logits; chosen_softmax, chosen_sigmoid or sparsemixer: the logits choose, then are scored
    normalise      the weights are divided by max(their sum + eps, least)
    scale          the weights are multiplied by it; with expert_scale also by a learned number of each expert
    bias           the logits have a bias
    choice_bias    added to the scores for the choice only
    groups         experts in so many equal groups, of which the `kept_groups` best take part, by their `group_score` "max" or "top2"
    softcap        logits become softcap * tanh(logits / softcap); 0: they do not
    jitter         of sparsemixer: experts further than twice this below the best, relative to the size, are ignored
    """

    score: str = "softmax"
    normalise: bool = False
    eps: float = 0.0
    least: float = 0.0
    scale: float = 1.0
    expert_scale: bool = False
    bias: bool = False
    choice_bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "max"
    softcap: float = 0.0
    jitter: float = 0.0

    def check(self, num_experts: int, num_experts_per_tok: int) -> None:
        """Raises ConfigError unless the rule works for so many experts."""
        if self.score not in SCORES or self.group_score not in GROUP_SCORES:
            raise ConfigError(f"router of score {self.score!r} and group score {self.group_score!r} is not supported")
        if not 1 <= self.kept_groups <= self.groups or num_experts % self.groups:
            raise ConfigError(f"router keeps {self.kept_groups} of {self.groups} groups of {num_experts} experts: expected equal groups")
        if num_experts_per_tok > self.kept_groups * (num_experts // self.groups):
            raise ConfigError(f"num_experts_per_tok={num_experts_per_tok}: more than {self.kept_groups} of {self.groups} groups have")

    def tensors(self, num_experts: int, hidden_size: int) -> dict[str, TensorSpec]:
        """The gate and the vectors of the rule, always float32."""
        specs = {"router": TensorSpec("mlp.gate.weight", (num_experts, hidden_size), "f32")}
        names = {"bias": self.bias, "e_score_correction_bias": self.choice_bias, "per_expert_scale": self.expert_scale}
        return specs | {f"router.{name}": TensorSpec(f"mlp.gate.{name}", (num_experts,)) for name, there in names.items() if there}

    def record(self, r: Recorder, site: Site, num_experts: int, chosen: int, state: RoutingState) -> None:
        """state.ids and state.weights of the layer from state.logits."""
        bias, choice_bias, scales = (self._vector(site, name) for name in ("bias", "e_score_correction_bias", "per_expert_scale"))
        numbers = np.array([self.softcap, self.eps, self.least, self.scale, 2 * self.jitter], np.float32)
        slots = [
            r.n_tok, state.logits.data, state.logits.stride, num_experts, chosen, state.ids[site.layer], state.weights[site.layer],
            SCORES[self.score], bias, choice_bias, self.groups, self.kept_groups, GROUP_SCORES[self.group_score], int(self.normalise),
            numbers, scales, r.scratch, r.scratch_bytes,
        ]  # fmt: skip
        r.program.record("route", r.kernels.get(make_route), slots)

    def _vector(self, site: Site, name: str) -> np.ndarray | int:
        vector = site.vector(f"router.{name}")
        return 0 if vector is None else padded_vector(vector)
