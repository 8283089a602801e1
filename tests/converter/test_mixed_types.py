"""A GGUF file whose matrices have many types, some without a kernel here, as dynamic quantisations have them."""

import gguf
import numpy as np
import pytest
from colibri_converter import convert
from colibri_converter.source_types import SOURCE_TYPES
from model_dirs import read_model
from test_source_types import random_source_blocks

from libcolibri.format import read_manifest, verify
from libcolibri.quant import FORMATS
from tests.random_blocks import random_blocks

DIM, EXPERTS, VOCAB = 256, 3, 32
# GGUF's name -> canonical name, type, and what it is stored as.
MATRICES = {
    "token_embd": ("model.embed_tokens", "q5_k", "q5_k"),
    "output": ("lm_head", "q6_k", "q6_k"),
    "blk.0.attn_q": ("model.layers.0.self_attn.q_proj", "q3_k", "q3_k"),
    "blk.0.attn_k": ("model.layers.0.self_attn.k_proj", "iq4_nl", "iq4_nl"),
    "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", "iq2_s", "q4_k"),
    "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", "q2_k", "q2_k"),
    "blk.0.ffn_gate_exps": ("model.layers.0.mlp.experts.{}.gate_proj", "iq3_s", "q5_k"),
    "blk.0.ffn_up_exps": ("model.layers.0.mlp.experts.{}.up_proj", "iq2_xxs", "q4_k"),
    "blk.0.ffn_down_exps": ("model.layers.0.mlp.experts.{}.down_proj", "mxfp4", "mxfp4"),
}


def blocks_of(kind, rows, cols):
    """Random blocks, uint8 (rows, bytes)."""
    make = random_blocks if kind in FORMATS else random_source_blocks
    seed = np.random.default_rng(3) if kind in FORMATS else 3
    return make(kind, rows, cols // SOURCE_TYPES[kind].block_cols, seed).reshape(rows, -1)


def write(path):
    """The file; returns canonical name -> float32."""
    writer, values = gguf.GGUFWriter(path, "qwen3moe"), {}
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(DIM)
    writer.add_expert_feed_forward_length(DIM)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(DIM, np.float32))
    for name in ("blk.0.attn_q_norm", "blk.0.attn_k_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    writer.add_tensor("blk.0.ffn_gate_inp.weight", np.eye(EXPERTS, DIM, dtype=np.float32))
    for name, (canonical, kind, _) in MATRICES.items():
        count, rows = EXPERTS if "{}" in canonical else 1, VOCAB if name in ("token_embd", "output") else DIM
        blocks = blocks_of(kind, count * rows, DIM)
        shaped = blocks.reshape(count, rows, -1) if "{}" in canonical else blocks
        writer.add_tensor(f"{name}.weight", shaped, raw_dtype=gguf.GGMLQuantizationType[kind.upper()])
        fmt = SOURCE_TYPES[kind]
        matrices = fmt.dequantize_blocks(blocks.reshape(count * rows, -1, fmt.ggml_block_bytes)).reshape(count, rows, DIM)
        values.update({f"{canonical.format(e)}.weight": matrix for e, matrix in enumerate(matrices)})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_a_file_of_many_types(tmp_path):
    values = write(tmp_path / "ud.gguf")
    report = convert(tmp_path / "ud.gguf", tmp_path / "m", tokenizer=False)
    manifest, found = verify(tmp_path / "m"), read_model(tmp_path / "m")
    restored = {name: (was, now) for name, was, now in report.restored}
    for canonical, kind, stored in MATRICES.values():
        for expert in range(EXPERTS if "{}" in canonical else 1):
            name = f"{canonical.format(expert)}.weight"
            if "{}" in canonical:
                assert manifest.experts[0].parts[canonical.rpartition(".")[2]].type == stored
            else:
                assert manifest.tensors[name].type == stored
            if kind == stored:
                assert np.array_equal(found[name], values[name]) and name not in restored
            else:
                error = np.sqrt(np.mean((found[name] - values[name]) ** 2) / np.mean(values[name] ** 2))
                assert error < 0.08 and restored[name] == (kind, stored), (name, error)


def test_four_bit_floats_are_never_rounded_again(tmp_path):
    values = write(tmp_path / "ud.gguf")
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    for quant, stored in (("q4_k_m", "mxfp4"), ("q8_0", "mxfp4"), ("bf16", "bf16"), ("f32", "f32")):
        convert(tmp_path / "ud.gguf", tmp_path / quant, quant=quant, tokenizer=False)
        assert read_manifest(tmp_path / quant).experts[0].parts["down_proj"].type == stored
        assert np.array_equal(read_model(tmp_path / quant)[name], values[name])


@pytest.mark.parametrize(("quant", "most"), [("q6_k", "q6_k"), ("q5_k_m", "q5_k"), ("q4_k_m", "q4_k")])
def test_recipes_of_256_columns(quant, most, tmp_path):
    write(tmp_path / "ud.gguf")
    convert(tmp_path / "ud.gguf", tmp_path / "m", quant=quant, tokenizer=False)
    tensors = read_manifest(tmp_path / "m").tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"].type == most
    assert tensors["lm_head.weight"].type == "q6_k"
