"""Builds a random model directory in milliseconds, for tests that need one on disk.

In: a folder and config changes. Out: the folder, with every tensor of the config in float32 (or another type), values reproducible by seed.
"""

import json
import zlib
from pathlib import Path

import numpy as np

from libcolibri.config import ModelConfig
from libcolibri.format import (
    DENSE_NAME,
    EXPERT_ALIGN,
    PARTS,
    ExpertsEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    plan_parts,
    sha256_of,
    write_manifest,
)
from libcolibri.models.registry import parse_config
from libcolibri.quant import FORMATS
from libcolibri.safetensors_header import build_header

TINY_MOE = {
    "model_type": "qwen2_moe",
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "eos_token_id": 47,
}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every dense tensor of a model with this config, by Hugging Face name."""
    D, q, kv = config.hidden_size, config.q_size, config.kv_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, D), "model.norm.weight": (D,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}."
        attn, mlp = layer + "self_attn.", layer + "mlp."
        shapes |= {layer + "input_layernorm.weight": (D,), layer + "post_attention_layernorm.weight": (D,)}
        shapes |= {
            attn + "q_proj.weight": (q, D),
            attn + "k_proj.weight": (kv, D),
            attn + "v_proj.weight": (kv, D),
            attn + "o_proj.weight": (D, q),
        }
        if config.attention_bias:
            shapes |= {attn + "q_proj.bias": (q,), attn + "k_proj.bias": (kv,), attn + "v_proj.bias": (kv,)}
        if config.attention_out_bias:
            shapes[attn + "o_proj.bias"] = (D,)
        if config.qk_norm:
            full = config.qk_norm == "full"
            shapes |= {
                attn + "q_norm.weight": (q if full else config.head_dim,),
                attn + "k_norm.weight": (kv if full else config.head_dim,),
            }
        if not config.moe_layers[i]:
            shapes |= mlp_shapes(mlp, D, config.intermediate_size)
            continue
        shapes[mlp + "gate.weight"] = (config.num_experts, D)
        if config.shared_expert_intermediate_size:
            shapes |= mlp_shapes(mlp + "shared_expert.", D, config.shared_expert_intermediate_size)
            shapes[mlp + "shared_expert_gate.weight"] = (1, D)
    return shapes


def mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (width, hidden),
        prefix + "up_proj.weight": (width, hidden),
        prefix + "down_proj.weight": (hidden, width),
    }


def to_tiles(quant: str, values: np.ndarray) -> np.ndarray:
    """Tiles of a float32 matrix, rows filled up to whole tiles with zeros."""
    return FORMATS[quant].quantize(np.pad(values, ((0, -len(values) % 16), (0, 0))))


def random_values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """float32 values of a size that lets every layer matter: outputs of a matrix are about as large as its inputs."""
    if "norm" in name:
        return rng.normal(1.0, 0.1, shape).astype(np.float32)
    scale = 1.0 if "embed" in name else 0.02 if len(shape) == 1 else shape[1] ** -0.5
    return rng.normal(0.0, scale, shape).astype(np.float32)


def make_model(
    folder: Path, *, seed: int = 0, quant: str = "f32", expert_quant: dict[int, str | dict[str, str]] | None = None, **changes
) -> Path:
    """Write a random model; `changes` alter TINY_MOE (None removes a key). expert_quant: type of a layer's experts, or
    types by part (their values are then exact in float16), else `quant`."""
    raw = {key: value for key, value in {**TINY_MOE, **changes}.items() if value is not None}
    config, rng = parse_config(raw), np.random.default_rng(seed)
    folder.mkdir(parents=True)
    shapes = tensor_shapes(config)
    tensors, parts = {}, []
    for name, shape in shapes.items():
        values = random_values(name, shape, rng)
        f32_only = len(shape) == 1 or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        tensors[name] = TensorEntry("f32" if f32_only else quant, shape)
        parts.append(values if len(shape) == 1 else to_tiles(tensors[name].type, values))
    header = build_header((n, "F32" if len(e.shape) == 1 else "U8", e.stored_shape) for n, e in tensors.items())
    (folder / DENSE_NAME).write_bytes(header + b"".join(part.tobytes() for part in parts))
    experts = {
        i: write_experts(folder, config, i, (expert_quant or {}).get(i, quant), rng) for i, routed in enumerate(config.moe_layers) if routed
    }
    files = {p.name: FileEntry(p.stat().st_size, sha256_of(p)) for p in sorted(folder.iterdir())}
    manifest = Manifest(
        kind="decoder", family=config.family, config=raw, quantization={"recipe": quant}, tensors=tensors, experts=experts,
        tokenizer=None, files=files, source={"name": "random", "seed": seed}, converter_version="test",
    )  # fmt: skip
    write_manifest(folder, manifest)
    return folder


def write_experts(folder: Path, config: ModelConfig, layer: int, quant: str | dict[str, str], rng: np.random.Generator) -> ExpertsEntry:
    D, F, E = config.hidden_size, config.moe_intermediate_size, config.num_experts
    shapes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    types = quant if isinstance(quant, dict) else dict.fromkeys(PARTS, quant)
    parts, expert_bytes = plan_parts(types, shapes)
    data = np.zeros((E, expert_bytes), np.uint8)
    for expert in range(E):
        for name in PARTS:
            values = random_values(name, shapes[name], rng)
            if isinstance(quant, dict):
                values = values.astype(np.float16).astype(np.float32)
            tiles = to_tiles(types[name], values).reshape(-1)
            data[expert, parts[name].offset : parts[name].offset + tiles.size] = tiles
    header = build_header(((f"experts.{e}", "U8", (expert_bytes,)) for e in range(E)), align=EXPERT_ALIGN)
    name = f"experts-{layer:05d}.safetensors"
    (folder / name).write_bytes(header + data.tobytes())
    return ExpertsEntry(name, E, expert_bytes, **parts, crc32=tuple(f"{zlib.crc32(row.tobytes()):08x}" for row in data))


def edit_manifest(folder: Path, edit) -> None:
    """Apply `edit` to the manifest's JSON in place."""
    path = folder / "colibri.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    path.write_text(json.dumps(data), encoding="utf-8")
