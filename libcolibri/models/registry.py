"""Which family reads which config.

In: config.json as a dict, in either spelling, text model nested or not. Out: `ModelConfig`.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from .config_reader import HARMLESS, ConfigReader, KeyFinder
from .family import Family

# One module per family; a family may have relatives under other names in its module.
_MODULES = (
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "gemma2", "gemma3", "gemma4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "gpt_oss", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kimi_linear", "laguna",
    "lfm2", "lfm2_moe", "llama", "llama4", "mellum", "mimo_v2_flash", "minimax_m2", "mistral", "mixtral", "nemotron_h", "olmo2", "olmoe",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "smollm3",
)  # fmt: skip


def _load() -> dict[str, Family]:
    modules = [importlib.import_module(f".{name}", __package__) for name in _MODULES]
    return {family.name: family for module in modules for family in vars(module).values() if isinstance(family, Family)}


FAMILIES = _load()

# Families that people have, and what of theirs has no equations here.
MISSING = {
    "deepseek_v4": "hyper-connections, compressed sparse attention and the table of experts by token have no equations here",
    "deepseek_v32": "the indexer of its sparse attention has no equations here",
    "glm5_next": "hyper-connections and its sparse attention have no equations here",
    "hy_v4": "hyper-connections and its sparse attention have no equations here",
    "inkling": "its table of n-grams and its sparse attention have no equations here",
    "kimi_k3": "its delta attention with hyper-connections has no equations here",
    "mistral_large4": "its attention over compressed keys has no equations here",
    "muse_spark": "hyper-connections and its sparse attention have no equations here",
    "qwen4_exp": "hyper-connections, its table of n-grams and its sparse attention have no equations here",
}

# What may stand beside a nested text model: the parts for pictures and sound, which text generation does not touch.
BESIDE_TEXT = HARMLESS | frozenset(
    [
        "audio_config",
        "audio_token_id",
        "audio_token_index",
        "boa_token_id",
        "boi_token_id",
        "boi_token_index",
        "eoa_token_id",
        "eoa_token_index",
        "eoi_token_id",
        "eoi_token_index",
        "ignore_index",
        "image_grid_pinpoints",
        "image_seq_length",
        "image_token_id",
        "image_token_index",
        "is_encoder_decoder",
        "language_model_only",
        "mm_tokens_per_image",
        "model_type",
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "text_config",
        "use_image_newline_parameter",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_feature_layer",
        "vision_feature_select_strategy",
        "vision_start_token_id",
        "vision_token_id",
    ]
)

# Read from the outer config where the nested one is silent.
INHERITED = ("bos_token_id", "eos_token_id", "tie_word_embeddings")


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig` of a Hugging Face config.

    Raises ConfigError naming the key: for an unknown family, a value without equations here, or a key nobody knows.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"config is a {type(raw).__name__}, expected an object with model_type")
    raw = text_config(raw)
    family = family_name(raw)
    _refuse_other_heads(raw, family)
    return FAMILIES[family].parse(ConfigReader(raw, family))


def keys_in_use(raw: Mapping[str, Any]) -> frozenset[str]:
    """The keys of `raw` that its family reads; raises as parse_config does, but not for keys that nobody reads."""
    reader = KeyFinder(raw, family_name(raw))
    FAMILIES[reader.family].parse(reader)
    return reader.used


def family_name(raw: Mapping[str, Any]) -> str:
    """The family of a text model's config: model_type without the "_text" that parts of multimodal models carry.

    Raises ConfigError for a family that cannot run, with what is missing where that is known.
    """
    name = str(raw.get("model_type")).removesuffix("_text")
    if name in MISSING:
        raise ConfigError(f"model_type={name!r} is not supported: {MISSING[name]}")
    if name not in FAMILIES:
        raise ConfigError(f"model_type={name!r} is not supported, only {', '.join(sorted(FAMILIES))}")
    return name


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own config: `raw`, or its nested text_config with what that inherits."""
    nested = raw.get("text_config")
    if nested is None:
        return raw
    if not isinstance(nested, Mapping):
        raise ConfigError(f"text_config is a {type(nested).__name__}, expected an object")
    for key in raw:
        if key not in BESIDE_TEXT and key not in INHERITED:
            raise ConfigError(
                f"{raw.get('model_type')} config: unknown key {key}={raw[key]!r} beside text_config; remove it if it is harmless"
            )
    inherited = {key: raw[key] for key in INHERITED if key in raw and nested.get(key) is None}
    return {**nested, **inherited}


def _refuse_other_heads(raw: Mapping[str, Any], family: str) -> None:
    """A classifier or embedder shares its model_type with the language model, but has another head."""
    architectures = raw.get("architectures") or []
    if architectures and not any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures):
        raise ConfigError(f"{family} config: architectures={architectures!r} is no language model, expected one ending in 'ForCausalLM'")
