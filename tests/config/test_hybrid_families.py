"""Families with recurrent layers as their published configs describe them, in words that the fixtures do not use."""

import json
from pathlib import Path

import pytest

from libcolibri.blocks.attention import Attention
from libcolibri.blocks.mamba2 import Mamba2
from libcolibri.blocks.mlp import Mlp
from libcolibri.blocks.moe import MoE
from libcolibri.blocks.short_conv import ShortConv
from libcolibri.errors import ConfigError
from libcolibri.models.registry import parse_config

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tiny"


def config(name: str, **changes) -> dict:
    """A fixture's config; None takes a key away."""
    raw = json.loads((FIXTURES / name / "config.json").read_text()) | changes
    return {key: value for key, value in raw.items() if value is not None}


def blocks(raw: dict) -> list[list[type]]:
    return [[type(sub.block) for sub in layer.sublayers] for layer in parse_config(raw).layers]


def test_lfm2_by_indices_and_three_halves_of_a_width():
    raw = config("lfm2", layer_types=None, full_attn_idxs=[1, 3], block_ff_dim=12288, block_auto_adjust_ff_dim=True)
    raw.pop("tie_word_embeddings")
    parsed = parse_config(raw | {"conv_dim": 64, "use_pos_enc": True, "block_use_swiglu": True, "block_mlp_init_scale": 1.0})
    assert [type(layer.sublayers[0].block) for layer in parsed.layers] == [ShortConv, Attention, ShortConv, Attention]
    assert parsed.layers[0].sublayers[1].block == Mlp(8192)
    assert parsed.tie_word_embeddings


def test_nemotron_h_by_letters():
    raw = config("nemotron_h", layers_block_type=None, hybrid_override_pattern="M*-E", num_hidden_layers=4)
    assert blocks(raw) == [[Mamba2], [Attention], [Mlp], [MoE]]
    with pytest.raises(ConfigError, match="num_hidden_layers=5"):
        parse_config(raw | {"num_hidden_layers": 5})
    with pytest.raises(ConfigError, match="layers_block_type='MX'"):
        parse_config(raw | {"hybrid_override_pattern": "MX"})


def test_granite_without_experts():
    raw = config("granitemoehybrid", num_local_experts=0, num_experts_per_tok=0, layer_types=["mamba", "attention"] * 2)
    assert blocks(raw) == [[Mamba2, Mlp], [Attention, Mlp]] * 2
    attention = parse_config(raw | {"position_embedding_type": "rope"}).layers[1].sublayers[0].block
    assert isinstance(attention, Attention) and attention.rope is not None


@pytest.mark.parametrize("limits", [[0.0], [0.5, 0.1], [0.0, {"__float__": "NaN"}], [0.0, "much"]])
def test_granite_refuses_time_steps_without_meaning(limits):
    with pytest.raises(ConfigError, match="time_step_limit"):
        parse_config(config("granitemoehybrid", time_step_limit=limits))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lfm2", {"conv_L_cache": 9}),
        ("lfm2", {"layer_types": ["conv", "conv", "conv", "sliding_attention"]}),
        ("nemotron_h", {"mlp_hidden_act": "gelu"}),
        ("nemotron_h", {"moe_latent_size": 32}),
        ("nemotron_h", {"n_groups": 3}),
        ("granitemoehybrid", {"mamba_d_head": 32}),
        ("granitemoehybrid", {"mamba_d_state": 24}),
    ],
)
def test_values_without_equations_are_refused(name, changes):
    with pytest.raises(ConfigError):
        parse_config(config(name, **changes))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_qwen3_5_as_released(name):
    """Beside a vision model, with the keys of its own head for further tokens; layers by interval."""
    plain = config(name)
    text = {key: value for key, value in plain.items() if key != "layer_types"} | {
        "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32", "output_gate_type": "swish",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    }  # fmt: skip
    if name == "qwen3_5_moe":
        text["mlp_only_layers"] = []
    outer = {"model_type": name, "text_config": text, "vision_config": {}, "language_model_only": False, "image_token_id": 9}
    assert parse_config(outer) == parse_config(plain)


def test_qwen3_next_as_released():
    plain = config("qwen3_next")
    released = {key: value for key, value in plain.items() if key != "layer_types"}
    assert parse_config(released | {"full_attention_interval": 4, "use_sliding_window": False}) == parse_config(plain)


def test_kimi_linear_as_released():
    """Delta layers in an object of their own, counted from 1."""
    plain = config("kimi_linear")
    moved = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    delta = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
    released = {key: value for key, value in plain.items() if key not in moved} | {
        "linear_attn_config": delta, "first_k_dense_replace": 1, "mla_use_nope": True, "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid", "num_nextn_predict_layers": 0, "rope_scaling": None, "rope_theta": 10000.0,
        "use_grouped_topk": True,
    }  # fmt: skip
    assert parse_config(released) == parse_config(plain)
    with pytest.raises(ConfigError, match="linear_attn_config"):
        parse_config(released | {"linear_attn_config": delta | {"gate_lower_bound": -5.0}})
