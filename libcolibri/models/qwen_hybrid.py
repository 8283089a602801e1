"""What Qwen3-Next and Qwen3.5 share: three layers of Gated DeltaNet for each of full attention with an output gate.

In: a `ConfigReader`. Out: the mixing block of every layer.
"""

from ..blocks.attention import Attention
from ..blocks.delta_net import GatedDeltaNet
from ..blocks.delta_rule import DeltaRule
from . import common
from .config_reader import ConfigReader


def mixers(reader: ConfigReader, *, tiled: bool) -> list[Attention | GatedDeltaNet]:
    """One block per layer; `tiled` is the order of the value heads in canonical tensors (blocks/delta_rule.py)."""
    reader.only("hidden_act", "silu", "swish")
    reader.only("attn_output_gate", True)
    reader.only("mamba_ssm_dtype", "float32")
    bias = reader.flag("attention_bias", False)
    fields = common.attention_fields(reader, head_dim=256, rotary=0.25)
    attention = Attention(**fields, qk_norm="head", bias=bias, out_bias=bias, gate="elementwise")
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
