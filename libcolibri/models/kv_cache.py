"""Keys and values of one timeline, layer by layer.

K of a layer: [KV head][position / 16][head_dim][16]; V: [KV head][position][head_dim]; float16 or float32 (kernels/attention.py).
"""

from collections.abc import Sequence

import numpy as np

from ..arena import align_up, allocate
from ..blocks.base import AttentionState, State

POSITIONS_PER_BLOCK = 16


class KVCache:
    """Room for `context_length` positions; the first `n_tok` are valid.

    descriptors   int64 (layers, 8): addresses of K and V, bytes per KV head of K, of V, positions: what kernels read
    """

    def __init__(self, states: Sequence[State | None], context_length: int, dtype: type = np.float16):
        self.context_length, self.dtype, self.n_tok = context_length, np.dtype(dtype), 0
        state = _only(states)
        self._layers = len(states)
        self._head_bytes = _head_bytes(state, context_length, self.dtype)
        self._part_bytes = align_up(self._head_bytes * state.kv_heads, 64)
        self._memory = allocate(2 * self._part_bytes * self._layers, "the KV cache")
        self.descriptors = np.zeros((self._layers, 8), np.int64)
        base = self._memory.ctypes.data
        for layer in range(self._layers):
            k = base + 2 * layer * self._part_bytes
            positions = align_up(context_length, POSITIONS_PER_BLOCK)
            self.descriptors[layer, :5] = k, k + self._part_bytes, self._head_bytes, self._head_bytes, positions
        self._shape = state.kv_heads, align_up(context_length, POSITIONS_PER_BLOCK), state.k_dim

    @staticmethod
    def bytes_for(states: Sequence[State | None], context_length: int, dtype: type = np.float16) -> int:
        """Bytes of a cache, before one is made."""
        state = _only(states)
        part = align_up(_head_bytes(state, context_length, np.dtype(dtype)) * state.kv_heads, 64)
        return 2 * part * len(states)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._memory.nbytes

    def truncate(self, n_tok: int) -> None:
        """Forget every position from `n_tok` on."""
        if not 0 <= n_tok <= self.n_tok:
            raise ValueError(f"cannot truncate a cache of {self.n_tok} positions to {n_tok}")
        self.n_tok = n_tok

    def _part(self, layer: int, part: int) -> np.ndarray:
        start = (2 * layer + part) * self._part_bytes
        return self._memory[start : start + self._head_bytes * self._shape[0]].view(self.dtype)

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V of the valid positions, in storage order: (layers, KV heads, n_tok rounded up to 16, head_dim)."""
        heads, positions, head_dim = self._shape
        kept = align_up(self.n_tok, POSITIONS_PER_BLOCK)
        parts = []
        for part in (0, 1):
            views = [self._part(layer, part).reshape(heads, positions, head_dim)[:, :kept] for layer in range(self._layers)]
            parts.append(np.stack(views))
        return parts[0], parts[1]

    def restore(self, k: np.ndarray, v: np.ndarray, n_tok: int) -> None:
        """Take over what `export` gave; the cache may be longer than the one it came from."""
        heads, positions, head_dim = self._shape
        kept = align_up(n_tok, POSITIONS_PER_BLOCK)
        expected = (self._layers, heads, kept, head_dim)
        if n_tok > self.context_length or k.shape != expected or v.shape != expected or k.dtype != self.dtype:
            raise ValueError(f"a KV cache of shape {k.shape} {k.dtype} does not fit {expected} {self.dtype}")
        for part, source in enumerate((k, v)):
            for layer in range(self._layers):
                self._part(layer, part).reshape(heads, positions, head_dim)[:, :kept] = source[layer]
        self.n_tok = n_tok


def _only(states: Sequence[State | None]) -> AttentionState:
    """The state that all layers have alike."""
    state = states[0]
    assert isinstance(state, AttentionState)
    return state


def _head_bytes(state: AttentionState, context_length: int, dtype: np.dtype) -> int:
    return align_up(context_length, POSITIONS_PER_BLOCK) * state.k_dim * dtype.itemsize
