"""Mamba-2: a short convolution, the selective state update, and a gated norm."""

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..kernels.mamba import make_gated_norm, make_selective_scan
from ..recorder import LANES, Recorder, Rows, wants
from .base import Block, RecurrentState, TensorSpec
from .causal_conv import CausalConv
from .site import Site


@dataclass(frozen=True, slots=True)
class Mamba2(Block):
    """z | x | B | C | dt = in_proj(u); x | B | C = silu(conv(...)); out = out_proj(norm(scan(x, B, C, dt) * silu(z))).

    The scan and the norm are kernels/mamba.py's.

    num_groups   of heads; a group shares B and C, and has a norm of its own
    d_state      columns of a head's state
    taps         tokens that the convolution sees; with conv_bias it has a bias
    dt_limits    least and greatest time step
    bias         in_proj and out_proj have biases

    Raises ConfigError for numbers that do not fit together.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    d_state: int
    taps: int
    eps: float
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    conv_bias: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ConfigError(f"{self.num_heads} mamba heads are no multiple of {self.num_groups} groups")
        for name, found in (("head size", self.head_dim), ("state size", self.d_state)):
            if found < 1 or found % LANES:
                raise ConfigError(f"a mamba {name} of {found} is not supported, only multiples of {LANES}")

    @property
    def inner_size(self) -> int:
        """Columns of x, y and z."""
        return self.num_heads * self.head_dim

    @property
    def conv(self) -> CausalConv:
        """Over x | B | C."""
        return CausalConv("mamba.conv1d", self.inner_size + 2 * self.num_groups * self.d_state, self.taps, self.conv_bias)

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        projected = self._projected_size
        specs = {
            "in_proj": TensorSpec("mamba.in_proj.weight", (projected, hidden_size)),
            **self.conv.tensors(),
            **{name: TensorSpec(f"mamba.{name}", (self.num_heads,)) for name in ("A", "D", "dt_bias")},
            "norm": TensorSpec("mamba.norm.weight", (self.inner_size,)),
            "out_proj": TensorSpec("mamba.out_proj.weight", (hidden_size, self.inner_size)),
        }
        if self.bias:
            specs["in_bias"] = TensorSpec("mamba.in_proj.bias", (projected,))
            specs["out_bias"] = TensorSpec("mamba.out_proj.bias", (hidden_size,))
        return specs

    def rows(self, hidden_size: int) -> dict[str, int]:
        return {"projected": self._projected_size, "convolved": self.conv.channels, "scanned": self.inner_size}

    def state(self) -> RecurrentState:
        return RecurrentState((self.conv.state(), ("ssm", self.inner_size * self.d_state)))

    def record(self, r: Recorder, site: Site) -> None:
        in_proj, out_proj = site.matrix("in_proj"), site.matrix("out_proj")
        projected, convolved, scanned = site.rows("projected"), site.rows("convolved"), site.rows("scanned")
        r.product("mamba in", in_proj, site.input(r, wants([in_proj])), projected, bias=site.vector("in_bias"))
        self.conv.record(r, site, projected.data[:, self.inner_size :], projected.stride, convolved, silu=True)
        self._record_scan(r, site, projected, convolved, scanned)
        slots = [
            r.n_tok, scanned.data, scanned.stride, projected.data, projected.stride, self.num_groups, self.inner_size // self.num_groups,
            site.vector("norm"), r.scalar(self.eps), r.scratch, r.scratch_bytes,
        ]  # fmt: skip
        r.program.record("mamba norm", r.kernels.get(make_gated_norm), slots)
        r.product("mamba out", out_proj, r.activation("quantize", scanned, wants([out_proj])), site.out, onto=site.onto)
        if (bias := site.vector("out_bias")) is not None:
            r.add_vector("mamba out bias", site.out, bias)

    def _record_scan(self, r: Recorder, site: Site, projected: Rows, convolved: Rows, scanned: Rows) -> None:
        dt = projected.data[:, self.inner_size + self.conv.channels :]
        slots = [
            r.n_tok, convolved.data, convolved.stride, dt, projected.stride, site.vector("A"), site.vector("D"), site.vector("dt_bias"),
            np.array(self.dt_limits, np.float32), self.num_heads, self.num_groups, self.head_dim, self.d_state, site.state + SSM,
            scanned.data, scanned.stride,
        ]  # fmt: skip
        r.program.record("mamba scan", r.kernels.get(make_selective_scan), slots)

    @property
    def _projected_size(self) -> int:
        return self.inner_size + self.conv.channels + self.num_heads


SSM = 8  # bytes from the state's descriptor to the second array's address
