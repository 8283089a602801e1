"""Grouped-query attention: projections, rotary embedding, the KV cache, softmax, output projection."""

from dataclasses import dataclass

from ..arena import align_up
from ..errors import ConfigError
from ..recorder import LANES, Recorder, head_bundle, padded_vector, wants
from ..rope import RopeConfig
from .base import AttentionState, Block, TensorSpec
from .site import Site


@dataclass(frozen=True, slots=True)
class Attention(Block):
    """out = o_proj(softmax(q . K) @ V) with H query heads, G key/value heads of Dh columns.

    bias, out_bias  q, k, v projections have biases; o_proj has one
    qk_norm         None, "head" (RMSNorm over head_dim) or "full" (over all heads at once), before the rotation; its epsilon is `eps`
    clip_qkv        q, k, v are clamped to +-clip_qkv after projection and norm
    window          a position sees itself and window - 1 before it; None: all before it

    Raises ConfigError for numbers that do not fit together.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: RopeConfig
    eps: float
    bias: bool = False
    out_bias: bool = False
    qk_norm: str | None = None
    clip_qkv: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % LANES:
            raise ConfigError(f"head_dim={self.head_dim} is not supported, only multiples of {LANES}")
        if self.qk_norm not in (None, "head", "full"):
            raise ConfigError(f"qk_norm={self.qk_norm!r} is not supported, only None, 'head' or 'full'")
        if self.clip_qkv is not None and not self.clip_qkv > 0.0:
            raise ConfigError(f"clip_qkv={self.clip_qkv}: expected null or a number above 0")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"sliding_window={self.window} in a model with sliding layers: expected at least 1")

    @property
    def q_size(self) -> int:
        """Outputs of q_proj: H * Dh."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of k_proj and of v_proj: G * Dh."""
        return self.num_key_value_heads * self.head_dim

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        sizes = {"q": self.q_size, "k": self.kv_size, "v": self.kv_size}
        specs = {f"{p}_proj": TensorSpec(f"self_attn.{p}_proj.weight", (rows, hidden_size)) for p, rows in sizes.items()}
        specs["o_proj"] = TensorSpec("self_attn.o_proj.weight", (hidden_size, self.q_size))
        if self.bias:
            specs |= {f"{p}_bias": TensorSpec(f"self_attn.{p}_proj.bias", (rows,)) for p, rows in sizes.items()}
        if self.out_bias:
            specs["o_bias"] = TensorSpec("self_attn.o_proj.bias", (hidden_size,))
        if self.qk_norm is not None:
            widths = (self.head_dim, self.head_dim) if self.qk_norm == "head" else (self.q_size, self.kv_size)
            specs |= {f"{p}_norm": TensorSpec(f"self_attn.{p}_norm.weight", (w,)) for p, w in zip("qk", widths, strict=True)}
        return specs

    def rows(self, hidden_size: int) -> dict[str, int]:
        return {"q": self.q_size, "k": self.kv_size, "v": self.kv_size, "attended": self.q_size}

    def state(self) -> AttentionState:
        return AttentionState(self.num_key_value_heads, self.head_dim, self.head_dim, self.window)

    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        return ((self.rope, self.head_dim),)

    def scratch_bytes(self, hidden_size: int, context_length: int) -> int:
        scores = head_bundle(self.num_attention_heads // self.num_key_value_heads) * _scores_row_bytes(context_length) + 64
        return max(Block.scratch_bytes(self, hidden_size, context_length), scores)

    def record(self, r: Recorder, site: Site) -> None:
        q, k, v, attended = (site.rows(name) for name in ("q", "k", "v", "attended"))
        q_proj, k_proj, v_proj, o_proj = (site.matrix(f"{p}_proj") for p in "qkvo")
        x = site.input(r, wants([q_proj, k_proj, v_proj]))
        r.product("q", q_proj, x, q, bias=site.vector("q_bias"), barrier=False)
        r.product("k", k_proj, x, k, bias=site.vector("k_bias"), barrier=False)
        r.product("v", v_proj, x, v, bias=site.vector("v_bias"))
        per_head = self._record_qk_norm(r, site)
        table = site.rope_table(self.rope, self.head_dim)
        r.rope_append(site.start, q, k, v, self.head_dim, table, per_head, self.eps, site.state, site.kv_dtype)
        r.attention(
            site.start, q, self.num_key_value_heads, self.head_dim, site.state, site.kv_dtype, self.window or 0, attended,
            r.scratch, r.scratch_bytes, _scores_row_bytes(len(table)),
        )  # fmt: skip
        r.product("o", o_proj, r.activation("quantize", attended, wants([o_proj])), site.out, onto=site.onto)
        if (bias := site.vector("o_bias")) is not None:
            r.add_vector("o bias", site.out, bias)

    def _record_qk_norm(self, r: Recorder, site: Site) -> tuple:
        """Norms over all heads and clipping happen here; norms per head are left to the rotation, which gets their weights."""
        q_norm, k_norm = site.vector("q_norm"), site.vector("k_norm")
        if self.qk_norm == "full":
            assert q_norm is not None and k_norm is not None
            r.norm_in_place("q norm", site.rows("q"), padded_vector(q_norm), self.eps)
            r.norm_in_place("k norm", site.rows("k"), padded_vector(k_norm), self.eps)
        if self.clip_qkv is not None:
            for name in "qkv":
                r.clip("clip", site.rows(name), self.clip_qkv)
        return (q_norm, k_norm) if self.qk_norm == "head" else (None, None)


def _scores_row_bytes(context_length: int) -> int:
    return align_up(context_length, 16) * 4 + 64
