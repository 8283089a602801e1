"""A GGUF file's metadata as a Hugging Face config.

In:  GgufFile
Out: config.json's keys; SourceError names the metadata key that is missing or has no counterpart
"""

from typing import Any

import numpy as np

from libcolibri.errors import SourceError

from .gguf import GgufFile

# GGUF architecture -> model_type. llama also stands for mistral (same equations, its window is not in the file) and mixtral (with experts).
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
    "bert": "bert",
}
ROUTERS_RENORMALISED = {"qwen2_moe": False, "qwen3_moe": True, "olmoe": False}  # llama.cpp has this in code, not in the file
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


class _Metadata:
    """Typed access to the metadata below "<architecture>."."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.prefix = file.metadata["general.architecture"]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key; `default` if absent; an error if of another kind. A list of equal numbers counts as the number."""
        value = self.file.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise self.fault(key, value, f"expected {kind.__name__}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive number; an error if absent and without default."""
        value = self.get(key, int, default)
        if value is None or not 0 < value < 1 << 31:
            raise self.fault(key, value, "expected a positive number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal that gives it back: 1e-06, not 9.999999974752427e-07."""
        value = self.get(key, float, default)
        if value is None or not np.isfinite(value):
            raise self.fault(key, value, "expected a finite number")
        return float(str(np.float32(value)))

    def fault(self, key: str, found: object, hint: str) -> SourceError:
        return SourceError(f"{self.file.path}: metadata {self.prefix}.{key} is {str(found)[:60]}: {hint}")


def config_from_metadata(file: GgufFile) -> dict[str, Any]:
    """config.json's keys for the model in `file`."""
    meta = _Metadata(file)
    family = ARCHITECTURES[meta.prefix]
    if family == "bert":
        return _encoder(meta)
    if family == "llama" and meta.get("expert_count", int, 0):
        family = "mixtral"
    return _common(meta, family) | _rope(meta) | _routed(meta, family) | _specials(meta)


def _common(meta: _Metadata, family: str) -> dict[str, Any]:
    heads, dim = meta.size("attention.head_count"), meta.size("embedding_length")
    head_dim = meta.size("attention.key_length", dim // heads or None)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.size(key, head_dim) != head_dim:
            raise meta.fault(key, meta.size(key), f"only {head_dim}, the size of a head, is supported")
    names = meta.file.tensors
    config = {
        "model_type": family,
        "vocab_size": _vocab_size(meta, "token_embd.weight"),
        "hidden_size": dim,
        "num_hidden_layers": meta.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": meta.size("feed_forward_length", meta.get("expert_feed_forward_length", int)),
        "rms_norm_eps": meta.real("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "max_position_embeddings": meta.size("context_length"),
        "tie_word_embeddings": "output.weight" not in names,
    }
    if family in ("llama", "qwen3", "qwen3_moe", "olmoe"):
        config["attention_bias"] = "blk.0.attn_q.bias" in names
    if family == "olmoe":
        clamp = meta.get("attention.clamp_kqv", float, 0.0)
        config |= {"clip_qkv": clamp} if clamp else {}
        if dim != heads * head_dim:
            raise meta.fault("attention.key_length", head_dim, f"olmoe heads have {dim} / {heads} columns")
        del config["head_dim"]
    return config


def _vocab_size(meta: _Metadata, name: str) -> int:
    tensor = meta.file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise SourceError(f"{meta.file.path}: tensor {name!r} is missing or no matrix: the file holds no complete model")
    return tensor.shape[0]


def _rope(meta: _Metadata) -> dict[str, Any]:
    config: dict[str, Any] = {"rope_theta": meta.real("rope.freq_base", 10000.0)}
    kind = meta.get("rope.scaling.type", str, "none")
    factors = meta.file.tensors.get("rope_freqs.weight")
    if factors is not None:
        return config | {"rope_scaling": _llama3_scaling(meta, config["rope_theta"])}
    if kind == "none":
        return config
    if kind not in ("linear", "yarn"):
        raise meta.fault("rope.scaling.type", kind, "only none, linear and yarn are supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.real("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.size("rope.scaling.original_context_length", meta.size("context_length"))
    return config | {"rope_scaling": scaling}


def _llama3_scaling(meta: _Metadata, theta: float) -> dict[str, Any]:
    """The parameters behind rope_freqs.weight, which holds one divisor per frequency; verified by computing the divisors again."""
    file, tensor = meta.file, meta.file.tensors["rope_freqs.weight"]
    if tensor.type != "f32":
        raise SourceError(f"{file.path}: tensor 'rope_freqs.weight' has type {tensor.type}, expected f32")
    found = file.raw(tensor).view(np.float32).astype(np.float64)
    factor = float(str(np.float32(found.max())))
    wavelength = 2 * np.pi * theta ** (np.arange(len(found)) / len(found))
    smooth = np.clip((LLAMA3_CONTEXT / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    if not np.allclose(found, 1 / (smooth + (1 - smooth) / factor), rtol=1e-4):
        raise SourceError(f"{file.path}: tensor 'rope_freqs.weight' is no llama3 scaling with factor {factor:g}, which alone is supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def _routed(meta: _Metadata, family: str) -> dict[str, Any]:
    """Experts. Layers without a router are dense."""
    if family not in ("mixtral", *ROUTERS_RENORMALISED):
        return {}
    count, per_token = meta.size("expert_count"), meta.size("expert_used_count")
    if family == "mixtral":
        return {"num_local_experts": count, "num_experts_per_tok": per_token}
    config: dict[str, Any] = {"num_experts": count, "num_experts_per_tok": per_token, "norm_topk_prob": ROUTERS_RENORMALISED[family]}
    width = meta.size("expert_feed_forward_length", _expert_width(meta))
    if family == "olmoe":
        return config | {"intermediate_size": width}
    dense = [layer for layer in range(meta.size("block_count")) if f"blk.{layer}.ffn_gate_inp.weight" not in meta.file.tensors]
    config |= {"moe_intermediate_size": width, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    if family == "qwen2_moe":
        shared = meta.file.tensors.get("blk.0.ffn_gate_shexp.weight")
        config["shared_expert_intermediate_size"] = meta.size("expert_shared_feed_forward_length", shared.shape[0] if shared else None)
    return config


def _expert_width(meta: _Metadata) -> int | None:
    for tensor in meta.file.tensors.values():
        if tensor.name.endswith(".ffn_gate_exps.weight") and len(tensor.shape) == 3:
            return tensor.shape[1]
    return None


def _specials(meta: _Metadata) -> dict[str, Any]:
    """Token ids that config.json has too."""
    config = {}
    for name in ("bos", "eos"):
        value = meta.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(value, int) and not isinstance(value, bool):
            config[f"{name}_token_id"] = value
    return config


def _encoder(meta: _Metadata) -> dict[str, Any]:
    """bert, or xlm-roberta where the vocabulary is its unigram model."""
    family = "xlm-roberta" if meta.file.metadata.get("tokenizer.ggml.model") == "t5" else "bert"
    positions = meta.file.tensors.get("position_embd.weight")
    types = meta.file.tensors.get("token_types.weight")
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
