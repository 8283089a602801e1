"""Documents to chunks that follow their structure.

In:  Document, a function that counts tokens
Out: Chunks: exact slices of the document's text, each under one heading path

First sections (headings), then paragraphs, code blocks and tables, then sentences, then length in the embedder's tokens.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from .documents import Block, Document

CountTok = Callable[[str], int]

CHUNKER_VERSION = 1  # raise it when the same document would be cut differently: documents are then cut again at the next ingest

# A sentence ends at a full stop of any script and the quotes closing after it; ASCII stops only before a space.
# Possessive, because dot leaders and rows of exclamation marks would otherwise be tried from every one of their characters.
_SENTENCE_END = re.compile(
    r"[。！？；…｡؟۔।]+[”’」』）】》\"')\]]*\s*|(?<![.!?])[.!?]++[\"')\]”’]*+\s++|\n\s*\n\s*"
    r"|\n(?=[ \t]*(?:[-*+•·]|[0-9]{1,3}[.)、])\s)"  # items of a list
)
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|cf|vs|fig|no|dr|mr|mrs|ms|prof|st|approx|resp|[A-Za-z])|\d)\.\s+$", re.IGNORECASE)
_SOFT_BREAK = re.compile(r"[\n\t ，、,;:：)\]}）]")
COUNTED_TEXTS = 64  # the same sentence is counted to see whether it fits, as a unit, and as a chunk; 64 chunks are a few pages
_MAX_CHARS_PER_TOK = 24  # a unit longer than that per allowed token is cut without counting it as a whole


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """How documents are cut.

    max_tok : most tokens of a chunk together with its heading path; lowered to what the embedder can take
    overlap_sentences : sentences of the previous chunk repeated at the start of the next within one section
    overlap_share : most of max_tok that such sentences may take
    """

    max_tok: int = 256
    overlap_sentences: int = 1
    overlap_share: float = 0.2

    @property
    def fingerprint(self) -> str:
        return f"chunker{CHUNKER_VERSION}-{self.max_tok}-{self.overlap_sentences}-{self.overlap_share}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """document.text[start:end] == text; line counts from 1 in the file; n_tok counts the text without its headings."""

    start: int
    end: int
    text: str
    heading_path: tuple[str, ...]
    line: int
    n_tok: int

    def with_headings(self, title: str) -> str:
        """What is embedded: the headings say what a paragraph is about."""
        return passage_text(title, self.heading_path, self.text)


def passage_text(title: str, heading_path: tuple[str, ...], text: str) -> str:
    """Heading path (the title where there is none), then the chunk's text."""
    names = [name for name in heading_path if not text.lstrip("#= \t").startswith(name)] or ([] if heading_path else [title])
    return " > ".join(names) + "\n" + text if names else text


@dataclass(frozen=True, slots=True)
class _Unit:
    """The smallest thing that is moved between chunks: a sentence, a line of code, or a cut piece of one."""

    start: int
    end: int
    n_tok: int
    is_sentence: bool


