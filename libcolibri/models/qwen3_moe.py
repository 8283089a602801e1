"""Qwen3-MoE: Qwen3's attention, routed experts, no shared expert."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen3_moe"; an absent norm_topk_prob means false."""
    fields = common.base_fields(reader)
    bias = reader.flag("attention_bias", False)
    fields |= common.qwen_window(reader, fields["num_hidden_layers"], rule="all")
    fields |= common.routed_fields(reader, fields["num_hidden_layers"])
    return common.build(reader, **fields, qk_norm="head", attention_bias=bias, attention_out_bias=bias)
