"""Llama: grouped-query attention, SwiGLU MLP, biases where the config says so."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "llama"."""
    fields = common.base_fields(reader)
    bias = reader.flag("attention_bias", False)
    reader.only("mlp_bias", False)
    fields |= common.no_window(reader, fields["num_hidden_layers"])
    return common.build(reader, **fields, attention_bias=bias, attention_out_bias=bias)
