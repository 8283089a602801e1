"""The weights of a decoder, each bound to a field once.

Axes: D hidden_size, H query heads, G key/value heads, Dh head_dim, E num_experts, F expert width, V vocab_size.
"""

from dataclasses import dataclass

import numpy as np

from .matrix import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """Projections and what is added to or normalises their outputs."""

    q_proj: Matrix  # (H*Dh, D)
    k_proj: Matrix  # (G*Dh, D)
    v_proj: Matrix  # (G*Dh, D)
    o_proj: Matrix  # (D, H*Dh)
    q_bias: np.ndarray | None = None  # float32 (H*Dh,)
    k_bias: np.ndarray | None = None  # float32 (G*Dh,)
    v_bias: np.ndarray | None = None  # float32 (G*Dh,)
    o_bias: np.ndarray | None = None  # float32 (D,)
    q_norm: np.ndarray | None = None  # float32 (Dh,) for qk_norm "head", (H*Dh,) for "full"
    k_norm: np.ndarray | None = None  # float32 (Dh,) for qk_norm "head", (G*Dh,) for "full"


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """down_proj(silu(gate_proj(x)) * up_proj(x)), F the MLP's width."""

    gate_proj: Matrix  # (F, D)
    up_proj: Matrix  # (F, D)
    down_proj: Matrix  # (D, F)


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
    """How the experts of a layer lie in their bytes; all experts of a layer alike."""

    layer: int
    num_experts: int
    expert_bytes: int
    gate_proj: PartLayout  # (F, D)
    up_proj: PartLayout  # (F, D)
    down_proj: PartLayout  # (D, F)


@dataclass(frozen=True, slots=True, eq=False)
class MoeWeights:
    """Router and shared expert; the routed experts' weights come from the expert cache."""

    router: Matrix  # f32 (E, D)
    experts: ExpertLayout
    shared: MlpWeights | None = None
    shared_gate: Matrix | None = None  # f32 (1, D)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer: exactly one of `mlp` and `moe` is there."""

    input_layernorm: np.ndarray  # float32 (D,)
    post_attention_layernorm: np.ndarray  # float32 (D,)
    attention: AttentionWeights
    mlp: MlpWeights | None = None
    moe: MoeWeights | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """Everything that stays in memory. `lm_head` is `embed_tokens` itself when they are tied."""

    embed_tokens: Matrix  # (V, D)
    norm: np.ndarray  # float32 (D,)
    lm_head: Matrix  # (V, D)
    layers: list[LayerWeights]

    @property
    def expert_layouts(self) -> dict[int, ExpertLayout]:
        """Layout of the routed experts by layer; empty in a dense model."""
        return {i: layer.moe.experts for i, layer in enumerate(self.layers) if layer.moe is not None}
