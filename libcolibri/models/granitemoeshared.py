"""Granite MoE with a shared expert."""

from ..blocks.mlp import Mlp
from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "granitemoeshared"."""
    width = reader.integer("shared_intermediate_size", 0, least=0)
    return common.granite_moe(reader, shared=Mlp(width, "mlp.shared_expert.") if width else None)


FAMILY = Family("granitemoeshared", parse, common.GRANITE_MOE)
