"""What a decoder computes, as data: frozen, checked once, in Hugging Face's names.

In: values a family file (models/) has read from a config. Out: `ModelConfig`, which loader, decoder and KV cache take as true.
"""

from dataclasses import dataclass

from .errors import ConfigError
from .rope import RopeConfig

_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only language model. Fields have the names of Hugging Face's config.json.

    head_dim                           never derived later: a family file has settled it
    attention_bias, attention_out_bias q, k, v projections have biases; o_proj has one
    qk_norm                            None, "head" (RMSNorm over head_dim) or "full" (over all heads at once), before the rotation
    clip_qkv                           q, k, v are clamped to +-clip_qkv after projection and norm
    sliding_window, sliding_layers     a position sees itself and sliding_window - 1 before it, in the layers marked True
    intermediate_size                  width of a dense layer's MLP
    num_experts ... norm_topk_prob     softmax over all experts, top num_experts_per_tok, divided by their sum if norm_topk_prob
    shared_expert_intermediate_size    0 without a shared expert; with one, it is scaled by sigmoid(shared_expert_gate(x))
    moe_layers                         one flag per layer; all False in a dense model
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: str | None = None
    clip_qkv: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    shared_expert_intermediate_size: int = 0
    moe_layers: tuple[bool, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        if not self.rms_norm_eps >= 0.0:
            raise ConfigError(f"rms_norm_eps={self.rms_norm_eps}: expected a number from 0 up")
        if self.hidden_act != "silu":
            raise ConfigError(f"hidden_act={self.hidden_act!r} is not supported, only 'silu'")
        if self.qk_norm not in (None, "head", "full"):
            raise ConfigError(f"qk_norm={self.qk_norm!r} is not supported, only None, 'head' or 'full'")
        if self.clip_qkv is not None and not self.clip_qkv > 0.0:
            raise ConfigError(f"clip_qkv={self.clip_qkv}: expected null or a number above 0")
        self._fill_layer_flags()
        self._check_attention()
        self._check_experts()

    def _fill_layer_flags(self) -> None:
        for name in ("sliding_layers", "moe_layers"):
            flags = getattr(self, name) or (False,) * self.num_hidden_layers
            if len(flags) != self.num_hidden_layers:
                raise ConfigError(f"{name} has {len(flags)} entries, expected one for each of {self.num_hidden_layers} layers")
            object.__setattr__(self, name, tuple(bool(flag) for flag in flags))

    def _check_attention(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; the rotary embedding turns pairs")
        if any(self.sliding_layers) and (self.sliding_window is None or self.sliding_window < 1):
            raise ConfigError(f"sliding_window={self.sliding_window} in a model with sliding layers: expected at least 1")

    def _check_experts(self) -> None:
        if not any(self.moe_layers):
            if self.intermediate_size < 1:
                raise ConfigError(f"intermediate_size={self.intermediate_size}: expected at least 1")
            return
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(f"num_experts_per_tok={self.num_experts_per_tok}: expected 1 to num_experts={self.num_experts}")
        if self.moe_intermediate_size < 1:
            raise ConfigError(f"moe_intermediate_size={self.moe_intermediate_size}: expected at least 1")
        if not all(self.moe_layers) and self.intermediate_size < 1:
            raise ConfigError(f"intermediate_size={self.intermediate_size} in a model with dense layers: expected at least 1")

    @property
    def q_size(self) -> int:
        """Outputs of q_proj: H * Dh."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of k_proj and of v_proj: G * Dh."""
        return self.num_key_value_heads * self.head_dim

    @property
    def is_moe(self) -> bool:
        return any(self.moe_layers)

    @property
    def max_context_length(self) -> int:
        """Longest context the positions allow, in tokens; yarn and the like stretch the pre-training length."""
        stretched = int((self.rope.original_max_position_embeddings or 0) * self.rope.factor)
        return max(self.max_position_embeddings, stretched)

    def window_of(self, layer: int) -> int | None:
        """Positions that `layer` sees, itself included; None when it sees all."""
        return self.sliding_window if self.sliding_layers[layer] else None
