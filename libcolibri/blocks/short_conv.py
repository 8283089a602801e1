"""LFM2's gated short convolution: a mixer that sees the last few tokens only."""

from dataclasses import dataclass

from ..recorder import Recorder, wants
from .base import Block, RecurrentState, TensorSpec
from .causal_conv import CausalConv
from .site import Site


@dataclass(frozen=True, slots=True)
class ShortConv(Block):
    """B | C | x = in_proj(u); out = out_proj(C * conv(B * x)); in_proj and out_proj have biases if the convolution has one."""

    conv: CausalConv

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        channels = self.conv.channels
        specs = {
            "in_proj": TensorSpec("conv.in_proj.weight", (3 * channels, hidden_size)),
            **self.conv.tensors(),
            "out_proj": TensorSpec("conv.out_proj.weight", (hidden_size, channels)),
        }
        if self.conv.bias:
            specs["in_bias"] = TensorSpec("conv.in_proj.bias", (3 * channels,))
            specs["out_bias"] = TensorSpec("conv.out_proj.bias", (hidden_size,))
        return specs

    def rows(self, hidden_size: int) -> dict[str, int]:
        return {"projected": 3 * self.conv.channels, "mixed": self.conv.channels}

    def state(self) -> RecurrentState:
        return RecurrentState((self.conv.state(),))

    def record(self, r: Recorder, site: Site) -> None:
        in_proj, out_proj = site.matrix("in_proj"), site.matrix("out_proj")
        projected, mixed = site.rows("projected"), site.rows("mixed")
        r.product("conv in", in_proj, site.input(r, wants([in_proj])), projected, bias=site.vector("in_bias"))
        gate_in, gate_out, x = (projected.data[:, i * self.conv.channels :] for i in range(3))
        self.conv.record(r, site, x, projected.stride, mixed, gate_in=gate_in, gate_out=gate_out)
        r.product("conv out", out_proj, r.activation("quantize", mixed, wants([out_proj])), site.out, onto=site.onto)
        if (bias := site.vector("out_bias")) is not None:
            r.add_vector("conv out bias", site.out, bias)
