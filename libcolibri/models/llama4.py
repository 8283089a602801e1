"""Llama 4: chunked layers with unit-length q and k, full layers without positions, one expert and a shared one for a token."""

from dataclasses import replace
from typing import Any

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "llama4_text"."""
    width = reader.integer("intermediate_size")
    moe = MoE(
        num_experts=reader.integer("num_local_experts"),
        num_experts_per_tok=reader.integer("num_experts_per_tok", 1),
        moe_intermediate_size=width,
        router=Router("chosen_sigmoid"),
        shared=Mlp(width, "mlp.shared_expert."),
        scale_input=True,
    )
    layers = common.standard_layers(_attentions(reader), _routed(reader), common.mlp(reader, "intermediate_size_mlp"), moe)
    common.ignore(reader, "for_llm_compressor")
    return common.build(reader, layers, eps=1e-5)


def _attentions(reader: ConfigReader) -> list[Attention]:
    """Layers with rotary embedding are chunked and norm q and k after it; the others see all and scale q by position."""
    fields, bias = common.attention_fields(reader, eps=1e-5, head_dim=128, theta=5e5), reader.flag("attention_bias", False)
    ropes, chunk = common.ropes_by_layer(reader, fields["rope"]), reader.integer("attention_chunk_size", 8192)
    unit = "unit_last" if reader.flag("use_qk_norm", True) else None
    scale, floor = reader.number("attn_scale", 0.1), reader.number("floor_scale", 8192)
    # Some releases have a number here, which means true.
    temperature = (scale, floor) if reader.value("attn_temperature_tuning", True) else None
    kinds = reader.value("layer_types", None) or ["full_attention" if rope is None else "chunked_attention" for rope in ropes]
    if len(kinds) != len(ropes) or any(kind not in ("full_attention", "chunked_attention") for kind in kinds):
        raise reader.refusal("layer_types", kinds, f"{len(ropes)} entries, each 'full_attention' or 'chunked_attention'")
    plain = Attention(**fields, bias=bias, out_bias=bias)
    return [
        replace(
            plain, rope=rope, chunk=chunk if kind == "chunked_attention" else None, qk_norm=None if rope is None else unit,
            temperature=temperature if rope is None else None,
        )
        for rope, kind in zip(ropes, kinds, strict=True)
    ]  # fmt: skip


def _routed(reader: ConfigReader) -> list[bool]:
    count, step = common.num_layers(reader), reader.integer("interleave_moe_layer_step", 1)
    layers = reader.value("moe_layers", None) or range(step - 1, count, step)
    return [i in layers for i in range(count)]


def _gguf(meta: Metadata) -> dict[str, Any]:
    return {
        "intermediate_size_mlp": meta.size("feed_forward_length"),
        "intermediate_size": meta.size("expert_feed_forward_length"),
        "moe_layers": [i for i, there in enumerate(meta.layers_with("ffn_gate_inp.weight")) if there],
        "use_qk_norm": meta.size("expert_count") != 128,  # Maverick has none; llama.cpp knows it by its experts too
    }


FAMILY = Family(
    "llama4",
    parse,
    (
        *common.INTERLEAVED_ROPE,
        Rule(
            r"(.*)\.feed_forward\.experts\.gate_up_proj",
            r"\1.mlp.experts.{}.gate_proj.weight \1.mlp.experts.{}.up_proj.weight",
            "transpose halves",
        ),
        Rule(r"(.*)\.feed_forward\.experts\.down_proj", r"\1.mlp.experts.{}.down_proj.weight", "transpose"),
        Rule(r"(.*)\.feed_forward\.router\.weight", r"\1.mlp.gate.weight"),
        Rule(r"(.*)\.feed_forward\.(.*)", r"\1.mlp.\2"),
    ),
    gguf=(Gguf("llama4", _gguf, common.GGUF_INTERLEAVED),),
)
