"""LFM2: short convolutions in most layers, attention with a norm per head in the others."""

from collections.abc import Iterable
from typing import Any

from ..blocks.attention import Attention
from ..blocks.base import Block, NormConfig
from ..blocks.causal_conv import CausalConv
from ..blocks.mlp import Mlp
from ..blocks.short_conv import ShortConv
from ..config import LayerConfig, ModelConfig, standard_layer
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata, sections

# What training left in published configs.
_INITIALISERS = ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init", "block_norm_eps")


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "lfm2"."""
    mlp = Mlp(_intermediate_size(reader))
    return build(reader, [standard_layer(mixer, mlp) for mixer in mixers(reader)])


def build(reader: ConfigReader, layers: Iterable[LayerConfig]) -> ModelConfig:
    """The config of these layers; LFM2 calls its epsilon norm_eps, and ties its head unless told otherwise."""
    tied = reader.flag(reader.either("tie_embedding", "tie_word_embeddings"), True)
    common.ignore(reader, *_INITIALISERS)
    return common.build(reader, layers, norm=NormConfig(_eps(reader)), tie_word_embeddings=tied)


def mixers(reader: ConfigReader) -> list[Block]:
    """A short convolution or attention for each layer."""
    hidden_size = reader.integer("hidden_size")
    for key in ("conv_dim", "conv_dim_out", "block_dim"):
        reader.only(key, hidden_size)
    reader.only("use_pos_enc", True)
    conv = ShortConv(CausalConv("conv.conv", hidden_size, reader.integer("conv_L_cache", 3), reader.flag("conv_bias", False)))
    reader.only("num_heads", reader.integer("num_attention_heads"))
    reader.either("theta", "rope_theta")
    attention = Attention(**common.attention_fields(reader, theta=1e6) | {"eps": _eps(reader)}, qk_norm="head")
    return [attention if full else conv for full in _attention_layers(reader)]


def _attention_layers(reader: ConfigReader) -> list[bool]:
    count, types, full = common.num_layers(reader), reader.value("layer_types", None), reader.value("full_attn_idxs", None)
    if types is None:
        return [full is None or i in full for i in range(count)]
    if not isinstance(types, list) or len(types) != count or any(t not in ("conv", "full_attention") for t in types):
        raise reader.refusal("layer_types", types, f"{count} entries, each 'conv' or 'full_attention'")
    return [t == "full_attention" for t in types]


def _eps(reader: ConfigReader) -> float:
    return float(reader.number("norm_eps", 1e-5))


def _intermediate_size(reader: ConfigReader) -> int:
    """The width of the MLP; the config gives 3/2 of it where block_auto_adjust_ff_dim is set."""
    size = reader.integer("block_ff_dim" if reader.has("block_ff_dim") else "intermediate_size", 12288)
    reader.value("intermediate_size", None)
    reader.only("block_use_swiglu", True)
    adjusted, factor = reader.flag("block_auto_adjust_ff_dim", True), reader.number("block_ffn_dim_multiplier", 1.0)
    multiple = reader.integer("block_multiple_of", 256)
    if not adjusted:
        return int(size)
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


TENSORS = (
    Rule(r"(.*)\.operator_norm\.weight", r"\1.input_layernorm.weight"),
    Rule(r"(.*)\.ffn_norm\.weight", r"\1.post_attention_layernorm.weight"),
    Rule(r"model\.embedding_norm\.weight", "model.norm.weight"),
    Rule(r"(.*)\.self_attn\.out_proj\.weight", r"\1.self_attn.o_proj.weight"),
    Rule(r"(.*)\.self_attn\.([qk])_layernorm\.weight", r"\1.self_attn.\2_norm.weight"),
    Rule(r"(.*)\.conv\.conv\.weight", r"\1.conv.conv.weight", "conv"),
    Rule(r"(.*)\.feed_forward\.(experts\.\d+\.)?w1\.weight", r"\1.mlp.\2gate_proj.weight"),
    Rule(r"(.*)\.feed_forward\.(experts\.\d+\.)?w2\.weight", r"\1.mlp.\2down_proj.weight"),
    Rule(r"(.*)\.feed_forward\.(experts\.\d+\.)?w3\.weight", r"\1.mlp.\2up_proj.weight"),
)


def gguf_config(meta: Metadata) -> dict[str, Any]:
    """Keys of LFM2's files."""
    return {
        "layer_types": ["conv" if there else "full_attention" for there in meta.layers_with("shortconv.conv.weight")],
        "conv_L_cache": meta.size("shortconv.l_cache"),
        "norm_eps": meta.real("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "rms_norm_eps": None,
    }


GGUF_TENSORS = (
    Rule(r"token_embd_norm\.weight", "model.norm.weight"),
    Rule(r"(.*)\.shortconv\.conv\.weight", r"\1.conv.conv.weight", "conv"),
    *sections(("shortconv.in_proj", "conv.in_proj"), ("shortconv.out_proj", "conv.out_proj")),
)
FAMILY = Family("lfm2", parse, tensors=TENSORS, gguf=(Gguf("lfm2", gguf_config, GGUF_TENSORS),))
