"""dots.llm1: Qwen3's attention with windows in late layers, DeepSeek-V3's router, shared experts."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "dots1"; layers from max_window_layers up slide unless sliding_window is null."""
    bias, count = reader.flag("attention_bias", False), common.num_layers(reader)
    window = reader.integer("sliding_window", None if "sliding_window" in reader.raw else 4096)
    late = reader.integer("max_window_layers", 62, least=0)
    types = reader.value("layer_types", None)
    sliding = [window is not None and i >= late for i in range(count)] if types is None else common.sliding_flags(reader, types)
    moe, fields = common.deepseek_moe(reader, normalise=reader.flag("norm_topk_prob", False)), common.attention_fields(reader)
    windows = [window if slides else None for slides in sliding]
    attentions = common.attentions(windows, **fields, qk_norm="head", bias=bias, out_bias=bias)
    return common.build(reader, common.standard_layers(attentions, common.sparse_layers(reader, dense=0), common.mlp(reader), moe))


FAMILY = Family("dots1", parse, (common.SHARED_EXPERTS,))
