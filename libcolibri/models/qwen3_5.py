"""Qwen3.5, dense: Gated DeltaNet and gated attention with a plain feed-forward."""

from ..config import ModelConfig, standard_layer
from . import common, qwen_hybrid
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf

# Canonical tensors have value heads in turn over the key heads, as GGUF files have them: blocks of 256 columns cannot be reordered.
TENSORS = (
    *qwen_hybrid.NORMS,
    Rule(r"(.*\.linear_attn)\.A_log", r"\1.A", "neg_exp", qwen_hybrid.tiled_heads),
    Rule(r"(.*\.linear_attn\.(?:dt_bias|in_proj_[ab]\.weight))", r"\1", order=qwen_hybrid.tiled_heads),
    Rule(r"(.*\.linear_attn\.conv1d\.weight)", r"\1", "conv", qwen_hybrid.tiled_qkv),
    Rule(r"(.*\.linear_attn\.in_proj_qkv\.weight)", r"\1", order=qwen_hybrid.tiled_qkv),
    Rule(r"(.*\.linear_attn\.in_proj_z\.weight)", r"\1", order=qwen_hybrid.tiled_values),
    Rule(r"(.*\.linear_attn\.out_proj\.weight)", r"\1", columns=qwen_hybrid.tiled_values),
)


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen3_5"."""
    mixers, mlp = qwen_hybrid.mixers(reader, tiled=True), common.mlp(reader)
    return common.build(reader, [standard_layer(mixer, mlp) for mixer in mixers])


FAMILY = Family("qwen3_5", parse, TENSORS, gguf=(Gguf("qwen35", qwen_hybrid.gguf_config, qwen_hybrid.GGUF_TENSORS),))
