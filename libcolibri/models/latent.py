"""What the families with latent attention share: DeepSeek's config keys, and how its tensors become the canonical ones."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..blocks.mla import LatentAttention
from ..config import LayerConfig
from .config_reader import ConfigReader
from .family import Rule
from .gguf import Metadata
from .rope_config import read_rope, yarn_scale


def latent_attention(reader: ConfigReader, *, theta: float = 10000.0, rotated: bool = True) -> LatentAttention:
    """DeepSeek's keys; `rotated` false: positions are not encoded."""
    nope, rotary, heads = reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim"), reader.integer("num_attention_heads")
    for key, derived in (("qk_head_dim", nope + rotary), ("num_key_value_heads", heads)):
        reader.only(key, derived, None)
    # Derived by transformers; how the model was trained and spread over machines; its layers for further tokens, which are left out;
    # and the code that the release brought before transformers had its own.
    for unused in ("head_dim", "aux_loss_alpha", "ep_size", "seq_aux", "num_nextn_predict_layers", "auto_map"):
        reader.value(unused, None)
    for key in ("attention_bias", "mlp_bias"):
        reader.only(key, False)
    rope = read_rope(reader, reader.integer("max_position_embeddings"), theta) if rotated else None
    scaling = reader.raw.get("rope_parameters") or reader.raw.get("rope_scaling") or {}
    softening = scaling.get("mscale_all_dim") if isinstance(scaling, Mapping) and rope is not None and rope.type != "default" else None
    return LatentAttention(
        num_attention_heads=heads,
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotary,
        v_head_dim=reader.integer("v_head_dim"),
        scale=(nope + rotary) ** -0.5 * (yarn_scale(rope.factor, softening) ** 2 if rope is not None and softening else 1.0),
        rope=rope,
        q_lora_rank=reader.integer("q_lora_rank", None),
    )


def _block(layer: LayerConfig) -> LatentAttention:
    block = layer.sublayers[0].block
    assert isinstance(block, LatentAttention)
    return block


def _pairs_apart(count: int) -> np.ndarray:
    return np.concatenate([np.arange(0, count, 2), np.arange(1, count, 2)])


def _query_rows(layer: LayerConfig) -> np.ndarray:
    """Rotary columns of every head: pairs that stand side by side become halves."""
    block = _block(layer)
    head = np.concatenate([np.arange(block.qk_nope_head_dim), block.qk_nope_head_dim + _pairs_apart(block.qk_rope_head_dim)])
    return (np.arange(block.num_attention_heads)[:, None] * block.q_head + head).reshape(-1)


def _row_rows(layer: LayerConfig) -> np.ndarray:
    """The same for the rotary columns behind the latent."""
    block = _block(layer)
    return np.concatenate([np.arange(block.kv_lora_rank), block.kv_lora_rank + _pairs_apart(block.qk_rope_head_dim)])


def _keys_then_values(layer: LayerConfig) -> np.ndarray:
    """kv_b_proj holds each head's key rows before its value rows: all keys first, then all values."""
    block = _block(layer)
    head = np.arange(block.qk_nope_head_dim + block.v_head_dim)
    rows = np.arange(block.num_attention_heads)[:, None] * len(head) + head
    return np.concatenate([rows[:, : block.qk_nope_head_dim].reshape(-1), rows[:, block.qk_nope_head_dim :].reshape(-1)])


EXPANSION = Rule(r"(.*\.self_attn)\.kv_b_proj\.weight", r"\1.k_b_proj.weight \1.v_b_proj.weight", "absorb", order=_keys_then_values)
INTERLEAVED = (
    Rule(r"(.*\.self_attn\.q(?:_b)?_proj\.weight)", r"\1", order=_query_rows),
    Rule(r"(.*\.self_attn\.kv_a_proj_with_mqa\.weight)", r"\1", order=_row_rows),
)


def gguf_config(meta: Metadata) -> dict[str, Any]:
    """Keys of these families' files, where keys and values have been cut apart."""
    rotary, own = meta.size("rope.dimension_count"), meta.size("attention.key_length_mla", meta.size("attention.key_length"))
    softening = meta.get("rope.scaling.yarn_log_multiplier", float)
    config: dict[str, Any] = {
        "q_lora_rank": meta.get("attention.q_lora_rank", int, None),
        "kv_lora_rank": meta.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": own - rotary,
        "v_head_dim": meta.size("attention.value_length_mla", meta.size("attention.value_length")),
        "num_key_value_heads": None,
        "partial_rotary_factor": None,
    }
    if softening is not None:  # llama.cpp keeps a tenth of mscale_all_dim, which equals mscale in all released models
        scale = round(10 * meta.real("rope.scaling.yarn_log_multiplier"), 6)
        config["rope_scaling"] = {"mscale": scale, "mscale_all_dim": scale}
    return config


def scores_by_sigmoid(meta: Metadata) -> bool:
    """Whether the router of a file is DeepSeek-V3's, not DeepSeek-V2's."""
    # Early files do not say it; only DeepSeek-V3's router has a bias for the choice.
    return bool(meta.get("expert_gating_func", int, 2 if True in meta.layers_with("exp_probs_b.bias") else 1) == 2)


GGUF_TENSORS = (
    Rule(r"(.*)\.attn_(q|q_b)\.weight", r"\1.self_attn.\2_proj.weight", order=_query_rows),
    Rule(r"(.*)\.attn_kv_a_mqa\.weight", r"\1.self_attn.kv_a_proj_with_mqa.weight", order=_row_rows),
    Rule(r"(.*)\.attn_kv_b\.weight", r"\1.self_attn.k_b_proj.weight \1.self_attn.v_b_proj.weight", "absorb", order=_keys_then_values),
)
