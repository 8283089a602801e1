"""Nemotron-H: every layer is one block, Mamba-2, attention without positions, experts, or an MLP, the last two with squared ReLU."""

from typing import Any

from ..blocks.attention import Attention
from ..blocks.base import Block, NormConfig
from ..blocks.mamba2 import Mamba2
from ..blocks.mlp import Mlp
from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import LayerConfig, ModelConfig, Sublayer
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import MAMBA, Gguf, Metadata

_PATTERN = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
# Training, other programs' kernels, and positions that the attention of this family does not have.
_UNUSED = (
    "chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type",
    "num_logits_to_keep", "num_nextn_predict_layers", "norm_eps", "partial_rotary_factor", "rescale_prenorm_residual",
    "residual_in_fp32", "rope_theta", "time_step_floor", "time_step_limit", "time_step_max", "use_mamba_kernels",
)  # fmt: skip


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "nemotron_h"; its epsilon is layer_norm_epsilon alone."""
    eps = reader.number("layer_norm_epsilon", 1e-5)
    types = _layer_types(reader)
    blocks = {"linear_attention": _mamba(reader, eps), "full_attention": _attention(reader, eps), "mlp": _mlp(reader), "moe": _moe(reader)}
    common.ignore(reader, *_UNUSED)
    return common.build(reader, [LayerConfig((Sublayer(blocks[t], "norm"),)) for t in types], norm=NormConfig(eps))


def _layer_types(reader: ConfigReader) -> list[str]:
    """layer_types, layers_block_type (also in older words), or hybrid_override_pattern, a letter for each layer."""
    pattern = reader.value("hybrid_override_pattern", None)
    names = reader.value(reader.either("layer_types", "layers_block_type"), None)
    types = common.hybrid_layer_types(names or [_PATTERN.get(letter, letter) for letter in pattern or ""])
    if not types or any(t not in _PATTERN.values() for t in types):
        raise reader.refusal("layers_block_type", names or pattern, "one of mamba, attention, moe, mlp for each layer")
    reader.only("num_hidden_layers", len(types))
    return types


def _mamba(reader: ConfigReader, eps: float) -> Block:
    reader.only("mamba_hidden_act", "silu")
    reader.value("mamba_proj_bias", None)
    return Mamba2(
        num_heads=reader.integer("mamba_num_heads"),
        head_dim=reader.integer("mamba_head_dim"),
        num_groups=reader.integer("n_groups"),
        d_state=reader.integer("ssm_state_size"),
        taps=reader.integer("conv_kernel"),
        eps=eps,
        dt_limits=(reader.number("time_step_min", 0.001), float("inf")),
        conv_bias=reader.flag("use_conv_bias", True),
        bias=reader.flag("use_bias", False),
    )


def _attention(reader: ConfigReader, eps: float) -> Block:
    reader.only("sliding_window", None)
    reader.only("attention_bias", False)
    heads = reader.integer("num_attention_heads")
    return Attention(
        num_attention_heads=heads,
        num_key_value_heads=reader.integer("num_key_value_heads", None) or heads,
        head_dim=reader.integer(reader.either("attention_head_dim", "head_dim")),
        rope=None,
        eps=eps,
    )


def _mlp(reader: ConfigReader, key: str = "intermediate_size", default: int = 21504, prefix: str = "mlp.") -> Mlp:
    reader.only("mlp_hidden_act", "relu2")
    return Mlp(reader.integer(key, default), prefix, activation="relu2", bias=reader.flag("mlp_bias", False))


def _moe(reader: ConfigReader) -> Block:
    # An absent key means the class's default, which matters in models without such layers only: released ones state their sizes.
    reader.only("moe_latent_size", None)
    reader.only("n_shared_experts", 1)
    router = Router(
        score="sigmoid",
        choice_bias=True,
        groups=reader.integer("n_group", 1),
        kept_groups=reader.integer("topk_group", 1),
        group_score="top2",
        normalise=reader.flag("norm_topk_prob", True),
        eps=1e-20,
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    return MoE(
        reader.integer("n_routed_experts", 8),
        reader.integer("num_experts_per_tok", 2),
        reader.integer("moe_intermediate_size", 7688),
        router,
        shared=_mlp(reader, "moe_shared_expert_intermediate_size", 7688, "mlp.shared_expert."),
        activation="relu2",
    )


GGUF_TENSORS = (*common.GGUF_LLAMA, *MAMBA, Rule(r"(.*)\.attn_norm\.weight", r"\1.norm.weight"))


def _gguf(meta: Metadata) -> dict[str, Any]:
    mamba, attention, routed = (meta.layers_with(f"{name}.weight") for name in ("ssm_in", "attn_q", "ffn_gate_inp"))
    kinds = [
        "mamba" if has_ssm else "attention" if attends else "moe" if routes else "mlp"
        for has_ssm, attends, routes in zip(mamba, attention, routed, strict=True)
    ]
    heads = meta.size("ssm.time_step_rank")
    return {
        "layers_block_type": kinds,
        "layer_norm_epsilon": meta.real("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": heads,
        "mamba_head_dim": meta.size("ssm.inner_size") // heads,
        "n_groups": meta.size("ssm.group_count"),
        "ssm_state_size": meta.size("ssm.state_size"),
        "conv_kernel": meta.size("ssm.conv_kernel"),
        "moe_shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length", int, None),
        "n_shared_experts": None,
    }


FAMILY = Family(
    "nemotron_h",
    parse,
    tensors=(
        Rule(r"model\.embeddings\.weight", "model.embed_tokens.weight"),
        Rule(r"model\.norm_f\.weight", "model.norm.weight"),
        Rule(r"(.*)\.mixer\.A_log", r"\1.mamba.A", "neg_exp"),
        Rule(r"(.*)\.mixer\.conv1d\.weight", r"\1.mamba.conv1d.weight", "conv"),
        Rule(r"(.*)\.mixer\.((?:in|out)_proj\..*|conv1d\.bias|D|dt_bias|norm\.weight)", r"\1.mamba.\2"),
        Rule(r"(.*)\.mixer\.([qkvo]_proj\..*)", r"\1.self_attn.\2"),
        Rule(r"(.*)\.mixer\.shared_experts\.(.*)", r"\1.mlp.shared_expert.\2"),
        Rule(r"(.*)\.mixer\.((?:experts|gate|up_proj|down_proj)\..*)", r"\1.mlp.\2"),
    ),
    gguf=(
        Gguf("nemotron_h_moe", _gguf, GGUF_TENSORS),
        Gguf("nemotron_h", _gguf, GGUF_TENSORS),
    ),
)
