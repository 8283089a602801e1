"""The state of a session against plain lists: what a position needs is there after any mixture of passes, going back and restoring."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libcolibri.blocks.base import AttentionState, RecurrentState
from libcolibri.models.state import SNAPSHOTS, SequenceState

CONTEXT = 120
FULL, RING, RECURRENT = AttentionState(2, 8, 16), AttentionState(1, 8, 16, window=9), RecurrentState((("conv", 3), ("ssm", 40)))
LAYERS = [FULL, None, RING, RECURRENT]


def fingerprints(tokens: list[int]) -> list[int]:
    """One number per position that depends on all tokens up to it, exact in float32."""
    found, value = [], 1
    for token in tokens:
        value = (value * 31 + token + 1) % 65521
        found.append(value)
    return found


def floats_at(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)


class Timeline:
    """A state whose kernels write fingerprints: into the first column of K, the last of V, and everywhere in recurrent arrays."""

    def __init__(self, states=LAYERS, chunk_tok: int = 10, context_length: int = CONTEXT):
        self.declared = states
        self.state = SequenceState(states, context_length, chunk_tok, np.float32)
        self.tokens: list[int] = []

    def places(self, layer: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        """The first column of K and the last of V of the last KV head."""
        declared = self.declared[layer]
        k, v, k_head, v_head, capacity = (int(word) for word in self.state.descriptors[layer, :5])
        head, at = declared.kv_heads - 1, position % capacity
        in_k = k + head * k_head + (at // 16 * declared.k_dim * 16 + at % 16) * 4
        in_v = v + head * v_head + ((at + 1) * declared.v_dim - 1) * 4
        return floats_at(in_k, 1), floats_at(in_v, 1)

    def append(self, tokens: list[int], interrupted: bool = False) -> None:
        self.tokens = self.tokens[: self.state.n_tok] + tokens
        values, first = fingerprints(self.tokens), self.state.n_tok
        try:
            with self.state.appending(len(tokens)):
                for layer, declared in enumerate(self.declared):
                    self.write(layer, declared, values, first)
                if interrupted:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            self.truncate(self.state.n_tok)

    def write(self, layer: int, declared, values: list[int], first: int) -> None:
        if isinstance(declared, RecurrentState):
            for i, (_, count) in enumerate(declared.arrays):
                floats_at(int(self.state.descriptors[layer, i]), count)[:] = values[-1]
        if isinstance(declared, AttentionState):
            for position in range(first, len(values)):
                for place in self.places(layer, position):
                    place[:] = values[position]

    def truncate(self, n_tok: int) -> int:
        kept = self.state.truncate(n_tok)
        del self.tokens[kept:]
        return kept

    def check(self) -> None:
        """Everything that the next position needs holds the fingerprints of these tokens."""
        values, n = fingerprints(self.tokens), self.state.n_tok
        assert n == len(values)
        for layer, declared in enumerate(self.declared):
            if isinstance(declared, RecurrentState):
                for i, (_, count) in enumerate(declared.arrays):
                    assert (floats_at(int(self.state.descriptors[layer, i]), count) == (values[-1] if n else 0)).all()
            if isinstance(declared, AttentionState):
                for position in range(max(0, n - declared.window + 1) if declared.window else 0, n):
                    assert all(place[0] == values[position] for place in self.places(layer, position)), (layer, position)


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=10)
STEPS = st.one_of(
    st.tuples(st.just("append"), TOKENS),
    st.tuples(st.just("interrupt"), TOKENS),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
    st.tuples(st.just("snapshot"), st.none()),
    st.tuples(st.just("move"), st.integers(1, 30)),
)


@settings(max_examples=150, deadline=None)
@given(states=st.sampled_from([LAYERS, [FULL, RING], [RECURRENT], [FULL]]), steps=st.lists(STEPS, max_size=30))
def test_what_a_position_needs_is_always_there(states, steps):
    timeline = Timeline(states)
    for step, value in steps:
        state = timeline.state
        if step == "truncate":
            wished = int(value * state.n_tok)
            kept = timeline.truncate(wished)
            assert kept <= wished and (kept == wished or state.forgets)
        elif step == "snapshot":
            state.snapshot()
        elif step == "move":  # to another state, made for other passes
            moved = Timeline(states, chunk_tok=max(value, 10))
            moved.state.restore(state.export(), state.n_tok)
            moved.tokens, timeline = timeline.tokens, moved
        elif state.n_tok + len(value) <= CONTEXT:
            timeline.append(value, interrupted=step == "interrupt")
        timeline.check()


def test_a_ring_goes_back_as_far_as_a_pass_is_long():
    timeline = Timeline([RING], chunk_tok=10)  # 32 positions: a window of 9, passes of 10, rounded up
    for _ in range(5):
        timeline.append([1] * 10)
    assert timeline.truncate(26) == 26  # sees 18 .. 26, and 18 .. 49 are there
    assert timeline.truncate(25) == 0


def test_recurrent_layers_go_back_to_the_newest_snapshot():
    timeline = Timeline([RECURRENT])
    for n in (3, 4, 5):
        timeline.append([n] * n)
        timeline.state.snapshot()
    timeline.append([1])
    assert timeline.truncate(13) == 13  # nothing to do
    assert timeline.truncate(12) == 12 and timeline.truncate(11) == 7
    timeline.check()
    assert SNAPSHOTS == 2 and timeline.truncate(6) == 0  # the oldest made room
    timeline.check()


def test_memory_is_known_before_it_is_taken():
    whole, ring = 128 * (8 + 16) * 4, 32 * (8 + 16) * 4
    assert SequenceState.bytes_for([FULL], CONTEXT, 10, np.float32) == 2 * whole
    assert SequenceState.bytes_for([FULL], CONTEXT, 10, np.float16) == whole
    assert SequenceState.bytes_for([RING], CONTEXT, 10, np.float32) == (1 + SNAPSHOTS) * ring
    assert SequenceState.bytes_for([RING], 16, 10, np.float32) == ring // 2  # no shorter than the context: not a ring
    assert SequenceState.bytes_for([RECURRENT], CONTEXT, 10) == (1 + SNAPSHOTS) * (64 + 192)
    for states in (LAYERS, [None], [FULL]):
        state = SequenceState(states, CONTEXT, 10)
        assert state.nbytes == SequenceState.bytes_for(states, CONTEXT, 10)
        assert (state.descriptors[:, 0] % 64 == 0).all()


def test_passes_that_do_not_fit_are_refused():
    state = SequenceState([FULL, RECURRENT], 20, 16)
    for n in (0, 17):
        with pytest.raises(ValueError, match="tokens in one pass, expected 1 to 16"), state.appending(n):
            pass
    with state.appending(16):
        pass
    with pytest.raises(ValueError, match="16 \\+ 5 positions do not fit a state of 20"), state.appending(5):
        pass
    with pytest.raises(ValueError, match="cannot truncate a state of 16 positions to 17"):
        state.truncate(17)
    with pytest.raises(KeyboardInterrupt), state.appending(1):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="an interrupted pass"), state.appending(1):
        pass
    assert state.truncate(16) == 0


def test_restore_refuses_what_does_not_fit():
    timeline = Timeline()
    timeline.append([1, 2, 3])
    arrays, state = timeline.state.export(), SequenceState(LAYERS, CONTEXT, 10, np.float32)
    assert set(arrays) == {"0.k", "0.v", "2.k", "2.v", "3.conv", "3.ssm"} and arrays["0.k"].shape == (2, 1, 128)
    with pytest.raises(ValueError, match=r"arrays \['0.k'\] are missing or unknown"):
        state.restore({name: array for name, array in arrays.items() if name != "0.k"}, 3)
    with pytest.raises(ValueError, match=r"0.k is float16 \(2, 1, 128\), expected float32"):
        state.restore(arrays | {"0.k": arrays["0.k"].astype(np.float16)}, 3)
    with pytest.raises(ValueError, match=r"0.k is float32 \(2, 1, 128\), expected float32 \(2, 2, 128\)"):
        state.restore(arrays, 17)
    with pytest.raises(ValueError, match="130 positions do not fit"):
        state.restore(arrays, 130)
    assert state.n_tok == 0
