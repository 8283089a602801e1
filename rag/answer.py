"""Answers with checked citations, streamed.

In:  a session, a prompt with numbered sources
Out: AnswerEvents: what was found, text as it comes, and a result that says what each citation stands on
"""

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .citations import CitationParser, without_citations
from .prompt import REFUSAL_MARKERS, Message, Prompt, Source, prompt_text
from .retriever import Hit
from .sentence_matcher import SentenceMatcher
from .support import FoundSentence, MatchedCitation, best_sentence, sentence_words, stated_in, text_words


class AnswerSession(Protocol):
    """What is used of libcolibri.session.Session; `engine` has `tokenizer` and `context_length`."""

    @property
    def engine(self) -> Any: ...

    def generate(
        self,
        prompt: list[Message],
        sampling: Any = None,
        *,
        max_tokens: int | None = None,
        cancel: threading.Event | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Iterator[Any]: ...


@dataclass(frozen=True, slots=True)
class Citation:
    """What a number in the answer stands on; quote is the whole chunk.

    line : from 1 in the file, of the sentence that the answer's first sentence with this number was taken from; of the chunk's
        beginning when no sentence of it can be told, and in HTML
    origin : "model" when the model cited it; "matched" when it stands only where a sentence's words were found in it
    """

    number: int
    path: str
    title: str
    heading_path: tuple[str, ...]
    line: int
    quote: str
    document_id: int
    chunk_id: int
    origin: str = "model"


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
    matched : citations in the text that were put by comparing words, because the model gave none or one that shares nothing
    unknown_citations : numbers the model cited that do not exist
    unanswerable : the documents do not have the answer; `decided_by` is "retrieval" or "model"
    uncited : no source is cited and none could be matched: nothing in the text is checked
    quoted : the model wrote no word, at most citations; the text is the sentence of a source that shares most with the question
    generation : libcolibri's GenerationStats; None when the model was not asked
    """

    text: str
    citations: tuple[Citation, ...]
    sources: tuple[Citation, ...]
    matched: tuple[MatchedCitation, ...]
    unknown_citations: tuple[int, ...]
    unanswerable: bool
    decided_by: str | None
    uncited: bool
    left_out: tuple[Hit, ...]
    retrieval: RetrievalStats
    generation: Any
    finish_reason: str
    quoted: bool = False


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
class ReasoningEvent:
    """More of what the model thinks before it answers; no part of the answer, nothing in it is checked."""

    reasoning: str


@dataclass(frozen=True, slots=True)
class TextEvent:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end, always last."""

    result: AnswerResult


AnswerEvent = RetrievedEvent | PrefillEvent | ReasoningEvent | TextEvent | DoneEvent


def refuse(language: str, hits: Sequence[Hit], started_s: float) -> Iterator[AnswerEvent]:
    """The answer when the search found nothing relevant: said in the question's language, without the model."""
    text = prompt_text("unanswerable", language)
    yield TextEvent(text)
    stats = RetrievalStats(time.perf_counter() - started_s, len(hits), 0, 0, 0, 0)
    yield DoneEvent(
        AnswerResult(
            text=text, citations=(), sources=(), matched=(), unknown_citations=(), unanswerable=True, decided_by="retrieval", uncited=False,
            left_out=(), retrieval=stats, generation=None, finish_reason="stop",
        )
    )  # fmt: skip


def stream_answer(
    session: AnswerSession,
    prompt: Prompt,
    *,
    question: str,
    sampling: Any,
    max_tokens: int | None,
    cancel: threading.Event | None,
    template_options: Mapping[str, Any] | None,
    search_s: float,
    n_hits: int,
) -> Iterator[AnswerEvent]:
    """Generate, checking citations on the way. Closing the iterator ends the generation."""
    writing = _Writing(prompt, question)
    pieces: list[str] = []
    stats: Any = None
    finish_reason = "stop"
    steps = session.generate(prompt.messages, sampling, max_tokens=max_tokens, cancel=cancel, template_options=template_options)
    for step in steps:
        stats = step.stats
        finish_reason = step.finish_reason or finish_reason
        if step.token_id is None and not step.text and step.finish_reason is None:
            yield PrefillEvent(step.stats)
            continue
        if step.reasoning:
            yield ReasoningEvent(step.reasoning)
        if text := writing.feed(step.text):
            pieces.append(text)
            yield TextEvent(text)
    if text := writing.finish(finish_reason):
        pieces.append(text)
        yield TextEvent(text)
    retrieval = RetrievalStats(search_s, n_hits, len(prompt.sources), len(prompt.left_out), prompt.dropped_history, prompt.n_tok)
    yield DoneEvent(_result("".join(pieces), writing, prompt, retrieval, stats, finish_reason))


class _Writing:
    """From the model's text to the one that is shown: the refusal spelt out, unknown citations marked, missing ones matched."""

    def __init__(self, prompt: Prompt, question: str):
        self._language, self._question, self._sources = prompt.language, question, prompt.sources
        self._wordless: str | None = ""  # citations and signs, held until a word comes; None from then on
        self._quotation: tuple[int, FoundSentence] | None = None
        self._beginning: str | None = ""  # held as long as it may be the refusal; None once something else has begun
        self.parser = CitationParser(len(prompt.sources))
        texts = {source.number: text_words(source.hit.chunk.heading_path, source.hit.chunk.text) for source in prompt.sources}
        self.matcher = SentenceMatcher(texts, question)

    def feed(self, piece: str) -> str:
        if self._beginning is not None:
            self._beginning += piece
            if may_become_refusal(self._beginning):
                return ""
            piece, self._beginning = self._beginning, None
        return self._with_words(self.matcher.feed(self.parser.feed(piece)))

    def finish(self, finish_reason: str) -> str:
        held, self._beginning = self._beginning, None
        if held and is_refusal_marker(held):
            return prompt_text("unanswerable", self._language)
        if held and says_unanswerable(held):
            return held
        end = self.matcher.feed(self.parser.feed(held or "") + self.parser.finish())
        text = self._with_words(end + self.matcher.finish(finish_reason == "stop"))
        if self._wordless is None or finish_reason == "cancelled":
            return text
        return self._instead()

    @property
    def quoted(self) -> bool:
        return self._quotation is not None

    def _with_words(self, text: str) -> str:
        """The text, held back as long as there is no word in it."""
        if self._wordless is None:
            return text
        self._wordless += text
        if not _WORD.search(without_citations(self._wordless)):
            return ""
        text, self._wordless = self._wordless, None
        return text

    def line_of(self, source: Source) -> int:
        """Where in the file a source has what the answer says with its number."""
        chunk = source.hit.chunk
        stated = self.matcher.first_sentence.get(source.number)
        if self._quotation is not None and self._quotation[0] == source.number:
            found: FoundSentence | None = self._quotation[1]
        else:
            found = stated_in(stated, chunk.text, self._question) if stated else None
        if found is None or source.hit.document.kind == "html":  # the text of HTML has other lines than the file
            return chunk.line
        return chunk.line + chunk.text.count("\n", 0, found.start)

    def _instead(self) -> str:
        """For an answer without a word: the sentence of a source the model named that the question is clearly about, or the refusal."""
        words = sentence_words(self._question)
        named = [source for source in self._sources if source.number in self.parser.cited]
        found = [(source, best_sentence(words, source.hit.chunk.text)) for source in named]
        able = [(source, sentence) for source, sentence in found if sentence is not None and sentence.share >= QUOTE_SUPPORT]
        if not able:
            return prompt_text("unanswerable", self._language)
        source, sentence = max(able, key=lambda pair: (pair[1].share, -pair[0].number))
        self._quotation = (source.number, sentence)
        return prompt_text("quotation", self._language).format(sentence=" ".join(sentence.text.split()), number=source.number)


def _result(
    text: str, writing: _Writing, prompt: Prompt, retrieval: RetrievalStats, generation: Any, finish_reason: str
) -> AnswerResult:
    origins = dict.fromkeys((match.number for match in writing.matcher.matched), "matched")
    origins |= dict.fromkeys(writing.matcher.of_model, "model")
    sources = {
        source.number: citation_of(source.number, source.hit, origins.get(source.number, "model"), writing.line_of(source))
        for source in prompt.sources
    }
    shown = CitationParser(len(prompt.sources))
    shown.feed(text)
    shown.finish()
    says_unknown = says_unanswerable(text) and not shown.cited
    return AnswerResult(
        text=text,
        citations=tuple(sources[number] for number in shown.cited),
        sources=tuple(sources.values()),
        matched=tuple(writing.matcher.matched),
        unknown_citations=tuple(writing.parser.unknown),
        unanswerable=says_unknown,
        decided_by="model" if says_unknown else None,
        uncited=not shown.cited and not says_unknown and finish_reason != "cancelled",
        left_out=prompt.left_out,
        retrieval=retrieval,
        generation=generation,
        finish_reason=finish_reason,
        quoted=writing.quoted,
    )


def citation_of(number: int, hit: Hit, origin: str, line: int) -> Citation:
    """The facts behind a source's number."""
    document, chunk = hit.document, hit.chunk
    return Citation(number, document.path, document.title, chunk.heading_path, line, chunk.text, document.id, chunk.id, origin)


QUOTE_SUPPORT = 0.4  # of a question by a sentence that is shown in place of an answer: a question's own words take up the rest
_WORD = re.compile(r"[^\W_]")

_AROUND = " \t\n\"'“”「」*`.。!！"


def is_refusal_marker(text: str) -> bool:
    """Whether an answer is the word the model was told to write when no source has the answer."""
    return text.strip(_AROUND).casefold() in (marker.casefold() for marker in REFUSAL_MARKERS.values())


def may_become_refusal(text: str) -> bool:
    """Whether the beginning of an answer may still turn out to be a refusal: the marker or the sentence, whole and alone."""
    begun = text.strip(_AROUND).casefold()
    ways = [*REFUSAL_MARKERS.values(), *(prompt_text("unanswerable", language).strip(_AROUND) for language in ("en", "zh"))]
    return any(way.casefold().startswith(begun) for way in ways)


def says_unanswerable(text: str) -> bool:
    """Whether an answer is the sentence that says that the documents do not have it."""
    beginning = text.strip(_AROUND).casefold()
    return any(beginning.startswith(prompt_text("unanswerable", language).rstrip(".。").casefold()) for language in ("en", "zh"))
