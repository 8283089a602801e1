"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without positions in the others, DeepSeek-V3's router."""

from typing import Any

from ..blocks.kda import KimiDeltaAttention
from ..config import ModelConfig
from . import common, latent
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata, sections


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "kimi_linear"; released configs describe the delta layers in linear_attn_config, counting from 1."""
    reader = reader.with_defaults(
        max_position_embeddings=reader.integer("model_max_length"),
        num_experts_per_tok=reader.integer("num_experts_per_token"),
        n_group=reader.integer("num_expert_group", 1),
        norm_topk_prob=reader.flag("moe_renormalize", True),
        **_delta_keys(reader),
    )
    common.ignore(reader, "rope_theta", "rope_scaling", "rope_parameters", "use_grouped_topk")  # nothing turns
    reader.only("mla_use_nope", True)
    reader.only("moe_layer_freq", 1)
    reader.only("moe_router_activation_func", "sigmoid")
    delta = KimiDeltaAttention(
        num_heads=reader.integer("linear_num_heads"),
        head_dim=reader.integer("linear_head_dim"),
        taps=reader.integer("linear_conv_kernel_dim"),
        eps=common.norm_eps(reader),
    )
    attention = latent.latent_attention(reader, rotated=False)
    mixers = [delta if kind == "linear_attention" else attention for kind in _layer_types(reader)]
    moe = common.deepseek_moe(reader, num_experts="num_experts", shared="num_shared_experts")
    return common.build(reader, common.standard_layers(mixers, common.sparse_layers(reader, dense=1), common.mlp(reader), moe))


def _delta_keys(reader: ConfigReader) -> dict[str, Any]:
    """The keys of linear_attn_config as newer configs call them."""
    given = reader.value("linear_attn_config", None)
    if given is None:
        return {}
    names = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim", "linear_conv_kernel_dim": "short_conv_kernel_size"}
    if not isinstance(given, dict) or not given.keys() <= {*names.values(), "kda_layers", "full_attn_layers"}:
        raise reader.refusal("linear_attn_config", given, f"an object with {', '.join(names.values())}, kda_layers, full_attn_layers")
    full = given.get("full_attn_layers") or []
    types = ["full_attention" if i + 1 in full else "linear_attention" for i in range(common.num_layers(reader))]
    return {name: given[key] for name, key in names.items() if key in given} | {"layer_types": types}


def _layer_types(reader: ConfigReader) -> list[str]:
    types, count = reader.value("layer_types"), common.num_layers(reader)
    if not isinstance(types, list) or len(types) != count or any(t not in ("linear_attention", "full_attention") for t in types):
        raise reader.refusal("layer_types", types, f"{count} entries, each 'linear_attention' or 'full_attention'")
    return types


def _gguf(meta: Metadata) -> dict[str, Any]:
    heads = meta.by_layer("attention.head_count_kv")
    return latent.gguf_config(meta) | {
        "model_max_length": meta.size("context_length"),
        "num_experts_per_token": meta.size("expert_used_count"),
        "num_shared_experts": meta.size("expert_shared_count"),
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "linear_num_heads": meta.size("attention.head_count"),
        "linear_head_dim": meta.size("kda.head_dim"),
        "linear_conv_kernel_dim": meta.size("ssm.conv_kernel"),
        "rope_theta": None,
    }


FAMILY = Family(
    "kimi_linear",
    parse,
    (
        latent.EXPANSION,
        *common.BLOCK_SPARSE_MOE,
        Rule(r"(.*)\.block_sparse_moe\.shared_experts\.(.*)", r"\1.mlp.shared_expert.\2"),
        Rule(r"(.*)\.block_sparse_moe\.gate\.e_score_correction_bias", r"\1.mlp.gate.e_score_correction_bias"),
        Rule(r"(.*)\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)", r"\1.mlp.\2"),
        Rule(r"(.*\.self_attn)\.A_log", r"\1.A", "flatten neg_exp"),
        Rule(r"(.*\.self_attn\.[qkv]_conv1d\.weight)", r"\1", "conv"),
    ),
    gguf=(
        Gguf(
            "kimi-linear",
            _gguf,
            (
                *sections(
                    ("ssm_a", "self_attn.A"), ("ssm_beta", "self_attn.b_proj"), ("ssm_norm", "self_attn.o_norm"),
                    *((f"ssm_{x}", f"self_attn.{x}_proj") for x in ("f_a", "f_b", "g_a", "g_b")),
                ),
                Rule(r"(.*)\.ssm_dt\.bias", r"\1.self_attn.dt_bias"),
                Rule(r"(.*)\.ssm_conv1d_([qkv])\.weight", r"\1.self_attn.\2_conv1d.weight", "conv"),
            ),
        ),
    ),
)  # fmt: skip
