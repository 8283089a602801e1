"""Reads the rotary embedding of a config in both spellings.

In: a `ConfigReader` with `rope_parameters` (new), or with `rope_theta` and `rope_scaling` (published). Out: `RopeConfig`.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..rope import ROPE_TYPES, RopeConfig
from .config_reader import ConfigReader

_OTHER_NAMES = {"su": "longrope", "dynamic": "ntk_alpha"}  # "dynamic" without alpha depends on the length of each text and is refused


def read_rope(reader: ConfigReader, max_positions: int, theta: float, *, partial: float | None = None) -> RopeConfig:
    """One rotary embedding for all layers; refuses types and keys without equations here.

    theta     the family's default
    partial   the family's default share of columns that turn; None: the family knows no such key
    """
    key, scaling = _scaling(reader)
    return _parse(reader, key, scaling, max_positions, theta, partial)


def read_layer_ropes(
    reader: ConfigReader, max_positions: int, thetas: Mapping[str, float], *, partial: float | None = None,
    local_theta: str = "rope_local_base_freq",
) -> dict[str, RopeConfig]:  # fmt: skip
    """A rotary embedding for each layer type: `rope_parameters` by type; in the published spelling `rope_theta` and `rope_scaling` hold for
    "full_attention", `local_theta` names the base of the others.

    thetas    layer type -> the family's default
    """
    nested = reader.raw.get("rope_parameters")
    if nested is None:
        full = read_rope(reader, max_positions, thetas["full_attention"], partial=partial)
        local = {kind: default for kind, default in thetas.items() if kind != "full_attention"}
        share = 1.0 if partial is None else full.partial_rotary_factor
        return {"full_attention": full} | {kind: RopeConfig("default", reader.number(local_theta, t), share) for kind, t in local.items()}
    reader.value("rope_parameters")
    reader.only("rope_theta", None, thetas["full_attention"])
    reader.only("rope_scaling", None)
    if not isinstance(nested, dict) or not nested.keys() <= thetas.keys():
        raise reader.refusal("rope_parameters", nested, f"an object with {', '.join(thetas)}")
    parsed = {}
    for kind, default in thetas.items():
        parsed[kind] = _parse(reader, f"rope_parameters.{kind}", nested.get(kind) or {}, max_positions, default, partial)
    return parsed


def _scaling(reader: ConfigReader) -> tuple[str, dict[str, Any]]:
    """Name and value of the object that describes the embedding."""
    if reader.has("rope_parameters") and reader.has("rope_scaling"):
        raise ConfigError(f"{reader.family} config: both rope_parameters and rope_scaling are given; remove one")
    key = "rope_parameters" if reader.has("rope_parameters") else "rope_scaling"
    scaling = {name: reader.value(name, None) for name in ("rope_parameters", "rope_scaling")}[key]
    if scaling is not None and not isinstance(scaling, dict):
        raise reader.refusal(key, scaling, "an object or null")
    return key, dict(scaling or {})


def _parse(reader: ConfigReader, key: str, scaling: dict, max_positions: int, theta: float, partial: float | None) -> RopeConfig:
    rope = ConfigReader(dict(scaling), f"{reader.family} {key}")
    stated = rope.value(rope.either("type", "rope_type"), "default")
    kind = _OTHER_NAMES.get(stated, stated)
    if kind not in ROPE_TYPES or (kind == "ntk_alpha" and not rope.has("alpha")):
        raise ConfigError(f"{rope.family}: rope_type={stated!r} is not supported, only {', '.join(ROPE_TYPES)}")
    fields: dict[str, Any] = {
        "type": kind,
        "theta": rope.number("rope_theta", None) or reader.number("rope_theta", None) or theta,
        "partial_rotary_factor": _partial(reader, rope, kind, partial),
    }
    for sections in ("mrope_section", "mrope_interleaved"):  # which columns count rows and columns of a picture: all count tokens in text
        rope.value(sections, None)
    original = reader.integer("original_max_position_embeddings", None) or rope.integer("original_max_position_embeddings", None)
    rope.value("original_max_position_embeddings", None)
    fields |= _SCALED[kind](rope, original or max_positions, max_positions)
    rope.finish()
    return RopeConfig(**fields)


def _partial(reader: ConfigReader, rope: ConfigReader, kind: str, default: float | None) -> float:
    if default is None and kind != "proportional":
        rope.only("partial_rotary_factor", 1.0, None)
        return 1.0
    inner, outer = rope.number("partial_rotary_factor", None), reader.number("partial_rotary_factor", None)
    return inner or outer or default or 1.0


def _default(rope: ConfigReader, original: int, max_positions: int) -> dict[str, Any]:
    rope.value("factor", None)  # transformers ignores a stray factor for this type, so it changes nothing
    return {}


def _linear(rope: ConfigReader, original: int, max_positions: int) -> dict[str, Any]:
    return {"factor": rope.number("factor")}


def _proportional(rope: ConfigReader, original: int, max_positions: int) -> dict[str, Any]:
    return {"factor": rope.number("factor", 1.0)}


def _ntk_alpha(rope: ConfigReader, original: int, max_positions: int) -> dict[str, Any]:
    for unused in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):  # written beside alpha, which alone counts
        rope.value(unused, None)
    return {"alpha": rope.number("alpha")}


def _llama3(rope: ConfigReader, original: int, max_positions: int) -> dict[str, Any]:
    return {
        "factor": rope.number("factor"), "original_max_position_embeddings": original,
        "low_freq_factor": rope.number("low_freq_factor"), "high_freq_factor": rope.number("high_freq_factor"),
    }  # fmt: skip


def _yarn(rope: ConfigReader, original: int, max_positions: int) -> dict[str, Any]:
    factor = rope.number("factor", None) or max_positions / original
    return {
        "factor": factor, "original_max_position_embeddings": original,
        "beta_fast": rope.number("beta_fast", None) or 32.0, "beta_slow": rope.number("beta_slow", None) or 1.0,
        "truncate": rope.flag("truncate", True), "attention_factor": _yarn_attention_factor(rope, factor),
    }  # fmt: skip


def yarn_scale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, as the YaRN paper has it."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """The stated number, else yarn's scale; DeepSeek's configs divide one by another."""
    stated, mscale, mscale_all_dim = _stated_factor(rope), rope.number("mscale", None), rope.number("mscale_all_dim", None)
    if stated is not None:
        return stated
    return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim) if mscale and mscale_all_dim else yarn_scale(factor, 1.0)


def _stated_factor(rope: ConfigReader) -> float | None:
    stated = rope.number("attention_factor", None)
    if stated is not None and stated <= 0.0:
        raise rope.refusal("attention_factor", stated, "a number above 0")
    return stated


def _longrope(rope: ConfigReader, original: int, max_positions: int) -> dict[str, Any]:
    factor = rope.number("factor", None) or max(max_positions / original, 1.0)
    derived = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    scale = _stated_factor(rope) or derived
    return {
        "factor": factor, "original_max_position_embeddings": original,
        "short_factor": _numbers(rope, "short_factor"), "long_factor": _numbers(rope, "long_factor"),
        "attention_factor": rope.number("short_mscale", None) or scale, "long_attention_factor": rope.number("long_mscale", None) or scale,
    }  # fmt: skip


def _numbers(rope: ConfigReader, key: str) -> tuple[float, ...]:
    found = rope.value(key)
    if not isinstance(found, list) or not all(isinstance(x, int | float) and not isinstance(x, bool) and x > 0 for x in found):
        raise rope.refusal(key, found, "a list of numbers above 0")
    return tuple(float(x) for x in found)


_SCALED = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope, "proportional": _proportional,
    "ntk_alpha": _ntk_alpha,
}  # fmt: skip
