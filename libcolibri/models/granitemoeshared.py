"""Granite MoE with a shared expert."""

from typing import Any

from ..blocks.mlp import Mlp
from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, Metadata, has_shared_width


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "granitemoeshared"."""
    width = reader.integer("shared_intermediate_size", 0, least=0)
    return common.granite_moe(reader, shared=Mlp(width, "mlp.shared_expert.") if width else None)


def _gguf(meta: Metadata) -> dict[str, Any]:
    return {"shared_intermediate_size": meta.size("expert_shared_feed_forward_length")}


FAMILY = Family(
    "granitemoeshared",
    parse,
    common.GRANITE_MOE,
    gguf=(Gguf("granitemoe", _gguf, common.GGUF_LLAMA, has_shared_width),),
)
