"""Granite 4: Mamba-2 in most layers, attention in the others, experts beside a shared MLP or that MLP alone, Granite's multipliers."""

from typing import Any

from ..blocks.attention import Attention
from ..blocks.base import Block
from ..blocks.mamba2 import Mamba2
from ..blocks.mlp import Mlp
from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import MAMBA, Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "granitemoehybrid"; its intermediate_size is the width of one expert."""
    reader.only("normalization_function", "rmsnorm")
    common.ignore(reader, "init_method", "mamba_chunk_size")
    mixers = {"linear_attention": _mamba(reader), "full_attention": _attention(reader)}
    ffn = _feed_forward(reader)
    layers = [standard_layer(mixers[kind], ffn) for kind in _layer_types(reader)]
    return common.build(reader, layers, **common.granite_multipliers(reader))


def _layer_types(reader: ConfigReader) -> list[str]:
    count = common.num_layers(reader)
    types = common.hybrid_layer_types(reader.value(reader.either("layers_block_type", "layer_types"), None) or ["mamba"] * count)
    if len(types) != count or any(t not in ("linear_attention", "full_attention") for t in types):
        raise reader.refusal("layer_types", types, f"{count} entries, each 'mamba' or 'attention'")
    return types


def _mamba(reader: ConfigReader) -> Block:
    heads, inner = reader.integer("mamba_n_heads", 128), reader.integer("mamba_expand", 2) * reader.integer("hidden_size")
    if reader.value("mamba_d_head", "auto") not in ("auto", inner // heads) or inner % heads:
        raise reader.refusal("mamba_d_head", reader.raw["mamba_d_head"], f"mamba_expand * hidden_size / mamba_n_heads = {inner / heads}")
    return Mamba2(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=reader.integer("mamba_n_groups", 1),
        d_state=reader.integer("mamba_d_state", 256),
        taps=reader.integer("mamba_d_conv", 4),
        eps=common.norm_eps(reader),
        dt_limits=_limits(reader),
        conv_bias=reader.flag("mamba_conv_bias", True),
        bias=reader.flag("mamba_proj_bias", False),
    )


def _limits(reader: ConfigReader) -> tuple[float, float]:
    """time_step_limit; infinity is no JSON number, so newer configs spell it as an object."""
    given = reader.value("time_step_limit", None) or [0.0, float("inf")]
    limits = [float(limit.get("__float__", "nan")) if isinstance(limit, dict) else limit for limit in given]
    if len(limits) != 2 or not all(isinstance(limit, int | float) for limit in limits) or not 0 <= limits[0] < limits[1]:
        raise reader.refusal("time_step_limit", given, "two numbers from 0 up, the second greater")
    return float(limits[0]), float(limits[1])


def _attention(reader: ConfigReader) -> Block:
    bias = reader.flag("attention_bias", False)
    fields: dict[str, Any] = common.attention_fields(reader) | {"scale": reader.number("attention_multiplier", None) or 1.0}
    reader.only("position_embedding_type", None, "nope", "rope")
    if reader.raw.get("position_embedding_type") != "rope":
        fields["rope"] = None
    return Attention(**fields, bias=bias, out_bias=bias)


def _feed_forward(reader: ConfigReader) -> Block:
    """Experts beside the shared MLP; without experts the MLP is all there is, under the same names."""
    reader.only("hidden_act", "silu", "swish")
    shared = Mlp(reader.integer("shared_intermediate_size", 1024), "mlp.shared_expert.")
    if reader.integer("num_local_experts", 8, least=0):
        return common.granite_experts(reader, shared)
    common.ignore(reader, "intermediate_size", "num_experts_per_tok")
    return shared


def _gguf(meta: Metadata) -> dict[str, Any]:
    kinds = ["attention" if heads else "mamba" for heads in meta.by_layer("attention.head_count_kv")]
    return {
        "layer_types": kinds,
        "mamba_n_heads": meta.size("ssm.time_step_rank"),
        "mamba_expand": meta.size("ssm.inner_size") // meta.size("embedding_length"),
        "mamba_n_groups": meta.size("ssm.group_count"),
        "mamba_d_state": meta.size("ssm.state_size"),
        "mamba_d_conv": meta.size("ssm.conv_kernel"),
        "shared_intermediate_size": meta.size("expert_shared_feed_forward_length", meta.get("feed_forward_length", int)),
        "num_local_experts": meta.get("expert_count", int, 0),
        "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned", bool, True) else "nope",  # llama.cpp's own use of that key
    }


FAMILY = Family(
    "granitemoehybrid",
    parse,
    tensors=(
        *common.GRANITE_MOE,
        Rule(r"(.*)\.mamba\.A_log", r"\1.mamba.A", "neg_exp"),
        Rule(r"(.*)\.mamba\.conv1d\.weight", r"\1.mamba.conv1d.weight", "conv"),
    ),
    gguf=(Gguf("granitehybrid", _gguf, (*common.GGUF_LLAMA, *MAMBA)),),
)
