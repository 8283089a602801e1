"""Qwen2 and Qwen2.5: biases on q, k and v, none on o."""

from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen2"."""
    reader.only("attention_bias", True)
    attentions = common.attentions(common.qwen_window(reader, rule="late"), **common.attention_fields(reader), bias=True)
    mlp = common.mlp(reader)
    return common.build(reader, [standard_layer(attention, mlp) for attention in attentions])


FAMILY = Family("qwen2", parse, gguf=(Gguf("qwen2"),))
