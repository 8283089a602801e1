"""How a family looks in llama.cpp's files: their metadata in the words of config.json, their tensors under canonical names.

In:  `Metadata` of a file
Out: what a family file says in its `Gguf`; llama.cpp's names are rewritten from "blk.N." to "model.layers.N." before rules see them
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .family import Rule


class Metadata(Protocol):
    """Typed access to a file's keys below "<architecture>."; a value of another kind is refused by name."""

    @property
    def layers(self) -> int:
        """Layers of the model itself, without those that predict further tokens (MTP)."""

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key; `default` if absent. A list of equal numbers counts as the number."""

    def size(self, key: str, default: int | None = None) -> int:
        """A positive number; refused if absent and without default."""

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number, as the shortest decimal that its float32 stands for."""

    def by_layer(self, key: str, default: Any = None) -> list[Any]:
        """One value per layer, also where the file has a single one for all."""

    def is_list(self, key: str) -> bool:
        """Whether the key is there with one value per layer."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor called `name` in the file, None if there is none."""

    def values(self, name: str) -> list[float] | None:
        """Elements of the float32 vector called `name` in the file."""

    def layers_with(self, name: str) -> list[bool]:
        """Whether each layer has the tensor "blk.N.<name>"."""


def _nothing(meta: Metadata) -> dict[str, Any]:
    return {}


def _always(meta: Metadata) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Gguf:
    """A family's files of one architecture.

    architecture   general.architecture
    config         keys of config.json beside those that all files give (converter/gguf_config.py), or in place of them
    tensors        rules for names that the common table does not have right for this family
    chosen         which files of the architecture are the family's
    """

    architecture: str
    config: Callable[[Metadata], dict[str, Any]] = _nothing
    tensors: tuple[Rule, ...] = ()
    chosen: Callable[[Metadata], bool] = _always


def window_types(meta: Metadata, period: int, *, full_first: bool = False) -> list[str]:
    """layer_types from the file's flag per layer, or from how often full attention comes: in the last of `period` layers, or in the first.

    period   llama.cpp's own for the family, where the file does not say
    """
    key = "attention.sliding_window_pattern"
    if meta.is_list(key):
        flags = meta.by_layer(key)
    else:
        period, full = meta.size(key, period), 0 if full_first else -1
        flags = [i % period != full % period for i in range(meta.layers)]
    return ["sliding_attention" if slides else "full_attention" for slides in flags]


def is_routed(meta: Metadata) -> bool:
    """Whether the model has experts."""
    return bool(meta.get("expert_count", int, 0))


def has_shared_width(meta: Metadata) -> bool:
    """Whether the file says how wide its shared expert is."""
    return meta.get("expert_shared_feed_forward_length", int) is not None


def sections(*parts: tuple[str, str]) -> tuple[Rule, ...]:
    """Rules for (llama.cpp's name, canonical name) of tensors of a layer, with any ending."""
    return tuple(Rule(rf"(.*\.\d+)\.{name}(\..*)?", rf"\1.{to}\2") for name, to in parts)


# Of families that have norms behind their blocks too.
PRE_FEEDFORWARD = Rule(r"(.*)\.ffn_norm\.weight", r"\1.pre_feedforward_layernorm.weight")
MAMBA = (
    *sections(("ssm_in", "mamba.in_proj"), ("ssm_out", "mamba.out_proj"), ("ssm_norm", "mamba.norm")),
    *sections(("ssm_a", "mamba.A"), ("ssm_d", "mamba.D")),
    Rule(r"(.*)\.ssm_dt\.bias", r"\1.mamba.dt_bias"),
    Rule(r"(.*)\.ssm_conv1d\.weight", r"\1.mamba.conv1d.weight", "conv"),
    Rule(r"(.*)\.ssm_conv1d\.bias", r"\1.mamba.conv1d.bias"),
)


def long_rope(meta: Metadata) -> dict[str, Any] | None:
    """rope_scaling of a file with rotary factors for short and long contexts; None without."""
    short, long = meta.values("rope_factors_short.weight"), meta.values("rope_factors_long.weight")
    if short is None or long is None:
        return None
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
    return scaling | {"original_max_position_embeddings": meta.size("rope.scaling.original_context_length")}


def turning_share(turning: int, head_dim: int) -> float:
    """partial_rotary_factor as a config writes it: the shortest decimal that makes `turning` of head_dim columns turn."""
    shares = (math.ceil(turning / head_dim * 10**digits) / 10**digits for digits in range(1, 7))
    return next((share for share in shares if int(share * head_dim) == turning), turning / head_dim)


def layer_ropes(meta: Metadata, thetas: Mapping[str, float]) -> dict[str, Any]:
    """rope_parameters by layer type, in place of one for all layers. thetas: the family's bases, for files that do not say them."""
    head_dim, parameters = meta.size("attention.key_length"), {}
    for kind, theta in thetas.items():
        suffix = "_swa" if kind == "sliding_attention" else ""
        turning = meta.size(f"rope.dimension_count{suffix}", meta.size("rope.dimension_count", head_dim))
        rope = {"rope_theta": meta.real(f"rope.freq_base{suffix}", theta), "partial_rotary_factor": turning_share(turning, head_dim)}
        parameters[kind] = rope
    return {"rope_parameters": parameters, "rope_theta": None, "partial_rotary_factor": None}
