"""Qwen2 and Qwen2.5: biases on q, k and v, none on o."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen2"."""
    fields = common.base_fields(reader)
    reader.only("attention_bias", True)
    fields |= common.qwen_window(reader, fields["num_hidden_layers"], rule="late")
    return common.build(reader, **fields, attention_bias=True)
