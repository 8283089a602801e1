"""Gemma 4: wider heads in full layers, normed values that may be the keys, shared caches, inputs by layer, experts beside the MLP."""

from typing import Any

from ..blocks.attention import Attention
from ..blocks.base import Block
from ..blocks.moe import MoE
from ..blocks.parallel_moe import ParallelMoE
from ..blocks.per_layer_input import PerLayerInput, PerLayerInputs
from ..blocks.router import Router
from ..config import LayerConfig, ModelConfig, Sublayer, sandwich_layer
from ..rope import RopeConfig
from . import common
from .config_reader import ConfigReader
from .family import Family, Rule
from .gguf import PRE_FEEDFORWARD, Gguf, Metadata, sections
from .rope_config import read_layer_ropes

# Published configs name only what differs from these.
DEFAULTS = {
    "vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "sliding_window": 512, "hidden_size_per_layer_input": 256,
    "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}, "sliding_attention": {}},
}  # fmt: skip
THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}


def parse(reader: ConfigReader) -> ModelConfig:
    """Reads a config of model_type "gemma4_text"."""
    reader = reader.with_defaults(**DEFAULTS)
    reader.only("use_bidirectional_attention", None, "vision")  # text attends to what came before in either case
    attentions = _attentions(reader)
    layers = [sandwich_layer(attention, ffn) for attention, ffn in zip(attentions, _ffns(reader, attentions), strict=True)]
    return common.build(
        reader,
        _with_inputs(reader, layers),
        tied=True,
        embedding_multiplier=reader.integer("hidden_size") ** 0.5,
        logit_softcap=reader.number("final_logit_softcapping", None),
    )


def _attentions(reader: ConfigReader) -> list[Attention]:
    windows = common.mixed_windows(reader, pattern=6, window=512)
    windows[-1] = None  # the last layer is full whatever the config says
    ropes = read_layer_ropes(reader, reader.integer("max_position_embeddings"), THETAS)
    fields = common.head_fields(reader) | {"bias": reader.flag("attention_bias", False)}
    k_is_v, first_shared = reader.flag("attention_k_eq_v", False), len(windows) - reader.integer("num_kv_shared_layers", 0, least=0)
    made = []
    for i, window in enumerate(windows):
        own = fields | _widths(reader, i, window) | {"rope": _rope(ropes, window), "v_is_k": k_is_v and window is None}
        shared = None if i < first_shared else max(j for j in range(first_shared) if (windows[j] is None) == (window is None))
        made.append(Attention(**own, out_bias=own["bias"], qk_norm="head", v_norm=True, scale=1.0, window=window, reads_layer=shared))
    return made


def _rope(ropes: dict[str, RopeConfig], window: int | None) -> RopeConfig:
    return ropes["full_attention" if window is None else "sliding_attention"]


def _widths(reader: ConfigReader, layer: int, window: int | None) -> dict[str, int]:
    """What a full layer has in place of head_dim and num_key_value_heads: by layer (new spelling), or for all of them."""
    head_dim, kv_heads = reader.integer("global_head_dim", 512), reader.integer("num_global_key_value_heads", None)
    by_layer = reader.value("per_layer_config", None)
    if by_layer is not None:
        found = by_layer.get(str(layer), {}) if isinstance(by_layer, dict) else None
        if not isinstance(found, dict) or not found.keys() <= {"head_dim", "num_key_value_heads"}:
            raise reader.refusal("per_layer_config", by_layer, "head_dim and num_key_value_heads by layer")
        return found
    if window is not None:
        return {}
    return {"head_dim": head_dim} | ({"num_key_value_heads": kv_heads} if kv_heads and reader.flag("attention_k_eq_v", False) else {})


def _ffns(reader: ConfigReader, attentions: list[Attention]) -> list[Block]:
    """Dense blocks, of twice the width where a layer has no keys of its own if the config says so, or dense and routed ones together."""
    width, doubled = reader.integer("intermediate_size"), reader.flag("use_double_wide_mlp", False)
    dense = [common.gelu_mlp(reader, width * (2 if doubled and a.reads_layer is not None else 1)) for a in attentions]
    if not reader.flag("enable_moe_block", False):
        common.ignore(reader, "num_experts", "top_k_experts", "moe_intermediate_size")
        return list(dense)
    return [ParallelMoE(mlp, _moe(reader), common.norm_eps(reader)) for mlp in dense]


def _moe(reader: ConfigReader) -> MoE:
    return MoE(
        num_experts=reader.integer("num_experts"),
        num_experts_per_tok=reader.integer("top_k_experts"),
        moe_intermediate_size=reader.integer("moe_intermediate_size"),
        router=Router(normalise=True, expert_scale=True),
        activation="gelu_tanh",
    )


