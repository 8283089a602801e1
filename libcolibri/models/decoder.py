"""One decoder for every family: records the programs of a step, and runs them.

In:  ModelConfig, ModelWeights, a thread team, the expert cache
Out: logits of a chunk of tokens appended to a KV cache

A layer is x += o_proj(attention(norm(x))); x += mlp(norm(x)) or the mixture of experts. Two programs hold all layers: one for a
single token, one for a chunk. What differs from run to run (token ids, their number, the first position, the cache) is read from
small arrays. A replay stops at an expert fault; the missing experts are brought in and it resumes there.
"""

import threading
from typing import Protocol

import numpy as np

from ..arena import align_up, allocate
from ..config import ModelConfig
from ..errors import ConfigError
from ..kernels.kernel_set import KernelSet
from ..recorder import LANES, Recorder, Rows, head_bundle, padded, padded_vector, wants
from ..rope import rope_tables
from ..thread_team import Team
from ..weights import AttentionWeights, LayerWeights, MlpWeights, ModelWeights
from .kv_cache import KVCache
from .moe_block import MoeState, ResidentExperts, record_moe

LOGITS_CHUNK_TOK = 32  # tokens whose logits are computed at once


class Experts(ResidentExperts, Protocol):
    """The expert cache as the decoder uses it."""

    def bring_in(self, layer: int, expert_ids: np.ndarray) -> None:
        """Make at least one of the experts resident, as many as fit; others of any layer may be evicted."""


class Buffers:
    """Activations that both programs share."""

    def __init__(self, config: ModelConfig, max_tok: int):
        self.x = Rows(max_tok, config.hidden_size)
        self.q, self.k, self.v = Rows(max_tok, config.q_size), Rows(max_tok, config.kv_size), Rows(max_tok, config.kv_size)
        self.attended = Rows(max_tok, config.q_size)
        self.hidden, self.spare = Rows(max_tok, max(1, config.intermediate_size)), Rows(max_tok, max(1, config.intermediate_size))
        self.moe = MoeState(config, max_tok) if config.is_moe else None

    @staticmethod
    def bytes_for(config: ModelConfig, max_tok: int) -> int:
        """Bytes of the buffers, before they are made; panels take as much again as 3/8 of the rows."""
        attention = 2 * padded(config.q_size) + 2 * padded(config.kv_size)
        cols = padded(config.hidden_size) + attention + 2 * padded(max(1, config.intermediate_size))
        moe = MoeState.bytes_for(config, max_tok) if config.is_moe else 0
        panels = 3 * (config.hidden_size + config.q_size + config.intermediate_size) // 2 + padded(config.hidden_size) * 4
        return max_tok * (cols * 4 + panels) + moe


