"""What a block of a decoder layer is: a frozen config that declares its tensors, buffers and state, and records its operations.

In:  the residual stream (tokens, hidden_size), the weights that the block declared, the state that a session keeps for it
Out: operations in a program that add the block's output to the residual stream
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..matrix import Matrix
from ..recorder import Activation, Recorder, Rows
from ..rope import RopeConfig

Weights = Mapping[str, Matrix | np.ndarray]  # by field name, as declared in Block.tensors


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
    """How the residual stream is normalised: "rms", or "layer" (mean subtracted, bias added)."""

    eps: float
    kind: str = "rms"


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm with its weights: float32 (D,) padded to whole vectors."""

    config: NormConfig
    weight: np.ndarray
    bias: np.ndarray | None = None


class Site(Protocol):
    """Where a block is recorded: one layer of one program.

    layer      index of the layer
    x          the residual stream, float32 (tokens, hidden_size)
    norm       applied to x before the block, or None
    out, onto  the block's last product writes `out`, plus `onto` where it is given (then both are x)
    start      int64 (1,): position of the first token of this run
    state      address of the layer's state descriptor (models/state.py), rewritten before every run
    kv_dtype   element type of keys and values
    """

    layer: int
    x: Rows
    norm: Norm | None
    out: Rows
    onto: Rows | None
    start: np.ndarray
    state: int
    kv_dtype: np.dtype
    weights: Weights

    def input(self, r: Recorder, wanted: frozenset[str]) -> Activation:
        """The normed residual stream in the wanted forms (recorder.wants)."""

    def rows(self, name: str) -> Rows:
        """The buffer that the block declared under `name`; all layers share it."""

    def rope_table(self, rope: RopeConfig, head_dim: int) -> np.ndarray:
        """float32 (positions, rotary columns): cosines, then sines (rope.py)."""

    def state_of(self, layer: int) -> int:
        """Address of another layer's state descriptor."""


class Block(Protocol):
    """A frozen, hashable dataclass; layers with equal blocks share buffers."""

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        """Field name -> tensor, in the order in which they are stored."""

    def rows(self, hidden_size: int) -> dict[str, int]:
        """Buffer name -> columns: float32 rows, one per token of a chunk, that `record` uses."""

    def state(self) -> State | None:
        """What a session keeps for a layer of this block."""

    def scratch_bytes(self, hidden_size: int, context_length: int) -> int:
        """Scratch memory that each thread needs while the block runs."""

    def record(self, r: Recorder, site: Site) -> None:
        """Record the block's operations: out = block(norm(x)) (+ onto)."""
