"""Prompt tokens -> steps: prefill in chunks, then one token at a time.

In:  a session with the prompt's tokens, a sampler, limits
Out: `Step`s; after each one the session's tokens and state agree, so a reader may leave at any step
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .errors import PassCancelled
from .stats import GenerationStats, PhaseStats
from .text_filter import Piece, TextFilter

if TYPE_CHECKING:
    from .session import Session


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of a generation brought.

    text            complete characters of the answer to append; "" during prefill and while a character is unfinished
    token_id        the token generated; None during prefill and in the step that reports a cancellation
    finish_reason   None, or in the last step "stop" (end token or stop string), "length" (max_tokens or context), "cancelled"
    reasoning       characters of the model's reasoning to append, which are no part of the answer
    tool_call       characters of a call of one of the tools given, as the model writes it; a newline ends each call
    """

    text: str
    token_id: int | None
    finish_reason: str | None
    stats: GenerationStats
    reasoning: str = ""
    tool_call: str = ""


class TokenSampler(Protocol):
    """Chooses the next token and is told what the text holds so far."""

    def pick(self, logits: np.ndarray, history: list[int]) -> int: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """When a generation ends. `cancel` is looked at before every forward pass, and in it while experts are read."""

    max_tokens: int | None
    end_ids: frozenset[int]
    cancel: threading.Event | None

    @property
    def cancelled(self) -> bool:
        return self.cancel is not None and self.cancel.is_set()


class Generation:
    """One run over a session; iterate over `steps()` once."""

    def __init__(self, session: "Session", prompt: list[int], sampler: TokenSampler, text: TextFilter, limits: Limits):
        self._session, self._prompt, self._sampler, self._text, self._limits = session, prompt, sampler, text, limits
        self._started = time.perf_counter()
        self._turn = session.begin_turn()
        self.stats = GenerationStats(prompt_tok=len(prompt))

    def steps(self) -> Iterator[Step]:
        """Prefill steps, then one step per token; the last one has a finish_reason."""
        logits = yield from self._prefill()
        if logits is None:
            yield Step("", None, "cancelled", self.stats)
            return
        while True:
            token_id = self._sample(logits)
            piece, reason = self._judge(token_id)
            yield self._step(piece, token_id, reason)
            if reason is not None:
                return
            if self._limits.cancelled:
                yield self._step(self._text.flush(), None, "cancelled")
                return
            try:
                logits = self._forward([token_id], prefill=False, last=True)
            except PassCancelled:
                yield self._step(self._text.flush(), None, "cancelled")
                return

    def _prefill(self):
        """Evaluate what the session does not have yet; returns the last position's logits, None when cancelled."""
        with self._session.using(self._turn):
            reused = self._session.rewind_to(self._prompt)
        self.stats = replace(self.stats, reused_tok=reused)
        logits = None
        for start, end in self._session.passes(reused, len(self._prompt)):
            if self._limits.cancelled:
                return None
            try:
                logits = self._forward(self._prompt[start:end], prefill=True, last=end == len(self._prompt))
            except PassCancelled:
                return None
            yield Step("", None, None, self.stats)
        return None if self._limits.cancelled else logits

    def _forward(self, token_ids: list[int], *, prefill: bool, last: bool) -> np.ndarray | None:
        with self._session.using(self._turn):
            done = self._session.extend(token_ids, "last" if last else "none", self._limits.cancel)
        one = PhaseStats(len(token_ids), 1, done.seconds, done.computed_bytes, done.experts)
        if prefill:
            self.stats = replace(self.stats, prefill=self.stats.prefill + one)
        else:
            self.stats = replace(self.stats, decode=self.stats.decode + one)
        return done.logits

    def _sample(self, logits: np.ndarray) -> int:
        started, first = time.perf_counter(), self.stats.completion_tok == 0
        with self._session.using(self._turn):
            token_id = int(self._sampler.pick(logits, self._session.tokens))
            self._session.note_sampled(token_id)
        now = time.perf_counter()
        self.stats = replace(
            self.stats,
            completion_tok=self.stats.completion_tok + 1,
            ttft_s=now - self._started if first else self.stats.ttft_s,
            decode=self.stats.decode + PhaseStats(seconds=0.0 if first else now - started),
        )
        return token_id

    def _step(self, piece: Piece, token_id: int | None, reason: str | None) -> Step:
        return Step(piece.text, token_id, reason, self.stats, piece.reasoning, piece.tool_call)

    def _judge(self, token_id: int) -> tuple[Piece, str | None]:
        """(text to show, finish reason) after a token."""
        if token_id in self._limits.end_ids:
            return self._text.flush(), "stop"
        piece = self._text.push(token_id)
        if piece.stopped:
            return piece, "stop"
        if self.stats.completion_tok == self._limits.max_tokens or self._session.is_full:
            return piece + self._text.flush(), "length"
        return piece, None
