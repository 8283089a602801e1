"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, softmax router without renormalisation, shared experts."""

from typing import Any

from ..blocks.mlp import Mlp
from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig
from . import common, latent
from .config_reader import ConfigReader
from .family import Family
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "deepseek_v2"; its norm_topk_prob has no effect in transformers, so true is refused."""
    reader.only("moe_layer_freq", 1)
    reader.only("norm_topk_prob", False)
    reader.only("scoring_func", "softmax")
    method = reader.value("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise reader.refusal("topk_method", method, "'greedy' or 'group_limited_greedy'")
    groups, kept = reader.integer("n_group", None) or 1, reader.integer("topk_group", None) or 1
    if method == "greedy":
        groups = kept = 1
    width, shared = reader.integer("moe_intermediate_size"), reader.integer("n_shared_experts", None, least=0) or 0
    moe = MoE(
        num_experts=reader.integer("n_routed_experts"),
        num_experts_per_tok=reader.integer("num_experts_per_tok"),
        moe_intermediate_size=width,
        router=Router(scale=reader.number("routed_scaling_factor", 1.0), groups=groups, kept_groups=kept, group_score="max"),
        shared=Mlp(width * shared, "mlp.shared_expert.") if shared else None,
    )
    routed = common.sparse_layers(reader, dense=0)
    attentions = [latent.latent_attention(reader)] * len(routed)
    return common.build(reader, common.standard_layers(attentions, routed, common.mlp(reader), moe))


def _gguf(meta: Metadata) -> dict[str, Any]:
    method = "group_limited_greedy" if meta.get("expert_group_count", int, 1) > 1 else "greedy"
    return latent.gguf_config(meta) | {"topk_method": method, "norm_topk_prob": None}


FAMILY = Family(
    "deepseek_v2",
    parse,
    (*latent.INTERLEAVED, latent.EXPANSION, common.SHARED_EXPERTS),
    gguf=(Gguf("deepseek2", _gguf, latent.GGUF_TENSORS, lambda meta: not latent.scores_by_sigmoid(meta)),),
)
