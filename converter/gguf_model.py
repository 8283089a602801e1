"""A GGUF file as a Source: its names and metadata in Hugging Face's words, weights untouched.

In:  a GGUF file
Out: Source; matrices that llama.cpp reordered get a row order that undoes it
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libcolibri.errors import SourceError

from .gguf import GgufFile, GgufTensor, read_gguf
from .gguf_config import ARCHITECTURES, config_from_metadata
from .names import expected_tensors, match_tensors, recognise, skip_reason
from .source import KEEP, Source, SourceTensor, expert_slices, tensor_from_bytes
from .tokenizers import files_from_gguf

DECODER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
DECODER_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
FUSED_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
ENCODER_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
ENCODER_LAYER = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)\.(weight|bias)")
_BLOCK_EXPERT = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down)\.(\d{1,6})\.weight")


@dataclass(frozen=True)
class _Context:
    """What a tensor's translation depends on."""

    path: Path
    kind: str
    config: dict[str, Any]
    interleaved: bool  # llama.cpp stores q and k rows for rotary pairs side by side


def open_gguf(path: Path) -> Source:
    """Open a GGUF file of a supported architecture. Reads the header only."""
    file = read_gguf(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise SourceError(f"{path}: GGUF architecture {str(architecture)[:40]!r} is not supported, only {', '.join(ARCHITECTURES)}")
    config = config_from_metadata(file)
    kind, family = recognise(config, path)
    context = _Context(path, kind, config, architecture == "llama")
    found, aliases, skipped = _collect(file, context)
    tensors = match_tensors(found, expected_tensors(kind, config, path), aliases, path)
    status = path.stat()
    fingerprint = {"name": path.name, "bytes": status.st_size, "header_sha256": file.header_sha256}
    state = json.dumps([fingerprint, status.st_mtime_ns])
    metadata = file.metadata
    return Source(path, kind, family, config, tensors, tuple(skipped), KEEP, fingerprint, state, lambda: files_from_gguf(path, metadata))


def _collect(file: GgufFile, context: _Context) -> tuple[dict[str, SourceTensor], dict[str, str], list[str]]:
    found: dict[str, SourceTensor] = {}
    aliases: dict[str, str] = {}
    skipped: list[str] = []
    tied = context.config.get("tie_word_embeddings") is True
    for name, entry in file.tensors.items():
        if name == "rope_freqs.weight":  # became rope_scaling of the config
            skipped.append(name)
            continue
        translated = _translate(file, context, entry)
        keep = {n: t for n, t in translated.items() if not skip_reason(n, context.kind, context.config["num_hidden_layers"])}
        if not keep or (tied and "lm_head.weight" in keep):
            skipped.append(name)
            continue
        for canonical, tensor in keep.items():
            if canonical in found:
                raise SourceError(f"{file.path}: tensors {name!r} and {aliases[canonical]!r} are the same weight")
            found[canonical], aliases[canonical] = tensor, name
    return found, aliases, skipped


def _translate(file: GgufFile, context: _Context, entry: GgufTensor) -> dict[str, SourceTensor]:
    """One GGUF tensor under its canonical names: one per expert when experts are fused."""
    raw = file.raw(entry)
    if match := _BLOCK_EXPERT.fullmatch(entry.name):  # files of early 2024: one tensor per expert
        _expect_dims(file, entry, 2)
        name = f"model.layers.{int(match[1])}.mlp.experts.{int(match[3])}.{match[2]}_proj.weight"
        return {name: tensor_from_bytes(entry.type, entry.shape, raw)}
    match = _BLOCK.fullmatch(entry.name)
    if match and match[2] in FUSED_EXPERTS and match[3] == "weight" and context.kind == "decoder":
        _expect_dims(file, entry, 3)
        matrices = expert_slices(raw, entry.type, entry.shape[0], (entry.shape[1], entry.shape[2]))
        prefix = f"model.layers.{int(match[1])}.mlp.experts."
        return {f"{prefix}{e}.{FUSED_EXPERTS[match[2]]}.weight": matrix for e, matrix in enumerate(matrices)}
    name = _canonical(entry.name, match, context.kind)
    shape = _canonical_shape(name, entry.shape)
    if len(shape) > 2:
        raise SourceError(f"{file.path}: tensor {entry.name!r} has {len(shape)} dimensions, expected a vector or a matrix")
    tensor = tensor_from_bytes(entry.type, shape, raw)
    return {name: _restore(tensor, name, context)}


def _expect_dims(file: GgufFile, entry: GgufTensor, dims: int) -> None:
    if len(entry.shape) != dims:
        raise SourceError(f"{file.path}: tensor {entry.name!r} has {len(entry.shape)} dimensions, expected {dims}")


def _canonical(name: str, match: re.Match[str] | None, kind: str) -> str:
    """Hugging Face's name; an unknown one is returned as it is and reported later."""
    layer_names, names = (DECODER_LAYER, DECODER_NAMES) if kind == "decoder" else (ENCODER_LAYER, ENCODER_NAMES)
    if match:
        prefix = "model.layers" if kind == "decoder" else "encoder.layer"
        return f"{prefix}.{int(match[1])}.{layer_names[match[2]]}.{match[3]}" if match[2] in layer_names else name
    stem, _, suffix = name.rpartition(".")
    return f"{names[stem]}.{suffix}" if stem in names and suffix in ("weight", "bias") else name


def _canonical_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """GGUF files may drop a leading 1 of a matrix."""
    one_row = name.endswith((".shared_expert_gate.weight", "token_type_embeddings.weight"))
    return (1, *shape) if one_row and len(shape) == 1 else shape


def _restore(tensor: SourceTensor, name: str, context: _Context) -> SourceTensor:
    """Undo what llama.cpp's converter did to the rows."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if context.interleaved and part in heads:
        return _undo_interleaving(tensor, context.config[heads[part]])
    if context.config["model_type"] == "xlm-roberta" and name == "embeddings.position_embeddings.weight":
        rows = np.concatenate([np.zeros((2, tensor.cols), np.float32), tensor.read()])  # rows 0 and 1 belong to padding and are never read
        return tensor_from_bytes("f32", rows.shape, rows.reshape(-1).view(np.uint8))
    return tensor


def _undo_interleaving(tensor: SourceTensor, heads: int) -> SourceTensor:
    """llama.cpp stores row (t, j) of a head, t half and j < head_dim / 2, at place (j, t)."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        return tensor  # a wrong shape is reported with its expected one by match_tensors
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    if len(tensor.shape) == 2:
        return tensor.reordered(order)
    values = np.ascontiguousarray(tensor.read()[0, order])
    return tensor_from_bytes("f32", tensor.shape, values.view(np.uint8))
