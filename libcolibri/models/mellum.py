"""Mellum 2: Qwen3's attention with windows and a rotary embedding for each layer type, softmax router."""

from typing import Any

from ..blocks.attention import Attention
from ..blocks.moe import MoE
from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, Metadata, layer_ropes, window_types
from .rope_config import read_layer_ropes

THETAS = {"full_attention": 500000.0, "sliding_attention": 10000.0}


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "mellum"; without layer_types all layers are full, without mlp_layer_types all have experts."""
    common.ignore(reader, "mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers")
    bias, fields = reader.flag("attention_bias", False), common.head_fields(reader)
    ropes = read_layer_ropes(reader, reader.integer("max_position_embeddings"), THETAS)
    fields |= {"qk_norm": "head", "bias": bias, "out_bias": bias}
    attentions = [
        Attention(**fields, rope=ropes["sliding_attention" if window else "full_attention"], window=window)
        for window in common.layer_windows(reader, default=lambda i: False)
    ]
    moe, routed = MoE(**common.expert_fields(reader, normalise=True)), common.sparse_layers(reader, dense=0)
    return common.build(reader, common.standard_layers(attentions, routed, common.mlp(reader), moe))


def _gguf(meta: Metadata) -> dict[str, Any]:
    types = window_types(meta, 4) if meta.get("attention.sliding_window", int, 0) else None
    return layer_ropes(meta, THETAS) | {"layer_types": types}


FAMILY = Family("mellum", parse, gguf=(Gguf("mellum", _gguf),))
