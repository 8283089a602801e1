"""Qwen3-MoE: Qwen3's attention, routed experts, no shared expert."""

from typing import Any

from ..blocks.moe import MoE
from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen3_moe"; an absent norm_topk_prob means false."""
    fields, bias = common.attention_fields(reader), reader.flag("attention_bias", False)
    windows, routed = common.qwen_window(reader, rule="all"), common.routed_layers(reader)
    attentions = common.attentions(windows, **fields, qk_norm="head", bias=bias, out_bias=bias)
    mlp, moe = common.mlp(reader), MoE(**common.expert_fields(reader))
    return common.build(reader, [standard_layer(a, moe if r else mlp) for a, r in zip(attentions, routed, strict=True)])


def _gguf(meta: Metadata) -> dict[str, Any]:
    return {"norm_topk_prob": meta.get("expert_weights_norm", bool, True)}  # llama.cpp has it in code, not in the file


FAMILY = Family("qwen3_moe", parse, gguf=(Gguf("qwen3moe", _gguf),))
