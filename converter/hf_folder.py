"""A Hugging Face folder: config.json, safetensors shards, tokenizer files.

In:  a folder
Out: Source whose tensors are views of memory maps; SourceError names the file that is missing, cut short or malformed
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from libcolibri.errors import ConfigError, FormatError, SourceError
from libcolibri.models.registry import parse_config, text_config
from libcolibri.safetensors_header import TensorSlot, read_header, strict_json

from .names import canonical_name, expected_tensors, match_tensors, recognise, skip_reason
from .sentence_encoder import encoder_settings
from .source import Source, SourceTensor, expert_slices, tensor_from_bytes
from .tokenizers import files_from_folder

TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
INDEX_NAME = "model.safetensors.index.json"
_FUSED = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(\.weight)?")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def open_folder(folder: Path) -> Source:
    """Open a Hugging Face folder; config and every shard's header are checked, no weights are read."""
    config = _text_config(folder)
    kind, family = recognise(config, folder)
    if method := config.get("quantization_config"):
        name = method.get("quant_method", method) if isinstance(method, dict) else method
        raise SourceError(f"{folder}: weights quantised by {str(name)[:40]!r} are not supported: give the 16-bit checkpoint or a GGUF file")
    shards = _shards(folder)
    slots = _read_shards(folder, shards)
    if kind == "decoder" and "tie_word_embeddings" not in config:
        config["tie_word_embeddings"] = "lm_head.weight" not in slots
    if kind == "decoder" and "num_hidden_layers" not in config:
        config["num_hidden_layers"] = parse_config(config).num_hidden_layers  # Nemotron-H lists its layers without a count
    if kind == "encoder":
        config["encoder"] = encoder_settings(folder, config)
    found, aliases, skipped = _collect(folder, kind, family, config, slots)
    tensors = match_tensors(found, expected_tensors(kind, config, folder), aliases, folder)
    fingerprint, state = _fingerprint(folder, shards)
    return Source(folder, kind, family, config, tensors, tuple(skipped), False, fingerprint, state, lambda: files_from_folder(folder))


