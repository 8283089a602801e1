"""What a block of a decoder layer is: a frozen config that declares its tensors, buffers and state, and records its operations.

In:  the residual stream (tokens, hidden_size), the weights that the block declared, the state that a session keeps for it
Out: operations in a program that add the block's output to the residual stream
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..rope import RopeConfig

if TYPE_CHECKING:  # recording costs an import of the compiler, reading a config does not
    from ..recorder import Recorder
    from .moe import MoE
    from .moe_state import RoutingState
    from .site import Site


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a block.

    name    canonical name below its layer, e.g. "self_attn.q_proj.weight"
    shape   (rows, cols), or (n,) for a vector; convolution kernels and per-expert biases are vectors too, flattened
    type    None: any tensor type that the recipe chooses; "f32": small and delicate, always float32 (routers, gates)
    """

    name: str
    shape: tuple[int, ...]
    type: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionState:
    """Keys and values of a layer: `kv_heads` heads of k_dim and v_dim columns; only the last `window` positions where it is given."""

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """float32 arrays that every token rewrites: (name, number of elements); zeros at the start of a timeline."""

    arrays: tuple[tuple[str, int], ...]


State = AttentionState | RecurrentState


@dataclass(frozen=True, slots=True)
class NormConfig:
    """How rows are normalised: "rms", or "layer" (mean subtracted, bias added)."""

    eps: float
    kind: str = "rms"


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The routed experts of a layer: matrices (rows, cols) by part, in the order in which an expert holds them."""

    num_experts: int
    num_experts_per_tok: int
    parts: tuple[tuple[str, tuple[int, int]], ...]


class Block(ABC):
    """Part of a layer. Subclasses are frozen, hashable dataclasses; layers with equal blocks share buffers."""

    __slots__ = ()

    @abstractmethod
    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        """Field name -> tensor, in the order in which they are stored."""

    @abstractmethod
    def record(self, r: "Recorder", site: "Site") -> None:
        """Record the block's operations: site.out = block(norm(site.x)) (+ site.onto)."""

    def rows(self, hidden_size: int) -> dict[str, int]:
        """Buffer name -> columns: float32 rows, one per token of a chunk, that `record` uses."""
        return {}

    def state(self) -> State | None:
        """What a session keeps for a layer of this block."""
        return None

    def experts(self, hidden_size: int) -> ExpertShape | None:
        """Shapes of the routed experts of a layer of this block."""
        return None

    @property
    def routed(self) -> "MoE | None":
        """The part that sends tokens to experts, where the block has one."""
        return None

    def record_guess(self, r: "Recorder", site: "Site", state: "RoutingState") -> None:
        """Record the choice of experts that the layer would make for the residual stream as it is now, for a block with a routed part."""
        raise AssertionError(f"{type(self).__name__} chooses no experts")

    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        """Rotary embeddings whose tables `record` uses, each with the columns that turn."""
        return ()

    def scratch_bytes(self, hidden_size: int, context_length: int) -> int:
        """Scratch memory that each thread needs while the block runs."""
        return 4 * max(hidden_size, *self.rows(hidden_size).values(), 0) + SCRATCH_BESIDE_ROW_BYTES


SCRATCH_BESIDE_ROW_BYTES = 1088  # what norms and roundings keep beside one padded row
