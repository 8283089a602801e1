"""MiMo-V2-Flash: sliding layers have sinks and twice the key/value heads, heads of V are narrower and scaled, DeepSeek-V3's router."""

from typing import Any

from ..blocks.attention import Attention
from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata
from .rope_config import read_layer_ropes

THETAS = {"full_attention": 5000000.0, "sliding_attention": 10000.0}


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "mimo_v2_flash"; without layer_types the first layer and every sixth are full."""
    fields = common.head_fields(reader, eps=1e-5, head_dim=192)
    ropes = read_layer_ropes(reader, reader.integer("max_position_embeddings"), THETAS, partial=0.334)
    fields |= {
        "v_head_dim": reader.integer("v_head_dim", 128), "bias": reader.flag("attention_bias", False),
        "value_scale": reader.number("attention_value_scale", None) or 1.0,
    }  # fmt: skip
    sliding = fields | {
        "num_key_value_heads": 2 * fields["num_key_value_heads"], "window": reader.integer("sliding_window", 129), "sinks": True,
    }  # fmt: skip
    attentions = [
        Attention(**sliding, rope=ropes["sliding_attention"]) if slides else Attention(**fields, rope=ropes["full_attention"])
        for slides in common.sliding_layers(reader, default=lambda i: i > 0 and (i + 1) % 6 != 0)
    ]
    moe, routed = common.deepseek_moe(reader), common.sparse_layers(reader, dense=1)
    return common.build(reader, common.standard_layers(attentions, routed, common.mlp(reader), moe), eps=1e-5)


def _gguf(meta: Metadata) -> dict[str, Any]:
    turning, head_dim = meta.size("rope.dimension_count"), meta.size("attention.key_length")
    partial = {} if turning == int(0.334 * head_dim) else {"partial_rotary_factor": turning / head_dim}
    return {
        "num_key_value_heads": min(meta.by_layer("attention.head_count_kv")),
        "attention_value_scale": meta.real("attention.value_scale", 1.0),
        "rope_parameters": {
            kind: partial | {"rope_theta": meta.real(f"rope.freq_base{suffix}", THETAS[kind])}
            for kind, suffix in (("full_attention", ""), ("sliding_attention", "_swa"))
        },
        "rope_theta": None,
        "partial_rotary_factor": None,
    }


FAMILY = Family("mimo_v2_flash", parse, (Rule(r"(.*\.self_attn)\.attention_sink_bias", r"\1.sinks"),), gguf=(Gguf("mimo2", _gguf),))
