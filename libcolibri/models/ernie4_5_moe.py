"""ERNIE 4.5 MoE: softmax router with a bias for the choice, shared experts, neighbouring columns of a head turn together."""

from typing import Any

from ..blocks.mlp import Mlp
from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "ernie4_5_moe"; layers from moe_layer_start_index to moe_layer_end_index have experts."""
    common.ignore(reader, "auto_map", "moe_capacity", "moe_gate", "moe_use_aux_free", "compression_ratio")
    reader.only("use_bias", False)
    count, width = common.num_layers(reader), reader.integer("moe_intermediate_size")
    shared = reader.integer("moe_num_shared_experts", 2, least=0)
    first, interval = reader.integer("moe_layer_start_index", 1, least=0), reader.integer("moe_layer_interval", 1)
    last = reader.integer("moe_layer_end_index", -1, least=-1)
    routed = [(i + 1) % interval == 0 and first <= i <= (count if last == -1 else last) for i in range(count)]
    router = Router(choice_bias=True, normalise=True, least=reader.number("moe_norm_min", 1e-12))
    moe = MoE(
        num_experts=reader.integer(reader.either("num_experts", "moe_num_experts")),
        num_experts_per_tok=reader.integer(reader.either("num_experts_per_tok", "moe_k")),
        moe_intermediate_size=width,
        router=router,
        shared=Mlp(width * shared, "mlp.shared_expert.") if shared else None,
    )
    attentions = common.attentions(common.no_window(reader), **common.attention_fields(reader, eps=1e-5, theta=500000.0))
    layers = common.standard_layers(attentions, routed, common.mlp(reader), moe)
    return common.build(reader, layers, eps=1e-5, tied=True)


def _gguf(meta: Metadata) -> dict[str, Any]:
    return {
        "moe_num_shared_experts": meta.size("expert_shared_count"),
        "moe_layer_start_index": meta.get("leading_dense_block_count", int, 0),
        "moe_layer_interval": meta.size("interleave_moe_layer_step", 1),
    }


FAMILY = Family(
    "ernie4_5_moe",
    parse,
    (
        common.SHARED_EXPERTS,
        *common.INTERLEAVED_ROPE,
        Rule(r"(.*\.mlp)\.moe_statics\.e_score_correction_bias", r"\1.gate.e_score_correction_bias", "flatten"),
    ),
    gguf=(Gguf("ernie4_5-moe", _gguf, common.GGUF_INTERLEAVED),),
)
