"""Gemma 2: sandwich norms of 1 + w, every other layer sliding, capped scores and logits."""

from typing import Any

from ..config import ModelConfig, sandwich_layer
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import PRE_FEEDFORWARD, Gguf, Metadata

PLUS_ONE = Rule(r".*norm\.weight", r"\g<0>", "plus_one")


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "gemma2"."""
    bias = reader.flag("attention_bias", False)
    reader.only("use_bidirectional_attention", None, False)
    attentions = common.attentions(
        common.mixed_windows(reader, pattern=2, window=4096), **common.attention_fields(reader, head_dim=256),
        scale=reader.number("query_pre_attn_scalar", 256) ** -0.5, softcap=reader.number("attn_logit_softcapping", None), bias=bias,
        out_bias=bias,
    )  # fmt: skip
    mlp = common.gelu_mlp(reader)
    return common.build(
        reader,
        [sandwich_layer(attention, mlp) for attention in attentions],
        tied=True,
        embedding_multiplier=reader.integer("hidden_size") ** 0.5,
        logit_softcap=reader.number("final_logit_softcapping", None),
    )


def _gguf(meta: Metadata) -> dict[str, Any]:
    # llama.cpp knows the one size whose scores are scaled by the width of a head of hidden_size, not of a head, by its number of layers.
    heads, largest = meta.size("attention.head_count"), meta.size("block_count") == 46
    return {"query_pre_attn_scalar": meta.size("embedding_length") // heads if largest else meta.size("attention.key_length")}


FAMILY = Family("gemma2", parse, (PLUS_ONE,), gguf=(Gguf("gemma2", _gguf, (PRE_FEEDFORWARD,)),))
