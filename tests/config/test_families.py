"""Config parsing: both spellings agree, what changes the mathematics is read or refused."""

import json
from pathlib import Path

import pytest

from libcolibri.blocks.attention import Attention
from libcolibri.blocks.mlp import Mlp
from libcolibri.blocks.moe import MoE
from libcolibri.blocks.router import Router
from libcolibri.config import ModelConfig
from libcolibri.errors import ConfigError
from libcolibri.models.registry import FAMILIES, parse_config
from libcolibri.rope import RopeConfig

TINY = Path(__file__).parents[1] / "fixtures" / "tiny"


def attention(config: ModelConfig, layer: int = 0) -> Attention:
    return config.layers[layer].sublayers[0].block


def ffn(config: ModelConfig, layer: int = 0) -> Mlp | MoE:
    return config.layers[layer].sublayers[1].block


def windows(config: ModelConfig) -> list[int | None]:
    return [attention(config, i).window for i in range(config.num_hidden_layers)]


def raw_config(family: str, name: str = "config.json", **changes) -> dict:
    raw = json.loads((TINY / family / name).read_text(encoding="utf-8"))
    return {key: value for key, value in {**raw, **changes}.items() if value != "absent"}


@pytest.mark.parametrize("family", [name for name in sorted(FAMILIES) if (TINY / name).exists()])
def test_new_and_published_spelling_agree(family):
    new, published = (parse_config(raw_config(family, name)) for name in ("config.json", "config_legacy.json"))
    assert new == published
    assert new.family == family


def test_llama_reads_llama3_rope():
    assert attention(parse_config(raw_config("llama"))).rope == RopeConfig(
        type="llama3", theta=5e5, factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0
    )


def test_mistral_window_holds_everywhere():
    config = parse_config(raw_config("mistral"))
    assert windows(config) == [8] * 4
    assert windows(parse_config(raw_config("mistral", sliding_window="absent"))) == [4096] * 4
    assert windows(parse_config(raw_config("mistral", sliding_window=None))) == [None] * 4


def test_mixtral_always_renormalises():
    config = parse_config(raw_config("mixtral"))
    assert ffn(config) == MoE(8, 2, 48, Router(normalise=True))
    assert attention(config).head_dim == 16 and list(config.experts) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="norm_topk_prob=False"):
        parse_config(raw_config("mixtral", norm_topk_prob=False))


def test_qwen3_moe_norm_topk_prob_defaults_to_false():
    assert ffn(parse_config(raw_config("qwen3_moe"))).router.normalise
    assert not ffn(parse_config(raw_config("qwen3_moe", norm_topk_prob="absent"))).router.normalise


def test_qwen2_moe_layers_and_shared_expert():
    config = parse_config(raw_config("qwen2_moe"))
    assert list(config.experts) == [0, 2, 3] and ffn(config).shared.intermediate_size == 48 and ffn(config).shared_gate
    assert attention(config).bias and not attention(config).out_bias and attention(config).window is None
    assert list(parse_config(raw_config("qwen2_moe", mlp_only_layers=[], decoder_sparse_step=2)).experts) == [1, 3]


def test_olmoe_norm_over_full_width_and_clip():
    config = parse_config(raw_config("olmoe", clip_qkv=8.0))
    assert attention(config).qk_norm == "full" and attention(config).clip_qkv == 8.0 and not ffn(config).router.normalise


def test_qwen3_head_dim_is_128_when_absent():
    assert attention(parse_config(raw_config("qwen3", head_dim="absent"))).head_dim == 128
    assert attention(parse_config(raw_config("qwen3_moe", head_dim="absent"))).head_dim == 16


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen2", {"max_window_layers": 2, "layer_types": "absent"}, [None, None, 16, 16]),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"] * 2}, [16, None, 16, None]),
        ("qwen2_moe", {"layer_types": "absent"}, [16, None, 16, None]),
        ("qwen2_moe", {"layer_types": "absent", "max_window_layers": 2}, [16, None, None, None]),
        ("qwen3_moe", {}, [16] * 4),
    ],
)
def test_qwen_windows(family, changes, expected):
    config = parse_config(raw_config(family, use_sliding_window=True, sliding_window=16, **changes))
    assert windows(config) == expected


def test_nested_text_config():
    inner = raw_config("mistral", eos_token_id="absent")
    outer = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": inner, "eos_token_id": [2, 7]}
    config = parse_config(outer | {"vision_config": {"hidden_size": 3}, "image_token_index": 10})
    assert config.family == "mistral" and config.eos_token_ids == (2, 7)
    with pytest.raises(ConfigError, match="rope_twist"):
        parse_config(outer | {"rope_twist": 1})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "gpt_neox"}, "model_type='gpt_neox' is not supported"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "no language model"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"attn_logit_softcapping": 50.0}, "unknown key attn_logit_softcapping"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ("llama", {"is_causal": False}, "is_causal"),
        ("llama", {"norm_eps": 1e-5}, "norm_eps"),
        ("llama", {"num_hidden_layers": "4"}, "num_hidden_layers='4'"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True"),
        ("llama", {"hidden_size": "absent"}, "hidden_size is missing"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("llama", {"num_key_value_heads": 3}, "no multiple"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "both rope_parameters and rope_scaling"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "short_factor is missing"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window is false"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4, "use_sliding_window": True, "sliding_window": 8}, "layer_types"),
        ("qwen3_moe", {"num_experts": 9}, "disagree"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ("qwen2_moe", {"mlp_only_layers": [4]}, "mlp_only_layers"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv=0"),
        ("olmoe", {"sliding_window": 64}, "sliding_window=64"),
        ("mistral", {"num_key_value_heads": "absent"}, "num_key_value_heads is missing"),
    ],
)
def test_refusals_name_the_key(family, changes, message):
    with pytest.raises(ConfigError, match=message) as refused:
        parse_config(raw_config(family, **changes))
    assert "\n" not in str(refused.value)


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        parse_config(raw_config("llama")).hidden_size = 1  # type: ignore[misc]
    assert isinstance(parse_config(raw_config("llama")), ModelConfig)