def _with_inputs(reader: ConfigReader, layers: list[LayerConfig]) -> list[LayerConfig]:
    """The layers with a learned factor each and, in the models that have them, with the inputs of every layer."""
    columns, vocab_size = reader.integer("hidden_size_per_layer_input", least=0), reader.integer("vocab_size_per_layer_input", 262144)
    extra: tuple[Sublayer, ...] = ()
    if columns:
        extra = (Sublayer(PerLayerInput(len(layers), columns), output_norm="post_per_layer_input_norm"),)
    made = [LayerConfig((*layer.sublayers, *extra), scalar="layer_scalar") for layer in layers]
    if columns:
        prepare = Sublayer(PerLayerInputs(vocab_size, len(layers), columns, common.norm_eps(reader)))
        made[0] = LayerConfig((prepare, *made[0].sublayers), scalar="layer_scalar")
    return made


GGUF_TENSORS = (
    PRE_FEEDFORWARD,
    Rule(r"per_layer_token_embd\.weight", "model.layers.0.embed_tokens_per_layer.weight"),
    Rule(r"per_layer_model_proj\.weight", "model.layers.0.per_layer_model_projection.weight"),
    Rule(r"per_layer_proj_norm\.weight", "model.layers.0.per_layer_projection_norm.weight"),
    Rule(r"(.*)\.layer_output_scale\.weight", r"\1.layer_scalar"),
    Rule(r"(.*)\.ffn_gate_inp\.scale", r"\1.router.scale"),
    Rule(r"(.*)\.ffn_down_exps\.scale", r"\1.mlp.gate.per_expert_scale"),
    *sections(
        ("inp_gate", "per_layer_input_gate"), ("proj", "per_layer_projection"), ("post_norm", "post_per_layer_input_norm"),
        ("post_ffw_norm_1", "post_feedforward_layernorm_1"), ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
        ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    ),
)  # fmt: skip


def _gguf(meta: Metadata) -> dict[str, Any]:
    widths, heads = meta.by_layer("feed_forward_length"), meta.by_layer("attention.head_count_kv")
    full = [not slides for slides in meta.by_layer("attention.sliding_window_pattern")]
    factors, inputs = meta.values("rope_freqs.weight"), meta.shape("per_layer_token_embd.weight")
    turning = 1.0 if factors is None else sum(factor < 1e29 for factor in factors) / len(factors)
    routed = bool(meta.get("expert_count", int, 0))
    return {
        "head_dim": meta.size("attention.key_length_swa"),
        "global_head_dim": meta.size("attention.key_length"),
        "num_key_value_heads": next(n for n, wide in zip(heads, full, strict=True) if not wide),
        "num_global_key_value_heads": next(n for n, wide in zip(heads, full, strict=True) if wide),
        "attention_k_eq_v": not all(there for there, wide in zip(meta.layers_with("attn_v.weight"), full, strict=True) if wide)
        and not meta.get("attention.shared_kv_layers", int, 0),
        "num_kv_shared_layers": meta.get("attention.shared_kv_layers", int, 0),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": min(widths) < max(widths),
        "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input", int, 0),
        "vocab_size_per_layer_input": None if inputs is None else inputs[0],
        "enable_moe_block": routed,
        "top_k_experts": meta.size("expert_used_count") if routed else None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": turning, "rope_theta": meta.real("rope.freq_base", 1e6)
            },
            "sliding_attention": {"rope_theta": meta.real("rope.freq_base_swa", 1e4)},
        },
        "rope_theta": None,
        "partial_rotary_factor": None,
    }  # fmt: skip


FAMILY = Family(
    "gemma4",
    parse,
    (
        Rule(r"model\.((?:embed_tokens_per_layer|per_layer_model_projection|per_layer_projection_norm)\.weight)", r"model.layers.0.\1"),
        Rule(
            r"(.*\.\d+)\.experts\.gate_up_proj(?:\.weight)?",
            r"\1.mlp.experts.{}.gate_proj.weight \1.mlp.experts.{}.up_proj.weight",
            "halves",
        ),
        Rule(r"(.*\.\d+)\.experts\.down_proj(?:\.weight)?", r"\1.mlp.experts.{}.down_proj.weight"),
        Rule(r"(.*)\.router\.proj\.weight", r"\1.mlp.gate.weight"),
        Rule(r"(.*)\.router\.per_expert_scale", r"\1.mlp.gate.per_expert_scale"),
    ),
    gguf=(Gguf("gemma4", _gguf, GGUF_TENSORS),),
)
