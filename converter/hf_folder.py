"""A Hugging Face folder: config.json, safetensors shards, tokenizer files.

In:  a folder
Out: Source whose tensors are views of memory maps; SourceError names the file that is missing, cut short or malformed
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from libcolibri.errors import ConfigError, FormatError, SourceError
from libcolibri.models.registry import parse_config, text_config
from libcolibri.safetensors_header import TensorSlot, read_header, strict_json

from .hf_tensors import read_quantization, stored_tensors
from .names import expected_tensors, match_tensors, plain_name, recognise, skip_reason, transformer_for
from .sentence_encoder import encoder_settings
from .source import Source, SourceTensor
from .tokenizers import files_from_folder
from .transforms import Transformer

Slots = dict[str, tuple[Path, TensorSlot]]
INDEX_NAME = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def open_folder(folder: Path) -> Source:
    """Open a Hugging Face folder; config and every shard's header are checked, no weights are read."""
    config = _text_config(folder)
    kind, family = recognise(config, folder)
    quantization = read_quantization(config, folder)
    shards = _shards(folder)
    slots = _read_shards(folder, shards)
    if kind == "decoder" and "tie_word_embeddings" not in config:
        config["tie_word_embeddings"] = "lm_head.weight" not in slots
    if kind == "decoder" and "num_hidden_layers" not in config:
        config["num_hidden_layers"] = parse_config(config).num_hidden_layers  # Nemotron-H lists its layers without a count
    if kind == "encoder":
        config["encoder"] = encoder_settings(folder, config)
    expected = expected_tensors(kind, config, folder)
    transformer = transformer_for(kind, family, config, expected)
    kept, skipped = _leave_out(slots, kind, config, transformer)
    found, aliases = _collect(stored_tensors(kept, quantization), kind, transformer, folder)
    tensors = match_tensors(found, expected, aliases, folder)
    # Eight bits hold FP8 weights with an error far below theirs, and embedders are small; everything else fits better in four.
    recipe = "q8_0" if quantization.method or kind == "encoder" else "q4_k_m"
    fingerprint, state = _fingerprint(folder, shards)
    return Source(folder, kind, family, config, tensors, tuple(skipped), recipe, fingerprint, state, lambda: files_from_folder(folder))


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


def _read_shards(folder: Path, shards: dict[str, set[str] | None]) -> Slots:
    """Tensor name -> its file and place."""
    slots: Slots = {}
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


def _leave_out(slots: Slots, kind: str, config: dict[str, Any], transformer: Transformer) -> tuple[Slots, list[str]]:
    """(what belongs to the model, names of the rest)."""
    tied = kind == "decoder" and config.get("tie_word_embeddings") is True
    kept, skipped = {}, []
    for name, slot in slots.items():
        plain = plain_name(name, kind)
        canonical = transformer.names_of(plain)[0][0]
        if skip_reason(canonical, kind, config["num_hidden_layers"], transformer.skipped) or (tied and plain.startswith("lm_head.weight")):
            skipped.append(name)
        else:
            kept[name] = slot
    return kept, skipped


def _collect(
    stored: dict[str, SourceTensor], kind: str, transformer: Transformer, folder: Path
) -> tuple[dict[str, SourceTensor], dict[str, str]]:
    """(canonical name -> SourceTensor, canonical name -> name in the folder)."""
    found: dict[str, SourceTensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in stored.items():
        for canonical, made in transformer.apply(plain_name(name, kind), tensor).items():
            if canonical in found:
                raise SourceError(f"{folder}: tensors {name!r} and {aliases[canonical]!r} are the same weight")
            found[canonical], aliases[canonical] = made, name
    return found, aliases


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
