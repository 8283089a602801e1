"""Which tensors a model has: canonical names and shapes per family, and the other names they go by.

In:  family and config
Out: the tensors to expect; SourceError naming the first that is unknown, missing or of another shape
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libcolibri.errors import ConfigError, SourceError
from libcolibri.models.registry import FAMILIES as DECODERS
from libcolibri.models.registry import family_name, parse_config

from .source import SourceTensor
from .transforms import GENERAL_RULES, Transformer

ENCODERS = ("bert", "xlm-roberta")
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_LAYER = re.compile(r"(?:model\.layers|encoder\.layer)\.(\d+)\.")
_PREFIX = re.compile(r"^(model\.language_model|language_model\.model|backbone)\.")
_BESIDE = "mtp|visual|vision_tower|vision_model|audio_tower|multi_modal_projector|embed_vision|embed_audio"  # what is not text
_SKIP = re.compile(rf".*(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias)$|^(model\.)?({_BESIDE})\.")
_SKIP_ENCODER = re.compile(r"^(embeddings\.position_ids|cls\.|lm_head\.|classifier\.|qa_outputs\.)")


@dataclass(frozen=True, slots=True)
class Expected:
    """Shape of a tensor the model needs, or may have (`optional`); `type` where only one will do."""

    shape: tuple[int, ...]
    optional: bool = False
    type: str | None = None


def recognise(config: Mapping[str, Any], where: Path) -> tuple[str, str]:
    """("decoder" or "encoder", family) of a text model's config; SourceError for a family that cannot be converted."""
    if (name := config.get("model_type")) in ENCODERS:
        return "encoder", str(name)
    try:
        return "decoder", family_name(config)
    except ConfigError as error:
        raise SourceError(f"{where}: {error}") from error


def plain_name(name: str, kind: str) -> str:
    """A Hugging Face tensor's name without what only tells which model it is part of."""
    if kind == "encoder":
        name = re.sub(r"^(bert|roberta|model|0\.auto_model)\.", "", name)
        return name.replace(".LayerNorm.gamma", ".LayerNorm.weight").replace(".LayerNorm.beta", ".LayerNorm.bias")
    return _PREFIX.sub("model.", name).replace("language_model.lm_head.", "lm_head.")


def transformer_for(kind: str, family: str, config: Mapping[str, Any], expected: Mapping[str, Expected]) -> Transformer:
    """What makes canonical tensors of a family's plain ones."""
    if kind == "encoder":
        return Transformer((), None, {})
    found = DECODERS[family]
    shapes = {name: entry.shape for name, entry in expected.items()}
    return Transformer((*found.tensors, *GENERAL_RULES), parse_config(config), shapes, found.skipped)


def skip_reason(name: str, kind: str, num_layers: int, skipped: str = "") -> str | None:
    """Why a tensor is left out, or None if it belongs to the model."""
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= num_layers:
        return f"layer {layer[1]} lies beyond the model's {num_layers}"
    if _SKIP.match(name):
        return "no weight of the language model"
    if re.fullmatch(skipped, name):
        return "no part of what runs"
    if kind == "encoder" and _SKIP_ENCODER.match(name):
        return "no part of the encoder"
    return None


def expected_tensors(kind: str, config: Mapping[str, Any], where: Path) -> dict[str, Expected]:
    """Canonical name -> shape of everything the model consists of, in the order in which it is stored."""
    if kind == "decoder":
        return {name: Expected(spec.shape, type=spec.type) for name, spec in parse_config(config).tensors().items()}
    return _encoder(config, where)


def _encoder(config: Mapping[str, Any], where: Path) -> dict[str, Expected]:
    def size(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise SourceError(f"{where}: config key {key} is {value!r}, expected a positive number")
        return value

    dim, width = size("hidden_size"), size("intermediate_size")
    tensors = {
        "embeddings.word_embeddings.weight": Expected((size("vocab_size"), dim)),
        "embeddings.position_embeddings.weight": Expected((size("max_position_embeddings"), dim), type="f32"),
        "embeddings.token_type_embeddings.weight": Expected((size("type_vocab_size"), dim), type="f32"),
        **_pair("embeddings.LayerNorm", (dim,)),
    }
    for layer in range(size("num_hidden_layers")):
        prefix = f"encoder.layer.{layer}."
        for name in ("query", "key", "value"):
            tensors |= _pair(f"{prefix}attention.self.{name}", (dim, dim))
        tensors |= _pair(f"{prefix}attention.output.dense", (dim, dim)) | _pair(f"{prefix}attention.output.LayerNorm", (dim,))
        tensors |= _pair(f"{prefix}intermediate.dense", (width, dim)) | _pair(f"{prefix}output.dense", (dim, width))
        tensors |= _pair(f"{prefix}output.LayerNorm", (dim,))
    return tensors | _pair("pooler.dense", (dim, dim), optional=True)


def _pair(prefix: str, shape: tuple[int, ...], optional: bool = False) -> dict[str, Expected]:
    """A weight and its bias of as many rows."""
    return {f"{prefix}.weight": Expected(shape, optional), f"{prefix}.bias": Expected(shape[:1], optional)}


def match_tensors(
    found: Mapping[str, SourceTensor], expected: Mapping[str, Expected], aliases: Mapping[str, str], where: Path
) -> dict[str, SourceTensor]:
    """`found` in the order of `expected`. aliases: canonical name -> the name in the checkpoint, for messages."""
    unknown = [name for name in found if name not in expected]
    if unknown:
        raise SourceError(f"{where}: tensor {aliases.get(unknown[0], unknown[0])!r} is unknown to this model family{_more(unknown)}")
    missing = [name for name, entry in expected.items() if name not in found and not entry.optional]
    if missing:
        raise SourceError(f"{where}: tensor {missing[0]!r} is missing{_more(missing)}: a file of the checkpoint is missing or incomplete")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            shown = aliases.get(name, name)
            raise SourceError(f"{where}: tensor {shown!r} has shape {tensor.shape}, the config says {expected[name].shape}")
    return {name: found[name] for name in expected if name in found}


def _more(names: Iterable[str]) -> str:
    count = len(list(names)) - 1
    return f" (and {count} more)" if count else ""
