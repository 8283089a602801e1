"""Answers with checked citations, streamed.

In:  a session, a prompt with numbered sources
Out: AnswerEvents: what was found, text as it comes, and a result that says what each citation stands on
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .citations import CitationParser
from .prompt import Message, Prompt, prompt_text
from .retriever import Hit


class AnswerSession(Protocol):
    """What is used of libcolibri.session.Session; `engine` has `tokenizer` and `context_length`."""

    @property
    def engine(self) -> Any: ...

    def generate(
        self, prompt: list[Message], sampling: Any = None, *, max_tokens: int | None = None, cancel: threading.Event | None = None
    ) -> Iterator[Any]: ...


@dataclass(frozen=True, slots=True)
class Citation:
    """What a number in the answer stands on. line counts from 1 in the file; quote is the whole chunk."""

    number: int
    path: str
    title: str
    heading_path: tuple[str, ...]
    line: int
    quote: str
    document_id: int
    chunk_id: int


@dataclass(frozen=True, slots=True)
class RetrievalStats:
    """Time and size of the search and of the prompt made from it."""

    search_s: float
    n_hits: int
    n_sources: int
    n_left_out: int  # hits that did not fit into the context
    dropped_history: int  # messages that did not fit
    prompt_tok: int  # estimate


@dataclass(frozen=True, slots=True)
class AnswerResult:
    """A finished answer.

    text : as shown, unknown citation numbers marked "[9?]"
    citations : the sources that the text cites, in order of first use
    sources : every source the model was given, cited or not
    unknown_citations : numbers the model cited that do not exist
    unanswerable : the documents do not have the answer; `decided_by` is "retrieval" or "model"
    uncited : the model answered without citing any source: nothing in the text is checked
    generation : libcolibri's GenerationStats; None when the model was not asked
    """

    text: str
    citations: tuple[Citation, ...]
    sources: tuple[Citation, ...]
    unknown_citations: tuple[int, ...]
    unanswerable: bool
    decided_by: str | None
    uncited: bool
    left_out: tuple[Hit, ...]
    retrieval: RetrievalStats
    generation: Any
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RetrievedEvent:
    """The search is done; generation begins (or, if not answerable, does not)."""

    hits: tuple[Hit, ...]
    answerable: bool


@dataclass(frozen=True, slots=True)
class PrefillEvent:
    """The model is reading the prompt; stats is libcolibri's GenerationStats so far."""

    stats: Any


@dataclass(frozen=True, slots=True)
class TextEvent:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end, always last."""

    result: AnswerResult


AnswerEvent = RetrievedEvent | PrefillEvent | TextEvent | DoneEvent


def refuse(language: str, hits: Sequence[Hit], started_s: float) -> Iterator[AnswerEvent]:
    """The answer when the search found nothing relevant: said in the question's language, without the model."""
    text = prompt_text("unanswerable", language)
    yield TextEvent(text)
    stats = RetrievalStats(time.perf_counter() - started_s, len(hits), 0, 0, 0, 0)
    yield DoneEvent(
        AnswerResult(
            text=text, citations=(), sources=(), unknown_citations=(), unanswerable=True, decided_by="retrieval", uncited=False,
            left_out=(), retrieval=stats, generation=None, finish_reason="stop",
        )
    )  # fmt: skip


def stream_answer(
    session: AnswerSession,
    prompt: Prompt,
    *,
    sampling: Any,
    max_tokens: int | None,
    cancel: threading.Event | None,
    search_s: float,
    n_hits: int,
) -> Iterator[AnswerEvent]:
    """Generate, checking citations on the way. Closing the iterator ends the generation."""
    parser = CitationParser(len(prompt.sources))
    pieces: list[str] = []
    stats: Any = None
    finish_reason = "stop"
    steps = session.generate(prompt.messages, sampling, max_tokens=max_tokens, cancel=cancel)
    for step in steps:
        stats = step.stats
        finish_reason = step.finish_reason or finish_reason
        if step.token_id is None and not step.text and step.finish_reason is None:
            yield PrefillEvent(step.stats)
            continue
        if text := parser.feed(step.text):
            pieces.append(text)
            yield TextEvent(text)
    if text := parser.finish():
        pieces.append(text)
        yield TextEvent(text)
    retrieval = RetrievalStats(search_s, n_hits, len(prompt.sources), len(prompt.left_out), prompt.dropped_history, prompt.n_tok)
    yield DoneEvent(_result("".join(pieces), parser, prompt, retrieval, stats, finish_reason))


def _result(
    text: str, parser: CitationParser, prompt: Prompt, retrieval: RetrievalStats, generation: Any, finish_reason: str
) -> AnswerResult:
    sources = {source.number: citation_of(source.number, source.hit) for source in prompt.sources}
    says_unknown = says_unanswerable(text) and not parser.cited
    return AnswerResult(
        text=text,
        citations=tuple(sources[number] for number in parser.cited),
        sources=tuple(sources.values()),
        unknown_citations=tuple(parser.unknown),
        unanswerable=says_unknown,
        decided_by="model" if says_unknown else None,
        uncited=not parser.cited and not says_unknown and finish_reason != "cancelled",
        left_out=prompt.left_out,
        retrieval=retrieval,
        generation=generation,
        finish_reason=finish_reason,
    )


def citation_of(number: int, hit: Hit) -> Citation:
    """The facts behind a source's number."""
    document, chunk = hit.document, hit.chunk
    return Citation(number, document.path, document.title, chunk.heading_path, chunk.line, chunk.text, document.id, chunk.id)


def says_unanswerable(text: str) -> bool:
    """Whether an answer is the sentence the model was told to say when the sources have no answer."""
    beginning = text.strip().strip("\"'“”「」*").casefold()
    return any(beginning.startswith(prompt_text("unanswerable", language).rstrip(".。").casefold()) for language in ("en", "zh"))
