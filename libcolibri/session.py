"""One timeline of tokens: what has been read and written so far, and the state of the model after them.

In:  an engine, prompts as text, messages or token ids
Out: `Step`s, logits; a file that resumes the timeline later
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from .errors import ColibriError, ConfigError, ContextLengthError, DiskSpaceError, FormatError, TokenizerError
from .generator import Generation, Limits, Step
from .prompt_encoder import EncodedPrompt, encode_messages, is_conversation
from .reasoning import ReasoningSplitter
from .safetensors_reader import read_arrays
from .text_filter import NoText, StoppableText, TextFilter

if TYPE_CHECKING:
    from .engine import Engine, Pass
    from .sampler import SamplingParams

SESSION_FORMAT = "colibri-session-2"
MARK_TOK = 16  # a prompt ends with the opening of an answer, which the next prompt may spell in another way: the mark lies before it
LOGITS_CHUNK_TOK = 32  # logits of a large vocabulary are 0.6 MB a position


class Session:
    """Tokens and state of one conversation; made by `Engine.new_session`.

    tokens   every token so far, prompt and completion; the state covers a prefix of it

    One generation at a time: a newer one makes an older, unfinished iterator raise. Different sessions may run on different threads.
    """

    def __init__(self, engine: "Engine"):
        self._engine = engine
        self._state = engine.new_state()
        self.tokens: list[int] = []
        self._mark = 0  # where the state is to be remembered
        self._turn = 0
        self._in_use = threading.Lock()

    @property
    def engine(self) -> "Engine":
        """The engine whose model this timeline is of."""
        return self._engine

    # --- generating

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        sampling: "SamplingParams | None" = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        cancel: threading.Event | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Iterator[Step]:
        """Continue `prompt`, reusing the longest prefix it shares with this session.

        prompt       raw text, messages for the chat template, or token ids; always the whole text, not what is new in it
        sampling     SamplingParams; None is greedy
        max_tokens   None: until the model ends its text or the context is full
        stop         strings that end the text; they are not part of it
        cancel       checked before every forward pass, between the chunks of prefill too, and while experts are read
        tools        JSON schemas of functions the model may call; calls come in Step.tool_call
        template_options   variables of the chat template, such as ChatTemplate.thinking_options gives

        For messages, reasoning comes in Step.reasoning and not in Step.text. A continued text is given as the model writes it.
        Yields prefill steps without text, then one step per token. Arguments are checked here and now, not at the first step.
        Raises ContextLengthError, ConfigError, TokenizerError, TemplateError.
        """
        encoded = self._read_prompt(prompt, tools, template_options)
        if len(encoded.token_ids) > self._engine.context_length:
            raise ContextLengthError(len(encoded.token_ids), self._engine.context_length)
        if max_tokens is not None and max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens}: expected at least 1, or none for no limit")
        limits = Limits(max_tokens, self._engine.end_ids, cancel)
        sampler = self._engine.parts.make_sampler(sampling)
        return Generation(self, encoded.token_ids, sampler, self._text_filter(stop, encoded), limits).steps()

    def encode_prompt(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids that `generate` evaluates for `prompt`. Raises as `generate` does."""
        return self._read_prompt(prompt, tools, template_options).token_ids

    def _read_prompt(self, prompt: Any, tools: Any, template_options: Any) -> EncodedPrompt:
        if not isinstance(prompt, str | Sequence | np.ndarray):
            raise ConfigError(f"a prompt of type {type(prompt).__name__}: expected text, a list of messages, or token ids")
        if is_conversation(prompt):
            tokenizer = self._tokenizer("messages as a prompt")
            return encode_messages(prompt, tokenizer, self._engine.chat_template, tools, template_options or {})
        if tools or template_options:
            raise ConfigError("tools and template options are for a list of messages, the prompt is text or token ids: leave them out")
        if isinstance(prompt, str):
            tokenizer = self._tokenizer("text as a prompt")
            encoded = EncodedPrompt(tokenizer.with_bos(tokenizer.encode(prompt)))
        else:
            encoded = EncodedPrompt(self._check_ids(prompt))
        if not encoded.token_ids:
            raise ConfigError("the prompt is empty: give at least one token")
        return encoded

    def _tokenizer(self, use: str) -> Any:
        if self._engine.tokenizer is None:
            raise TokenizerError(f"this model has no tokenizer, {use} needs one: give token ids, or convert the model with its tokenizer")
        return self._engine.tokenizer

    def _check_ids(self, token_ids: Any) -> list[int]:
        vocab_size = self._engine.config.vocab_size
        checked = []
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer) or not 0 <= token_id < vocab_size:
                raise ConfigError(f"prompt token {token_id!r}: expected a token id from 0 to {vocab_size - 1}")
            checked.append(int(token_id))
        return checked

    def _text_filter(self, stop: str | Sequence[str], prompt: EncodedPrompt) -> TextFilter:
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if self._engine.tokenizer is None:
            if stops:
                self._tokenizer("a stop string")
            return NoText()
        markers = [token for section in prompt.sections for token in section.controls]
        stream = self._engine.tokenizer.stream(shown=markers) if markers else self._engine.tokenizer.stream()
        return StoppableText(stream, self._engine.parts.make_stop(stops), ReasoningSplitter(prompt.sections, prompt.inside))

    # --- the timeline

    @property
    def is_full(self) -> bool:
        """Whether the state has no room for another position."""
        return self._state.n_tok >= self._engine.context_length

    @property
    def chunk_tok(self) -> int:
        """Tokens of a prompt that one pass evaluates."""
        return self._engine.prefill_chunk

    @property
    def logits_chunk_tok(self) -> int:
        """Tokens evaluated at once when all their logits are wanted."""
        return min(LOGITS_CHUNK_TOK, self._engine.prefill_chunk)

    @property
    def state_bytes(self) -> int:
        return self._state.nbytes

    def passes(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Bounds of the passes that evaluate positions first .. end - 1; one of them ends at the mark that `rewind_to` has set."""
        while first < end:
            last = min(first + self.chunk_tok, self._mark if first < self._mark else end)
            yield first, last
            first = last

    def begin_turn(self) -> int:
        """Make the caller's the only generation that may continue."""
        self._turn += 1
        return self._turn

    @contextmanager
    def using(self, turn: int | None = None) -> Iterator[None]:
        """Exclusive use for one step. Raises ColibriError when another thread is inside, or `turn` is not the newest."""
        if not self._in_use.acquire(blocking=False):
            raise ColibriError("this session is in use by another thread: make one session per thread")
        try:
            if turn is not None and turn != self._turn:
                raise ColibriError("this generation was overtaken by a newer one of the same session: make one session per conversation")
            yield
        finally:
            self._in_use.release()

    def rewind_to(self, token_ids: Sequence[int]) -> int:
        """Forget everything after the common prefix with `token_ids`, whose last token is always evaluated anew for its logits.

        Returns the length of the prefix that stays; less than the common one where the state can only go back to an earlier snapshot.
        """
        known = min(self._state.n_tok, len(token_ids) - 1, len(self.tokens))
        same = next((i for i in range(known) if self.tokens[i] != token_ids[i]), known)
        kept = self._state.truncate(same)
        del self.tokens[kept:]
        self._mark = len(token_ids) - MARK_TOK if self._state.forgets and len(token_ids) - kept > MARK_TOK else len(token_ids)
        return kept

    def extend(self, token_ids: Sequence[int], logits: str = "none", cancel: threading.Event | None = None) -> "Pass":
        """Evaluate tokens after the state's end; what `tokens` had from there on is replaced by them.

        logits, cancel   as in Engine.forward; after PassCancelled the next call must be `rewind_to`
        """
        if self._state.n_tok + len(token_ids) > self._engine.context_length:
            raise ContextLengthError(self._state.n_tok + len(token_ids), self._engine.context_length)
        # Tokens first: should the pass be interrupted, the state still covers only what `tokens` holds.
        self.tokens[self._state.n_tok :] = token_ids
        done = self._engine.forward(self._state, token_ids, logits, cancel)
        if self._state.n_tok == self._mark:
            self._state.snapshot()
        return done

    def note_sampled(self, token_id: int) -> None:
        """Append a token that has not been evaluated yet."""
        self.tokens.append(token_id)

    def reset(self) -> None:
        """Forget everything; the memory stays reserved."""
        self.begin_turn()
        with self.using():
            self._state.truncate(0)
            self.tokens.clear()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 (T, V): logits after each of `token_ids`, evaluated from an empty session, which holds them afterwards."""
        checked = self.encode_prompt(list(token_ids))
        if len(checked) > self._engine.context_length:
            raise ContextLengthError(len(checked), self._engine.context_length)
        self.reset()
        rows = np.empty((len(checked), self._engine.config.vocab_size), np.float32)
        with self.using():
            for start in range(0, len(checked), self.logits_chunk_tok):
                piece = checked[start : start + self.logits_chunk_tok]
                rows[start : start + len(piece)] = self.extend(piece, "all").logits
        return rows

    # --- resuming later

    def save(self, path: str | Path) -> None:
        """Write tokens and state to a safetensors file, complete or not at all. DiskSpaceError when the drive does not take it."""
        path = Path(path)
        with self.using():
            self._state.truncate(self._state.n_tok)  # an interrupted pass may have left it halfway
            metadata = {"format": SESSION_FORMAT, "model": self._engine.fingerprint, "n_tok": str(self._state.n_tok)}
            arrays = self._state.export() | {"tokens": np.array(self.tokens, np.int64)}
        partial = path.with_name(path.name + ".partial")
        try:
            save_file(arrays, partial, metadata)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise DiskSpaceError(f"{path}: the session cannot be saved ({error}): make room, or give a path in another folder") from error

    @classmethod
    def load(cls, engine: "Engine", path: str | Path) -> "Session":
        """A session that goes on where `save` left off.

        Raises FormatError for a file that is none or belongs to another model, ContextLengthError when it does not fit.
        """
        tokens, n_tok, arrays = _read_session(Path(path), engine.fingerprint)
        if len(tokens) > engine.context_length:
            raise ContextLengthError(len(tokens), engine.context_length)
        session = cls(engine)
        session.tokens = session._check_ids(tokens)
        try:
            session._state.restore(arrays, n_tok)
        except ValueError as error:
            raise FormatError(f"{path}: its state is not one of this model ({error}): start a new session") from error
        return session


def _read_session(path: Path, fingerprint: str) -> tuple[list[int], int, dict[str, np.ndarray]]:
    try:
        arrays, metadata = read_arrays(path)
    except FormatError as error:
        raise FormatError(f"{path}: is no saved session ({error})") from error
    if metadata.get("format") != SESSION_FORMAT:
        raise FormatError(f"{path}: has format {metadata.get('format')!r}, expected {SESSION_FORMAT!r}: it is no session of this version")
    if metadata.get("model") != fingerprint:
        raise FormatError(f"{path}: was saved with another model: open that one, or start a new session")
    tokens, n_tok = arrays.pop("tokens", None), metadata.get("n_tok", "")
    if tokens is None or tokens.dtype != np.int64 or tokens.ndim != 1 or not n_tok.isdecimal() or int(n_tok) > len(tokens):
        raise FormatError(f"{path}: its tokens and state do not agree: it is damaged, start a new session")
    return tokens.tolist(), int(n_tok), arrays
