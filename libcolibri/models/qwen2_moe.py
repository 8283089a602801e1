"""Qwen1.5-MoE and Qwen2-MoE: routed experts beside one shared expert behind a sigmoid gate."""

from typing import Any

from ..blocks.moe import MoE
from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen2_moe"; q, k and v have biases unless qkv_bias is false."""
    windows, routed = common.qwen_window(reader, rule="even"), common.routed_layers(reader)
    attentions = common.attentions(windows, **common.attention_fields(reader), bias=reader.flag("qkv_bias", True))
    shared = common.mlp(reader, "shared_expert_intermediate_size", "mlp.shared_expert.")
    mlp, moe = common.mlp(reader), MoE(**common.expert_fields(reader), shared=shared, shared_gate=True)
    return common.build(reader, [standard_layer(a, moe if r else mlp) for a, r in zip(attentions, routed, strict=True)])


def _gguf(meta: Metadata) -> dict[str, Any]:
    routed = meta.layers_with("ffn_gate_inp.weight")
    return {"norm_topk_prob": False, "mlp_only_layers": [i for i, there in enumerate(routed) if not there]}


FAMILY = Family("qwen2_moe", parse, gguf=(Gguf("qwen2moe", _gguf),))
