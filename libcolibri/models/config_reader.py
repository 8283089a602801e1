"""Reads one config.json strictly: every key is used, known to be harmless, or refused by name.

In: a dict as found in config.json. Out: typed values, one call per key; `finish()` refuses what nobody asked for.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

# Keys that never change what the forward pass computes: bookkeeping, training, layers that predict further tokens (the converter leaves
# them out), and sampling defaults that old configs carried.
HARMLESS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "begin_suppress_tokens",
        "bad_words_ids",
        "cache_implementation",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "keys_to_ignore_at_inference",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_nextn_predict_layers",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "quantization_config",
        "quantization",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    ]
)

# Keys that are harmless at these values only: (key, values under which the equations stay as they are here).
INERT: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "auto_map": (None, {}),
    "is_causal": (True, None),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "use_qk_norm": (False, None),
}

_MISSING = object()


class ConfigReader:
    """Typed access to `raw`; remembers which keys were read."""

    def __init__(self, raw: Mapping[str, Any], family: str):
        self.raw, self.family = raw, family
        self._read: set[str] = set()

    def with_defaults(self, **defaults: Any) -> "ConfigReader":
        """A reader for a family whose published configs leave out what its class has as defaults."""
        copy = type(self)({**defaults, **self.raw}, self.family)
        copy._read = self._read  # reading from the copy is reading from this one
        return copy

    def has(self, key: str) -> bool:
        """Whether `key` is present and not null; does not count as reading it."""
        return self.raw.get(key) is not None

    def value(self, key: str, default: Any = _MISSING) -> Any:
        """`raw[key]`; `default` when absent. Without a default an absent key is an error."""
        self._read.add(key)
        found = self.raw.get(key, default)
        if found is _MISSING:
            raise ConfigError(f"{self.family} config: {key} is missing; take config.json from the model's own release")
        return found

    def integer(self, key: str, default: Any = _MISSING, *, least: int = 1) -> Any:
        """An int from `least` up. null is returned as None only where `default` is None."""
        found = self.value(key, default)
        if found is None and default is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            raise self.refusal(key, found, f"an integer from {least} up")
        return found

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A finite float; null only where `default` is None."""
        found = self.value(key, default)
        if found is None and default is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise self.refusal(key, found, "a finite number")
        return float(found)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """true or false."""
        found = self.value(key, default)
        if not isinstance(found, bool):
            raise self.refusal(key, found, "true or false")
        return found

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses `key` unless it is absent or one of `allowed`."""
        found = self.value(key, allowed[0])
        if found not in allowed:
            raise self.refusal(key, found, " or ".join(repr(value) for value in allowed))

    def either(self, *keys: str) -> str:
        """Which of several spellings of one value is present; the last when none is. Two that disagree are refused."""
        present = [key for key in keys if self.has(key)]
        if len({repr(self.raw[key]) for key in present}) > 1:
            found = " and ".join(f"{key}={self.raw[key]}" for key in present)
            raise ConfigError(f"{self.family} config: {found} disagree; remove the wrong one")
        self._read.update(keys)
        return present[0] if present else keys[-1]

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or null, as a tuple. -1 and the like mean none."""
        found = self.value(key, None)
        ids = [] if found is None else found if isinstance(found, list) else [found]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
            raise self.refusal(key, found, "a token id, a list of them, or null")
        return tuple(token_id for token_id in ids if token_id >= 0)

    def refusal(self, key: str, found: Any, expected: str) -> ConfigError:
        return ConfigError(f"{self.family} config: {key}={found!r} is not supported, expected {expected}")

    def finish(self) -> None:
        """Refuses every key that was neither read nor is known to be harmless."""
        for key, found in self.raw.items():
            if key in self._read or key in HARMLESS:
                continue
            if key in INERT:
                self.only(key, *INERT[key])
            elif key == "norm_eps":
                # Some exporters repeat rms_norm_eps under this name.
                self.only(key, self.raw.get("rms_norm_eps"))
            else:
                raise ConfigError(
                    f"{self.family} config: unknown key {key}={found!r} may change what the model computes; "
                    "remove it if it does not, else this model is not supported"
                )


class KeyFinder(ConfigReader):
    """A reader that refuses no key: it finds out which ones are read."""

    def finish(self) -> None:
        """Nothing: what is left unread is the answer."""

    @property
    def used(self) -> frozenset[str]:
        """The keys read so far."""
        return frozenset(self._read)
