"""OLMo 2: norms after the blocks instead of before them, q and k normed over all heads."""

from ..config import LayerConfig, ModelConfig, Sublayer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "olmo2"."""
    bias, mlp = reader.flag("attention_bias", False), common.mlp(reader)
    fields = common.attention_fields(reader, eps=1e-5)
    layers = [
        LayerConfig(
            (
                Sublayer(attention, output_norm="post_attention_layernorm"),
                Sublayer(mlp, output_norm="post_feedforward_layernorm"),
            )
        )
        for attention in common.attentions(common.no_window(reader), **fields, qk_norm="full", bias=bias, out_bias=bias)
    ]
    return common.build(reader, layers, eps=1e-5)


FAMILY = Family("olmo2", parse, gguf=(Gguf("olmo2"),))
