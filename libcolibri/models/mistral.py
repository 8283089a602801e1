"""Mistral: Llama without biases, with one sliding window for all layers."""

from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "mistral". An absent sliding_window means 4096 (the first release's), null means none."""
    attentions = common.attentions(common.every_layer_window(reader, default=4096), **common.attention_fields(reader))
    mlp = common.mlp(reader)
    return common.build(reader, [standard_layer(attention, mlp) for attention in attentions])


FAMILY = Family("mistral", parse)