class Decoder:
    """A model that can run. `forward` may be called from any thread; one call runs at a time.

    context_length   positions that any KV cache of this decoder may have
    max_chunk_tok    most tokens of one call
    kv_dtype         float16, or float32 where the weights are float32 (default: chosen so)

    Raises ConfigError for a head_dim that is no multiple of 16.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        team: Team,
        experts: Experts | None,
        *,
        context_length: int,
        max_chunk_tok: int = 512,
        kernels: KernelSet | None = None,
        kv_dtype: type | None = None,
    ):
        if config.head_dim % LANES:
            raise ConfigError(f"head_dim={config.head_dim} is not supported, only multiples of {LANES}")
        self.config, self.team, self.experts = config, team, experts
        self.context_length, self.max_chunk_tok = context_length, min(max_chunk_tok, context_length)
        self.kernels = kernels or KernelSet()
        self.kv_dtype = np.dtype(kv_dtype or default_kv_dtype(weights))
        self._weights = weights
        self._lock = threading.Lock()
        self._n_tok, self._start = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._ids = np.zeros(self.max_chunk_tok, np.int64)
        self._descriptors = np.zeros((config.num_hidden_layers, 8), np.int64)
        cos, sin = rope_tables(config.rope, config.head_dim, context_length)
        self._rope = np.ascontiguousarray(np.concatenate([cos, sin], axis=1))  # (S, Dh)
        self.buffers = Buffers(config, self.max_chunk_tok)
        self._record_programs()

    @staticmethod
    def activation_bytes(config: ModelConfig, max_chunk_tok: int, context_length: int, threads: int) -> int:
        """Bytes that a decoder needs beside weights, KV caches and experts, before one is made."""
        head = LOGITS_CHUNK_TOK * (padded(config.hidden_size) + padded(config.vocab_size)) * 4
        rope = context_length * config.head_dim * 4
        scores = threads * _scores_bytes(config, context_length)
        return Buffers.bytes_for(config, max_chunk_tok) + head + rope + scores + 3 * threads * _scratch_bytes(config)

    def new_kv_cache(self, context_length: int | None = None) -> KVCache:
        """An empty cache for one timeline."""
        return KVCache(self.config, context_length or self.context_length, self.kv_dtype.type)

    def routing(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Expert ids (T, K) int64 and weights (T, K) float32 that `layer` chose in the last call of forward."""
        state, n = self.buffers.moe, int(self._n_tok[0])
        assert state is not None
        return state.ids[layer, :n].copy(), state.weights[layer, :n].copy()

    @property
    def expert_counters(self) -> np.ndarray:
        """Hits and misses so far, int64 (2,): experts that were, or were not, resident when a layer first asked for them."""
        return np.zeros(2, np.int64) if self.buffers.moe is None else self.buffers.moe.counters

    def forward(self, kv: KVCache, token_ids: np.ndarray, logits: str = "last") -> np.ndarray | None:
        """Append tokens to the cache and compute their logits.

        token_ids   (T,) int64, 1 <= T <= max_chunk_tok, each within the vocabulary
        logits      "last": float32 (V,) of the last token; "all": float32 (T, V); "none": None

        Raises ExpertReadError when an expert's file fails; the cache is then as before.
        """
        n = len(token_ids)
        self._check(kv, token_ids)
        with self._lock:
            self._n_tok[0], self._start[0], self._ids[:n] = n, kv.n_tok, token_ids
            self._descriptors[:] = kv.descriptors
            if self.experts is not None:
                self.experts.clock[0] += 1
            self._run(self._step if n == 1 else self._chunk)
            kv.n_tok += n
            if logits == "none":
                return None
            if logits == "last":
                return self._logits(slice(n - 1, n))[0]
            return np.concatenate([self._logits(slice(at, min(at + LOGITS_CHUNK_TOK, n))) for at in range(0, n, LOGITS_CHUNK_TOK)])

    def _check(self, kv: KVCache, token_ids: np.ndarray) -> None:
        n = len(token_ids)
        if not 1 <= n <= self.max_chunk_tok:
            raise ValueError(f"{n} tokens in one call, expected 1 to {self.max_chunk_tok}")
        if kv.n_tok + n > min(kv.context_length, self.context_length):
            raise ValueError(f"{kv.n_tok} + {n} positions do not fit a cache of {kv.context_length}")
        if token_ids.min() < 0 or token_ids.max() >= self.config.vocab_size:
            raise ConfigError(f"token id {token_ids.max()} is outside the vocabulary of {self.config.vocab_size}")

    def _run(self, recorded: "_Recorded") -> None:
        at = 0
        while (at := self.team.run(recorded.program, at)) < len(recorded.program):
            layer, at = recorded.faults[at]
            assert self.experts is not None and self.buffers.moe is not None
            missing = self.buffers.moe.missing
            self.experts.bring_in(layer, missing[1 : 1 + missing[0]].copy())

    def _logits(self, tokens: slice) -> np.ndarray:
        """float32 (n, V) of n <= LOGITS_CHUNK_TOK tokens of the residual stream."""
        n = tokens.stop - tokens.start
        recorded, x, out = (self._head_one if n == 1 else self._head_many), self._head_x, self._head_out
        self._head_n[0] = n
        x.data[:n] = self.buffers.x.data[tokens]
        self._run(recorded)
        return out.data[:n, : self.config.vocab_size].copy()

    def _record_programs(self) -> None:
        config = self.config
        self._head_n = np.zeros(1, np.int64)
        self._head_x, self._head_out = Rows(LOGITS_CHUNK_TOK, config.hidden_size), Rows(LOGITS_CHUNK_TOK, config.vocab_size)
        self._scores_bytes = _scores_bytes(config, self.context_length)
        self._scores = allocate(self._scores_bytes * self.team.threads, "attention scores")
        self._step, self._chunk = self._record_layers(1), self._record_layers(self.max_chunk_tok)
        self._head_one, self._head_many = self._record_head(1), self._record_head(LOGITS_CHUNK_TOK)

    def _recorder(self, max_tok: int, n_tok: np.ndarray) -> Recorder:
        return Recorder(self.kernels, self.team.threads, max_tok, n_tok, _scratch_bytes(self.config))

    def _record_layers(self, max_tok: int) -> "_Recorded":
        r, b = self._recorder(max_tok, self._n_tok), self.buffers
        faults: dict[int, tuple[int, int]] = {}
        r.embed("embed", self._weights.embed_tokens, self._ids, b.x)
        for i, layer in enumerate(self._weights.layers):
            self._record_attention(r, i, layer)
            norm = padded_vector(layer.post_attention_layernorm)
            if layer.mlp is not None:
                self._record_mlp(r, layer.mlp, norm)
            else:
                assert layer.moe is not None and self.experts is not None and b.moe is not None
                wave, end = record_moe(r, self.config, i, layer.moe, norm, b.x, b.moe, self.experts)
                faults |= {wave: (i, wave), end: (i, wave)}
        return _Recorded(r.program.finish(), faults)

    def _record_attention(self, r: Recorder, index: int, layer: LayerWeights) -> None:
        """x += o_proj(attention(rope(q), rope(k), v)) of the normed x."""
        config, b, w = self.config, self.buffers, layer.attention
        norm = padded_vector(layer.input_layernorm)
        x = r.activation("norm", b.x, wants([w.q_proj, w.k_proj, w.v_proj]), norm, config.rms_norm_eps)
        r.product("q", w.q_proj, x, b.q, bias=w.q_bias, barrier=False)
        r.product("k", w.k_proj, x, b.k, bias=w.k_bias, barrier=False)
        r.product("v", w.v_proj, x, b.v, bias=w.v_bias)
        per_head = self._record_qk_norm(r, w)
        descriptor = self._descriptors[index].ctypes.data
        r.rope_append(self._start, b.q, b.k, b.v, config.head_dim, self._rope, per_head, config.rms_norm_eps, descriptor, self.kv_dtype)
        r.attention(
            self._start, b.q, config.num_key_value_heads, config.head_dim, descriptor, self.kv_dtype, config.window_of(index) or 0,
            b.attended, self._scores, self._scores_bytes, _scores_row_bytes(self.context_length),
        )  # fmt: skip
        attended = r.activation("quantize", b.attended, wants([w.o_proj]))
        r.product("o", w.o_proj, attended, b.x, onto=b.x)
        if w.o_bias is not None:
            r.add_vector("o bias", b.x, w.o_bias)

    def _record_qk_norm(self, r: Recorder, w: AttentionWeights) -> tuple:
        """Norms over all heads and clipping happen here; norms per head are left to the rotation, which gets their weights."""
        config, b = self.config, self.buffers
        if config.qk_norm == "full":
            assert w.q_norm is not None and w.k_norm is not None
            r.norm_in_place("q norm", b.q, padded_vector(w.q_norm), config.rms_norm_eps)
            r.norm_in_place("k norm", b.k, padded_vector(w.k_norm), config.rms_norm_eps)
        if config.clip_qkv is not None:
            for rows in (b.q, b.k, b.v):
                r.clip("clip", rows, config.clip_qkv)
        return (w.q_norm, w.k_norm) if config.qk_norm == "head" else (None, None)

    def _record_mlp(self, r: Recorder, w: MlpWeights, norm: np.ndarray) -> None:
        """x += down(silu(gate(x)) * up(x)) of the normed x."""
        b = self.buffers
        x = r.activation("norm", b.x, wants([w.gate_proj, w.up_proj]), norm, self.config.rms_norm_eps)
        r.gate_up("gate+up", w.gate_proj, w.up_proj, x, b.hidden, b.spare)
        hidden = r.activation("quantize", b.hidden, wants([w.down_proj]))
        r.product("down", w.down_proj, hidden, b.x, onto=b.x)

    def _record_head(self, max_tok: int) -> "_Recorded":
        """Logits of the final norm of _head_x."""
        r = self._recorder(max_tok, self._head_n)
        lm_head, norm = self._weights.lm_head, padded_vector(self._weights.norm)
        x = r.activation("norm", self._head_x, wants([lm_head]), norm, self.config.rms_norm_eps)
        r.product("lm_head", lm_head, x, self._head_out)
        return _Recorded(r.program.finish(), {})


class _Recorded:
    """A program, and for each operation that may stop it: (layer, operation to resume at)."""

    def __init__(self, program, faults: dict[int, tuple[int, int]]):
        self.program, self.faults = program, faults


def default_kv_dtype(weights: ModelWeights) -> type:
    """float32 for a model in float32, else float16."""
    return np.float32 if weights.layers[0].attention.k_proj.type == "f32" else np.float16


def _scratch_bytes(config: ModelConfig) -> int:
    widest = max(config.hidden_size, config.q_size, config.intermediate_size, 2 * config.head_dim)
    return padded(widest) * 4 + 1024


def _scores_row_bytes(context_length: int) -> int:
    return align_up(context_length, 16) * 4 + 64


def _scores_bytes(config: ModelConfig, context_length: int) -> int:
    group = head_bundle(config.num_attention_heads // config.num_key_value_heads)
    return group * _scores_row_bytes(context_length) + 64
