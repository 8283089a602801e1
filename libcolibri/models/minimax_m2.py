"""MiniMax-M2: q and k normed over all heads, partly turning heads, sigmoid router with a bias, no shared expert."""

from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "minimax_m2"; released configs say rotary_dim instead of partial_rotary_factor."""
    common.ignore(reader, "auto_map", "use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode")
    for part in ("full_attention", "linear_attention", "mlp"):
        for name in ("alpha", "beta"):
            reader.only(f"layernorm_{part}_{name}", 1.0)
    reader.only("qk_norm_type", "per_layer")
    for key in ("use_qk_norm", "use_routing_bias"):
        reader.only(key, True)
    for key in ("shared_intermediate_size", "n_group"):
        reader.only(key, 0, None)
    reader.only("attn_type_list", [1] * common.num_layers(reader), None)
    moe = common.deepseek_moe(reader, num_experts="num_local_experts", width="intermediate_size", eps=0.0)
    rotary, dim = reader.integer("rotary_dim", None), reader.integer("head_dim")
    fields = common.attention_fields(reader, theta=5e6, partial=rotary / dim if rotary else 1.0)
    attentions = common.attentions(common.no_window(reader), **fields, qk_norm="full")
    return common.build(reader, [standard_layer(attention, moe) for attention in attentions])


FAMILY = Family(
    "minimax_m2",
    parse,
    (
        *common.BLOCK_SPARSE_MOE,
        Rule(r"(.*)\.block_sparse_moe\.e_score_correction_bias", r"\1.mlp.gate.e_score_correction_bias"),
    ),
    gguf=(Gguf("minimax-m2"),),
)
