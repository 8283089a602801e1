"""Granite MoE: Granite's attention and multipliers, experts weighed by a softmax over the chosen ones."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, has_shared_width


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "granitemoe"."""
    return common.granite_moe(reader, shared=None)


FAMILY = Family(
    "granitemoe",
    parse,
    common.GRANITE_MOE,
    gguf=(Gguf("granitemoe", tensors=common.GGUF_LLAMA, chosen=lambda meta: not has_shared_width(meta)),),
)
