"""Mixtral: every layer routed, the chosen experts' weights always divided by their sum."""

from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "mixtral"; its intermediate_size is the width of one expert."""
    fields = common.base_fields(reader, eps=1e-5, theta=1e6)
    fields |= common.every_layer_window(reader, fields["num_hidden_layers"], default=None)
    reader.only("norm_topk_prob", True)
    return common.build(
        reader,
        **fields,
        num_experts=reader.integer(reader.either("num_experts", "num_local_experts")),
        num_experts_per_tok=reader.integer("num_experts_per_tok", 2),
        moe_intermediate_size=fields["intermediate_size"],
        norm_topk_prob=True,
        moe_layers=(True,) * fields["num_hidden_layers"],
    )
