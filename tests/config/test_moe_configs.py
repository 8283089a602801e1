"""Released configs of families with experts, in their own spellings; rules of routers and activations that are refused."""

import json
from pathlib import Path

import pytest

from libcolibri.blocks.mlp import Mlp
from libcolibri.blocks.moe import MoE
from libcolibri.blocks.router import Router
from libcolibri.errors import ConfigError
from libcolibri.models.registry import parse_config

TINY = Path(__file__).parents[1] / "fixtures" / "tiny"


def fixture(family: str, **changes) -> dict:
    """A fixture's config in the published spelling; "absent" takes a key away."""
    raw = json.loads((TINY / family / "config_legacy.json").read_text(encoding="utf-8"))
    return {key: value for key, value in {**raw, **changes}.items() if value != "absent"}


def blocks(config, layer: int = 1):
    return [sub.block for sub in config.layers[layer].sublayers]


def test_gpt_oss_as_released():
    config = parse_config({
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
            "truncate": False,
        },
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    })  # fmt: skip
    attention, moe = blocks(config, 0)
    assert attention.window == 128 and attention.sinks and attention.bias and attention.out_bias and blocks(config, 1)[0].window is None
    assert moe == MoE(32, 4, 2880, Router("chosen_softmax", bias=True), activation="clamped_swiglu", limit=7.0, bias=True)


def test_minimax_m2_says_rotary_dim():
    fields = {"rotary_dim": 16, "partial_rotary_factor": "absent", "scoring_func": "sigmoid", "use_routing_bias": True, "use_mtp": True}
    assert parse_config(fixture("minimax_m2", **fields)) == parse_config(fixture("minimax_m2"))
    with pytest.raises(ConfigError, match="shared_intermediate_size"):
        parse_config(fixture("minimax_m2", shared_intermediate_size=64))


def test_mimo_v2_flash_as_released():
    fields = {
        "rope_parameters": "absent", "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334,
        "layer_types": "absent", "hybrid_layer_pattern": [0, 1, 1, 0], "mlp_layer_types": "absent", "moe_layer_freq": [0, 1, 1, 1],
        "sliding_window": 7, "sliding_window_size": 7, "swa_num_key_value_heads": 2, "swa_head_dim": 24, "swa_v_head_dim": 16,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "rms_norm_eps": "absent", "norm_eps": "absent",
        "layernorm_epsilon": 1e-3, "routed_scaling_factor": None, "n_shared_experts": None, "topk_method": "noaux_tc",
    }  # fmt: skip
    assert parse_config(fixture("mimo_v2_flash", **fields)) == parse_config(fixture("mimo_v2_flash"))
    for key, value in (("swa_num_key_value_heads", 3), ("hybrid_layer_pattern", [0, 2, 1, 0]), ("add_full_attention_sink_bias", True)):
        with pytest.raises(ConfigError, match=key):
            parse_config(fixture("mimo_v2_flash", **{**fields, key: value}))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu limit"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func"),
        ("glm4_moe", {"n_group": 3}, "3 groups of 8 experts"),
        ("dots1", {"num_experts_per_tok": 5}, "num_experts_per_tok=5"),
        ("hunyuan_v1_moe", {"moe_topk": [3, 3, 2, 3]}, "moe_topk"),
        ("laguna", {"gating": "per-layer"}, "gating"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"),
        ("laguna", {"num_attention_heads_per_layer": [4, 4]}, "num_attention_heads_per_layer"),
        ("hy_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    ],
)
def test_what_has_no_equations_is_refused(family, changes, named):
    with pytest.raises(ConfigError, match=named):
        parse_config(fixture(family, **changes))


def test_relu2_has_one_matrix_before_the_activation():
    assert list(Mlp(8, activation="relu2").tensors(16)) == ["mlp.up_proj", "mlp.down_proj"]
    experts = MoE(4, 2, 8, Router(), activation="relu2").experts(16)
    assert experts.parts == (("up_proj", (8, 16)), ("down_proj", (16, 8)))
    with pytest.raises(ConfigError, match="'gelu' is not supported, only silu"):
        Mlp(8, activation="gelu")
