"""LFM2-MoE: LFM2 whose later layers have routed experts."""

from typing import Any

from ..blocks.mlp import Mlp
from ..blocks.moe import MoE
from ..blocks.router import Router
from ..config import ModelConfig, standard_layer
from . import lfm2
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import Gguf, Metadata


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "lfm2_moe"; the bias of the choice is called expert_bias there."""
    mlp, dense = Mlp(reader.integer("intermediate_size")), reader.integer("num_dense_layers", 2, least=0)
    router = Router(
        score="sigmoid",
        choice_bias=reader.flag("use_expert_bias", True),
        normalise=reader.flag("norm_topk_prob", True),
        eps=1e-6,
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    moe = MoE(reader.integer("num_experts"), reader.integer("num_experts_per_tok"), reader.integer("moe_intermediate_size"), router)
    mixers = lfm2.mixers(reader)
    return lfm2.build(reader, [standard_layer(mixer, mlp if i < dense else moe) for i, mixer in enumerate(mixers)])


def _gguf(meta: Metadata) -> dict[str, Any]:
    return lfm2.gguf_config(meta) | {"num_dense_layers": meta.get("leading_dense_block_count", int, 0), "block_auto_adjust_ff_dim": None}


FAMILY = Family(
    "lfm2_moe",
    parse,
    tensors=(
        *lfm2.TENSORS,
        Rule(r"(.*)\.feed_forward\.gate\.weight", r"\1.mlp.gate.weight"),
        Rule(r"(.*)\.feed_forward\.expert_bias", r"\1.mlp.gate.e_score_correction_bias"),
    ),
    gguf=(Gguf("lfm2moe", _gguf, lfm2.GGUF_TENSORS),),
)
