"""Where a block is recorded: its weights, buffers and state in one layer of one program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..matrix import Matrix
from ..recorder import Activation, Recorder, Rows
from ..rope import RopeConfig
from ..weights import ExpertLayout, Norm

if TYPE_CHECKING:
    from .moe_state import MoeState


class ResidentExperts(Protocol):
    """What native code reads and writes of the expert cache: int64 arrays (num_experts,) of a layer, and the clock of the stamps."""

    def table(self, layer: int) -> np.ndarray: ...

    def stamps(self, layer: int) -> np.ndarray: ...

    @property
    def clock(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Site:
    """One sublayer of one program.

    layer       index of the layer
    weights     tensors by field name, as the block declared them
    x           the residual stream, float32 (tokens, hidden_size)
    norm        applied to x before the block, or None
    out, onto   the block's last product writes `out`, plus `onto` where it is given (then both are x)
    buffers     the block's declared rows by name
    start       int64 (1,): position of the first token of this run
    ids         int64 (tokens,): the tokens of this run
    states      int64 (layers, 8): state descriptors (models/state.py), rewritten before every run
    kv_dtype    element type of keys and values
    rope_table  (RopeConfig, rotary columns) -> float32 (positions, rotary columns): cosines, then sines
    context_length  positions of a timeline
    experts     layout of the layer's routed experts; `moe` and `resident` are there with it
    faults      operation at which a replay may stop for missing experts -> operation to resume at
    """

    layer: int
    weights: Mapping[str, Matrix | np.ndarray]
    x: Rows
    norm: Norm | None
    out: Rows
    onto: Rows | None
    buffers: Mapping[str, Rows]
    start: np.ndarray
    ids: np.ndarray
    states: np.ndarray
    kv_dtype: np.dtype
    rope_table: Callable[[RopeConfig, int], np.ndarray]
    context_length: int
    experts: ExpertLayout | None = None
    moe: "MoeState | None" = None
    resident: ResidentExperts | None = None
    faults: dict[int, int] = field(default_factory=dict)

    @property
    def state(self) -> int:
        """Address of the layer's state descriptor."""
        return self.state_of(self.layer)

    def state_of(self, layer: int) -> int:
        """Address of any layer's state descriptor."""
        return self.states[layer].ctypes.data

    def has(self, name: str) -> bool:
        """Whether the block declared the field."""
        return name in self.weights

    def matrix(self, name: str) -> Matrix:
        """A declared matrix."""
        found = self.weights[name]
        assert isinstance(found, Matrix)
        return found

    def vector(self, name: str) -> np.ndarray | None:
        """A declared vector, float32 (n,); None when the block has none of this name."""
        found = self.weights.get(name)
        assert found is None or isinstance(found, np.ndarray)
        return found

    def rows(self, name: str) -> Rows:
        """The buffer that the block declared; all layers share it."""
        return self.buffers[name]

    def input(self, r: Recorder, wanted: frozenset[str]) -> Activation:
        """The normed residual stream in the wanted forms (recorder.wants)."""
        return r.activation("norm", self.x, wanted, self.norm)
