"""The gated delta rule with the gates before it and the gated norm after it: the part that linear attention blocks have in common."""

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..kernels.delta_net import make_delta_gates, make_delta_rule, make_gated_norm, make_unit_heads
from ..recorder import LANES, Recorder, Rows, padded_vector
from .site import Site


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Heads of kernels/delta_net.py: keys and queries of `key_dim` columns, values of `value_dim`.

    tiled         value head h reads key head h % key_heads; otherwise neighbours share a key head
    per_channel   a decay for every column of a key; otherwise one for every value head

    Raises ConfigError for numbers that do not fit together.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False
    per_channel: bool = False

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ConfigError(f"{self.value_heads} value heads of linear attention are no multiple of {self.key_heads} key heads")
        for name, found in (("key", self.key_dim), ("value", self.value_dim)):
            if found % LANES:
                raise ConfigError(f"{name} heads of {found} columns in linear attention are not supported, only multiples of {LANES}")

    @property
    def key_size(self) -> int:
        """Columns of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Columns of all values."""
        return self.value_heads * self.value_dim

    def state(self) -> tuple[str, int]:
        """An array of the block's RecurrentState: S of every head."""
        return "delta", self.value_heads * self.key_dim * self.value_dim

    def record(
        self, r: Recorder, site: Site, qkv: tuple[np.ndarray, np.ndarray, np.ndarray], stride: int, decay: Rows, beta: Rows, out: Rows,
        *, array: int,
    ) -> None:  # fmt: skip
        """out = the rule of q, k and v, in rows `stride` bytes apart, and of the gates' projections `decay` and `beta`; overwrites them.

        array   which of the block's RecurrentState is S. The block has the fields "A" (value heads) and "dt_bias" (as many as decays).
        """
        q, k, v = qkv
        for name, x, scale in (("unit q", q, self.key_dim**-0.5), ("unit k", k, 1.0)):
            slots = [r.n_tok, x, stride, self.key_heads, self.key_dim, r.scalar(scale)]
            r.program.record(name, r.kernels.get(make_unit_heads), slots, barrier=False)
        a, dt_bias = site.vector("A"), site.vector("dt_bias")
        assert a is not None and dt_bias is not None
        a, dt_bias = padded_vector(np.repeat(a, len(dt_bias) // len(a))), padded_vector(dt_bias)
        slots = [r.n_tok, decay.data, decay.stride, decay.padded, a, dt_bias, beta.data, beta.stride, beta.padded]
        r.program.record("delta gates", r.kernels.get(make_delta_gates), slots)
        slots = [
            r.n_tok, q, k, v, stride, self.value_heads, self.key_heads, int(self.tiled), self.key_dim, self.value_dim, decay.data,
            decay.stride, beta.data, beta.stride, out.data, out.stride, site.state + 8 * array,
        ]  # fmt: skip
        r.program.record("delta rule", r.kernels.get(make_delta_rule, int(self.per_channel)), slots)

    def record_norm(self, r: Recorder, site: Site, x: Rows, gate: Rows, eps: float, *, sigmoid: bool) -> None:
        """x = norm(x) * silu(gate) of every head, or sigmoid(gate); the block has the field "norm" (value_dim)."""
        slots = [
            r.n_tok, x.data, x.stride, self.value_heads, self.value_dim, site.vector("norm"), r.scalar(eps), gate.data, gate.stride,
            r.scratch, r.scratch_bytes,
        ]  # fmt: skip
        r.program.record("gated norm", r.kernels.get(make_gated_norm, int(sigmoid)), slots)
