"""One decoder for every family: records the programs of a step, and runs them.

In:  ModelConfig, ModelWeights, a thread team, the expert cache
Out: logits of a chunk of tokens appended to a session's state

A layer adds its blocks' outputs to the residual stream (blocks/). Two programs hold all layers: one for a single token, one for a
chunk. What differs from run to run (token ids, their number, the first position, the state) is read from small arrays. A replay stops
at an expert fault; the missing experts are brought in and it resumes there.
"""

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ..blocks.moe import MoE
from ..blocks.moe_state import MoeState, RoutingState
from ..blocks.site import ResidentExperts, Site
from ..config import ModelConfig, Sublayer
from ..errors import ConfigError, PassCancelled
from ..kernels.kernel_set import KernelSet
from ..kernels.moe import make_stop
from ..matrix import Matrix
from ..memory_speed import memory_speed
from ..prefetch import Prefetch, most_likely
from ..program import Program
from ..recorder import Recorder, Rows, padded, wants
from ..rope import RopeConfig, rope_tables
from ..thread_team import Team
from ..weights import ModelWeights, Norm, SublayerWeights
from .state import SequenceState

LOGITS_CHUNK_TOK = 32  # tokens whose logits are computed at once


class Experts(ResidentExperts, Protocol):
    """The expert cache as the decoder uses it."""

    @property
    def holds_everything(self) -> bool: ...

    def begin_pass(self, n_tok: int) -> None: ...

    def end_pass(self, routed: Mapping[int, np.ndarray]) -> None: ...

    def note(self, layer: int, chosen: np.ndarray) -> None: ...

    def demand(self, layer: int, expert_ids: np.ndarray, busy: np.ndarray) -> None: ...

    def look_ahead(self, layer: int, expert_ids: Sequence[int], most: int, busy_layer: int, busy: np.ndarray) -> None: ...

    def collect(self, layer: int, quorum: int = 0, cancel: threading.Event | None = None) -> None: ...


