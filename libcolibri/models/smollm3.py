"""SmolLM3: Llama whose every fourth layer does not encode positions."""

from dataclasses import replace

from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "smollm3"."""
    fields, bias = common.attention_fields(reader, theta=2e6), reader.flag("attention_bias", False)
    reader.only("mlp_bias", False)
    reader.only("use_sliding_window", False)
    reader.value("sliding_window", None)  # counts with use_sliding_window only
    attentions = common.attentions(common.no_window(reader), **fields, bias=bias, out_bias=bias)
    ropes = common.ropes_by_layer(reader, fields["rope"])
    mlp = common.mlp(reader)
    layers = [standard_layer(replace(attention, rope=rope), mlp) for attention, rope in zip(attentions, ropes, strict=True)]
    return common.build(reader, layers, tied=True)


FAMILY = Family("smollm3", parse, gguf=(Gguf("smollm3", tensors=common.GGUF_LLAMA),))
