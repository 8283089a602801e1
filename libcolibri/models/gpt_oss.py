"""gpt-oss: sinks and biases in attention, every other layer with a window, experts with clamped SwiGLU and biases."""

from typing import Any

from ..blocks.attention import Attention
from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "gpt_oss"; without layer_types the even layers slide."""
    common.ignore(reader, "initial_context_length")
    reader.only("hidden_act", "silu")
    reader.only("swiglu_alpha", 1.702)
    moe = MoE(
        num_experts=reader.integer(reader.either("num_experts", "num_local_experts")),
        num_experts_per_tok=reader.integer(reader.either("experts_per_token", "num_experts_per_tok")),
        moe_intermediate_size=reader.integer("intermediate_size"),
        router=Router(score="chosen_softmax", bias=True),
        activation="clamped_swiglu",
        limit=reader.number("swiglu_limit", 7.0),
        bias=True,
    )
    bias, fields = reader.flag("attention_bias", True), common.attention_fields(reader, eps=1e-5, theta=150000.0)
    windows = common.layer_windows(reader, default=lambda i: i % 2 == 0)
    layers = [standard_layer(Attention(**fields, bias=bias, out_bias=bias, sinks=True, window=window), moe) for window in windows]
    return common.build(reader, layers, eps=1e-5)


def _gguf(meta: Metadata) -> dict[str, Any]:
    return {"intermediate_size": meta.size("expert_feed_forward_length"), "rope_scaling": {"truncate": False}}  # the latter is in no file


FAMILY = Family(
    "gpt_oss",
    parse,
    (
        Rule(r"(.*\.mlp)\.router\.(weight|bias)", r"\1.gate.\2"),
        Rule(
            r"(.*\.mlp\.experts)\.gate_up_proj",
            r"\1.{}.gate_proj.weight \1.{}.up_proj.weight",
            "transpose deinterleave halves",
        ),
        Rule(r"(.*\.mlp\.experts)\.down_proj", r"\1.{}.down_proj.weight", "transpose"),
        # The released MXFP4 weights are rows of outputs already.
        Rule(r"(.*\.mlp\.experts)\.gate_up_proj_blocks", r"\1.{}.gate_proj.weight \1.{}.up_proj.weight", "deinterleave halves"),
        Rule(r"(.*\.mlp\.experts)\.down_proj_blocks", r"\1.{}.down_proj.weight"),
        Rule(r"(.*\.mlp\.experts)\.gate_up_proj_bias", r"\1.gate_proj.bias \1.up_proj.bias", "flatten deinterleave halves"),
        Rule(r"(.*\.mlp\.experts)\.down_proj_bias", r"\1.down_proj.bias", "flatten"),
    ),
    gguf=(Gguf("gpt-oss", _gguf),),
)
