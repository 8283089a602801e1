"""How well a model predicts a text.

In:  an engine, token ids, a window
Out: `Perplexity`: exp of the mean negative log-likelihood
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import ConfigError
from .session import Session

if TYPE_CHECKING:
    from .engine import Engine

DEFAULT_WINDOW_TOK = 512
Progress = Callable[[str, int, int], None]  # what, tokens done, tokens in all


@dataclass(frozen=True, slots=True)
class Perplexity:
    """nll is the mean negative log-likelihood in nats per token over `n_tok` predicted tokens; ppl = exp(nll)."""

    nll: float
    n_tok: int

    @property
    def ppl(self) -> float:
        return math.exp(self.nll) if self.nll < 700.0 else math.inf


def perplexity(
    engine: "Engine",
    token_ids: Sequence[int],
    context_length: int | None = None,
    stride: int | None = None,
    on_progress: Progress | None = None,
) -> Perplexity:
    """Perplexity of `token_ids` in windows of `context_length` tokens.

    context_length   None: 512, or the engine's context length if that is shorter
    stride   tokens from one window's start to the next, at most a window; None: windows side by side. A smaller one gives every
             scored token more context and takes longer. Each token is scored once; a window's first token is context only,
             so with windows side by side one token per window is not scored. No token is added at a window's start.

    Raises ConfigError for fewer than two tokens, or a window that the engine's context does not hold.
    """
    if context_length is None:
        context_length = min(DEFAULT_WINDOW_TOK, engine.context_length)
    stride = stride or context_length
    if not 2 <= context_length <= engine.context_length:
        raise ConfigError(f"perplexity window of {context_length} tokens: expected 2 to the context length {engine.context_length}")
    if not 1 <= stride <= context_length:
        raise ConfigError(f"perplexity stride {stride}: expected 1 to the window of {context_length} tokens")
    if len(token_ids) < 2:
        raise ConfigError(f"perplexity of {len(token_ids)} tokens: expected at least 2")
    session, losses = engine.new_session(), []
    for start, end, first_scored in _windows(len(token_ids), context_length, stride):
        losses.append(_window_losses(session, list(token_ids[start:end]), first_scored - start))
        if on_progress is not None:
            on_progress("perplexity", end, len(token_ids))
    flat = np.concatenate(losses)
    return Perplexity(float(flat.mean()), len(flat))


def _windows(total: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, first token scored) of each window; every token but unavoidable first ones is scored exactly once."""
    scored = 1
    for start in range(0, total - 1, stride):
        end = min(start + window, total)
        yield start, end, max(scored, start + 1)
        scored = end
        if end == total:
            return


def _window_losses(session: Session, token_ids: list[int], first_scored: int) -> np.ndarray:
    """float64: -log p of token_ids[first_scored:], each given all tokens before it in the window."""
    session.reset()
    losses = np.empty(len(token_ids) - first_scored)
    with session.using():
        for start in range(0, first_scored - 1, session.chunk_tok):
            session.extend(token_ids[start : min(start + session.chunk_tok, first_scored - 1)])
        for start in range(first_scored - 1, len(token_ids) - 1, session.logits_chunk_tok):
            end = min(start + session.logits_chunk_tok, len(token_ids) - 1)
            logits = session.extend(token_ids[start:end], "all").logits
            assert logits is not None
            losses[start - first_scored + 1 : end - first_scored + 1] = -log_likelihood(logits, token_ids[start + 1 : end + 1])
    return losses


def log_likelihood(logits: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    """float64 (T,): log softmax(logits)[t, targets[t]] for logits (T, V)."""
    wide = logits.astype(np.float64)
    highest = wide.max(axis=1)
    return wide[np.arange(len(wide)), np.asarray(targets)] - highest - np.log(np.exp(wide - highest[:, None]).sum(axis=1))
