"""The dense feed-forward block, which a shared expert is too."""

from dataclasses import dataclass

from ..errors import ConfigError
from ..kernels.ffn import ACTIVATIONS
from ..recorder import Activation, Recorder, Rows, wants
from .base import Block, TensorSpec
from .site import Site


def ffn_parts(activation: str, hidden_size: int, width: int) -> dict[str, tuple[int, int]]:
    """Matrices (rows, cols) of a feed-forward network by name; relu2 has one before the activation."""
    gate = {} if activation == "relu2" else {"gate_proj": (width, hidden_size)}
    return gate | {"up_proj": (width, hidden_size), "down_proj": (hidden_size, width)}


def check_activation(activation: str, limit: float) -> None:
    """Raises ConfigError for one that kernels/ffn.py does not have, or a limit that is none."""
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} is not supported, only {', '.join(ACTIVATIONS)}")
    if activation == "clamped_swiglu" and not limit > 0.0:
        raise ConfigError(f"swiglu limit {limit}: expected a number above 0")


@dataclass(frozen=True, slots=True)
class Mlp(Block):
    """out = down_proj(act(gate_proj(x), up_proj(x))), F columns wide; act is an activation of kernels/ffn.py with its limit.

    prefix   of its tensors' names and its buffers' below the layer
    bias     the matrices have biases
    """

    intermediate_size: int
    prefix: str = "mlp."
    activation: str = "silu"
    limit: float = 0.0
    bias: bool = False

    def __post_init__(self) -> None:
        if self.intermediate_size < 1:
            raise ConfigError(f"intermediate_size={self.intermediate_size}: expected at least 1")
        check_activation(self.activation, self.limit)

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        parts = ffn_parts(self.activation, hidden_size, self.intermediate_size)
        specs = {self.prefix + part: TensorSpec(f"{self.prefix}{part}.weight", shape) for part, shape in parts.items()}
        if self.bias:
            specs |= {f"{self.prefix}{part}.bias": TensorSpec(f"{self.prefix}{part}.bias", (rows,)) for part, (rows, _) in parts.items()}
        return specs

    def rows(self, hidden_size: int) -> dict[str, int]:
        return {self.prefix + "hidden": self.intermediate_size, self.prefix + "spare": self.intermediate_size}

    def record(self, r: Recorder, site: Site) -> None:
        self.record_on(r, site, site.input(r, self.wanted(site)), site.out, site.onto)

    def _inputs(self) -> list[str]:
        return [self.prefix + part for part in ("gate_proj", "up_proj") if self.activation != "relu2" or part == "up_proj"]

    def wanted(self, site: Site) -> frozenset[str]:
        """Forms of the input."""
        return wants([site.matrix(name) for name in self._inputs()])

    def record_on(self, r: Recorder, site: Site, x: Activation, out: Rows, onto: Rows | None, *, barrier: bool = True) -> None:
        """out = mlp(x) (+ onto)."""
        hidden, spare, down = site.rows(self.prefix + "hidden"), site.rows(self.prefix + "spare"), site.matrix(self.prefix + "down_proj")
        inputs = [(site.matrix(name), site.vector(f"{name}.bias")) for name in self._inputs()]
        first, second = inputs[0], inputs[1] if len(inputs) == 2 else (None, None)
        r.gate_up(
            f"{self.prefix}gate+up", first[0], second[0], x, hidden, spare, activation=self.activation, limit=self.limit,
            gate_bias=first[1], up_bias=second[1],
        )  # fmt: skip
        opened, bias = r.activation("quantize", hidden, wants([down])), site.vector(f"{self.prefix}down_proj.bias")
        r.product(f"{self.prefix}down", down, opened, out, onto=onto, bias=bias, barrier=barrier)
