"""Hy3: Qwen3's attention, DeepSeek-V3's router without groups under names of its own, one shared expert."""

from typing import Any

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "hy_v3"."""
    bias = reader.flag("attention_bias", False)
    reader.only("mlp_bias", False)
    reader.flag("enable_moe_fp32_combine", True)  # the sum over experts is float32 here in any case
    moe = common.deepseek_moe(reader, num_experts="num_experts", shared="num_shared_experts", scale=reader.number("router_scaling_factor"))
    fields = common.attention_fields(reader, eps=1e-5, theta=11158840.0)
    attentions = common.attentions(common.no_window(reader), **fields, qk_norm="head", bias=bias, out_bias=bias)
    routed = common.sparse_layers(reader, dense=1)
    return common.build(reader, common.standard_layers(attentions, routed, common.mlp(reader), moe), eps=1e-5)


def _gguf(meta: Metadata) -> dict[str, Any]:
    shared = meta.size("expert_shared_feed_forward_length") // meta.size("expert_feed_forward_length")
    return {"router_scaling_factor": meta.real("expert_weights_scale"), "num_shared_experts": shared}


FAMILY = Family(
    "hy_v3",
    parse,
    (
        common.SHARED_EXPERTS,
        Rule(r"(.*\.mlp)\.router\.gate\.weight", r"\1.gate.weight"),
        Rule(r"(.*\.mlp)\.expert_bias", r"\1.gate.e_score_correction_bias"),
    ),
    gguf=(Gguf("hy_v3", _gguf),),
)
