"""A decoder, state, team and tokenizer in a few lines of numpy, for everything above them.

The toy model's logits depend on every token before a position, so a wrong prefix, a lost token or a mixed-up session changes them.
"""

import time

import numpy as np

from libcolibri.engine import Parts


class FakeState:
    """Remembers the tokens themselves; goes back to any of them."""

    forgets, seen_bytes = False, 0

    def __init__(self, context_length: int):
        self.context_length, self.n_tok = context_length, 0
        self.seen = np.zeros(context_length, np.int64)
        self.nbytes = self.seen.nbytes

    @staticmethod
    def bytes_for(states, context_length: int, chunk_tok: int, dtype: type = np.float16) -> int:
        return 8 * context_length

    def truncate(self, n_tok: int) -> int:
        assert 0 <= n_tok <= self.n_tok
        self.n_tok = n_tok
        return n_tok

    def snapshot(self) -> None:
        assert not self.forgets

    def export(self) -> dict[str, np.ndarray]:
        return {"seen": self.seen[: self.n_tok].copy()}

    def restore(self, arrays: dict[str, np.ndarray], n_tok: int) -> None:
        if arrays["seen"].shape != (n_tok,):
            raise ValueError(f"{arrays['seen'].shape} does not fit {n_tok}")
        self.seen[:n_tok], self.n_tok = arrays["seen"], n_tok


class FakeForgetfulState(FakeState):
    """Goes back to its newest snapshot only."""

    forgets = True

    def __init__(self, context_length: int):
        super().__init__(context_length)
        self.snapshots: list[int] = []

    def truncate(self, n_tok: int) -> int:
        self.snapshots = [n for n in self.snapshots if n <= n_tok]
        return super().truncate(n_tok if n_tok == self.n_tok else max(self.snapshots, default=0))

    def snapshot(self) -> None:
        self.snapshots.append(self.n_tok)


def toy_logits(tokens, vocab_size: int) -> np.ndarray:
    """float32 (V,) after `tokens`: a function of all of them in order."""
    state = 1
    for token in tokens:
        state = (state * 1_000_003 + int(token) + 1) % (1 << 61)
    return np.random.default_rng(state).normal(size=vocab_size).astype(np.float32)


class FakeDecoder:
    """Counts and records its calls; asks the expert cache as a real one would."""

    delay_s, state_type = 0.0, FakeState

    def __init__(self, config, weights, team, experts, *, context_length, max_chunk_tok=512, kv_dtype=None, prefetch=None):
        self.config, self.weights, self.team, self.experts = config, weights, team, experts
        self.context_length, self.max_chunk_tok = context_length, max_chunk_tok
        self.layer_counters = np.zeros((config.num_hidden_layers, 2), np.int64)
        self.calls: list[tuple[int, str]] = []
        self.inside = 0

    @staticmethod
    def activation_bytes(config, max_chunk_tok: int, context_length: int, threads: int) -> int:
        return 4 * config.hidden_size * max_chunk_tok

    def dense_bytes(self, logits: str) -> int:
        return 1000 if logits == "none" else 1500

    def memory_speed(self) -> float:
        return 1e9

    def new_state(self, context_length: int) -> FakeState:
        assert context_length == self.context_length
        return self.state_type(context_length)

    def forward(self, state: FakeState, token_ids: np.ndarray, logits: str = "last", cancel=None):
        assert token_ids.dtype == np.int64 and 1 <= len(token_ids) <= self.max_chunk_tok and not self.team.closed
        assert state.n_tok + len(token_ids) <= state.context_length
        assert self.inside == 0, "two forward passes at once"
        self.inside += 1
        time.sleep(self.delay_s)
        self.calls.append((len(token_ids), logits))
        state.seen[state.n_tok : state.n_tok + len(token_ids)] = token_ids
        first = state.n_tok
        state.n_tok += len(token_ids)
        if self.experts is not None:
            self.experts.begin_pass(len(token_ids))
            self._use_experts(token_ids)
        rows = [toy_logits(state.seen[: i + 1], self.config.vocab_size) for i in range(first, state.n_tok)] if logits != "none" else []
        self.inside -= 1
        return None if logits == "none" else rows[-1] if logits == "last" else np.stack(rows)

    def _use_experts(self, token_ids: np.ndarray) -> None:
        K = self.config.num_experts_per_tok
        for layer, shape in self.config.experts.items():
            for token in token_ids:
                table, stamps = self.experts.table(layer), self.experts.stamps(layer)
                left = [(int(token) + layer + k) % shape.num_experts for k in range(K)]
                self.layer_counters[layer] += [sum(table[e] != 0 for e in left), sum(table[e] == 0 for e in left)]
                while left:  # what is resident is used up, then the rest is asked for
                    for expert in [e for e in left if table[e]]:
                        stamps[expert] = self.experts.clock[0]
                        left.remove(expert)
                    if left:
                        self.experts.bring_in(layer, np.array(left))
                        assert any(table[e] for e in left)


