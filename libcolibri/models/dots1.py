"""dots.llm1: Qwen3's attention with windows in late layers, DeepSeek-V3's router, shared experts."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "dots1"; without layer_types the layers from max_window_layers up slide."""
    bias, late = reader.flag("attention_bias", False), reader.integer("max_window_layers", 62, least=0)
    windows = common.layer_windows(reader, default=lambda i: i >= late)
    moe, fields = common.deepseek_moe(reader, normalise=reader.flag("norm_topk_prob", False)), common.attention_fields(reader)
    attentions = common.attentions(windows, **fields, qk_norm="head", bias=bias, out_bias=bias)
    return common.build(reader, common.standard_layers(attentions, common.sparse_layers(reader, dense=0), common.mlp(reader), moe))


FAMILY = Family("dots1", parse, (common.SHARED_EXPERTS,), gguf=(Gguf("dots1"),))
