"""Plain text, reStructuredText and source code to blocks.

In:  cleaned text
Out: ParsedText; the text is unchanged, so offsets and lines are the file's own
"""

import re
from collections.abc import Iterator

from .documents import Block, ParsedText

MAX_HEADING_CHARS = 120

_UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}")
# "3.1. Title", "Chapter 4 Title", and their Chinese forms; only believed between blank lines.
_NUMBERED = re.compile(
    r"(?:(?:chapter|appendix|section|part)\s+[0-9a-z]+[.:]?|[0-9]+(?:\.[0-9]+)*\.?|第[一二三四五六七八九十百零〇0-9]+[章节節篇部条條])[\s:：]+\S",
    re.IGNORECASE,
)
_SENTENCE_END = tuple(".。！；;,，：:!")


def lines_of(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of every line, end without the newline."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        if end < 0:
            end = len(text)
        yield start, end
        start = end + 1


def parse_plain(text: str) -> ParsedText:
    """Paragraphs parted by blank lines; headings underlined or numbered on a line of their own."""
    groups = list(_groups(text))
    blocks: list[Block] = []
    path: list[str] = []
    levels: list[str] = []  # one key per depth: the underline character, or the count of dots of a number
    for line_number, lines in groups:
        heading = _heading_of(text, lines)
        if heading is not None:
            title, key, n_lines = heading
            depth = levels.index(key) if key in levels else len(levels)
            del levels[depth:], path[depth:]
            levels.append(key)
            path.append(title)
            blocks.append(Block("heading", lines[0][0], lines[n_lines - 1][1], tuple(path), line_number))
            lines, line_number = lines[n_lines:], line_number + n_lines
        if lines:
            blocks.append(Block(_kind_of_lines(text, lines), lines[0][0], lines[-1][1], tuple(path), line_number))
    return ParsedText(text, tuple(blocks), _title_of(text, blocks))


def parse_code(text: str) -> ParsedText:
    """Source code: blocks parted by blank lines, so that a function stays together where it fits."""
    blocks = [Block("code", lines[0][0], lines[-1][1], (), line) for line, lines in _groups(text)]
    return ParsedText(text, tuple(blocks), None)


def _groups(text: str) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Runs of non-blank lines with the number of their first line."""
    run: list[tuple[int, int]] = []
    number = first = 1
    for start, end in lines_of(text):
        if text[start:end].isspace() or start == end:
            if run:
                yield first, run
            run = []
        else:
            if not run:
                first = number
            run.append((start, end))
        number += 1
    if run:
        yield first, run


def _heading_of(text: str, lines: list[tuple[int, int]]) -> tuple[str, str, int] | None:
    """(title, level key, number of lines it takes) when the group begins with a heading."""
    start, end = lines[0]
    if end - start > MAX_HEADING_CHARS:
        return None
    title = text[start:end].strip()
    if len(lines) > 1 and lines[1][1] - lines[1][0] <= 2 * MAX_HEADING_CHARS:
        under = _UNDERLINE.fullmatch(text[lines[1][0] : lines[1][1]].rstrip())
        if under and not _UNDERLINE.fullmatch(title):
            return title, under.group(1), 2
    if len(lines) == 1 and _NUMBERED.match(title) and not title.endswith(_SENTENCE_END):
        number = title.split()[0].rstrip(".")
        return title, "numbered" + "." * number.count("."), 1
    return None


def _kind_of_lines(text: str, lines: list[tuple[int, int]]) -> str:
    if all(text[start : start + 4] == "    " or text[start] == "\t" for start, _ in lines) and len(lines) > 1:
        return "code"
    return "list" if re.match(r"\s*(?:[-*+•·]|[0-9]{1,3}[.)、])\s*\S", text[lines[0][0] : lines[0][1]][:80]) else "paragraph"


def _title_of(text: str, blocks: list[Block]) -> str | None:
    if blocks and blocks[0].kind == "heading":
        return blocks[0].heading_path[-1]
    return None
