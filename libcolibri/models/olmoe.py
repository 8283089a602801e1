"""OLMoE: RMSNorm over the full width of q and of k, optional clamping, every layer routed."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "olmoe"; its intermediate_size is the width of one expert."""
    fields = common.base_fields(reader, eps=1e-5)
    bias = reader.flag("attention_bias", False)
    fields |= common.no_window(reader, fields["num_hidden_layers"])
    return common.build(
        reader,
        **fields,
        qk_norm="full",
        attention_bias=bias,
        attention_out_bias=bias,
        clip_qkv=reader.number("clip_qkv", None),
        num_experts=reader.integer(reader.either("num_local_experts", "num_experts")),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        moe_intermediate_size=fields["intermediate_size"],
        norm_topk_prob=reader.flag("norm_topk_prob", False),
        moe_layers=(True,) * fields["num_hidden_layers"],
    )