class ForgetfulDecoder(FakeDecoder):
    state_type = FakeForgetfulState


class FakeTeam:
    def __init__(self, threads: int):
        self.threads, self.closed = threads, False

    def close(self) -> None:
        self.closed = True


class FakeTokenizer:
    """One token per byte below 48 of a small alphabet; token 5 is the first half of "é", 6 the second; 47 ends a text."""

    alphabet = " abcd..efghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQR\0"
    vocab_size, bos_token_id, eos_token_ids = 48, None, (47,)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [token for letter in text for token in ((5, 6) if letter == "é" else (self.alphabet.index(letter),))]

    def with_bos(self, token_ids) -> list[int]:
        return list(token_ids)

    def decode(self, token_ids) -> str:
        stream = self.stream()
        return "".join(stream.push(token) for token in token_ids) + stream.flush()

    def stream(self, shown=()) -> "FakeStream":
        return FakeStream()


class FakeStream:
    half = False

    def push(self, token_id: int) -> str:
        if token_id == 5:
            self.half = True
            return ""
        if token_id == 6:
            whole, self.half = self.half, False
            return "é" if whole else "\ufffd"
        return FakeTokenizer.alphabet[token_id]

    def flush(self) -> str:
        return ""


class FakeTemplate:
    source = "u...a"
    builtin = None

    def render(self, messages, *, add_generation_prompt=True, **options) -> str:
        self.options = options
        return "".join(f"{m['role'][0]}{m['content']} " for m in messages) + ("a" if add_generation_prompt else "")


class FakeStops:
    """Stop strings with the plainest hold-back: as many characters as the longest one minus one."""

    def __init__(self, stops):
        self.stops, self.held = list(stops), ""

    def push(self, text: str) -> tuple[str, bool]:
        self.held += text
        places = [self.held.find(stop) for stop in self.stops if stop in self.held]
        if places:
            return self.held[: min(places)], True
        keep = max((len(stop) - 1 for stop in self.stops), default=0)
        cut = max(len(self.held) - keep, 0)
        out, self.held = self.held[:cut], self.held[cut:]
        return out, False

    def flush(self) -> str:
        out, self.held = self.held, ""
        return out


class GreedySampler:
    def pick(self, logits, history) -> int:
        return int(np.argmax(logits))


class ScriptSampler:
    """Picks what a test prescribes, and keeps the histories it was shown."""

    def __init__(self, script):
        self.script, self.histories = list(script), []

    def pick(self, logits, history) -> int:
        self.histories.append(list(history))
        return self.script.pop(0)


def fake_parts(**changes) -> Parts:
    parts = {
        "decoder": FakeDecoder,
        "state": FakeState,
        "team": FakeTeam,
        "load_tokenizer": lambda path, entry: FakeTokenizer(),
        "load_chat_template": lambda path: FakeTemplate(),
        "make_sampler": lambda params: params if hasattr(params, "pick") else GreedySampler(),
        "make_stop": FakeStops,
    }
    return Parts(**{**parts, **changes})
