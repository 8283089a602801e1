"""Gemma 3: Gemma 2 with normed q and k instead of capped scores, five sliding layers to a full one, each kind with its own RoPE."""

from dataclasses import replace
from typing import Any

from ..blocks.attention import Attention
from ..config import ModelConfig, sandwich_layer
from . import common
from .config_reader import ConfigReader
from .family import Family
from .gemma2 import PLUS_ONE
from .gguf import PRE_FEEDFORWARD, Gguf, Metadata
from .rope_config import read_layer_ropes

# Published configs name only what differs from these.
DEFAULTS = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "gemma3_text"."""
    reader = reader.with_defaults(**DEFAULTS)
    reader.only("use_bidirectional_attention", False, None)
    attentions, mlp = _attentions(reader), common.gelu_mlp(reader)
    return common.build(
        reader,
        [sandwich_layer(attention, mlp) for attention in attentions],
        tied=True,
        embedding_multiplier=reader.integer("hidden_size") ** 0.5,
        logit_softcap=reader.number("final_logit_softcapping", None),
    )


def _attentions(reader: ConfigReader) -> list[Attention]:
    pattern = reader.integer(reader.either("sliding_window_pattern", "_sliding_window_pattern"), 6)
    ropes = read_layer_ropes(reader, reader.integer("max_position_embeddings"), THETAS)
    windows, bias = common.mixed_windows(reader, pattern=pattern, window=4096), reader.flag("attention_bias", False)
    made = common.attentions(
        windows, **common.head_fields(reader), rope=ropes["full_attention"], qk_norm="head", bias=bias, out_bias=bias,
        scale=reader.number("query_pre_attn_scalar") ** -0.5, softcap=reader.number("attn_logit_softcapping", None),
    )  # fmt: skip
    return [attention if attention.window is None else replace(attention, rope=ropes["sliding_attention"]) for attention in made]


def _gguf(meta: Metadata) -> dict[str, Any]:
    # llama.cpp knows the one size whose scores are scaled by the width of a head of hidden_size, not of a head, by its number of layers.
    heads, largest = meta.size("attention.head_count"), meta.size("block_count") == 62
    return {
        "query_pre_attn_scalar": meta.size("embedding_length") // heads if largest else meta.size("attention.key_length"),
        "rope_local_base_freq": meta.real("rope.freq_base_swa", THETAS["sliding_attention"]),
    }


FAMILY = Family("gemma3", parse, (PLUS_ONE,), gguf=(Gguf("gemma3", _gguf, (PRE_FEEDFORWARD,)),))
