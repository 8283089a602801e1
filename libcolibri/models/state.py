"""What a session keeps of its timeline, layer by layer: keys and values, and the arrays of recurrent layers.

In:  the blocks' declarations (blocks/base.py), the context length, the most tokens of one pass
Out: `SequenceState`: descriptors that kernels read; going back, snapshots, export

K of an attention layer: [KV head][position / 16][k_dim][16]; V: [KV head][position][v_dim]; float16 or float32 (kernels/attention.py).
A layer with a window keeps no more positions than the window and one pass need: position p lies at p % capacity, a ring. Rings and
recurrent arrays forget what came before; what lets a session go back further are snapshots of them.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..arena import align_up, allocate
from ..blocks.base import AttentionState, RecurrentState, State

POSITIONS_PER_BLOCK = 16
SNAPSHOTS = 2  # the ends of the last two prompts: a chat goes back by one answer, or by one question and its answer
DESCRIPTOR_WORDS = 8


@dataclass(frozen=True, slots=True)
class _Attention:
    """Memory of an attention layer: K, then V, for `capacity` positions."""

    state: AttentionState
    capacity: int
    dtype: np.dtype
    forgets: bool

    def head_bytes(self) -> tuple[int, int]:
        """Bytes of one KV head of K, of V."""
        column = self.capacity * self.dtype.itemsize
        return column * self.state.k_dim, column * self.state.v_dim

    def part_bytes(self) -> list[int]:
        return [align_up(size * self.state.kv_heads, 64) for size in self.head_bytes()]

    def descriptor(self, addresses: list[int]) -> list[int]:
        """K, V, bytes per KV head of K, of V, capacity."""
        return [*addresses, *self.head_bytes(), self.capacity]

    def first_needed(self, n_tok: int) -> int:
        """The earliest position that position n_tok sees."""
        return max(0, n_tok - self.state.window + 1) if self.forgets and self.state.window else 0

    def seen_bytes(self, n_tok: int) -> int:
        """Bytes of the keys and values that the position before n_tok sees."""
        positions = n_tok if self.state.window is None else min(n_tok, self.state.window)
        return positions * self.state.kv_heads * (self.state.k_dim + self.state.v_dim) * self.dtype.itemsize

    def slots(self, n_tok: int) -> np.ndarray:
        """Blocks of the ring that hold what position n_tok sees, in the order of positions."""
        first = self.first_needed(n_tok) // POSITIONS_PER_BLOCK
        return np.arange(first, -(-n_tok // POSITIONS_PER_BLOCK)) % (self.capacity // POSITIONS_PER_BLOCK)

    def views(self, memory: list[np.ndarray]) -> dict[str, np.ndarray]:
        """K and V as (KV heads, blocks, elements of a block of 16 positions)."""
        heads, blocks = self.state.kv_heads, self.capacity // POSITIONS_PER_BLOCK
        parts = zip("kv", memory, self.head_bytes(), strict=True)
        return {name: part[: heads * size].view(self.dtype).reshape(heads, blocks, -1) for name, part, size in parts if size}


@dataclass(frozen=True, slots=True)
class _Recurrent:
    """Memory of a recurrent layer: its arrays in the declared order."""

    state: RecurrentState
    forgets = True

    def part_bytes(self) -> list[int]:
        return [align_up(4 * count, 64) for _, count in self.state.arrays]

    def seen_bytes(self, n_tok: int) -> int:
        """Bytes of the arrays, which a position reads and writes."""
        return 2 * sum(4 * count for _, count in self.state.arrays)

    def descriptor(self, addresses: list[int]) -> list[int]:
        return addresses

    def views(self, memory: list[np.ndarray]) -> dict[str, np.ndarray]:
        """float32 (n,) by name."""
        parts = zip(self.state.arrays, memory, strict=True)
        return {name: part[: 4 * count].view(np.float32) for (name, count), part in parts}


_Layer = _Attention | _Recurrent


@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    """A copy of everything that forgets, as it was after n_tok positions; `written` as in SequenceState."""

    n_tok: int
    written: int
    copy: np.ndarray


class SequenceState:
    """The state of one timeline of up to `context_length` positions; the first `n_tok` are valid.

    states        one declaration per layer, None for layers without state
    chunk_tok     most tokens of one pass
    kv_dtype      float16 or float32
    descriptors   int64 (layers, 8). Attention: addresses of K and V, bytes per KV head of K, of V, capacity in positions; position p lies
                  at p % capacity. Recurrent: addresses of its arrays.

    Memory is laid out in one block, layers that forget behind the others, so that a snapshot is one copy.
    """

    def __init__(self, states: Sequence[State | None], context_length: int, chunk_tok: int, kv_dtype: type = np.float16):
        self.context_length, self.chunk_tok, self.n_tok = context_length, min(chunk_tok, context_length), 0
        self._layers = _layers(states, context_length, chunk_tok, kv_dtype)
        self.nbytes = _bytes_of(self._layers.values())
        memory = allocate(self.nbytes, "the state of a session")
        self.descriptors = np.zeros((len(states), DESCRIPTOR_WORDS), np.int64)
        self._memory: dict[int, list[np.ndarray]] = {}
        at = self._lay_out(memory, 0, forgetful=False)
        end = self._lay_out(memory, at, forgetful=True)
        self._forgetful = memory[at:end]
        self._free = np.split(memory[end:], SNAPSHOTS)
        self._snapshots: list[_Snapshot] = []  # in the order of positions
        self._written = 0  # positions up to here have been written, valid or not
        self._restored = 0  # `restore` brought what this position needs, nothing earlier
        self._interrupted = False

    @staticmethod
    def bytes_for(states: Sequence[State | None], context_length: int, chunk_tok: int, kv_dtype: type = np.float16) -> int:
        """Bytes of memory, with room for snapshots, before it is taken."""
        return _bytes_of(_layers(states, context_length, chunk_tok, kv_dtype).values())

    def _lay_out(self, memory: np.ndarray, at: int, *, forgetful: bool) -> int:
        """Give every layer of the kind its memory from `at` on; returns the end."""
        for index, layer in self._layers.items():
            if layer.forgets != forgetful:
                continue
            ends = at + np.cumsum([0, *layer.part_bytes()])
            self._memory[index] = [memory[start:end] for start, end in pairwise(ends)]
            words = layer.descriptor([memory.ctypes.data + int(start) for start in ends[:-1]])
            self.descriptors[index, : len(words)] = words
            at = int(ends[-1])
        return at

    # --- forward

    @property
    def seen_bytes(self) -> int:
        """Bytes that the last position had to go through: keys and values that it sees, recurrent arrays read and written."""
        return sum(layer.seen_bytes(self.n_tok) for layer in self._layers.values())

    @property
    def forgets(self) -> bool:
        """Whether some layer forgets, so that going back may need a snapshot."""
        return len(self._forgetful) > 0

    @contextmanager
    def appending(self, n: int) -> Iterator[None]:
        """A pass that computes n positions more; they are valid when it ends without an exception.

        Raises ValueError when they do not fit, or when the pass before was interrupted and `truncate` has not been called since.
        """
        if not 1 <= n <= self.chunk_tok:
            raise ValueError(f"{n} tokens in one pass, expected 1 to {self.chunk_tok}")
        if self.n_tok + n > self.context_length:
            raise ValueError(f"{self.n_tok} + {n} positions do not fit a state of {self.context_length}")
        if self._interrupted:
            raise ValueError("an interrupted pass has left a recurrent state halfway: truncate before the next pass")
        self._written = max(self._written, self.n_tok + n)
        self._interrupted = any(isinstance(layer, _Recurrent) for layer in self._layers.values())
        yield
        self._interrupted = False
        self.n_tok += n

    # --- back

    def truncate(self, n_tok: int) -> int:
        """Forget the positions from `n_tok` on; returns how many are really kept.

        Where a layer has forgotten what position n_tok needs, the state goes back to its newest snapshot of at most n_tok positions, or
        to its beginning; the caller computes the rest again.
        """
        if not 0 <= n_tok <= self.n_tok:
            raise ValueError(f"cannot truncate a state of {self.n_tok} positions to {n_tok}")
        for snapshot in [s for s in self._snapshots if s.n_tok > n_tok]:
            self._snapshots.remove(snapshot)
            self._free.append(snapshot.copy)
        if self._remembers(n_tok):
            self.n_tok = n_tok
        elif self._snapshots:
            newest = self._snapshots[-1]
            self._forgetful[:] = newest.copy
            self.n_tok, self._written = newest.n_tok, newest.written
        else:
            self._forgetful[:] = 0
            self.n_tok = self._written = self._restored = 0
        self._interrupted = False
        return self.n_tok

    def _remembers(self, n_tok: int) -> bool:
        """Whether all that position n_tok needs is still in memory."""
        for layer in self._layers.values():
            if isinstance(layer, _Recurrent):
                if n_tok != self.n_tok or self._interrupted:
                    return False
            elif layer.first_needed(n_tok) < max(self._written - layer.capacity, layer.first_needed(self._restored)):
                return False
        return True

    def snapshot(self) -> None:
        """Remember the present position, in place of the oldest remembered one; of use only where layers forget."""
        if not self.forgets or self._interrupted or any(s.n_tok == self.n_tok for s in self._snapshots):
            return
        copy = self._free.pop() if self._free else self._snapshots.pop(0).copy
        copy[:] = self._forgetful
        self._snapshots.append(_Snapshot(self.n_tok, self._written, copy))

    # --- elsewhere

    def export(self) -> dict[str, np.ndarray]:
        """Copies of all that the next position needs, by "<layer>.<name>"; snapshots are not among it.

        "k", "v"   (KV heads, blocks, elements of a block of 16 positions), the blocks that position n_tok sees
        others     float32 (n,), as the block declared them
        """
        found = {}
        for index, layer in self._layers.items():
            for name, view in layer.views(self._memory[index]).items():
                part = view if isinstance(layer, _Recurrent) else view[:, layer.slots(self.n_tok)]
                found[f"{index}.{name}"] = part.copy()
        return found

    def restore(self, arrays: dict[str, np.ndarray], n_tok: int) -> None:
        """Take over what `export` gave; this state may be longer than that one, and made for other passes.

        Raises ValueError for arrays that do not fit; nothing has changed then.
        """
        if n_tok > self.context_length:
            raise ValueError(f"{n_tok} positions do not fit a state of {self.context_length}")
        targets = {}
        for index, layer in self._layers.items():
            for name, view in layer.views(self._memory[index]).items():
                slots = slice(None) if isinstance(layer, _Recurrent) else (slice(None), layer.slots(n_tok))
                targets[f"{index}.{name}"] = view, slots
        if targets.keys() != arrays.keys():
            raise ValueError(f"arrays {sorted(targets.keys() ^ arrays.keys())} are missing or unknown")
        for name, (view, slots) in targets.items():
            shape = view[slots].shape
            if arrays[name].shape != shape or arrays[name].dtype != view.dtype:
                raise ValueError(f"{name} is {arrays[name].dtype} {arrays[name].shape}, expected {view.dtype} {shape}")
        self.truncate(0)
        for name, (view, slots) in targets.items():
            view[slots] = arrays[name]
        self.n_tok = self._written = self._restored = n_tok


def _layers(states: Sequence[State | None], context_length: int, chunk_tok: int, kv_dtype: type) -> dict[int, _Layer]:
    """Memory of each layer that has state, by index."""
    return {i: _layer(state, context_length, chunk_tok, np.dtype(kv_dtype)) for i, state in enumerate(states) if state is not None}


def _layer(state: State, context_length: int, chunk_tok: int, kv_dtype: np.dtype) -> _Layer:
    if isinstance(state, RecurrentState):
        return _Recurrent(state)
    whole = align_up(context_length, POSITIONS_PER_BLOCK)
    ring = whole if state.window is None else align_up(state.window + min(chunk_tok, context_length), POSITIONS_PER_BLOCK)
    return _Attention(state, min(whole, ring), kv_dtype, forgets=ring < whole)


def _bytes_of(layers: Collection[_Layer]) -> int:
    total = sum(sum(layer.part_bytes()) for layer in layers)
    return total + SNAPSHOTS * sum(sum(layer.part_bytes()) for layer in layers if layer.forgets)
