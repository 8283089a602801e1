"""Granite: llama's layers with multipliers of embeddings, attention scores, blocks' outputs and logits."""

from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "granite"."""
    mlp = common.mlp(reader, bias=reader.flag("mlp_bias", False))
    layers = [standard_layer(attention, mlp) for attention in common.granite_attentions(reader)]
    return common.build(reader, layers, **common.granite_multipliers(reader))


FAMILY = Family("granite", parse, gguf=(Gguf("granite", tensors=common.GGUF_LLAMA),))
