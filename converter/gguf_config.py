"""A GGUF file's metadata as a Hugging Face config.

In:  GgufFile
Out: config.json's keys; SourceError names the metadata key that is missing or has no counterpart
"""

from typing import Any

import numpy as np

from libcolibri.errors import ConfigError, SourceError
from libcolibri.models.gguf import Gguf, turning_share, window_types
from libcolibri.models.registry import FAMILIES, keys_in_use

from .gguf import GgufFile

LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192
SCORES = {1: "softmax", 2: "sigmoid", 3: "chosen_softmax", 4: "sqrtsoftplus"}
# Numbers that files give as they are: key of config.json -> metadata key. What changes nothing: 1, for the caps 0.
NUMBERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Keys that change what a model computes, for a family's own function to ask for. In files of other families they are refused.
SPECIAL = (
    "adapters.count", "attention.clamp_kqv", "attention.kv_lora_rank", "attention.max_alibi_bias", "attention.output_scale",
    "attention.rope_pattern", "attention.shared_kv_layers", "attention.temperature_length", "attention.temperature_scale",
    "attention.value_scale", "embedding_length_per_layer_input", "expert_group_scale", "expert_latent_length", "hash_layer_count",
    "hyper_connection.count", "kda.gate_lower_bound", "kda.safe_gate", "moe_latent_size", "n_deepstack_layers", "num_loops", "ple.layers",
    "rope.scaling.alpha", "router_logit_softcapping", "ssm.dt_b_c_rms", "swiglu_clamp_exp", "swiglu_clamp_shexp", "use_parallel_residual",
)  # fmt: skip