def chunk_document(document: Document, count_tok: CountTok, config: ChunkConfig | None = None) -> list[Chunk]:
    """Cut a document into chunks of at most `config.max_tok` tokens.

    Chunks are in order, never empty, never cross a heading, and together hold every word of the document except headings that
    have nothing under them but further headings (those are in the chunks' heading paths).
    """
    config = config or ChunkConfig()
    count_tok = lru_cache(maxsize=COUNTED_TEXTS)(count_tok)
    chunks: list[Chunk] = []
    sections = list(_sections(document.blocks))
    for index, section in enumerate(sections):
        following = sections[index + 1] if index + 1 < len(sections) else None
        if following and all(block.kind == "heading" for block in section) and _is_under(following[0], section[-1]):
            continue
        path = section[0].heading_path
        heading_tok = count_tok(passage_text(document.title, path, "")) if path else 0
        max_tok = max(config.max_tok - heading_tok, config.max_tok // 2, 1)
        chunks.extend(_chunk_section(document, section, count_tok, max_tok, config))
    return chunks


def _sections(blocks: tuple[Block, ...]) -> Iterator[list[Block]]:
    section: list[Block] = []
    for block in blocks:
        if block.kind == "heading" and section:
            yield section
            section = []
        section.append(block)
    if section:
        yield section


def _is_under(block: Block, heading: Block) -> bool:
    depth = len(heading.heading_path)
    return len(block.heading_path) > depth and block.heading_path[:depth] == heading.heading_path


def _chunk_section(document: Document, section: list[Block], count_tok: CountTok, max_tok: int, config: ChunkConfig) -> Iterator[Chunk]:
    units = [unit for block in section for unit in _units(document.text, block, count_tok, max_tok)]
    total = sum(unit.n_tok for unit in units)
    # Chunks of like length, instead of full ones and a crumb.
    target = math.ceil(total / max(1, math.ceil(total / max_tok)))
    first = 0
    fresh = 0  # first unit that no chunk holds yet
    while fresh < len(units):
        end, total = first, 0
        while end < len(units) and (end == first or (total < target and total + units[end].n_tok <= max_tok)):
            total += units[end].n_tok
            end += 1
        if end <= fresh:  # the overlap left no room for anything new
            first = fresh
            continue
        chunk = _make_chunk(document, section, units[first].start, units[end - 1].end, count_tok)
        # Counts of parts do not add up exactly to the count of the whole.
        while chunk is not None and chunk.n_tok > max_tok and end - 1 > fresh:
            end -= 1
            chunk = _make_chunk(document, section, units[first].start, units[end - 1].end, count_tok)
        if chunk is not None and chunk.n_tok > max_tok and first < fresh:
            first = fresh
            continue
        if chunk is not None:
            yield chunk
        fresh = end
        first = _overlap_start(units, first, end, max_tok, config)


def _overlap_start(units: list[_Unit], first: int, end: int, max_tok: int, config: ChunkConfig) -> int:
    """Where the next chunk begins: some whole sentences before `end`, within the allowance."""
    start, total = end, 0
    for _ in range(config.overlap_sentences):
        if start - 1 <= first or not units[start - 1].is_sentence:
            break
        total += units[start - 1].n_tok
        if total > config.overlap_share * max_tok:
            break
        start -= 1
    return start


def _make_chunk(document: Document, section: list[Block], start: int, end: int, count_tok: CountTok) -> Chunk | None:
    text = document.text[start:end]
    start += len(text) - len(text.lstrip())
    text = text.strip()
    if not text:
        return None
    return Chunk(start, start + len(text), text, section[0].heading_path, document.line_at(start), count_tok(text))


def _units(text: str, block: Block, count_tok: CountTok, max_tok: int) -> Iterator[_Unit]:
    """A block whole when it is code or a table and fits; else its sentences or lines; else pieces of those."""
    if block.kind in ("code", "table", "heading"):
        if _fits(text, block.start, block.end, count_tok, max_tok):
            yield _Unit(block.start, block.end, count_tok(text[block.start : block.end]), False)
            return
        spans = _lines(text, block.start, block.end)
    else:
        spans = sentence_spans(text, block.start, block.end)
    for start, end in spans:
        if _fits(text, start, end, count_tok, max_tok):
            yield _Unit(start, end, count_tok(text[start:end]), block.kind in ("paragraph", "list"))
        else:
            yield from _pieces(text, start, end, count_tok, max_tok)


def _fits(text: str, start: int, end: int, count_tok: CountTok, max_tok: int) -> bool:
    return end - start <= max_tok * _MAX_CHARS_PER_TOK and count_tok(text[start:end]) <= max_tok


def _lines(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        found = text.find("\n", start, end)
        stop = end if found < 0 else found + 1
        yield start, stop
        start = stop


def sentence_spans(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Sentences of a text as spans that together cover text[start:end]."""
    last = start
    for found in _SENTENCE_END.finditer(text, start, end):
        stop = found.end()
        if _ABBREVIATION.search(text, max(last, stop - 12), stop) and "\n\n" not in found.group():
            continue
        if stop > last:
            yield last, stop
            last = stop
    if last < end:
        yield last, end


def _pieces(text: str, start: int, end: int, count_tok: CountTok, max_tok: int) -> Iterator[_Unit]:
    """Cut what has no sentence ends: at a space or comma where there is one, else anywhere but inside a character cluster."""
    guess = max_tok * 4
    while start < end:
        stop = min(start + max(guess, 1), end)
        n_tok = count_tok(text[start:stop])
        while n_tok > max_tok and stop - start > 1:
            stop = start + max(1, min(stop - start - 1, (stop - start) * max_tok // n_tok))
            n_tok = count_tok(text[start:stop])
        guess = max(1, min((stop - start) * 5 // 4, max_tok * _MAX_CHARS_PER_TOK))
        if stop < end:
            stop = _soft_stop(text, start, stop)
            n_tok = count_tok(text[start:stop])
        yield _Unit(start, stop, n_tok, False)
        start = stop


def _soft_stop(text: str, start: int, stop: int) -> int:
    half = start + (stop - start) // 2
    for position in range(stop, half, -1):
        if _SOFT_BREAK.match(text[position - 1]):
            return position
    for position in range(stop, half, -1):
        if not _joins(text, position):
            return position
    return stop


def _joins(text: str, position: int) -> bool:
    """Whether text[position] belongs to the character before it (accent, joiner, variation selector, skin tone)."""
    character = text[position]
    return (
        unicodedata.combining(character) != 0
        or unicodedata.category(character) in ("Mn", "Me", "Mc")
        or character in "\u200d\ufe0e\ufe0f"
        or "\U0001f3fb" <= character <= "\U0001f3ff"
        or text[position - 1] == "\u200d"
    )
