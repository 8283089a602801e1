"""Kimi Delta Attention: a gated delta network whose state forgets channel by channel."""

from dataclasses import dataclass

from ..recorder import Recorder, Rows, wants
from .base import Block, RecurrentState, TensorSpec
from .causal_conv import CausalConv
from .delta_rule import DeltaRule
from .site import Site


@dataclass(frozen=True, slots=True)
class KimiDeltaAttention(Block):
    """q, k, v = silu(conv(proj(x))) each; out = o_proj(norm(rule(q, k, v)) * sigmoid(g_b_proj(g_a_proj(x)))).

    The rule's decay is exp(A * softplus(f_b_proj(f_a_proj(x)) + dt_bias)) for every channel, its beta sigmoid(b_proj(x)) for every head.

    taps   tokens that the convolutions see
    """

    num_heads: int
    head_dim: int
    taps: int
    eps: float

    @property
    def rule(self) -> DeltaRule:
        return DeltaRule(self.num_heads, self.num_heads, self.head_dim, self.head_dim, per_channel=True)

    @property
    def convs(self) -> dict[str, CausalConv]:
        """Of q, k and v."""
        return {x: CausalConv(f"self_attn.{x}_conv1d", self.rule.key_size, self.taps, field=f"{x}_conv") for x in "qkv"}

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        size, dim = self.rule.key_size, self.head_dim
        shapes = {"f_a": (dim, hidden_size), "f_b": (size, dim), "g_a": (dim, hidden_size), "g_b": (size, dim), "o": (hidden_size, size)}
        shapes = dict.fromkeys("qkv", (size, hidden_size)) | shapes
        specs = {f"{x}_proj": TensorSpec(f"self_attn.{x}_proj.weight", shape) for x, shape in shapes.items()}
        for conv in self.convs.values():
            specs |= conv.tensors()
        return specs | {
            "b_proj": TensorSpec("self_attn.b_proj.weight", (self.num_heads, hidden_size), "f32"),
            "A": TensorSpec("self_attn.A", (self.num_heads,)),
            "dt_bias": TensorSpec("self_attn.dt_bias", (size,)),
            "norm": TensorSpec("self_attn.o_norm.weight", (dim,)),
        }

    def rows(self, hidden_size: int) -> dict[str, int]:
        size = self.rule.key_size
        wide = dict.fromkeys(("q", "k", "v", "decay", "gate", "mixed"), size)
        return wide | {"f_a": self.head_dim, "g_a": self.head_dim, "beta": self.num_heads}

    def state(self) -> RecurrentState:
        return RecurrentState((*(conv.state() for conv in self.convs.values()), self.rule.state()))

    def record(self, r: Recorder, site: Site) -> None:
        q, k, v, mixed, beta = (site.rows(name) for name in ("q", "k", "v", "mixed", "beta"))
        products = {x: (f"{x}_proj", site.rows(x)) for x in ("q", "k", "v", "f_a", "g_a")} | {"beta": ("b_proj", beta)}
        x = site.input(r, wants(site.matrix(field) for field, _ in products.values()))
        for name, (field, out) in products.items():
            r.product(f"kda {name}", site.matrix(field), x, out, barrier=name == "beta")
        self._record_low_rank(r, site, "f", site.rows("decay"))
        self._record_low_rank(r, site, "g", site.rows("gate"))
        for i, (name, conv) in enumerate(self.convs.items()):
            rows = site.rows(name)
            conv.record(r, site, rows.data, rows.stride, rows, silu=True, array=i, barrier=name == "v")
        self.rule.record(r, site, (q.data, k.data, v.data), q.stride, site.rows("decay"), beta, mixed, array=len(self.convs))
        self.rule.record_norm(r, site, mixed, site.rows("gate"), self.eps, sigmoid=True)
        o_proj = site.matrix("o_proj")
        r.product("kda out", o_proj, r.activation("quantize", mixed, wants([o_proj])), site.out, onto=site.onto)

    def _record_low_rank(self, r: Recorder, site: Site, name: str, out: Rows) -> None:
        """out = the second of the two projections `name`."""
        second = site.matrix(f"{name}_b_proj")
        inner = r.activation("quantize", site.rows(f"{name}_a"), wants([second]))
        r.product(f"kda {name}", second, inner, out)
