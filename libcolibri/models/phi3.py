"""Phi-3 and Phi-4-mini: Llama with fused projections and LongRoPE."""

from typing import Any

from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata, long_rope


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "phi3"."""
    mlp = common.mlp(reader)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.only(key, False)
    reader.value("auto_map", None)  # names the authors' own code, which this stands in for
    attentions = common.attentions(
        common.every_layer_window(reader, default=None), **common.attention_fields(reader, eps=1e-5, partial=1.0)
    )
    return common.build(reader, [standard_layer(attention, mlp) for attention in attentions], eps=1e-5)


GGUF_TENSORS = (
    Rule(r"(.*)\.attn_qkv\.weight", r"\1.self_attn.q_proj.weight \1.self_attn.k_proj.weight \1.self_attn.v_proj.weight", "split"),
    Rule(r"(.*)\.ffn_up\.weight", r"\1.mlp.gate_proj.weight \1.mlp.up_proj.weight", "halves"),
)


def _gguf(meta: Metadata) -> dict[str, Any]:
    scaling = long_rope(meta)
    return {} if scaling is None else {"rope_scaling": scaling}


FAMILY = Family(
    "phi3",
    parse,
    (
        Rule(r"(.*\.self_attn)\.qkv_proj\.weight", r"\1.q_proj.weight \1.k_proj.weight \1.v_proj.weight", "split"),
        Rule(r"(.*\.mlp)\.gate_up_proj\.weight", r"\1.gate_proj.weight \1.up_proj.weight", "halves"),
    ),
    gguf=(Gguf("phi3", _gguf, GGUF_TENSORS),),
)
