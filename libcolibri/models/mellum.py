"""Mellum 2: Qwen3's attention with windows and a rotary embedding for each layer type, softmax router."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "mellum"."""
    common.ignore(reader, "mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers")
    bias, types = reader.flag("attention_bias", False), common.layer_types(reader, default=lambda i: "full_attention")
    fields, windows = common.attention_fields(reader, rope=False), common.layer_windows(reader, default=lambda i: False)
    ropes = common.layer_ropes(reader, {"full_attention": 500000.0, "sliding_attention": 10000.0})
    attentions = [
        Attention(**fields, rope=ropes[kind], window=window, qk_norm="head", bias=bias, out_bias=bias)
        for kind, window in zip(types, windows, strict=True)
    ]
    moe = MoE(**common.expert_fields(reader, normalise=True))
    return common.build(reader, common.standard_layers(attentions, common.sparse_layers(reader, dense=0), common.mlp(reader), moe))


FAMILY = Family("mellum", parse)
