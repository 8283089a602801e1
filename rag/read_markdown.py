"""Markdown to blocks, by lines: linear in time whatever the nesting.

In:  cleaned text
Out: ParsedText; the text is unchanged, so offsets and lines are the file's own
"""

import re

from .documents import Block, ParsedText
from .read_text import lines_of

_ATX = re.compile(r" {0,3}(#{1,6})[ \t]+")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_FENCE = re.compile(r"\s{0,12}(`{3,}|~{3,})")
_LIST_ITEM = re.compile(r"\s*(?:[-*+]|[0-9]{1,9}[.)])\s")
_TABLE_RULE = re.compile(r" {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-*:?[ \t]*)*$")
_TITLE_KEY = re.compile(r"title:\s*[\"']?(.+?)[\"']?\s*$")
_MARKUP = re.compile(r"[*_`]{1,3}|!?\[([^\]]{0,300})\]\([^)]{0,600}\)")
MAX_LINE_CHARS = 10_000  # longer lines are prose, whatever they look like


def parse_markdown(text: str) -> ParsedText:
    """Blocks of a Markdown text; front matter gives the title and is no block."""
    builder = _Builder(text)
    lines = list(lines_of(text))
    first, title = _front_matter(text, lines)
    index = first
    while index < len(lines):
        index = builder.take(lines, index)
    builder.flush()
    if title is None:
        title = next((block.heading_path[-1] for block in builder.blocks if block.kind == "heading"), None)
    return ParsedText(text, tuple(builder.blocks), title)


class _Builder:
    """Collects lines into blocks and keeps the stack of headings."""

    def __init__(self, text: str):
        self.text = text
        self.blocks: list[Block] = []
        self.path: list[tuple[int, str]] = []
        self.run: list[tuple[int, int, int]] = []  # start, end, line number of an open paragraph, list or table
        self.run_kind = "paragraph"

    def take(self, lines: list[tuple[int, int]], index: int) -> int:
        """Consume the line at index (a fence consumes more); returns the next index."""
        start, end = lines[index]
        if end - start > MAX_LINE_CHARS:
            self.append("paragraph", start, end, index + 1)
            return index + 1
        line = self.text[start:end]
        if not line or line.isspace():
            self.flush()
            return index + 1
        if fence := _FENCE.match(line):
            return self._take_fence(lines, index, fence.group(1))
        if atx := _ATX.match(line):
            self.flush()
            self.heading(len(atx.group(1)), line[atx.end() :].rstrip().rstrip("#"), start, end, index + 1)
            return index + 1
        if (setext := _SETEXT.match(line)) and len(self.run) == 1 and self.run_kind == "paragraph":
            return self._take_setext(setext.group(1)[0], end, index)
        if _TABLE_RULE.match(line) and "|" in line and len(self.run) == 1:
            self.run_kind = "table"
        kind = "list" if _LIST_ITEM.match(line) and self.run_kind != "table" else self.run_kind if self.run else "paragraph"
        self.append(kind, start, end, index + 1)
        return index + 1

    def append(self, kind: str, start: int, end: int, line: int) -> None:
        if self.run and kind != self.run_kind:
            self.flush()
        self.run_kind = kind
        self.run.append((start, end, line))

    def flush(self) -> None:
        if self.run:
            self._add(self.run_kind, self.run[0][0], self.run[-1][1], self.run[0][2])
        self.run, self.run_kind = [], "paragraph"

    def heading(self, level: int, title: str, start: int, end: int, line: int) -> None:
        title = " ".join(_MARKUP.sub(lambda found: found.group(1) or "", title).split())[:200]
        self.path = [entry for entry in self.path if entry[0] < level]
        if title:
            self.path.append((level, title))
            self._add("heading", start, end, line)

    def _add(self, kind: str, start: int, end: int, line: int) -> None:
        self.blocks.append(Block(kind, start, end, tuple(title for _, title in self.path), line))

    def _take_setext(self, mark: str, end: int, index: int) -> int:
        start, title_end, line = self.run[0]
        self.run = []
        self.heading(1 if mark == "=" else 2, self.text[start:title_end], start, end, line)
        return index + 1

    def _take_fence(self, lines: list[tuple[int, int]], index: int, fence: str) -> int:
        self.flush()
        last = index
        for last in range(index + 1, len(lines)):
            line = self.text[lines[last][0] : lines[last][1]].strip()
            if line.startswith(fence) and not line.strip(fence[0]):
                break
        self._add("code", lines[index][0], lines[last][1], index + 1)
        return last + 1


def _front_matter(text: str, lines: list[tuple[int, int]]) -> tuple[int, str | None]:
    """(index of the first line after YAML front matter, its title)."""
    if not lines or text[lines[0][0] : lines[0][1]].rstrip() != "---":
        return 0, None
    title = None
    for index, (start, end) in enumerate(lines[1:200], start=1):
        line = text[start:end].rstrip()
        if line in ("---", "..."):
            return index + 1, title
        if found := _TITLE_KEY.match(line[:400]):
            title = found.group(1)
    return 0, None
