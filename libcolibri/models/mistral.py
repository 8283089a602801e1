"""Mistral: Llama without biases, with one sliding window for all layers."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "mistral". An absent sliding_window means 4096 (the first release's), null means none."""
    fields = common.base_fields(reader)
    fields |= common.every_layer_window(reader, fields["num_hidden_layers"], default=4096)
    return common.build(reader, **fields)
