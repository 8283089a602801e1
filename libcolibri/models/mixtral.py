"""Mixtral: every layer routed, the chosen experts' weights always divided by their sum."""

from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, is_routed


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "mixtral"; its intermediate_size is the width of one expert."""
    windows = common.every_layer_window(reader, default=None)
    reader.only("norm_topk_prob", True)
    reader.only("hidden_act", "silu", "swish")
    moe = MoE(
        num_experts=reader.integer(reader.either("num_experts", "num_local_experts")),
        num_experts_per_tok=reader.integer("num_experts_per_tok", 2),
        moe_intermediate_size=reader.integer("intermediate_size"),
        router=Router(normalise=True),
    )
    attentions = common.attentions(windows, **common.attention_fields(reader, eps=1e-5, theta=1e6))
    return common.build(reader, [standard_layer(attention, moe) for attention in attentions], eps=1e-5)


FAMILY = Family("mixtral", parse, common.BLOCK_SPARSE_MOE, gguf=(Gguf("llama", tensors=common.GGUF_LLAMA, chosen=is_routed),))
