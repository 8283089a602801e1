"""Which tensors a model has: canonical names and shapes per family, and the other names they go by.

In:  family and config
Out: the tensors to expect; SourceError naming the first that is unknown, missing or of another shape
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libcolibri.config import ModelConfig
from libcolibri.errors import SourceError
from libcolibri.format import PARTS
from libcolibri.models.registry import FAMILIES as DECODERS
from libcolibri.models.registry import parse_config

from .source import SourceTensor

ENCODERS = ("bert", "xlm-roberta")
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_LAYER = re.compile(r"(?:model\.layers|encoder\.layer)\.(\d+)\.")
_MIXTRAL_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_SKIP = re.compile(r".*(rotary_emb\.inv_freq|\.masked_bias|\.attn\.bias)$|^(mtp|model\.mtp|model\.visual)\.")
_SKIP_ENCODER = re.compile(r"^(embeddings\.position_ids|cls\.|lm_head\.|classifier\.|qa_outputs\.)")


@dataclass(frozen=True, slots=True)
class Expected:
    """Shape of a tensor the model needs, or may have (`optional`)."""

    shape: tuple[int, ...]
    optional: bool = False


def kind_of(family: object, where: Path) -> str:
    """ "decoder" or "encoder"; SourceError for a family that cannot be converted."""
    if family in DECODERS:
        return "decoder"
    if family in ENCODERS:
        return "encoder"
    raise SourceError(f"{where}: model_type {family!r} is not supported, only {', '.join([*DECODERS, *ENCODERS])}")


def canonical_name(name: str, kind: str) -> str:
    """A Hugging Face tensor's name as this converter spells it."""
    if kind == "encoder":
        name = re.sub(r"^(bert|roberta|model|0\.auto_model)\.", "", name)
        return name.replace(".LayerNorm.gamma", ".LayerNorm.weight").replace(".LayerNorm.beta", ".LayerNorm.bias")
    if match := re.fullmatch(r"(model\.layers\.\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight", name):
        return f"{match[1]}.mlp.experts.{match[2]}.{_MIXTRAL_PARTS[match[3]]}.weight"
    return name.replace(".block_sparse_moe.gate.", ".mlp.gate.")


def skip_reason(name: str, kind: str, num_layers: int) -> str | None:
    """Why a tensor is left out, or None if it belongs to the model."""
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= num_layers:
        return f"layer {layer[1]} lies beyond the model's {num_layers}"
    if _SKIP.match(name):
        return "no weight of the language model"
    if kind == "encoder" and _SKIP_ENCODER.match(name):
        return "no part of the encoder"
    return None


def expected_tensors(kind: str, config: Mapping[str, Any], where: Path) -> dict[str, Expected]:
    """Canonical name -> shape of everything the model consists of, in the order in which it is stored."""
    if kind == "decoder":
        return _decoder(parse_config(config))
    return _encoder(config, where)


def _decoder(c: ModelConfig) -> dict[str, Expected]:
    dim, vocab = c.hidden_size, c.vocab_size
    tensors = {"model.embed_tokens.weight": Expected((vocab, dim))}
    for layer in range(c.num_hidden_layers):
        tensors |= _attention(c, f"model.layers.{layer}.")
        prefix = f"model.layers.{layer}.mlp."
        tensors |= _moe(c, prefix) if c.moe_layers[layer] else _mlp(prefix, c.intermediate_size, dim)
    tensors["model.norm.weight"] = Expected((dim,))
    if not c.tie_word_embeddings:
        tensors["lm_head.weight"] = Expected((vocab, dim))
    return tensors


def _attention(c: ModelConfig, prefix: str) -> dict[str, Expected]:
    dim, queries, keys = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    tensors = {f"{prefix}input_layernorm.weight": Expected((dim,)), f"{prefix}post_attention_layernorm.weight": Expected((dim,))}
    for name, rows, cols, bias in (
        ("q_proj", queries, dim, c.attention_bias),
        ("k_proj", keys, dim, c.attention_bias),
        ("v_proj", keys, dim, c.attention_bias),
        ("o_proj", dim, queries, c.attention_out_bias),
    ):
        tensors[f"{prefix}self_attn.{name}.weight"] = Expected((rows, cols))
        if bias:
            tensors[f"{prefix}self_attn.{name}.bias"] = Expected((rows,))
    if c.qk_norm is not None:
        tensors[f"{prefix}self_attn.q_norm.weight"] = Expected((queries if c.qk_norm == "full" else c.head_dim,))
        tensors[f"{prefix}self_attn.k_norm.weight"] = Expected((keys if c.qk_norm == "full" else c.head_dim,))
    return tensors


def _mlp(prefix: str, width: int, dim: int) -> dict[str, Expected]:
    shapes = {"gate_proj": (width, dim), "up_proj": (width, dim), "down_proj": (dim, width)}
    return {f"{prefix}{part}.weight": Expected(shapes[part]) for part in PARTS}


def _moe(c: ModelConfig, prefix: str) -> dict[str, Expected]:
    tensors = {f"{prefix}gate.weight": Expected((c.num_experts, c.hidden_size))}
    for expert in range(c.num_experts):
        tensors |= _mlp(f"{prefix}experts.{expert}.", c.moe_intermediate_size, c.hidden_size)
    if c.shared_expert_intermediate_size:
        tensors |= _mlp(f"{prefix}shared_expert.", c.shared_expert_intermediate_size, c.hidden_size)
        tensors[f"{prefix}shared_expert_gate.weight"] = Expected((1, c.hidden_size))
    return tensors


def _encoder(config: Mapping[str, Any], where: Path) -> dict[str, Expected]:
    def size(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise SourceError(f"{where}: config key {key} is {value!r}, expected a positive number")
        return value

    dim, width = size("hidden_size"), size("intermediate_size")
    tensors = {
        "embeddings.word_embeddings.weight": Expected((size("vocab_size"), dim)),
        "embeddings.position_embeddings.weight": Expected((size("max_position_embeddings"), dim)),
        "embeddings.token_type_embeddings.weight": Expected((size("type_vocab_size"), dim)),
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
