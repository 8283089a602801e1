"""Phi-3.5-MoE: LayerNorms, biases in attention and head, longrope, SparseMixer's router."""

from dataclasses import replace
from typing import Any

from ..blocks.base import NormConfig
from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, Metadata, long_rope


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "phimoe"."""
    common.ignore(reader, "auto_map", "input_jitter_noise")  # jitter of inputs is for training
    reader.only("hidden_act", "silu")
    bias, head_bias = reader.flag("attention_bias", False), reader.flag("lm_head_bias", False)
    windows = common.every_layer_window(reader, default=None)
    fields = common.attention_fields(reader, eps=1e-5, theta=1e6)
    # transformers, the reference, turns by the short factors at every length; only the size of cos and sin changes with it.
    fields["rope"] = replace(fields["rope"], long_factor=fields["rope"].short_factor)
    attentions = common.attentions(windows, **fields, bias=bias, out_bias=bias)
    moe = MoE(
        num_experts=reader.integer(reader.either("num_experts", "num_local_experts")),
        num_experts_per_tok=reader.integer("num_experts_per_tok", 2),
        moe_intermediate_size=reader.integer("intermediate_size"),
        router=Router(score="sparsemixer", jitter=reader.number("router_jitter_noise", 0.01)),
    )
    norm = NormConfig(common.norm_eps(reader, 1e-5), "layer")
    return common.build(reader, [standard_layer(attention, moe) for attention in attentions], norm=norm, lm_head_bias=head_bias)


def _gguf(meta: Metadata) -> dict[str, Any]:
    scaling, width = long_rope(meta), meta.size("feed_forward_length")
    own = {"intermediate_size": width, "lm_head_bias": meta.shape("output.bias") is not None}
    return own | ({} if scaling is None else {"rope_scaling": scaling})


FAMILY = Family("phimoe", parse, common.BLOCK_SPARSE_MOE, gguf=(Gguf("phimoe", _gguf),))
