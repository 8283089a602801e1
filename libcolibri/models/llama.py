"""Llama: grouped-query attention, SwiGLU MLP, biases where the config says so."""

from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, is_routed


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "llama"."""
    fields, bias = common.attention_fields(reader), reader.flag("attention_bias", False)
    reader.only("mlp_bias", False)
    mlp = common.mlp(reader)
    attentions = common.attentions(common.no_window(reader), **fields, bias=bias, out_bias=bias)
    return common.build(reader, [standard_layer(attention, mlp) for attention in attentions])


FAMILY = Family("llama", parse, gguf=(Gguf("llama", tensors=common.GGUF_LLAMA, chosen=lambda meta: not is_routed(meta)),))
