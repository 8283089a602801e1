"""Laguna: heads by layer, a softplus gate on attention's output, sigmoid router with a bias, one shared expert."""

from typing import Any

from ..blocks.attention import Attention
from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata, layer_ropes, sections, window_types
from .rope_config import read_layer_ropes

THETAS = {"full_attention": 500000.0, "sliding_attention": 10000.0}
GATES = {True: "softplus_head", "per-head": "softplus_head", "per-element": "softplus"}


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "laguna"; without layer_types all layers are full, without mlp_layer_types only the first is dense."""
    reader.only("gating", *GATES)
    reader.only("moe_apply_router_weight_on_input", False)
    fields, count = common.head_fields(reader), common.num_layers(reader)
    fields |= {"bias": (bias := reader.flag("attention_bias", False)), "out_bias": bias, "gate": GATES[reader.value("gating", True)]}
    ropes = read_layer_ropes(reader, reader.integer("max_position_embeddings"), THETAS, partial=1.0)
    heads = reader.value("num_attention_heads_per_layer", None) or [fields["num_attention_heads"]] * count
    if not isinstance(heads, list) or len(heads) != count or not all(type(n) is int and n > 0 for n in heads):
        raise reader.refusal("num_attention_heads_per_layer", heads, f"{count} integers from 1 up")
    attentions = [
        Attention(
            **(fields | {"num_attention_heads": n}), rope=ropes["sliding_attention" if window else "full_attention"], window=window,
            qk_norm="head",
        )
        for n, window in zip(heads, common.layer_windows(reader, default=lambda i: False), strict=True)
    ]  # fmt: skip
    router = Router(
        score="sigmoid", choice_bias=True, normalise=True, scale=reader.number("moe_routed_scaling_factor", 1.0),
        softcap=reader.number("moe_router_logit_softcapping", 0.0),
    )  # fmt: skip
    moe = MoE(
        num_experts=reader.integer("num_experts"),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        moe_intermediate_size=reader.integer("moe_intermediate_size"),
        router=router,
        shared=common.mlp(reader, "shared_expert_intermediate_size", "mlp.shared_expert."),
    )
    return common.build(reader, common.standard_layers(attentions, common.sparse_layers(reader, dense=1), common.mlp(reader), moe))


def _gguf(meta: Metadata) -> dict[str, Any]:
    heads, gate = meta.by_layer("attention.head_count"), meta.shape("blk.0.attn_gate.weight")
    return layer_ropes(meta, THETAS) | {
        "num_attention_heads_per_layer": heads,
        "layer_types": window_types(meta, 4, full_first=True) if meta.get("attention.sliding_window", int, 0) else None,
        "gating": "per-head" if gate is not None and gate[0] == heads[0] else "per-element",
        "moe_routed_scaling_factor": meta.real("expert_weights_scale", 1.0),
    }


FAMILY = Family(
    "laguna",
    parse,
    (common.SHARED_EXPERTS, Rule(r"(.*\.mlp)\.experts\.e_score_correction_bias", r"\1.gate.e_score_correction_bias")),
    gguf=(Gguf("laguna", _gguf, sections(("attn_gate", "self_attn.g_proj"))),),
)
