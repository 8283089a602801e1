"""Qwen1.5-MoE and Qwen2-MoE: routed experts beside one shared expert behind a sigmoid gate."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen2_moe"; q, k and v have biases unless qkv_bias is false."""
    fields = common.base_fields(reader)
    fields |= common.qwen_window(reader, fields["num_hidden_layers"], rule="even")
    fields |= common.routed_fields(reader, fields["num_hidden_layers"])
    return common.build(
        reader,
        **fields,
        attention_bias=reader.flag("qkv_bias", True),
        shared_expert_intermediate_size=reader.integer("shared_expert_intermediate_size"),
    )
