"""The depthwise causal convolution that recurrent mixers begin with: a part of their blocks."""

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..kernels.conv import MAX_TAPS, make_causal_conv
from ..recorder import LANES, Recorder, Rows
from .base import TensorSpec
from .site import Site


@dataclass(frozen=True, slots=True)
class CausalConv:
    """y[t] = sum over j of kernel[j] * x[t - taps + 1 + j] (+ bias), channel by channel.

    name    of its tensors below the layer; the kernel is a flat vector of (taps, channels)
    field   of the kernel in its block; also the name of its state

    Raises ConfigError for numbers that the kernel does not do.
    """

    name: str
    channels: int
    taps: int
    bias: bool = False
    field: str = "conv"

    def __post_init__(self) -> None:
        if self.channels % LANES:
            raise ConfigError(f"a convolution of {self.channels} channels is not supported, only multiples of {LANES}")
        if not 2 <= self.taps <= MAX_TAPS:
            raise ConfigError(f"a convolution of {self.taps} tokens is not supported, only 2 to {MAX_TAPS}")

    def tensors(self) -> dict[str, TensorSpec]:
        """Fields of the block that it is a part of."""
        specs = {self.field: TensorSpec(f"{self.name}.weight", (self.taps * self.channels,))}
        if self.bias:
            specs[f"{self.field}_bias"] = TensorSpec(f"{self.name}.bias", (self.channels,))
        return specs

    def state(self) -> tuple[str, int]:
        """An array of the block's RecurrentState: inputs of the last taps - 1 tokens."""
        return self.field, (self.taps - 1) * self.channels

    def record(
        self, r: Recorder, site: Site, x: np.ndarray, stride: int, out: Rows, *, silu: bool = False,
        gate_in: np.ndarray | None = None, gate_out: np.ndarray | None = None, array: int = 0, barrier: bool = True,
    ) -> None:  # fmt: skip
        """out = conv(x), rows `stride` bytes apart, then silu where asked; gates, in rows as far apart, multiply x and the result.

        array   which of the block's RecurrentState is the convolution's
        """
        bias = site.vector(f"{self.field}_bias")
        slots = [
            r.n_tok, x, stride, out.data, out.stride, self.channels, self.taps, site.vector(self.field), 0 if bias is None else bias,
            int(silu), site.state + 8 * array, 0 if gate_in is None else gate_in, 0 if gate_out is None else gate_out,
        ]  # fmt: skip
        r.program.record(self.field, r.kernels.get(make_causal_conv), slots, barrier=barrier)
