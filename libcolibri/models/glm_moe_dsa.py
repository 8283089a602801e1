"""GLM-5: DeepSeek-V3's layers with an indexer that picks the positions to attend to.

Up to index_topk positions the indexer picks all of them, and the layer is plain latent attention; that is what runs here, and the
longest context is index_topk. The indexer's own tensors are left out.
"""

from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from . import common, latent
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "glm_moe_dsa"."""
    reader.only("rope_interleave", True)
    for indexer in ("index_head_dim", "index_n_heads", "indexer_types", "indexer_rope_interleave", "index_topk_freq", "layer_types"):
        reader.value(indexer, None)
    attention, moe = latent.latent_attention(reader), common.deepseek_moe(reader)
    routed, positions = common.sparse_layers(reader, dense=3), reader.integer("index_topk")
    config = common.build(reader, common.standard_layers([attention] * len(routed), routed, common.mlp(reader), moe), eps=1e-5)
    return replace(config, max_context_length=min(config.max_context_length, positions))


def _gguf(meta: Metadata) -> dict[str, Any]:
    return latent.gguf_config(meta) | {"index_topk": meta.size("attention.indexer.top_k")}


FAMILY = Family(
    "glm_moe_dsa",
    parse,
    (*latent.INTERLEAVED, latent.EXPANSION, common.SHARED_EXPERTS),
    skipped=r".*\.indexer\..*",
    gguf=(Gguf("glm-dsa", _gguf, latent.GGUF_TENSORS),),
)
