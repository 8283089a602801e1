"""OLMoE: RMSNorm over the full width of q and of k, optional clamping, every layer routed."""

from typing import Any

from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "olmoe"; its intermediate_size is the width of one expert."""
    bias = reader.flag("attention_bias", False)
    reader.only("hidden_act", "silu", "swish")
    moe = MoE(
        num_experts=reader.integer(reader.either("num_local_experts", "num_experts")),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        moe_intermediate_size=reader.integer("intermediate_size"),
        router=Router(normalise=reader.flag("norm_topk_prob", False)),
    )
    attentions = common.attentions(
        common.no_window(reader), **common.attention_fields(reader, eps=1e-5), qk_norm="full", bias=bias, out_bias=bias,
        clip_qkv=reader.number("clip_qkv", None),
    )  # fmt: skip
    return common.build(reader, [standard_layer(attention, moe) for attention in attentions], eps=1e-5)


def _gguf(meta: Metadata) -> dict[str, Any]:
    clamp = meta.get("attention.clamp_kqv", float, 0.0)
    return {"norm_topk_prob": False, "intermediate_size": meta.size("expert_feed_forward_length", meta.size("feed_forward_length"))} | (
        {"clip_qkv": clamp} if clamp else {}
    )


FAMILY = Family("olmoe", parse, gguf=(Gguf("olmoe", _gguf),))
