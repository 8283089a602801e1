"""A retrieved passage as the conversation shows it.

In: colibri_rag's Hit and AnswerResult.  Out: Source, with a number, a place that can be opened, and each stage's rank and score.
"""

import os
from dataclasses import dataclass, replace
from typing import Any

from ..generation import stats_dict


@dataclass(frozen=True)
class Stage:
    """Where one search put a passage; rank 1 is best."""

    name: str
    rank: int | None  # None: this search did not find it, or does not rank
    score: float | None  # None: not known


@dataclass(frozen=True)
class Source:
    """A numbered passage of a document."""

    number: int
    path: str
    heading: str  # 'Chapter > Section', '' without headings
    line: int | None
    page: int | None
    text: str
    score: float
    stages: tuple[Stage, ...] = ()
    copies: tuple[str, ...] = ()  # places that say the same and were left out

    @property
    def short_place(self) -> str:
        """'notes.md:12', for a table in a narrow window."""
        return os.path.basename(self.place)

    @property
    def place(self) -> str:
        """'notes.md:12' or 'book.pdf, page 3'; relative to the working directory when it is below that."""
        path = os.path.relpath(self.path) if self.path.startswith(os.path.join(os.getcwd(), "")) else self.path
        if self.page is not None:
            return f"{path}, page {self.page}"
        return path if self.line is None else f"{path}:{self.line}"


def from_hits(hits: Any) -> tuple[Source, ...]:
    """Number hits from 1, best first: what a search shows."""
    return tuple(_from_hit(number, hit) for number, hit in enumerate(hits, 1))


def from_result(hits: Any, result: Any) -> tuple[Source, ...]:
    """The sources that the model was given, under the numbers by which it cites them; all hits if it was given none."""
    by_chunk = {hit.chunk.id: hit for hit in hits}
    sources = (replace(_from_hit(source.number, by_chunk[source.chunk_id]), line=source.line) for source in result.sources)
    return tuple(sources) or from_hits(hits)


def _from_hit(number: int, hit: Any) -> Source:
    document, chunk = hit.document, hit.chunk
    stages = (
        Stage("words", hit.lexical_rank, hit.bm25),
        Stage("meaning", hit.vector_rank, hit.cosine),
        Stage("coverage", None, hit.coverage),
    )
    copies = tuple(f"{path}:{line}" for path, line in hit.repeated_in)
    page = getattr(chunk, "page", None)  # documents without pages have chunks without
    return Source(number, document.path, " > ".join(chunk.heading_path), chunk.line, page, chunk.text, hit.score, stages, copies)


def as_json(source: Source, cited: bool | None = None) -> dict[str, Any]:
    """A source for --json."""
    facts: dict[str, Any] = {
        "number": source.number,
        "path": source.path,
        "heading": source.heading,
        "line": source.line,
        "page": source.page,
        "score": round(source.score, 6),
        "text": source.text,
    }
    return facts if cited is None else facts | {"cited": cited}


def turn_as_json(turn: Any, engine: Any = None) -> dict[str, Any]:
    """A turn for --json. engine: what answered, None when it was no model."""
    return {
        "question": turn.question,
        "answer": turn.answer,
        "in_documents": turn.in_documents,
        "sources": [as_json(source, source.number in turn.cited) for source in turn.sources],
        "unknown_citations": list(turn.unknown),
        "matched_citations": list(turn.matched),
        "finish_reason": turn.finish_reason,
        "notes": list(turn.notes),
        "stats": stats_dict(turn.stats, engine) if turn.stats is not None else None,
    }