def _text_config(folder: Path) -> dict[str, Any]:
    """config.json of the text model, which multimodal checkpoints nest; their quantization_config stands outside."""
    raw = _read_json(folder / "config.json")
    try:
        config = dict(text_config(raw))
    except ConfigError as error:
        raise SourceError(f"{folder}: {error}") from error
    return config | {key: raw[key] for key in ("quantization_config",) if key in raw}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SourceError(f"{path}: missing: give the folder of a Hugging Face checkpoint, or a GGUF file")
    try:
        return strict_json(path.read_bytes(), str(path), bare_constants=True)
    except FormatError as error:
        raise SourceError(str(error)) from error


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """Shard file name -> the tensors that the index expects in it; None without an index."""
    if not (folder / INDEX_NAME).is_file():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if "model.safetensors" in names:
            names = ["model.safetensors"]  # other files beside it are adapters or copies
        if not names or len(names) > 1:
            raise SourceError(f"{folder}: {_weights_hint(folder, names)}")
        return {names[0]: None}
    weight_map = _read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{folder / INDEX_NAME}: no weight_map in it: the file is damaged")
    shards: dict[str, set[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w][\w.+-]*\.safetensors", name):
            raise SourceError(f"{folder / INDEX_NAME}: tensor {tensor[:60]!r} lies in {str(name)[:60]!r}, which is no plain file name")
        names_in_shard = shards.setdefault(name, set())
        assert names_in_shard is not None
        names_in_shard.add(tensor)
    return shards


def _weights_hint(folder: Path, names: list[str]) -> str:
    if names:
        return f"{len(names)} safetensors files but no {INDEX_NAME}: download the index too"
    if any(path.suffix in _PICKLED for path in folder.iterdir()):
        return "weights only as pickled files (.bin, .pt), which can run code: get the safetensors files"
    if ggufs := sorted(folder.glob("*.gguf")):
        return f"no safetensors weights: give the GGUF file itself, {ggufs[0].name}"
    return "no safetensors weights in it: the download is incomplete"


def _read_shards(folder: Path, shards: dict[str, set[str] | None]) -> dict[str, tuple[Path, TensorSlot]]:
    """Tensor name -> its file and place."""
    slots: dict[str, tuple[Path, TensorSlot]] = {}
    for name, listed in shards.items():
        path = folder / name
        if not path.is_file():
            raise SourceError(f"{path}: missing, though {INDEX_NAME} names it: the download is incomplete")
        try:
            header = read_header(path)
        except FormatError as error:
            raise SourceError(str(error)) from error
        if listed is not None and (odd := listed ^ set(header)):
            raise SourceError(f"{path}: tensor {min(odd)!r} is not in both the shard and {INDEX_NAME}: files of two downloads are mixed")
        for tensor, slot in header.items():
            if tensor in slots:
                raise SourceError(f"{path}: tensor {tensor!r} is also in {slots[tensor][0].name}")
            slots[tensor] = path, slot
    return slots


def _collect(folder: Path, kind: str, family: str, config: dict[str, Any], slots: dict[str, tuple[Path, TensorSlot]]) -> Any:
    """(canonical name -> SourceTensor, canonical name -> name in the folder, skipped names)."""
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
        raise SourceError(f"{folder}: config key num_hidden_layers is {num_layers!r}, expected a positive number")
    tied = kind == "decoder" and config.get("tie_word_embeddings") is True
    maps: dict[Path, np.ndarray] = {}
    found: dict[str, SourceTensor] = {}
    aliases: dict[str, str] = {}
    skipped: list[str] = []
    for name, (path, slot) in slots.items():
        canonical = canonical_name(name, kind, family)
        if skip_reason(canonical, kind, num_layers) or (tied and canonical == "lm_head.weight"):
            skipped.append(name)
            continue
        if path not in maps:
            maps[path] = np.memmap(path, np.uint8, "r")
        for part, tensor in _tensors(f"{path}: tensor {name!r}", canonical, slot, maps[path][slot.start : slot.end]).items():
            if part in found:
                raise SourceError(f"{path}: tensors {name!r} and {aliases[part]!r} are the same weight")
            found[part], aliases[part] = tensor, name
    return found, aliases, skipped


def _tensors(what: str, name: str, slot: TensorSlot, raw: np.ndarray) -> dict[str, SourceTensor]:
    """One stored tensor as canonical ones: several when experts are fused."""
    if slot.dtype not in TYPES:
        raise SourceError(f"{what} has type {slot.dtype}, only {', '.join(TYPES)} can be converted: give the original 16-bit checkpoint")
    kind, raw = TYPES[slot.dtype], raw.view(np.ndarray)
    fused = _FUSED.fullmatch(name)
    if fused and len(slot.shape) == 3:
        return _split_experts(fused[1], fused[2], kind, slot.shape, raw)
    if len(slot.shape) not in (1, 2) or 0 in slot.shape:
        raise SourceError(f"{what} has shape {slot.shape}, expected a vector or a matrix")
    return {name: tensor_from_bytes(kind, slot.shape, raw)}


def _split_experts(layer: str, part: str, kind: str, shape: tuple[int, ...], raw: np.ndarray) -> dict[str, SourceTensor]:
    """Fused experts: gate_up_proj (E, 2F, D), gate rows first, or down_proj (E, D, F)."""
    count, rows, cols = shape
    result = {}
    for expert, matrix in enumerate(expert_slices(raw, kind, count, (rows, cols))):
        prefix = f"{layer}.mlp.experts.{expert}."
        if part == "down_proj":
            result[f"{prefix}down_proj.weight"] = matrix
            continue
        half = rows // 2
        result[f"{prefix}gate_proj.weight"] = SourceTensor(kind, (half, cols), matrix.blocks[:half])
        result[f"{prefix}up_proj.weight"] = SourceTensor(kind, (rows - half, cols), matrix.blocks[half:])
    return result


def _fingerprint(folder: Path, shards: dict[str, set[str] | None]) -> tuple[dict[str, Any], str]:
    """What identifies the checkpoint (FORMAT.md section 2), and the same with modification times."""
    digest, times, size = hashlib.sha256((folder / "config.json").read_bytes()), [], 0
    for name in sorted(shards):
        with (folder / name).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(length))
        status = (folder / name).stat()
        size += status.st_size
        times.append((name, status.st_size, status.st_mtime_ns))
    fingerprint = {"name": folder.resolve().name, "bytes": size, "header_sha256": digest.hexdigest()}
    return fingerprint, json.dumps([fingerprint, times])
