"""llama.cpp's tensor names, once a layer's "blk.N." is "model.layers.N." or "encoder.layer.N.": the rules that most families share.

A family's own rules (libcolibri/models/gguf.py) come first.
"""

import re

from libcolibri.models.family import Rule


def _layer(names: dict[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(rf"(.*\.\d+)\.{re.escape(name)}\.(weight|bias)", rf"\1.{to}.\2") for name, to in names.items())


def _top(names: dict[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(rf"{re.escape(name)}\.(weight|bias)", rf"{to}.\1") for name, to in names.items())


def _experts(part: str) -> tuple[Rule, ...]:
    """One part of all experts; of each expert alone, in files of early 2024; and the biases."""
    return (
        Rule(rf"(.*)\.ffn_{part}_exps\.weight", rf"\1.mlp.experts.{{}}.{part}_proj.weight"),
        Rule(rf"(.*)\.ffn_{part}\.(\d+)\.weight", rf"\1.mlp.experts.\2.{part}_proj.weight"),
        Rule(rf"(.*)\.ffn_{part}_exps\.bias", rf"\1.mlp.experts.{part}_proj.bias", "flatten"),
    )


DECODER_RULES = (
    *_top({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}),
    *_layer(
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        }
    ),
    Rule(r"(.*)\.exp_probs_b(?:\.bias)?", r"\1.mlp.gate.e_score_correction_bias"),
    Rule(r"(.*)\.attn_sinks\.weight", r"\1.self_attn.sinks"),
    *_experts("gate"),
    *_experts("up"),
    *_experts("down"),
    Rule(r"(.*)\.ffn_gate_up_exps\.weight", r"\1.mlp.experts.{}.gate_proj.weight \1.mlp.experts.{}.up_proj.weight", "halves"),
)
ENCODER_RULES = (
    *_top(
        {
            "token_embd": "embeddings.word_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
        }
    ),
    *_layer(
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        }
    ),
)
