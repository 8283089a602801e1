"""GLM-4.5 and its successors: partly turning heads, biases of q, k and v, DeepSeek-V3's router, shared experts."""

from typing import Any

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "glm4_moe"; an absent partial_rotary_factor means 0.5."""
    fields = common.attention_fields(reader, eps=1e-5, partial=0.5)
    bias, qk_norm = reader.flag("attention_bias", False), "head" if reader.flag("use_qk_norm", False) else None
    attentions = common.attentions(common.no_window(reader), **fields, bias=bias, qk_norm=qk_norm)
    routed = common.sparse_layers(reader, dense=1)
    return common.build(reader, common.standard_layers(attentions, routed, common.mlp(reader), common.deepseek_moe(reader)), eps=1e-5)


def _gguf(meta: Metadata) -> dict[str, Any]:
    return {"use_qk_norm": True in meta.layers_with("attn_q_norm.weight")}


FAMILY = Family("glm4_moe", parse, (common.SHARED_EXPERTS,), gguf=(Gguf("glm4moe", _gguf),))
