"""Files to documents: one text with the structure the chunker needs.

In:  a path (or bytes) of a .txt, .md, .rst, .html or source file
Out: Document: cleaned text, its blocks (headings, paragraphs, code, tables) and a line number for every offset
"""

import hashlib
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .decode import NotTextError, decode_bytes
from .errors import DocumentError

MAX_FILE_BYTES = 64 << 20
MAX_TITLE_CHARS = 200

MARKDOWN_SUFFIXES = frozenset({".md", ".markdown", ".mdown"})
HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
TEXT_SUFFIXES = frozenset({".txt", ".text", ".rst", ".log", ".adoc", ".org", ""})
_CODE = (
    ".py .pyi .js .ts .tsx .jsx .c .h .cc .cpp .hpp .rs .go .java .kt .rb .pl .lua .sh .bash .ps1 .sql .r .jl .m .swift .cs .scala "
    ".toml .ini .cfg .conf .yaml .yml .json .csv .tsv .xml .css .tex .cmake .proto"
)
CODE_SUFFIXES = frozenset(_CODE.split())
SUFFIXES = MARKDOWN_SUFFIXES | HTML_SUFFIXES | TEXT_SUFFIXES | CODE_SUFFIXES


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of a document's text: text[start:end].

    kind is "heading", "paragraph", "list", "code" or "table"; heading_path are the headings it stands under, outermost first (a
    heading's own path includes itself); line is where it begins in the file, counted from 1.
    """

    kind: str
    start: int
    end: int
    heading_path: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Document:
    """One file: cleaned text and its structure. Offsets count characters of `text`."""

    path: str
    title: str
    text: str
    sha256: str  # of the file's bytes
    blocks: tuple[Block, ...]
    kind: str  # "text", "markdown", "html", "code"
    encoding: str
    size_bytes: int
    modified_s: float  # seconds since 1970

    def line_at(self, offset: int) -> int:
        """Line of the source file, from 1, on which the character at `offset` stands (in HTML: on which its element begins)."""
        if not self.blocks:
            return 1
        line = bisect_right(self._line_starts, offset)
        if self.kind != "html":  # the text is the file's own
            return line
        block = self.blocks[max(0, bisect_right(self.blocks, offset, key=lambda block: block.start) - 1)]
        if block.kind != "code":
            return block.line
        return block.line + line - bisect_right(self._line_starts, block.start)

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(found.end() for found in re.finditer("\n", self.text))]


@dataclass(frozen=True)
class ParsedText:
    """What a reader hands back: text, blocks, and a title or None."""

    text: str
    blocks: tuple[Block, ...]
    title: str | None = None


def kind_of(path: str) -> str | None:
    """The document kind a file name stands for, or None when its type is not supported."""
    suffix = Path(path).suffix.lower()
    for kind, suffixes in (("markdown", MARKDOWN_SUFFIXES), ("html", HTML_SUFFIXES), ("text", TEXT_SUFFIXES), ("code", CODE_SUFFIXES)):
        if suffix in suffixes:
            return kind
    return None


def read_file(path: str, max_bytes: int = MAX_FILE_BYTES) -> tuple[bytes, float]:
    """A regular file's bytes and modification time; DocumentError says why it cannot be had."""
    try:
        # Non-blocking, so that opening a pipe does not wait for a writer; on regular files the flag changes nothing.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise DocumentError(path, "is not a regular file")
            if facts.st_size > max_bytes:
                raise DocumentError(path, f"has {facts.st_size} bytes, more than the limit of {max_bytes}; split it")
            return file.read(max_bytes + 1), facts.st_mtime
    except OSError as error:
        raise DocumentError(path, f"cannot be read: {error.strerror or error}") from error


def read_document(path: str, max_bytes: int = MAX_FILE_BYTES) -> Document:
    """Read one file as a document.

    Raises DocumentError when it is unreadable, binary, too large, or in no known encoding.
    """
    data, modified_s = read_file(path, max_bytes)
    return parse_document(path, data, modified_s)


def parse_document(path: str, data: bytes, modified_s: float = 0.0) -> Document:
    """A document from a file's bytes; the path's suffix chooses the reader (unknown suffixes are read as plain text)."""
    kind = kind_of(path) or "text"
    try:
        text, encoding = decode_bytes(data, _declared_charset(data) if kind == "html" else None)
    except NotTextError as error:
        raise DocumentError(path, str(error)) from error
    parsed = _readers()[kind](text)
    title = " ".join((parsed.title or "").split())[:MAX_TITLE_CHARS] or Path(path).stem
    digest = hashlib.sha256(data).hexdigest()
    return Document(path, title, parsed.text, digest, parsed.blocks, kind, encoding, len(data), modified_s)


def _readers() -> dict[str, Callable[[str], ParsedText]]:
    # Imported here because the readers build the Block and ParsedText defined above.
    from .read_html import parse_html
    from .read_markdown import parse_markdown
    from .read_text import parse_code, parse_plain

    return {"markdown": parse_markdown, "html": parse_html, "text": parse_plain, "code": parse_code}


def _declared_charset(data: bytes) -> str | None:
    found = re.search(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.-]{1,40})", data[:2048], re.IGNORECASE)
    if not found:
        return None
    name = found.group(1).decode("ascii").lower()
    # Browsers read both of these as their supersets.
    return {"gb2312": "gb18030", "gbk": "gb18030", "iso-8859-1": "cp1252"}.get(name, name)
