"""What Qwen3-Next and Qwen3.5 share: several layers of Gated DeltaNet for each of full attention with an output gate.

In:  a `ConfigReader`, or one layer's config
Out: the mixing block of every layer; rules for tensors; the orders in which checkpoints keep heads
"""

from typing import Any

import numpy as np

from ..blocks.attention import Attention
from ..blocks.delta_net import GatedDeltaNet
from ..blocks.delta_rule import DeltaRule
from ..blocks.mlp import Mlp
from ..config import LayerConfig
from . import common
from .config_reader import ConfigReader
from .family import Rule
from .gguf import Metadata, is_routed, sections

# Norms multiply by 1 + w, but not the one inside DeltaNet.
NORMS = (
    Rule(r"(.*\.(?:input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm)\.weight)", r"\1", "plus_one"),
    Rule(r"(model\.norm\.weight)", r"\1", "plus_one"),
)


def mixers(reader: ConfigReader, *, tiled: bool) -> list[Attention | GatedDeltaNet]:
    """One block per layer; `tiled` is the order of the value heads in canonical tensors (blocks/delta_rule.py)."""
    reader.only("hidden_act", "silu", "swish")
    reader.only("attn_output_gate", True)
    reader.only("mamba_ssm_dtype", "float32")
    reader.only("output_gate_type", "swish", "silu")  # of DeltaNet's norm; attention's gate is a sigmoid all the same
    common.ignore(reader, "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # a head that guesses further tokens
    bias = reader.flag("attention_bias", False)
    fields = common.attention_fields(reader, head_dim=256, partial=0.25)
    attention = Attention(**fields, qk_norm="head", bias=bias, out_bias=bias, gate="sigmoid")
    rule = DeltaRule(
        key_heads=reader.integer("linear_num_key_heads"),
        value_heads=reader.integer("linear_num_value_heads"),
        key_dim=reader.integer("linear_key_head_dim"),
        value_dim=reader.integer("linear_value_head_dim"),
        tiled=tiled,
    )
    linear = GatedDeltaNet(rule, reader.integer("linear_conv_kernel_dim"), fields["eps"])
    return [linear if kind == "linear_attention" else attention for kind in _layer_types(reader)]


def _layer_types(reader: ConfigReader) -> list[str]:
    """`layer_types`, or every full_attention_interval-th layer full."""
    count, interval, types = common.num_layers(reader), reader.integer("full_attention_interval", 4), reader.value("layer_types", None)
    if types is None:
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    known = ("linear_attention", "full_attention")
    if not isinstance(types, list) or len(types) != count or any(t not in known for t in types):
        raise reader.refusal("layer_types", types, f"{count} entries, each 'linear_attention' or 'full_attention'")
    return types


def shared_expert(reader: ConfigReader) -> Mlp:
    """The expert that every token uses, behind a sigmoid gate."""
    return common.mlp(reader, "shared_expert_intermediate_size", "mlp.shared_expert.")


def rule_of(layer: LayerConfig) -> DeltaRule:
    """Heads of a layer with Gated DeltaNet."""
    return next(sub.block.rule for sub in layer.sublayers if isinstance(sub.block, GatedDeltaNet))


def qkvz_by_part(layer: LayerConfig) -> np.ndarray:
    """Rows of q, of k, of v, then of z, from rows by key head: its q, its k, v and z of its value heads."""
    rule = rule_of(layer)
    shared = rule.value_size // rule.key_heads
    rows = np.arange(2 * (rule.key_size + rule.value_size)).reshape(rule.key_heads, -1)
    parts = np.split(rows, np.cumsum([rule.key_dim, rule.key_dim, shared]), axis=1)
    return np.concatenate([part.reshape(-1) for part in parts])


def ba_by_part(layer: LayerConfig) -> np.ndarray:
    """Rows of b, then of a, from rows by key head: b and a of its value heads."""
    rule = rule_of(layer)
    return np.arange(2 * rule.value_heads).reshape(rule.key_heads, 2, -1).swapaxes(0, 1).reshape(-1)


def tiled_heads(layer: LayerConfig) -> np.ndarray:
    """Value heads in turn over the key heads, from value heads that are neighbours where they share a key head."""
    rule = rule_of(layer)
    return np.arange(rule.value_heads).reshape(rule.key_heads, -1).T.reshape(-1)


def tiled_values(layer: LayerConfig) -> np.ndarray:
    """The same for columns of all values."""
    rule = rule_of(layer)
    return np.arange(rule.value_size).reshape(-1, rule.value_dim)[tiled_heads(layer)].reshape(-1)


def tiled_qkv(layer: LayerConfig) -> np.ndarray:
    """The same for q | k | v."""
    keys = 2 * rule_of(layer).key_size
    return np.concatenate([np.arange(keys), keys + tiled_values(layer)])


def gguf_config(meta: Metadata) -> dict[str, Any]:
    """Keys of these families' files; llama.cpp's converter has applied 1 + w, -exp, and the order of Qwen3.5's value heads."""
    values = meta.size("ssm.time_step_rank")
    return {
        "linear_num_key_heads": meta.size("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": meta.size("ssm.state_size"),
        "linear_value_head_dim": meta.size("ssm.inner_size") // values,
        "linear_conv_kernel_dim": meta.size("ssm.conv_kernel"),
        "layer_types": ["full_attention" if there else "linear_attention" for there in meta.layers_with("attn_q.weight")],
        "norm_topk_prob": meta.get("expert_weights_norm", bool, True) if is_routed(meta) else None,
    }


GGUF_TENSORS = (
    *sections(
        ("attn_qkv", "linear_attn.in_proj_qkv"), ("attn_gate", "linear_attn.in_proj_z"), ("ssm_alpha", "linear_attn.in_proj_a"),
        ("ssm_beta", "linear_attn.in_proj_b"), ("ssm_norm", "linear_attn.norm"), ("ssm_out", "linear_attn.out_proj"),
        ("ssm_a", "linear_attn.A"),
    ),
    Rule(r"(.*)\.ssm_ba\.weight", r"\1.linear_attn.in_proj_b.weight \1.linear_attn.in_proj_a.weight", "split", ba_by_part),
    Rule(r"(.*)\.ssm_dt\.bias", r"\1.linear_attn.dt_bias"),
    Rule(r"(.*)\.ssm_conv1d\.weight", r"\1.linear_attn.conv1d.weight", "conv"),
)  # fmt: skip
