"""Builds a random model directory in milliseconds, for tests that need one on disk.

In: a folder and config changes. Out: the folder, with every tensor of the config in float32 (or another type), values reproducible by seed.
"""

import json
import zlib
from pathlib import Path

import numpy as np

from libcolibri.blocks.base import ExpertShape
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
    tensors, parts = {}, []
    for name, spec in config.tensors().items():
        if ".mlp.experts." in name:
            continue
        shape = spec.shape
        values = random_values(name, shape, rng)
        tensors[name] = TensorEntry("f32" if len(shape) == 1 else spec.type or quant, shape)
        parts.append(values if len(shape) == 1 else to_tiles(tensors[name].type, values))
    header = build_header((n, "F32" if len(e.shape) == 1 else "U8", e.stored_shape) for n, e in tensors.items())
    (folder / DENSE_NAME).write_bytes(header + b"".join(part.tobytes() for part in parts))
    experts = {
        i: write_experts(folder, shape, i, (expert_quant or {}).get(i, quant), rng) for i, shape in config.experts.items()
    }
    files = {p.name: FileEntry(p.stat().st_size, sha256_of(p)) for p in sorted(folder.iterdir())}
    manifest = Manifest(
        kind="decoder", family=config.family, config=raw, quantization={"recipe": quant}, tensors=tensors, experts=experts,
        tokenizer=None, files=files, source={"name": "random", "seed": seed}, converter_version="test",
    )  # fmt: skip
    write_manifest(folder, manifest)
    return folder


def write_experts(folder: Path, shape: ExpertShape, layer: int, quant: str | dict[str, str], rng: np.random.Generator) -> ExpertsEntry:
    E, shapes = shape.num_experts, dict(shape.parts)
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
