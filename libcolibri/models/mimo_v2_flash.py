"""MiMo-V2-Flash: sliding layers have sinks and twice the key/value heads, heads of V are narrower and scaled, DeepSeek-V3's router."""

from typing import Any

from ..blocks.attention import Attention
from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata, layer_ropes
from .rope_config import read_layer_ropes

THETAS = {"full_attention": 5000000.0, "sliding_attention": 10000.0}


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "mimo_v2_flash"; without layer_types or the released hybrid_layer_pattern the first layer and every
    sixth are full.
    """
    eps = reader.number("layernorm_epsilon", 1e-5)
    fields = common.head_fields(reader, eps=eps, head_dim=192)
    ropes = read_layer_ropes(reader, reader.integer("max_position_embeddings"), THETAS, partial=0.334, local_theta="swa_rope_theta")
    fields |= {
        "v_head_dim": reader.integer("v_head_dim", 128), "bias": reader.flag("attention_bias", False),
        "value_scale": reader.number("attention_value_scale", None) or 1.0,
    }  # fmt: skip
    sliding = fields | {"num_key_value_heads": 2 * fields["num_key_value_heads"], "window": _window(reader), "sinks": True}
    _check_sliding_keys(reader, sliding)
    pattern = _flags(reader, "hybrid_layer_pattern") or [i > 0 and (i + 1) % 6 != 0 for i in range(common.num_layers(reader))]
    attentions = [
        Attention(**sliding, rope=ropes["sliding_attention"]) if slides else Attention(**fields, rope=ropes["full_attention"])
        for slides in common.sliding_layers(reader, default=lambda i: pattern[i])
    ]
    moe, routed = common.deepseek_moe(reader), _flags(reader, "moe_layer_freq") or common.sparse_layers(reader, dense=1)
    return common.build(reader, common.standard_layers(attentions, routed, common.mlp(reader), moe), eps=eps)


def _window(reader: ConfigReader) -> int:
    """Released configs count the positions before a token, `sliding_window` counts the token too."""
    window, before = reader.integer("sliding_window", 129), reader.integer("sliding_window_size", None)
    return window if before is None else before + 1


def _check_sliding_keys(reader: ConfigReader, sliding: dict[str, Any]) -> None:
    """What released configs say about sliding layers must be what is computed."""
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"):
        reader.only(f"swa_{key}", sliding[key])
    reader.only("add_swa_attention_sink_bias", True)
    reader.only("add_full_attention_sink_bias", False)
    common.ignore(reader, "auto_map", "attention_chunk_size", "hybrid_block_size")


def _flags(reader: ConfigReader, key: str) -> list[bool]:
    """0 or 1 for each layer; empty where the key is absent."""
    found, count = reader.value(key, None) or [], common.num_layers(reader)
    if found and (not isinstance(found, list) or len(found) != count or any(flag not in (0, 1) for flag in found)):
        raise reader.refusal(key, found, f"{count} entries, each 0 or 1")
    return [flag == 1 for flag in found]


def _gguf(meta: Metadata) -> dict[str, Any]:
    return layer_ropes(meta, THETAS) | {
        "num_key_value_heads": min(meta.by_layer("attention.head_count_kv")),
        "attention_value_scale": meta.real("attention.value_scale", 1.0),
    }


FAMILY = Family("mimo_v2_flash", parse, (Rule(r"(.*\.self_attn)\.attention_sink_bias", r"\1.sinks"),), gguf=(Gguf("mimo2", _gguf),))
