"""Gated DeltaNet: linear attention whose state is a matrix per head, of Qwen3-Next and Qwen3.5."""

from dataclasses import dataclass

from ..recorder import Recorder, wants
from .base import Block, RecurrentState, TensorSpec
from .causal_conv import CausalConv
from .delta_rule import DeltaRule
from .site import Site

# Projections of the input: buffer -> field.
PROJECTIONS = {"qkv": "in_proj_qkv", "z": "in_proj_z", "beta": "in_proj_b", "decay": "in_proj_a"}


@dataclass(frozen=True, slots=True)
class GatedDeltaNet(Block):
    """q | k | v = silu(conv(in_proj_qkv(x))); out = out_proj(norm(rule(q, k, v)) * silu(in_proj_z(x))).

    The rule's decay is exp(A * softplus(in_proj_a(x) + dt_bias)), its beta sigmoid(in_proj_b(x)): one of each for every value head.

    taps   tokens that the convolution sees
    """

    rule: DeltaRule
    taps: int
    eps: float

    @property
    def conv(self) -> CausalConv:
        """Over q | k | v."""
        return CausalConv("linear_attn.conv1d", 2 * self.rule.key_size + self.rule.value_size, self.taps)

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        heads, value_size = self.rule.value_heads, self.rule.value_size
        return {
            "in_proj_qkv": TensorSpec("linear_attn.in_proj_qkv.weight", (self.conv.channels, hidden_size)),
            "in_proj_z": TensorSpec("linear_attn.in_proj_z.weight", (value_size, hidden_size)),
            "in_proj_b": TensorSpec("linear_attn.in_proj_b.weight", (heads, hidden_size), "f32"),
            "in_proj_a": TensorSpec("linear_attn.in_proj_a.weight", (heads, hidden_size), "f32"),
            **self.conv.tensors(),
            **{name: TensorSpec(f"linear_attn.{name}", (heads,)) for name in ("A", "dt_bias")},
            "norm": TensorSpec("linear_attn.norm.weight", (self.rule.value_dim,)),
            "out_proj": TensorSpec("linear_attn.out_proj.weight", (hidden_size, value_size)),
        }

    def rows(self, hidden_size: int) -> dict[str, int]:
        heads, value_size = self.rule.value_heads, self.rule.value_size
        return {"qkv": self.conv.channels, "z": value_size, "beta": heads, "decay": heads, "mixed": value_size}

    def state(self) -> RecurrentState:
        return RecurrentState((self.conv.state(), self.rule.state()))

    def record(self, r: Recorder, site: Site) -> None:
        x, out_proj = site.input(r, wants(site.matrix(field) for field in PROJECTIONS.values())), site.matrix("out_proj")
        for name, field in PROJECTIONS.items():
            r.product(f"delta {name}", site.matrix(field), x, site.rows(name), barrier=name == "decay")
        qkv, mixed, key_size = site.rows("qkv"), site.rows("mixed"), self.rule.key_size
        self.conv.record(r, site, qkv.data, qkv.stride, qkv, silu=True)
        parts = qkv.data, qkv.data[:, key_size:], qkv.data[:, 2 * key_size :]
        self.rule.record(r, site, parts, qkv.stride, site.rows("decay"), site.rows("beta"), mixed, array=1)
        self.rule.record_norm(r, site, mixed, site.rows("z"), self.eps, sigmoid=False)
        r.product("delta out", out_proj, r.activation("quantize", mixed, wants([out_proj])), site.out, onto=site.onto)
