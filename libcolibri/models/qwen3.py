"""Qwen3: RMSNorm over each head of q and k before the rotation."""

from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen3". An absent head_dim means 128, whatever the hidden size."""
    fields, bias = common.attention_fields(reader, head_dim=128), reader.flag("attention_bias", False)
    windows = common.qwen_window(reader, rule="late")
    attentions = common.attentions(windows, **fields, qk_norm="head", bias=bias, out_bias=bias)
    mlp = common.mlp(reader)
    return common.build(reader, [standard_layer(attention, mlp) for attention in attentions])


FAMILY = Family("qwen3", parse, gguf=(Gguf("qwen3"),))
