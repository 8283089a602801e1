"""A GGUF file as a Source: its names and metadata in Hugging Face's words, weights untouched.

In:  a GGUF file
Out: Source; tensors that llama.cpp reordered get a row order that undoes it
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from libcolibri.errors import SourceError
from libcolibri.models.gguf import Gguf
from libcolibri.models.registry import FAMILIES, parse_config

from .gguf import GgufFile, read_gguf
from .gguf_config import config_from_metadata
from .gguf_names import DECODER_RULES, ENCODER_RULES
from .names import Expected, expected_tensors, match_tensors, recognise, skip_reason
from .source import KEEP, Source, SourceTensor, tensor_from_bytes
from .tokenizers import files_from_gguf
from .transforms import Transformer

# What became part of the config: factors of rotary frequencies.
_READ_AS_CONFIG = re.compile(r"rope_(freqs|factors_(long|short))\.weight")


def open_gguf(path: Path) -> Source:
    """Open a GGUF file of a supported architecture. Reads the header only."""
    file = read_gguf(path)
    config, gguf = config_from_metadata(file)
    kind, family = recognise(config, path)
    expected = expected_tensors(kind, config, path)
    found, aliases, skipped = _collect(file, kind, config, _transformer(gguf, family, config, expected), expected)
    tensors = match_tensors(found, expected, aliases, path)
    fingerprint = {"name": file.path.name, "bytes": file.nbytes, "header_sha256": file.header_sha256}
    state = json.dumps([fingerprint, [part.stat().st_mtime_ns for part in file.paths]])
    metadata = file.metadata
    return Source(path, kind, family, config, tensors, tuple(skipped), KEEP, fingerprint, state, lambda: files_from_gguf(path, metadata))


def _transformer(gguf: Gguf | None, family: str, config: Mapping[str, object], expected: Mapping[str, Expected]) -> Transformer:
    if gguf is None:
        return Transformer(ENCODER_RULES, None, {})
    shapes = {name: entry.shape for name, entry in expected.items()}
    return Transformer((*gguf.tensors, *DECODER_RULES), parse_config(config), shapes, FAMILIES[family].skipped)


def _collect(
    file: GgufFile, kind: str, config: Mapping[str, object], transformer: Transformer, expected: Mapping[str, Expected]
) -> tuple[dict[str, SourceTensor], dict[str, str], list[str]]:
    """(canonical name -> tensor, canonical name -> the file's name, names left out)."""
    found: dict[str, SourceTensor] = {}
    aliases: dict[str, str] = {}
    skipped: list[str] = []
    for name, entry in file.tensors.items():
        plain = re.sub(r"^blk\.0*(\d{1,6})\.", r"model.layers.\1." if kind == "decoder" else r"encoder.layer.\1.", name)
        if _READ_AS_CONFIG.fullmatch(name) or _is_left_out(transformer.names_of(plain)[0][0], kind, config, transformer):
            skipped.append(name)
            continue
        tensor = tensor_from_bytes(entry.type, entry.shape, file.raw(entry))
        try:
            parts = transformer.apply(plain, tensor)
        except SourceError as error:
            raise SourceError(f"{file.path}: {str(error).replace(plain, name)}") from error
        for canonical, part in parts.items():
            if canonical in found:
                raise SourceError(f"{file.path}: tensors {name!r} and {aliases[canonical]!r} are the same weight")
            found[canonical], aliases[canonical] = _fitted(canonical, part, expected, config), name
    return found, aliases, skipped


def _is_left_out(canonical: str, kind: str, config: Mapping[str, object], transformer: Transformer) -> bool:
    layers = config["num_hidden_layers"]
    assert isinstance(layers, int)
    tied = kind == "decoder" and config.get("tie_word_embeddings") is True and canonical == "lm_head.weight"
    return tied or skip_reason(canonical, kind, layers, transformer.skipped) is not None


def _fitted(name: str, tensor: SourceTensor, expected: Mapping[str, Expected], config: Mapping[str, object]) -> SourceTensor:
    """GGUF files drop a leading 1 of a matrix, give vectors one, and lack the two rows of XLM-R's positions that belong to padding."""
    if config["model_type"] == "xlm-roberta" and name == "embeddings.position_embeddings.weight":
        rows = np.concatenate([np.zeros((2, tensor.cols), np.float32), tensor.read()])  # never read
        return tensor_from_bytes("f32", rows.shape, rows.reshape(-1).view(np.uint8))
    shape = expected[name].shape if name in expected else tensor.shape
    same = len(shape) != len(tensor.shape) and np.prod(shape) == np.prod(tensor.shape)
    if not same or not isinstance(tensor.blocks, np.ndarray) or tensor.row_order is not None:
        return tensor
    count = shape[0] if len(shape) == 2 else 1
    return replace(tensor, shape=shape, blocks=tensor.blocks.reshape(count, -1, tensor.blocks.shape[-1]))