class FileMetadata:
    """`libcolibri.models.gguf.Metadata` of a file."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.prefix = file.metadata["general.architecture"]
        self.asked: set[str] = set()

    @property
    def layers(self) -> int:
        """Layers of the model itself: the last `nextn_predict_layers` blocks predict further tokens."""
        count = self.size("block_count") - self.get("nextn_predict_layers", int, 0)
        if count < 1:
            raise self.fault("nextn_predict_layers", self.get("nextn_predict_layers", int, 0), "expected fewer than block_count")
        return count

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        self.asked.add(key)
        value = self.file.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise self.fault(key, value, f"expected {kind.__name__}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if value is None or not 0 < value < 1 << 31:
            raise self.fault(key, value, "expected a positive number")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, float, default)
        if value is None or not np.isfinite(value):
            raise self.fault(key, value, "expected a finite number")
        return float(str(np.float32(value)))

    def value(self, key: str) -> Any:
        return self.file.metadata[f"{self.prefix}.{key}"]

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.file.metadata

    def is_list(self, key: str) -> bool:
        return isinstance(self.file.metadata.get(f"{self.prefix}.{key}"), np.ndarray)

    def by_layer(self, key: str, default: Any = None) -> list[Any]:
        self.asked.add(key)
        count, value = self.size("block_count"), self.file.metadata.get(f"{self.prefix}.{key}", default)
        values = value.tolist() if isinstance(value, np.ndarray) else [value] * count
        if len(values) not in (count, self.layers) or not all(isinstance(one, int) and 0 <= one < 1 << 31 for one in values):
            raise self.fault(key, value, f"expected a number or a flag for each of {count} layers")
        return values[: self.layers]

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self.file.tensors.get(name)
        return None if tensor is None else tensor.shape

    def values(self, name: str) -> list[float] | None:
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type != "f32" or len(tensor.shape) != 1:
            raise SourceError(f"{self.file.path}: tensor {name!r} has type {tensor.type} and shape {tensor.shape}, expected an f32 vector")
        return [float(str(value)) for value in self.file.raw(tensor).view(np.float32)]

    def layers_with(self, name: str) -> list[bool]:
        return [f"blk.{layer}.{name}" in self.file.tensors for layer in range(self.layers)]

    def fault(self, key: str, found: object, hint: str) -> SourceError:
        return SourceError(f"{self.file.path}: metadata {self.prefix}.{key} is {str(found)[:60]}: {hint}")


def config_from_metadata(file: GgufFile) -> tuple[dict[str, Any], Gguf | None]:
    """(config.json's keys, how the family looks in files; None for an encoder)."""
    architecture = file.metadata.get("general.architecture")
    candidates = [(family, gguf) for family in FAMILIES.values() for gguf in family.gguf if gguf.architecture == architecture]
    if not candidates and architecture != "bert":
        known = sorted({gguf.architecture for family in FAMILIES.values() for gguf in family.gguf} | {"bert"})
        raise SourceError(f"{file.path}: GGUF architecture {str(architecture)[:40]!r} is not supported, only {', '.join(known)}")
    meta = FileMetadata(file)
    if architecture == "bert":
        return _encoder(meta), None
    family, gguf = next((family, gguf) for family, gguf in candidates if gguf.chosen(meta))
    offered, own = _common(meta) | {"model_type": family.name}, gguf.config(meta)
    config = {key: value for key, value in _merged(offered, own).items() if value is not None}
    try:
        used = keys_in_use(config)
    except ConfigError as error:
        raise SourceError(f"{file.path}: {error}") from error
    _refuse_unread(meta, family.name, {key: config[key] for key in NUMBERS if key in config and key not in used})
    # What all files say is offered; a family takes what it knows. What a family says of itself is never dropped.
    return {key: value for key, value in config.items() if key in used or key in own or key == "model_type"}, gguf


def _refuse_unread(meta: FileMetadata, family: str, numbers: dict[str, float]) -> None:
    """Refuses what changes the computation and the family knows nothing of; `numbers` are those of NUMBERS that it did not read."""
    faults = {NUMBERS[name]: value for name, value in numbers.items() if value not in (0.0, 1.0)}
    unread = [key for key in SPECIAL if key not in meta.asked and meta.has(key)]
    faults |= {key: meta.value(key) for key in unread if np.any(meta.value(key))}
    for key, value in faults.items():
        raise meta.fault(key, value, f"models of family {family} have no such number here")


def _merged(offered: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `offered`, also inside objects."""
    both = {key: {**offered[key], **value} for key, value in own.items() if isinstance(value, dict) and isinstance(offered.get(key), dict)}
    merged = offered | own | both
    full = merged.get("rope_parameters", {}).get("full_attention")
    if full is not None and "rope_scaling" in merged:  # llama.cpp scales the layers without a window only
        merged["rope_parameters"] = merged["rope_parameters"] | {"full_attention": merged.pop("rope_scaling") | full}
    return merged


def _common(meta: FileMetadata) -> dict[str, Any]:
    """What all files say, in the words that most families know."""
    heads, dim = max(meta.by_layer("attention.head_count")), meta.size("embedding_length")
    heads_kv = [count for count in meta.by_layer("attention.head_count_kv", heads) if count]
    config = {
        "vocab_size": _vocab_size(meta, "token_embd.weight"),
        "hidden_size": dim,
        "num_hidden_layers": meta.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads_kv, default=heads),
        "head_dim": meta.get("attention.key_length", int, None),
        "intermediate_size": max(meta.by_layer("feed_forward_length", 0)) or None,
        "rms_norm_eps": meta.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.size("context_length"),
        "tie_word_embeddings": meta.shape("output.weight") is None,
        "attention_bias": True in meta.layers_with("attn_q.bias"),
        "v_head_dim": meta.get("attention.value_length", int, None),
        "sliding_window": meta.get("attention.sliding_window", int, None) or None,
        **{name: meta.real(key) for name, key in NUMBERS.items() if meta.has(key)},
        **_rope(meta),
        **_specials(meta),
    }
    if meta.has("attention.sliding_window_pattern"):
        config["layer_types"] = window_types(meta, 1)
    return config | (_experts(meta) if meta.get("expert_count", int, 0) else {})


def _experts(meta: FileMetadata) -> dict[str, Any]:
    """Routed and shared experts; families call their number differently."""
    return {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), meta.size("expert_count")),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length", _rows_of(meta, ".ffn_up_exps.weight")),
        "mlp_layer_types": ["sparse" if routed else "dense" for routed in meta.layers_with("ffn_gate_inp.weight")],
        "shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length", int, _rows_of(meta, ".ffn_up_shexp.weight")),
        "n_group": meta.get("expert_group_count", int),
        "topk_group": meta.get("expert_group_used_count", int),
        "n_shared_experts": meta.get("expert_shared_count", int),
        "routed_scaling_factor": meta.real("expert_weights_scale") if meta.has("expert_weights_scale") else None,
        "norm_topk_prob": meta.get("expert_weights_norm", bool),
        "scoring_func": SCORES.get(meta.get("expert_gating_func", int, 0)),
    }


def _vocab_size(meta: FileMetadata, name: str) -> int:
    shape = meta.shape(name)
    if shape is None or len(shape) != 2:
        raise SourceError(f"{meta.file.path}: tensor {name!r} is missing or no matrix: the file holds no complete model")
    return shape[0]


def _rope(meta: FileMetadata) -> dict[str, Any]:
    """rope_theta and rope_scaling; partial_rotary_factor where not all columns of a head turn."""
    head_dim = meta.get("attention.key_length", int, meta.size("embedding_length") // max(meta.by_layer("attention.head_count")))
    turning = meta.get("rope.dimension_count", int, head_dim)
    config: dict[str, Any] = {"rope_theta": meta.real("rope.freq_base", 10000.0)}
    if turning != head_dim:
        config["partial_rotary_factor"] = turning_share(turning, head_dim)
    factor = meta.real("rope.scaling.factor" if meta.has("rope.scaling.factor") else "rope.scale_linear", 1.0)  # the older key
    kind, factors = meta.get("rope.scaling.type", str, "none" if factor == 1.0 else "linear"), meta.values("rope_freqs.weight")
    if factors is not None and max(factors) < 1e29:
        return config | {"rope_scaling": _llama3_scaling(meta, config["rope_theta"], np.array(factors))}
    if kind in ("none", "longrope"):
        return config
    if kind not in ("linear", "yarn"):
        raise meta.fault("rope.scaling.type", kind, "only none, linear, longrope and yarn are supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.size("rope.scaling.original_context_length", meta.size("context_length"))
        keys = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
        scaling |= {name: meta.real(f"rope.scaling.{key}") for name, key in keys.items() if meta.has(f"rope.scaling.{key}")}
    return config | {"rope_scaling": scaling}


def _llama3_scaling(meta: FileMetadata, theta: float, found: np.ndarray) -> dict[str, Any]:
    """The parameters behind rope_freqs.weight, which holds one divisor per frequency; verified by computing the divisors again."""
    factor, wavelength = float(found.max()), 2 * np.pi * theta ** (np.arange(len(found)) / len(found))
    context = _llama3_context(found, factor, wavelength)
    smooth = np.clip((context / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    if not np.allclose(found, 1 / (smooth + (1 - smooth) / factor), rtol=1e-4):
        raise SourceError(
            f"{meta.file.path}: tensor 'rope_freqs.weight' is no llama3 scaling with factor {factor:g}, which alone is supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": context,
    }


def _llama3_context(found: np.ndarray, factor: float, wavelength: np.ndarray) -> int:
    """The context of pre-training, which decides where the divisors between 1 and `factor` lie; Llama 3's where there are none."""
    between = np.flatnonzero((found > 1.001) & (found < 0.999 * factor))
    if not len(between):
        return LLAMA3_CONTEXT
    smooth = (1 / found[between] - 1 / factor) / (1 - 1 / factor)
    return round(float(np.median(wavelength[between] * (LLAMA3_LOW + (LLAMA3_HIGH - LLAMA3_LOW) * smooth))))


def _rows_of(meta: FileMetadata, name: str) -> int | None:
    """Rows of the first matrix, or of each of the first stack of matrices, whose name ends so."""
    return next((tensor.shape[-2] for tensor in meta.file.tensors.values() if tensor.name.endswith(name)), None)


def _specials(meta: FileMetadata) -> dict[str, Any]:
    """Token ids that config.json has too."""
    config = {}
    for name in ("bos", "eos"):
        value = meta.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(value, int) and not isinstance(value, bool):
            config[f"{name}_token_id"] = value
    return config


def _encoder(meta: FileMetadata) -> dict[str, Any]:
    """bert, or xlm-roberta where the vocabulary is its unigram model."""
    family = "xlm-roberta" if meta.file.metadata.get("tokenizer.ggml.model") == "t5" else "bert"
    positions, types = meta.file.tensors.get("position_embd.weight"), meta.file.tensors.get("token_types.weight")
    if positions is None or types is None:
        raise SourceError(f"{meta.file.path}: tensor 'position_embd.weight' or 'token_types.weight' is missing: not a BERT encoder")
    pooling = {1: "mean", 2: "cls"}.get(meta.get("pooling_type", int, 1))
    if pooling is None:
        raise meta.fault("pooling_type", meta.get("pooling_type", int), "only 1 (mean) and 2 (cls) are supported")
    return {
        "model_type": family,
        "vocab_size": _vocab_size(meta, "token_embd.weight"),
        "hidden_size": meta.size("embedding_length"),
        "num_hidden_layers": meta.size("block_count"),
        "num_attention_heads": meta.size("attention.head_count"),
        "intermediate_size": meta.size("feed_forward_length"),
        "hidden_act": "gelu",
        "layer_norm_eps": meta.real("attention.layer_norm_epsilon"),
        "max_position_embeddings": positions.shape[0] + (2 if family == "xlm-roberta" else 0),
        "type_vocab_size": types.shape[0] if len(types.shape) == 2 else 1,
        "pad_token_id": 1 if family == "xlm-roberta" else 0,
        "encoder": {
            "pooling": pooling,
            "normalize": True,
            "max_tok": min(positions.shape[0], meta.size("context_length")),
            "query_prefix": "",
            "passage_prefix": "",
        },
    }