class Buffers:
    """Activations that both programs share: rows by (name, columns), and one MoeState for each kind of routing."""

    def __init__(self, config: ModelConfig, max_tok: int):
        self.x, self.out = Rows(max_tok, config.hidden_size), Rows(max_tok, config.hidden_size)
        self.rows = {key: Rows(max_tok, key[1]) for key in _row_kinds(config)}
        self.moe: dict[MoE, MoeState] = {
            block: block.moe_state(config.hidden_size, max_tok, config.num_hidden_layers) for block in _moe_blocks(config)
        }

    @staticmethod
    def bytes_for(config: ModelConfig, max_tok: int) -> int:
        """Bytes of the buffers, before they are made; panels take as much again as 3/8 of the rows, normed rows as the stream."""
        columns = [config.hidden_size] * 3 + [cols for _, cols in _row_kinds(config)]
        moe = sum(block.moe_state_bytes(config.hidden_size, max_tok) for block in _moe_blocks(config))
        return max_tok * sum(padded(cols) * 4 + 3 * cols // 2 for cols in columns) + moe


def _row_kinds(config: ModelConfig) -> dict[tuple[str, int], None]:
    return {(name, cols): None for block in config.blocks for name, cols in block.rows(config.hidden_size).items()}


def _moe_blocks(config: ModelConfig) -> list[MoE]:
    return list(dict.fromkeys(block.routed for block in config.blocks if block.routed is not None))


class Decoder:
    """A model that can run. `forward` may be called from any thread; one call runs at a time.

    context_length   positions that any state of this decoder may have
    max_chunk_tok    most tokens of one call
    kv_dtype         float16, or float32 where the weights are float32 (default: chosen so)
    prefetch         says when experts are read before a layer asks for them; None: never
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
        prefetch: Prefetch | None = None,
    ):
        self.config, self.team, self.experts, self.prefetch = config, team, experts, prefetch
        self.context_length, self.max_chunk_tok = context_length, min(max_chunk_tok, context_length)
        self.kernels = kernels or KernelSet()
        self.kv_dtype = np.dtype(kv_dtype or default_kv_dtype(weights))
        self._weights, self._layers_bytes, self._head_bytes = weights, _layers_bytes(weights), _head_bytes(weights)
        self._lock = threading.Lock()
        self._n_tok, self._start = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._ids = np.zeros(self.max_chunk_tok, np.int64)
        self._descriptors = np.zeros((config.num_hidden_layers, 8), np.int64)
        self._rope_tables: dict[tuple[RopeConfig, int], np.ndarray] = {}
        self._moe_layers = {i: moe for i, layer in enumerate(config.layers) for sub in layer.sublayers if (moe := sub.block.routed)}
        self.buffers = Buffers(config, self.max_chunk_tok)
        self._record_programs()

    @staticmethod
    def activation_bytes(config: ModelConfig, max_chunk_tok: int, context_length: int, threads: int) -> int:
        """Bytes that a decoder needs beside weights, states and experts, before one is made."""
        head = LOGITS_CHUNK_TOK * (padded(config.hidden_size) + padded(config.vocab_size)) * 4
        ropes = {kind for block in config.blocks for kind in block.ropes()}
        rope = sum(context_length * columns * 4 for _, columns in ropes)
        return Buffers.bytes_for(config, max_chunk_tok) + head + rope + 4 * threads * _scratch_bytes(config, context_length)

    def new_state(self, context_length: int | None = None) -> SequenceState:
        """An empty state for one timeline."""
        return SequenceState(self.config.states, context_length or self.context_length, self.max_chunk_tok, self.kv_dtype.type)

    def routing(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Expert ids (T, K) int64 and weights (T, K) float32 that `layer` chose in the last call of forward."""
        state, n = self.buffers.moe[self._moe_layers[layer]], int(self._n_tok[0])
        return state.ids[layer, :n].copy(), state.weights[layer, :n].copy()

    def _routed(self, n_tok: int) -> dict[int, np.ndarray]:
        """By layer, the experts (T, K) that the last call of forward used; views."""
        return {layer: self.buffers.moe[block].ids[layer, :n_tok] for layer, block in self._moe_layers.items()}

    @property
    def expert_counters(self) -> np.ndarray:
        """Hits and misses so far, int64 (2,): experts that were, or were not, resident when a layer first asked for them."""
        return self.layer_counters.sum(axis=0)

    @property
    def layer_counters(self) -> np.ndarray:
        """`expert_counters` by layer, int64 (num_hidden_layers, 2)."""
        return sum((state.counters for state in self.buffers.moe.values()), start=np.zeros((self.config.num_hidden_layers, 2), np.int64))

    def dense_bytes(self, logits: str) -> int:
        """Bytes of the weights that every pass goes through, with the head's where logits are wanted ("last", "all").

        Of tables with a row for each token of the vocabulary only a row for each token is read: they are not counted.
        """
        return self._layers_bytes + (0 if logits == "none" else self._head_bytes)

    def memory_speed(self) -> float:
        """Bytes/s at which the threads read this model's dense matrices at best. Nothing else should be running."""
        layers = (field for layer in self._weights.layers for sub in layer.sublayers for field in sub.fields.values())
        matrices = [self._weights.lm_head, *(field for field in layers if isinstance(field, Matrix))]
        return memory_speed([matrix.tiles for matrix in matrices], self.team.threads)

    def forward(
        self, state: SequenceState, token_ids: np.ndarray, logits: str = "last", cancel: threading.Event | None = None
    ) -> np.ndarray | None:
        """Append tokens to the state and compute their logits.

        token_ids   (T,) int64, 1 <= T <= max_chunk_tok, each within the vocabulary
        logits      "last": float32 (V,) of the last token; "all": float32 (T, V); "none": None
        cancel      looked at before every layer of a pass over several tokens, and whenever experts are missing

        Raises ExpertReadError when an expert's file fails, and PassCancelled; the positions before stay valid once the state is truncated
        to them.
        """
        n = len(token_ids)
        self._check(state, token_ids)
        with self._lock:
            self._n_tok[0], self._start[0], self._ids[:n] = n, state.n_tok, token_ids
            self._descriptors[:] = state.descriptors
            if self.experts is not None:
                self.experts.begin_pass(n)
            started = time.perf_counter()
            guess = None
            if self.prefetch is not None and self.prefetch.wanted(n):
                guess = self._guess_one if n == 1 else self._guess_many
                guess.layer = -1
            with state.appending(n):
                self._run(self._step if n == 1 else self._chunk, cancel, guess)
            if self.experts is not None:
                self.experts.end_pass(self._routed(n))
            if self.prefetch is not None:
                self.prefetch.note(n, guess is not None, time.perf_counter() - started)
            if logits == "none":
                return None
            if logits == "last":
                return self._logits(slice(n - 1, n))[0]
            return np.concatenate([self._logits(slice(at, min(at + LOGITS_CHUNK_TOK, n))) for at in range(0, n, LOGITS_CHUNK_TOK)])

    def _check(self, state: SequenceState, token_ids: np.ndarray) -> None:
        """What the state cannot check of a call."""
        n = len(token_ids)
        if not 1 <= n <= self.max_chunk_tok:
            raise ValueError(f"{n} tokens in one call, expected 1 to {self.max_chunk_tok}")
        if state.n_tok + n > self.context_length:
            raise ValueError(f"{state.n_tok} + {n} positions do not fit a decoder of {self.context_length}")
        if token_ids.min() < 0 or token_ids.max() >= self.config.vocab_size:
            raise ConfigError(f"token id {token_ids.max()} is outside the vocabulary of {self.config.vocab_size}")

    def _run(self, recorded: "_Recorded", cancel: threading.Event | None = None, guess: "_Guess | None" = None) -> None:
        """Replay a program to its end. At an expert fault, what is missing is asked for, and computed as it arrives."""
        at, asking = 0, -1
        while (at := self.team.run(recorded.program, at)) < len(recorded.program):
            if cancel is not None and cancel.is_set():
                raise PassCancelled("the pass was cancelled between two layers")
            if at in recorded.pauses:
                at += 1
                continue
            layer, state, wave = recorded.faults[at]
            missing, ready = (experts[1 : 1 + experts[0]].copy() for experts in (state.missing, state.ready))
            assert self.experts is not None
            if at != wave:
                self.experts.collect(layer, self._quorum(len(missing)), cancel)
                at = wave
                continue
            if layer != asking:
                asking = layer
                if came := self._first_fault(layer, state, missing):
                    if came == len(missing) and guess is not None:  # nothing to wait for, and an idle drive
                        self._look_ahead(guess, layer, np.concatenate([ready, missing]))
                    at = wave
                    continue
            self.experts.demand(layer, missing, ready)
            if guess is not None and guess.layer != layer:
                self._look_ahead(guess, layer, ready)
            if len(ready):
                at = wave + 1
            else:
                self.experts.collect(layer, self._quorum(len(missing)), cancel)
                at = wave

    def _first_fault(self, layer: int, state: MoeState, missing: np.ndarray) -> int:
        """A layer has missed experts for the first time in a pass. How many of them were there already, read ahead: hits after all."""
        assert self.experts is not None
        n = int(self._n_tok[0])
        if n > 1:
            self.experts.note(layer, state.ids[layer, :n])
        self.experts.collect(layer)
        came = int(np.count_nonzero(self.experts.table(layer)[missing]))
        state.counters[layer] += [came, -came]
        return came

    def _quorum(self, n_missing: int) -> int:
        """How many missing experts to wait for before computing: all that a token wants, a few of a prompt's, which take longer."""
        return n_missing if self._n_tok[0] == 1 else -(-n_missing // 4)

    def _look_ahead(self, guess: "_Guess", layer: int, ready: np.ndarray) -> None:
        """While a layer waits for the drive: let the next one guess its experts, and read those after."""
        assert self.experts is not None and self.prefetch is not None
        guess.layer = layer
        following = guess.following.get(layer)
        if following is not None:
            self.team.run(guess.program, guess.starts[following])
            n = int(self._n_tok[0])
            likely = most_likely(guess.states[following].ids[following, :n])
            self.experts.look_ahead(following, likely, self.prefetch.most(n), layer, ready)

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
        self._step, self._chunk = self._record_layers(1), self._record_layers(self.max_chunk_tok)
        self._head_one, self._head_many = self._record_head(1), self._record_head(LOGITS_CHUNK_TOK)
        if self.prefetch is not None:
            self._guess_one, self._guess_many = self._record_guess(1), self._record_guess(self.max_chunk_tok)

    def _recorder(self, max_tok: int, n_tok: np.ndarray) -> Recorder:
        return Recorder(self.kernels, self.team.threads, max_tok, n_tok, _scratch_bytes(self.config, self.context_length))

    def _record_layers(self, max_tok: int) -> "_Recorded":
        r, config, x = self._recorder(max_tok, self._n_tok), self.config, self.buffers.x
        recorded = _Recorded(r.program)
        r.embed("embed", self._weights.embed_tokens, self._ids, x)
        if config.embedding_multiplier != 1.0:
            r.scale("embedding multiplier", x, r.scalar(config.embedding_multiplier))
        for i, weights in enumerate(self._weights.layers):
            if max_tok > 1:
                recorded.pauses.add(r.program.record("pause", r.kernels.get(make_stop), []))
            for sub, found in zip(config.layers[i].sublayers, weights.sublayers, strict=True):
                self._record_sublayer(r, i, sub, found, recorded)
            if weights.scalar is not None:
                r.scale("layer scalar", x, weights.scalar)
        r.program.finish()
        return recorded

    def _record_sublayer(self, r: Recorder, layer: int, sub: Sublayer, weights: SublayerWeights, recorded: "_Recorded") -> None:
        """x += residual_multiplier * output_norm(block(input_norm(x))); without multiplier and output norm in place."""
        b, factor = self.buffers, self.config.residual_multiplier
        site = self._site(layer, sub, weights)
        sub.block.record(r, site)
        if site.out is not b.x:
            r.add_normed("add", b.x, b.out, weights.output_norm, factor)
        if site.moe is not None:
            recorded.faults |= {at: (layer, site.moe, resume) for at, resume in site.faults.items()}

    def _site(self, layer: int, sub: Sublayer, weights: SublayerWeights) -> Site:
        b = self.buffers
        in_place = sub.output_norm is None and self.config.residual_multiplier == 1.0
        moe = None if sub.block.routed is None else b.moe[sub.block.routed]
        return Site(
            layer=layer, weights=weights.fields, x=b.x, norm=weights.input_norm, out=b.x if in_place else b.out,
            onto=b.x if in_place else None, start=self._start, ids=self._ids, states=self._descriptors, kv_dtype=self.kv_dtype,
            buffers={name: b.rows[name, cols] for name, cols in sub.block.rows(self.config.hidden_size).items()},
            rope_table=self._rope_table, context_length=self.context_length, experts=weights.experts, moe=moe, resident=self.experts,
        )  # fmt: skip

    def _record_guess(self, max_tok: int) -> "_Guess":
        """For each layer with experts but the first, what it would choose for the residual stream of the layer before."""
        r = self._recorder(max_tok, self._n_tok)
        layers = sorted(self._moe_layers)
        guess = _Guess(r.program, dict(itertools.pairwise(layers)))
        states = {block: RoutingState(block.num_experts, block.num_experts_per_tok, max_tok, 1 + layers[-1]) for block in self.buffers.moe}
        for i in layers[1:]:
            for sub, found in zip(self.config.layers[i].sublayers, self._weights.layers[i].sublayers, strict=True):
                if sub.block.routed is not None:
                    guess.starts[i], guess.states[i] = len(r.program), states[sub.block.routed]
                    sub.block.record_guess(r, self._site(i, sub, found), guess.states[i])
                    r.program.record("stop", r.kernels.get(make_stop), [])
        r.program.finish()
        return guess

    def _rope_table(self, rope: RopeConfig, columns: int) -> np.ndarray:
        """float32 (context_length, columns): cosines, then sines; one table for all layers that turn alike."""
        if (rope, columns) not in self._rope_tables:
            table = np.concatenate(rope_tables(rope, columns, self.context_length), axis=1)
            self._rope_tables[rope, columns] = np.ascontiguousarray(table)
        return self._rope_tables[rope, columns]

    def _record_head(self, max_tok: int) -> "_Recorded":
        """Logits of the final norm of _head_x."""
        r, config, weights = self._recorder(max_tok, self._head_n), self.config, self._weights
        x = r.activation("norm", self._head_x, wants([weights.lm_head]), weights.norm)
        r.product("lm_head", weights.lm_head, x, self._head_out, bias=weights.lm_head_bias)
        if config.logits_multiplier != 1.0:
            r.scale("logits multiplier", self._head_out, r.scalar(config.logits_multiplier))
        if config.logit_softcap is not None:
            r.softcap("logit softcap", self._head_out, config.logit_softcap)
        r.program.finish()
        return _Recorded(r.program)


class _Recorded:
    """A program, and for each operation that may stop it: (layer, routing state, operation to resume at). It always stops at `pauses`, for
    somebody to look whether it should go on: a long prompt takes seconds."""

    def __init__(self, program: Program):
        self.program = program
        self.pauses: set[int] = set()
        self.faults: dict[int, tuple[int, MoeState, int]] = {}


class _Guess:
    """A program that guesses, in parts: from operation starts[layer] to the next stop it fills states[layer].

    following   by layer, the next one with experts
    layer       the layer that looked ahead last
    """

    def __init__(self, program: Program, following: dict[int, int]):
        self.program, self.following, self.layer = program, following, -1
        self.starts: dict[int, int] = {}
        self.states: dict[int, RoutingState] = {}


def _layers_bytes(weights: ModelWeights) -> int:
    """Bytes of all layers' own tensors, without tables of the vocabulary and without experts."""
    total = 0
    for layer in weights.layers:
        for sub in layer.sublayers:
            total += sum(field.nbytes for name, field in sub.fields.items() if name != "table")  # PerLayerInputs
            total += _norm_bytes(sub.input_norm) + _norm_bytes(sub.output_norm)
    return total


def _head_bytes(weights: ModelWeights) -> int:
    """Bytes of what makes logits of the residual stream."""
    bias = weights.lm_head_bias
    return weights.lm_head.nbytes + _norm_bytes(weights.norm) + (0 if bias is None else bias.nbytes)


def _norm_bytes(norm: Norm | None) -> int:
    return 0 if norm is None else norm.weight.nbytes + (0 if norm.bias is None else norm.bias.nbytes)


def default_kv_dtype(weights: ModelWeights) -> type:
    """float32 for a model in float32, else float16."""
    return np.float32 if weights.embed_tokens.type == "f32" else np.float16


def _scratch_bytes(config: ModelConfig, context_length: int) -> int:
    return max(block.scratch_bytes(config.hidden_size, context_length) for block in config.blocks)
