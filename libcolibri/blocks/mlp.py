"""The dense feed-forward block, which a shared expert is too."""

from dataclasses import dataclass

from ..errors import ConfigError
from ..recorder import Activation, Recorder, Rows, wants
from .base import Block, TensorSpec
from .site import Site


@dataclass(frozen=True, slots=True)
class Mlp(Block):
    """out = down_proj(silu(gate_proj(x)) * up_proj(x)), F columns wide.

    prefix   of its tensors' names and its buffers' below the layer
    """

    intermediate_size: int
    prefix: str = "mlp."

    def __post_init__(self) -> None:
        if self.intermediate_size < 1:
            raise ConfigError(f"intermediate_size={self.intermediate_size}: expected at least 1")

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        shapes = {"gate_proj": (self.intermediate_size, hidden_size), "up_proj": (self.intermediate_size, hidden_size)}
        shapes["down_proj"] = (hidden_size, self.intermediate_size)
        return {self.prefix + part: TensorSpec(f"{self.prefix}{part}.weight", shape) for part, shape in shapes.items()}

    def rows(self, hidden_size: int) -> dict[str, int]:
        return {self.prefix + "hidden": self.intermediate_size, self.prefix + "spare": self.intermediate_size}

    def record(self, r: Recorder, site: Site) -> None:
        self.record_on(r, site, site.input(r, self.wanted(site)), site.out, site.onto)

    def wanted(self, site: Site) -> frozenset[str]:
        """Forms of the input."""
        return wants([site.matrix(self.prefix + "gate_proj"), site.matrix(self.prefix + "up_proj")])

    def record_on(self, r: Recorder, site: Site, x: Activation, out: Rows, onto: Rows | None, *, barrier: bool = True) -> None:
        """out = mlp(x) (+ onto)."""
        gate, up, down = (site.matrix(self.prefix + part) for part in ("gate_proj", "up_proj", "down_proj"))
        hidden, spare = site.rows(self.prefix + "hidden"), site.rows(self.prefix + "spare")
        r.gate_up(f"{self.prefix}gate+up", gate, up, x, hidden, spare)
        r.product(f"{self.prefix}down", down, r.activation("quantize", hidden, wants([down])), out, onto=onto, barrier=barrier)
