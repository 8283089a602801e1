"""Hunyuan-A13B: q and k normed after the rotation, softmax router, one shared MLP."""

from typing import Any

from ..blocks.mlp import Mlp
from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata

# Of the released configs: training, pictures, and mechanisms that the model does not use.
UNUSED = (
    "add_classification_head", "auto_map", "class_num", "dense_list", "eod_token_id", "mask_init_id", "moe_drop_tokens",
    "moe_layer_num_skipped", "moe_random_routing_dropped_token", "pool_type", "sep_token_id", "text_end_id", "text_start_id",
    "cla_share_factor", "use_mixed_mlp_moe", "num_shared_expert", "im_end_id", "im_newline_id", "im_start_id",
)  # fmt: skip


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "hunyuan_v1_moe"; numbers per layer must be equal in all of them."""
    common.ignore(reader, *UNUSED)
    reader.only("hidden_act", "silu")
    reader.only("norm_type", "rms")
    for key in ("use_qk_norm", "use_rotary_pos_emb"):
        reader.only(key, True)
    for key in ("use_cla", "position_embedding_xdrope", "group_limited_greedy", "mlp_bias", "use_mla"):
        reader.only(key, False)
    width = reader.integer("intermediate_size")
    reader.only("moe_intermediate_size", width, [width] * common.num_layers(reader))
    moe = MoE(
        num_experts=reader.integer(reader.either("num_local_experts", "num_experts")),
        num_experts_per_tok=_same_in_all_layers(reader, "moe_topk"),
        moe_intermediate_size=width,
        router=Router(normalise=True),
        shared=Mlp(width, "mlp.shared_expert."),
    )
    bias, fields = reader.flag("attention_bias", False), common.attention_fields(reader, eps=1e-5)
    attentions = common.attentions(common.no_window(reader), **fields, bias=bias, out_bias=bias, qk_norm="head_last")
    return common.build(reader, [standard_layer(attention, moe) for attention in attentions], eps=1e-5)


def _same_in_all_layers(reader: ConfigReader, key: str) -> int:
    found: Any = reader.value(key)
    values = found if isinstance(found, list) else [found]
    if len(set(map(repr, values))) != 1 or isinstance(values[0], bool) or not isinstance(values[0], int):
        raise reader.refusal(key, found, "an integer, the same in all layers")
    return values[0]


def _gguf(meta: Metadata) -> dict[str, Any]:
    return {"moe_topk": meta.size("expert_used_count"), "intermediate_size": meta.size("expert_feed_forward_length")}


FAMILY = Family(
    "hunyuan_v1_moe",
    parse,
    (
        common.SHARED_EXPERTS,
        Rule(r"(.*\.mlp\.gate)\.wg\.weight", r"\1.weight"),
        Rule(r"(.*\.self_attn)\.query_layernorm\.weight", r"\1.q_norm.weight"),
        Rule(r"(.*\.self_attn)\.key_layernorm\.weight", r"\1.k_norm.weight"),
    ),
    gguf=(Gguf("hunyuan-moe", _gguf),),
)
