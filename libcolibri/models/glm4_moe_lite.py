"""GLM-4.7-Flash: DeepSeek-V3's layers in another size."""

from ..config import ModelConfig
from . import common, latent
from .config_reader import ConfigReader
from .family import Family


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "glm4_moe_lite"."""
    reader.only("rope_interleave", True)
    reader.only("partial_rotary_factor", 1.0, None)
    attention, moe = latent.latent_attention(reader), common.deepseek_moe(reader)
    routed = common.sparse_layers(reader, dense=1)
    return common.build(reader, common.standard_layers([attention] * len(routed), routed, common.mlp(reader), moe), eps=1e-5)


FAMILY = Family("glm4_moe_lite", parse, (*latent.INTERLEAVED, latent.EXPANSION, common.SHARED_EXPERTS))
