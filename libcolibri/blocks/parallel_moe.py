"""Gemma's feed-forward block: a dense MLP and experts side by side, each with norms of its own."""

from dataclasses import dataclass

import numpy as np

from ..recorder import Activation, Recorder, padded_vector
from ..weights import Norm
from .base import Block, ExpertShape, NormConfig, TensorSpec
from .mlp import Mlp
from .moe import MoE
from .moe_state import RoutingState
from .site import Site

NORMS = {
    "dense_norm": "post_feedforward_layernorm_1.weight",
    "experts_input_norm": "pre_feedforward_layernorm_2.weight",
    "experts_norm": "post_feedforward_layernorm_2.weight",
    "router_norm": "router.scale",
}


@dataclass(frozen=True, slots=True)
class ParallelMoE(Block):
    """out = dense_norm(mlp(norm(x))) + experts_norm(experts(experts_input_norm(x))); the router reads router_norm(x) / sqrt(D).

    The block must have an output norm: `out` holds the dense part while the experts run.
    """

    mlp: Mlp
    moe: MoE
    eps: float

    @property
    def routed(self) -> MoE:
        return self.moe

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        norms = {field: TensorSpec(name, (hidden_size,)) for field, name in NORMS.items()}
        return self.mlp.tensors(hidden_size) | self.moe.tensors(hidden_size) | norms

    def experts(self, hidden_size: int) -> ExpertShape:
        return self.moe.experts(hidden_size)

    def rows(self, hidden_size: int) -> dict[str, int]:
        return self.mlp.rows(hidden_size) | self.moe.rows(hidden_size) | {"experts_out": hidden_size}

    def scratch_bytes(self, hidden_size: int, context_length: int) -> int:
        return max(Block.scratch_bytes(self, hidden_size, context_length), self.moe.scratch_bytes(hidden_size, context_length))

    def record(self, r: Recorder, site: Site) -> None:
        assert site.onto is None
        self.mlp.record_on(r, site, site.input(r, self.mlp.wanted(site)), site.out, None)
        dense = self._norm(site, "dense_norm")
        r.norm_in_place("dense norm", site.out, padded_vector(dense.weight), self.eps)
        self.moe.record_routing(r, site, self._router_input(r, site))
        norm = self._norm(site, "experts_input_norm")
        x = r.activation("experts norm", site.x, self.moe.experts_wanted(site), norm, settled=True)
        self.moe.record_experts(r, site, x, site.rows("experts_out"), None)
        r.add_normed("experts", site.out, site.rows("experts_out"), self._norm(site, "experts_norm"), 1.0)

    def record_guess(self, r: Recorder, site: Site, state: RoutingState) -> None:
        self.moe.record_choice(r, site, self._router_input(r, site), state)

    def _router_input(self, r: Recorder, site: Site) -> Activation:
        return r.activation("router norm", site.x, self.moe.router_wanted(site), self._norm(site, "router_norm", site.x.cols**-0.5))

    def _norm(self, site: Site, name: str, factor: float = 1.0) -> Norm:
        """The norm with this weight, times a factor."""
        weight = site.vector(name)
        assert weight is not None
        return Norm(NormConfig(self.eps), weight * np.float32(factor))
