"""Qwen3.5 with experts: as Qwen3.5, every layer routed with a shared expert behind a sigmoid gate."""

from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig, standard_layer
from . import common, qwen_hybrid
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf
from .qwen3_5 import TENSORS


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "qwen3_5_moe"; the chosen experts' weights are always divided by their sum."""
    mixers = qwen_hybrid.mixers(reader, tiled=True)
    reader.only("norm_topk_prob", True)
    reader.only("mlp_only_layers", [], None)
    reader.only("decoder_sparse_step", 1)
    common.ignore(reader, "intermediate_size")  # no layer is dense
    fields = common.expert_fields(reader) | {"router": Router(normalise=True)}
    moe = MoE(**fields, shared=qwen_hybrid.shared_expert(reader), shared_gate=True)
    return common.build(reader, [standard_layer(mixer, moe) for mixer in mixers])


FAMILY = Family("qwen3_5_moe", parse, TENSORS, gguf=(Gguf("qwen35moe", qwen_hybrid.gguf_config, qwen_hybrid.GGUF_TENSORS),))
