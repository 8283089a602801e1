"""The weights of a decoder, each bound to a field once.

Axes: D hidden_size, E num_experts, F expert width, V vocab_size.
"""

from dataclasses import dataclass

import numpy as np

from .blocks.base import NormConfig
from .matrix import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A norm and its weights, float32 (D,)."""

    config: NormConfig
    weight: np.ndarray
    bias: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One matrix inside an expert's bytes: `bytes` of tiles at `offset`."""

    type: str
    rows: int
    cols: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How the experts of a layer lie in their bytes; all experts of a layer alike.

    parts   gate_proj (F, D) where there is one, up_proj (F, D), down_proj (D, F), in the order in which an expert holds them
    """

    layer: int
    num_experts: int
    expert_bytes: int
    parts: dict[str, PartLayout]


@dataclass(frozen=True, slots=True, eq=False)
class SublayerWeights:
    """One block's tensors by the field names that it declared, the norms around it, and where its routed experts lie."""

    fields: dict[str, Matrix | np.ndarray]
    input_norm: Norm | None
    output_norm: Norm | None
    experts: ExpertLayout | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer; `scalar`, float32 (1,), multiplies the residual stream after it."""

    sublayers: tuple[SublayerWeights, ...]
    scalar: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """Everything that stays in memory. `lm_head` is `embed_tokens` itself when they are tied."""

    embed_tokens: Matrix  # (V, D)
    norm: Norm | None
    lm_head: Matrix  # (V, D)
    layers: tuple[LayerWeights, ...]
    lm_head_bias: np.ndarray | None = None  # float32 (V,)
