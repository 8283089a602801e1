"""Grouped-query attention: projections, norms, rotary embedding, the KV cache, softmax, output gate, output projection."""

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..recorder import LANES, HeadNorms, Heads, KeysValues, Recorder, Rows, attention_scratch_bytes, padded_vector, wants
from ..rope import RopeConfig
from .base import AttentionState, Block, TensorSpec
from .site import Site

QK_NORMS = (None, "full", "head", "head_last", "unit_last")
GATES = (None, "sigmoid", "softplus", "softplus_head")


@dataclass(frozen=True, slots=True)
class Attention(Block):
    """out = o_proj(gate * softmax(q . K * scale) @ V) with H query heads, G key/value heads of Dh columns.

    rope            the rotary embedding of q and k; None: positions are not encoded
    eps             epsilon of all norms here
    v_head_dim      columns of a head of V; None: head_dim
    bias, out_bias  q, k, v projections have biases; o_proj has one
    qk_norm         RMSNorm of q and k: None, "full" over all heads before the rotation, "head" per head before it, "head_last" per head
                    after it, "unit_last" per head after it without a weight
    v_norm          V is normed per head, without a weight
    clip_qkv        q, k, v are clamped to +-clip_qkv after projection and norm
    v_is_k          there is no v_proj: V are the keys as projected
    value_scale     V is multiplied by it
    window, chunk   a position sees itself and window - 1 before it; only its own chunk, from multiples of chunk on; None: all before it
    scale           of the scores; None: Dh**-0.5
    softcap         scores become softcap * tanh(score / softcap)
    sinks           one more score per head in the softmax, which has no value
    temperature     (a, b): q at position p is multiplied by 1 + a * ln(1 + floor((p + 1) / b))
    gate            None; "sigmoid": q_proj yields q and a gate for each head; "softplus", "softplus_head": g_proj yields a gate for each
                    column or for each head
    reads_layer     index of the layer whose keys and values are read; this one has none of its own

    Raises ConfigError for numbers that do not fit together.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: RopeConfig | None
    eps: float
    v_head_dim: int | None = None
    bias: bool = False
    out_bias: bool = False
    qk_norm: str | None = None
    v_norm: bool = False
    clip_qkv: float | None = None
    v_is_k: bool = False
    value_scale: float = 1.0
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    temperature: tuple[float, float] | None = None
    gate: str | None = None
    reads_layer: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of num_key_value_heads={self.num_key_value_heads}"
            )
        for name, allowed in (("qk_norm", QK_NORMS), ("gate", GATES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not supported, only {', '.join(map(repr, allowed))}")
        for name in ("clip_qkv", "window", "chunk", "scale", "softcap"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ConfigError(f"attention with {name}={getattr(self, name)}: expected null or a number above 0")
        self._check_widths()

    def _check_widths(self) -> None:
        step = 8 if self.qk_norm in (None, "full") else LANES
        if self.head_dim % step:
            raise ConfigError(f"head_dim={self.head_dim} is not supported, only multiples of {step}")
        if self.v_dim % LANES:
            raise ConfigError(f"v_head_dim={self.v_dim} is not supported, only multiples of {LANES}")
        if self.v_is_k and self.v_dim != self.head_dim:
            raise ConfigError(f"v_head_dim={self.v_dim} where values are the keys: expected head_dim={self.head_dim}")
        turning = 0 if self.rope is None else self.rope.columns(self.head_dim)
        if turning % 2:
            raise ConfigError(f"{turning} of head_dim={self.head_dim} columns are rotary; the embedding turns pairs")

    @property
    def v_dim(self) -> int:
        """Columns of a head of V."""
        return self.v_head_dim or self.head_dim

    @property
    def q_head(self) -> int:
        """Outputs of q_proj for one head."""
        return self.head_dim * (2 if self.gate == "sigmoid" else 1)

    def _sizes(self) -> dict[str, int]:
        """Outputs of the projections that the block has, by letter."""
        sizes = {"q": self.num_attention_heads * self.q_head}
        if self.reads_layer is None:
            sizes["k"] = self.num_key_value_heads * self.head_dim
            if not self.v_is_k:
                sizes["v"] = self.num_key_value_heads * self.v_dim
        if self.gate in ("softplus", "softplus_head"):
            sizes["g"] = self.num_attention_heads * (self.v_dim if self.gate == "softplus" else 1)
        return sizes

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        sizes = self._sizes()
        specs = {f"{p}_proj": TensorSpec(f"self_attn.{p}_proj.weight", (rows, hidden_size)) for p, rows in sizes.items()}
        specs["o_proj"] = TensorSpec("self_attn.o_proj.weight", (hidden_size, self.num_attention_heads * self.v_dim))
        if self.bias:
            specs |= {f"{p}_bias": TensorSpec(f"self_attn.{p}_proj.bias", (rows,)) for p, rows in sizes.items() if p != "g"}
        if self.out_bias:
            specs["o_bias"] = TensorSpec("self_attn.o_proj.bias", (hidden_size,))
        if self.qk_norm in ("full", "head", "head_last"):
            widths = {p: sizes[p] if self.qk_norm == "full" else self.head_dim for p in "qk" if p in sizes}
            specs |= {f"{p}_norm": TensorSpec(f"self_attn.{p}_norm.weight", (width,)) for p, width in widths.items()}
        if self.sinks:
            specs["sinks"] = TensorSpec("self_attn.sinks", (self.num_attention_heads,))
        return specs

    def rows(self, hidden_size: int) -> dict[str, int]:
        return self._sizes() | {"attended": self.num_attention_heads * self.v_dim}

    def state(self) -> AttentionState | None:
        if self.reads_layer is not None:
            return None
        return AttentionState(self.num_key_value_heads, self.head_dim, self.v_dim, self.window or self.chunk)

    def ropes(self) -> tuple[tuple[RopeConfig, int], ...]:
        return () if self.rope is None else ((self.rope, self.rope.columns(self.head_dim)),)

    def _heads(self) -> Heads:
        return Heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.v_dim, self.q_head)

    def scratch_bytes(self, hidden_size: int, context_length: int) -> int:
        return max(Block.scratch_bytes(self, hidden_size, context_length), attention_scratch_bytes(self._heads(), context_length))

    def record(self, r: Recorder, site: Site) -> None:
        q, attended, o_proj = site.rows("q"), site.rows("attended"), site.matrix("o_proj")
        cache = KeysValues(site.state if self.reads_layer is None else site.state_of(self.reads_layer), site.kv_dtype, site.start)
        self._record_projections(r, site)
        self._record_append(r, site, cache)
        r.attention(
            cache, self._heads(), q, attended, site.context_length, scale=self.scale or self.head_dim**-0.5, softcap=self.softcap,
            sinks=site.vector("sinks"), window=self.window, chunk=self.chunk,
        )  # fmt: skip
        self._record_gate(r, site, attended)
        opened = r.activation("quantize", attended, wants([o_proj]))
        r.product("o", o_proj, opened, site.out, bias=site.vector("o_bias"), onto=site.onto)

    def _record_projections(self, r: Recorder, site: Site) -> None:
        names = list(self._sizes())
        x = site.input(r, wants([site.matrix(f"{p}_proj") for p in names]))
        for p in names:
            r.product(p, site.matrix(f"{p}_proj"), x, site.rows(p), bias=site.vector(f"{p}_bias"), barrier=p == names[-1])

    def _record_append(self, r: Recorder, site: Site, cache: KeysValues) -> None:
        """Norms over all heads and clipping; then what is done head by head on the way into the cache."""
        projected = [p for p in "qkv" if p in self._sizes()]
        if self.qk_norm == "full":
            for p in [p for p in projected if p != "v"]:
                r.norm_in_place(f"{p} norm", site.rows(p), padded_vector(_vector(site, f"{p}_norm")), self.eps)
        if self.clip_qkv is not None:
            for p in projected:
                r.clip("clip", site.rows(p), self.clip_qkv)
        k, v = (None, None) if self.reads_layer is not None else (site.rows("k"), site.rows("k" if self.v_is_k else "v"))
        table = None if self.rope is None else site.rope_table(self.rope, self.rope.columns(self.head_dim))
        r.rope_append(
            cache, self._heads(), site.rows("q"), k, v, norms=self._head_norms(site), table=table, v_factor=self.value_scale,
            q_factors=self._temperatures(site.context_length),
        )  # fmt: skip

    def _head_norms(self, site: Site) -> HeadNorms:
        q, k = None, None
        if self.qk_norm == "unit_last":
            q = k = np.ones(self.head_dim, np.float32)
        elif self.qk_norm in ("head", "head_last"):
            q, k = site.vector("q_norm"), site.vector("k_norm")
        v = np.ones(self.v_dim, np.float32) if self.v_norm else None
        return HeadNorms(self.eps, q, k, v, last=self.qk_norm in ("head_last", "unit_last"))

    def _temperatures(self, context_length: int) -> np.ndarray | None:
        """float32 (positions,): factors of q, which keep the softmax of many positions sharp."""
        if self.temperature is None:
            return None
        strength, step = self.temperature
        return (1.0 + strength * np.log1p((np.arange(context_length) + 1) // step)).astype(np.float32)

    def _record_gate(self, r: Recorder, site: Site, attended: Rows) -> None:
        heads = self.num_attention_heads
        if self.gate == "sigmoid":
            r.gate("gate", attended, heads, site.rows("q"), "sigmoid", first=self.head_dim, gate_head=self.q_head)
        elif self.gate is not None:
            r.gate("gate", attended, heads, site.rows("g"), "softplus", gate_head=self.v_dim if self.gate == "softplus" else 0)


def _vector(site: Site, name: str) -> np.ndarray:
    found = site.vector(name)
    assert found is not None
    return found

