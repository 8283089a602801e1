"""Qwen3: RMSNorm over each head of q and k before the rotation."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen3". An absent head_dim means 128, whatever the hidden size."""
    fields = common.base_fields(reader, head_dim=128)
    bias = reader.flag("attention_bias", False)
    fields |= common.qwen_window(reader, fields["num_hidden_layers"], rule="late")
    return common.build(reader, **fields, qk_norm="head", attention_bias=bias, attention_out_bias=bias)
