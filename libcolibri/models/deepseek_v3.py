"""DeepSeek-V3, R1, V3.1 and Kimi-K2: latent attention, sigmoid router with groups of experts, shared experts."""

from ..config import ModelConfig
from . import common, latent
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "deepseek_v3". Later layers predict further tokens (MTP) and are left out."""
    reader.only("rope_interleave", True)  # the rotary rows are put in order when the model is converted
    reader.only("moe_layer_freq", 1)
    attention, moe = latent.latent_attention(reader), common.deepseek_moe(reader)
    routed = common.sparse_layers(reader, dense=3)
    return common.build(reader, common.standard_layers([attention] * len(routed), routed, common.mlp(reader), moe))


FAMILY = Family(
    "deepseek_v3",
    parse,
    (*latent.INTERLEAVED, latent.EXPANSION, common.SHARED_EXPERTS),
    gguf=(Gguf("deepseek2", latent.gguf_config, latent.GGUF_TENSORS, latent.scores_by_sigmoid),),
)
KIMI_K2 = Family("kimi_k2", parse, FAMILY.tensors)
