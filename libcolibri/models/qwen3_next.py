"""Qwen3-Next: Gated DeltaNet and gated attention, every layer routed with a shared expert behind a sigmoid gate."""

from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig
from . import common, qwen_hybrid
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen3_next"."""
    reader.only("use_sliding_window", False)
    mixers, routed = qwen_hybrid.mixers(reader, tiled=False), common.routed_layers(reader)
    fields = common.expert_fields(reader) | {"router": Router(normalise=reader.flag("norm_topk_prob", True))}
    moe = MoE(**fields, shared=qwen_hybrid.shared_expert(reader), shared_gate=True)
    return common.build(reader, common.standard_layers(mixers, routed, common.mlp(reader), moe))


FAMILY = Family(
    "qwen3_next",
    parse,
    (
        *qwen_hybrid.NORMS,
        Rule(r"(.*\.linear_attn)\.A_log", r"\1.A", "neg_exp"),
        Rule(r"(.*\.linear_attn\.conv1d\.weight)", r"\1", "conv"),
        Rule(r"(.*\.linear_attn\.in_proj_)qkvz\.weight", r"\1qkv.weight \1z.weight", "split", qwen_hybrid.qkvz_by_part),
        Rule(r"(.*\.linear_attn\.in_proj_)ba\.weight", r"\1b.weight \1a.weight", "split", qwen_hybrid.ba_by_part),
    ),
    gguf=(Gguf("qwen3next", qwen_hybrid.gguf_config, qwen_hybrid.GGUF_TENSORS),),
)
