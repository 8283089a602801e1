"""Configs that leave most to their family's defaults, as released ones of Gemma and Llama 4 do."""

from libcolibri.blocks.attention import Attention
from libcolibri.blocks.parallel_moe import ParallelMoE
from libcolibri.models.registry import parse_config
from libcolibri.rope import RopeConfig


def attentions(config) -> list[Attention]:
    return [sub.block for layer in config.layers for sub in layer.sublayers if isinstance(sub.block, Attention)]


def test_gemma3_beside_a_vision_model():
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = parse_config({"model_type": "gemma3", "text_config": text, "vision_config": {}, "mm_tokens_per_image": 256})
    found = attentions(config)
    assert (config.vocab_size, config.max_context_length, config.tie_word_embeddings) == (262208, 131072, True)
    assert [a.window for a in found[:7]] == [1024] * 5 + [None, 1024]
    assert found[0].rope == RopeConfig(theta=1e4) and found[5].rope == RopeConfig("linear", 1e6, factor=8.0)
    assert (found[0].num_attention_heads, found[0].num_key_value_heads, found[0].head_dim, found[0].scale) == (8, 4, 256, 0.0625)


def test_gemma4_with_global_widths():
    """Full layers have heads of their own width and number, and no projection of values."""
    text = {
        "hidden_size": 2816, "intermediate_size": 2112, "model_type": "gemma4_text", "num_hidden_layers": 30, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_global_key_value_heads": 2, "global_head_dim": 512, "attention_k_eq_v": True,
        "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    config = parse_config({"model_type": "gemma4", "text_config": text, "audio_config": None})
    sliding, full = attentions(config)[4:6]
    assert (sliding.head_dim, sliding.num_key_value_heads, sliding.v_is_k, sliding.window) == (256, 8, False, 1024)
    assert (full.head_dim, full.num_key_value_heads, full.v_is_k, full.window) == (512, 2, True, None)
    assert full.rope == RopeConfig("proportional", 1e6, 0.25)
    assert all(isinstance(layer.sublayers[1].block, ParallelMoE) and layer.scalar == "layer_scalar" for layer in config.layers)
    assert "v_proj" in sliding.tensors(2816) and "v_proj" not in full.tensors(2816)


def test_gemma4_layers_without_keys_read_the_last_ones_of_their_kind():
    text = {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "model_type": "gemma4_text",
    }  # fmt: skip
    config = parse_config(text)
    found = attentions(config)
    assert [a.reads_layer for a in found[13:20]] == [None, None, 13, 13, 13, 13, 14]
    assert [config.states[i] is None for i in (14, 15)] == [False, True]
    assert "model.layers.15.self_attn.k_proj.weight" not in config.tensors()
    assert config.tensors()["model.layers.14.mlp.up_proj.weight"].shape == (6144, 1536)
    assert config.tensors()["model.layers.15.mlp.up_proj.weight"].shape == (12288, 1536)
    assert config.tensors()["model.layers.0.embed_tokens_per_layer.weight"].shape == (262144, 35 * 256)


def test_llama4_derives_layers_from_intervals():
    text = {
        "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "model_type": "llama4_text", "vocab_size": 202048,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "num_local_experts": 16, "moe_layers": [],
        "no_rope_layers": [], "attn_temperature_tuning": 4, "max_position_embeddings": 10485760,
    }  # fmt: skip
    scaling = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    text["rope_scaling"] = {**scaling, "rope_type": "llama3"}
    config = parse_config({"model_type": "llama4", "text_config": text})
    found = attentions(config)
    assert [(a.chunk, a.qk_norm, a.temperature) for a in found[2:4]] == [(8192, "unit_last", None), (None, None, (0.1, 8192.0))]
    assert len(config.experts) == 48 and found[3].rope is None
