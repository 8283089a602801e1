"""Read a model directory back as float32, and write GGUF files of the tiny models."""

import json

import gguf
import numpy as np
from safetensors import safe_open

from libcolibri.format import PARTS, dense_slots, expert_offsets, read_manifest
from libcolibri.quant import FORMATS

ARCHITECTURE = {
    "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe", "bert": "bert",
}  # fmt: skip
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "attention.self.query": "attn_q",
    "attention.self.key": "attn_k", "attention.self.value": "attn_v", "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up", "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}  # fmt: skip
TOP_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd", "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}  # fmt: skip
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def source_tensors(folder):
    """Canonical name -> float32 of a tiny Hugging Face model, by safetensors itself."""
    result = {}
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            canonical = name
            if "block_sparse_moe" in name:
                canonical = name.replace("block_sparse_moe.gate", "mlp.gate").replace("block_sparse_moe", "mlp")
                for short, long in MIXTRAL.items():
                    canonical = canonical.replace(f".{short}.", f".{long}.")
            result[canonical] = read_bf16(folder / "model.safetensors", name)
    return result


def read_bf16(path, name):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + length])[name]
    assert entry["dtype"] == "BF16"
    first, stop = entry["data_offsets"]
    bits = np.frombuffer(raw, np.uint16, (stop - first) // 2, 8 + length + first).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(entry["shape"])


def read_model(folder):
    """Canonical name -> float32 of everything in a model directory."""
    manifest, result = read_manifest(folder), {}
    raw = np.fromfile(folder / "dense.safetensors", np.uint8)
    for name, slot in dense_slots(folder, manifest).items():
        entry, data = manifest.tensors[name], raw[slot.start : slot.end]
        if len(entry.shape) == 1:
            result[name] = data.view(np.float32)
        else:
            result[name] = FORMATS[entry.type].dequantize(data.reshape(entry.stored_shape), *entry.shape)
    for layer, entry in manifest.experts.items():
        raw = np.fromfile(folder / entry.file, np.uint8)
        for expert, offset in enumerate(expert_offsets(folder, manifest, layer)):
            for part in PARTS:
                place = entry.parts[part]
                data = raw[offset + place.offset : offset + place.offset + place.bytes]
                tiles = data.reshape(FORMATS[place.type].tile_shape(*place.shape))
                result[f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"] = FORMATS[place.type].dequantize(tiles, *place.shape)
    return result


def interleave(weights, heads):
    """What llama.cpp's converter does to q and k: (halves, pairs) of a head's rows become (pairs, halves)."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(path, folder, kind="F32", edit=None):
    """A GGUF file of a tiny model as llama.cpp's converter would write it; matrices as `kind`. edit(writer) adds metadata."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, ARCHITECTURE[family])
    _metadata(writer, config, family)
    if edit is not None:
        edit(writer)
    for name, data in _gguf_tensors(source_tensors(folder), config, family).items():
        qtype = gguf.GGMLQuantizationType[kind]
        plain = data.ndim == 1 or "gate_inp" in name or data.shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0]
        if plain:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer, config, family):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if family == "bert":
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if count := config.get("num_local_experts", config.get("num_experts")):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _gguf_tensors(tensors, config, family):
    result, experts = {}, {}
    for name, data in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if stem in TOP_NAMES:
            result[f"{TOP_NAMES[stem]}.{suffix}"] = data
        elif ".experts." in stem:
            layer, expert, part = stem.split(".")[2], int(stem.split(".")[5]), stem.split(".")[6].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[expert] = data
        elif "pooler" not in stem:
            layer, rest = stem.split(".", 3)[2:]
            if ARCHITECTURE[family] == "llama" and rest in ("self_attn.q_proj", "self_attn.k_proj"):
                data = interleave(data, config["num_attention_heads" if "q_proj" in rest else "num_key_value_heads"])
            data = data[0] if rest == "mlp.shared_expert_gate" else data
            result[f"blk.{layer}.{LAYER_NAMES[rest]}.{suffix}"] = data
    return result | {name: np.stack([parts[e] for e in sorted(parts)]) for name, parts in experts.items()}
