"""What Qwen3-Next and Qwen3.5 share: several layers of Gated DeltaNet for each of full attention with an output gate.

In:  a `ConfigReader`, or one layer's config
Out: the mixing block of every layer; rules for tensors; the orders in which checkpoints keep heads
"""

import numpy as np

from ..blocks.attention import Attention
from ..blocks.delta_net import GatedDeltaNet
from ..blocks.delta_rule import DeltaRule
from ..blocks.mlp import Mlp
from ..config import LayerConfig
from . import common
from .config_reader import ConfigReader
from .family import Rule

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
