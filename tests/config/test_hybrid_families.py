"""LFM2, Nemotron-H and Granite 4 as their published configs describe them, in words that the fixtures do not use."""

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
