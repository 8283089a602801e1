"""HTML to text and blocks with a flat scanner: no tree, so no nesting can exhaust the stack or the clock.

In:  decoded HTML
Out: ParsedText whose text is what a reader sees; each block knows the line of the file it began on

Scripts, styles, navigation and hidden elements are left out: what a person cannot see must not reach the model.
"""

import html
import re
from collections.abc import Iterator

from .decode import clean_text
from .documents import Block, ParsedText

_TAG_NAME = re.compile(r"</?([a-zA-Z][a-zA-Z0-9:-]{0,40})")
_HIDDEN = re.compile(r"\shidden(?:[\s=/>]|$)|aria-hidden\s*=\s*[\"']?true|display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
# Tables of contents and navigation bars, as DocBook, Sphinx and MkDocs name them: they match every question and answer none.
_NAVIGATION = re.compile(
    r"\sclass\s*=\s*[\"'](?:[^\"']*\s)?(?:toc|navheader|navfooter|toctree-wrapper|sphinxsidebar|breadcrumbs?)[\s\"']", re.IGNORECASE
)
_SPACES = re.compile(r"[ \t\n\xa0\u3000]+")
_HAN_BREAK = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef])[ ]?\n[ ]*(?=[\u3000-\u9fff\uff00-\uffef])")

RAW_TEXT = frozenset({"script", "style", "textarea", "iframe", "noembed", "xmp"})
LEFT_OUT = frozenset({"script", "style", "noscript", "template", "svg", "math", "nav", "iframe", "object", "select", "button", "noembed"})
VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"])
HEADINGS = {f"h{level}": level for level in range(1, 7)}
_BREAKS = (
    "address article aside blockquote body center dd details dialog div dl dt fieldset figcaption figure footer form header hr html "
    "legend li main menu ol option p pre section summary table tbody tfoot thead tr ul caption"
)
BREAKS = frozenset(_BREAKS.split())
MAX_ATTRIBUTE_CHARS = 4096  # looked at for being hidden
MAX_HIDDEN_DEPTH = 1_000_000


def parse_html(source: str) -> ParsedText:
    """Visible text of an HTML page with headings, code blocks, lists and tables."""
    builder = _Builder()
    for kind, content, name, line in _Scanner(source).tokens():
        if kind == "text":
            builder.text(content, line)
        elif kind == "open":
            builder.open(name, content, line)
        else:
            builder.close(name, line)
    builder.flush()
    return ParsedText("".join(builder.pieces), tuple(builder.blocks), builder.title or builder.first_heading())


class _Scanner:
    """Cuts a page into tags and text. Linear: what was not found once is not sought again."""

    def __init__(self, source: str):
        self._source = source
        self._absent: set[str] = set()

    def tokens(self) -> Iterator[tuple[str, str, str, int]]:
        """("text" | "open" | "close", text or attributes, lower-case tag name, line from 1)."""
        source, position, line = self._source, 0, 1
        while position < len(source):
            kind, start, end, name = self._next(position)
            first, last = (start, end) if kind == "text" else (start, min(end, start + MAX_ATTRIBUTE_CHARS))
            if kind != "skip":
                yield kind, source[first:last], name, line
            line += source.count("\n", position, end)
            position = end
            if kind == "open" and name in RAW_TEXT:
                # Its content is no markup; without an end tag it runs to the end of the file, as in browsers.
                closing = re.compile(rf"</{name}\b", re.IGNORECASE).search(source, position)
                end = closing.start() if closing else len(source)
                yield "text", source[position:end], "", line
                line += source.count("\n", position, end)
                position = end

    def _next(self, position: int) -> tuple[str, int, int, str]:
        """(kind, start of its content, end, tag name) of what begins at position; comments are of kind "skip"."""
        source = self._source
        if source[position] != "<":
            end = self._find("<", position)
            return "text", position, len(source) if end < 0 else end, ""
        name = _TAG_NAME.match(source, position)
        if name is not None:
            kind = "close" if source[position + 1] == "/" else "open"
            return kind, name.end(), self._end_of_tag(name.end()), name.group(1).lower()
        if source[position + 1 : position + 2] not in ("!", "?", "/"):
            return "text", position, position + 1, ""
        mark = "-->" if source.startswith("<!--", position) else ">"
        end = self._find(mark, position + 2)
        return "skip", position, len(source) if end < 0 else end + len(mark), ""

    def _find(self, what: str, start: int) -> int:
        if what in self._absent:
            return -1
        found = self._source.find(what, start)
        if found < 0:
            self._absent.add(what)
        return found

    def _end_of_tag(self, position: int) -> int:
        """Offset behind a tag's ">", which does not count inside quotes."""
        source = self._source
        while True:
            end = self._find(">", position)
            if end < 0:
                return len(source)
            quote = min((at for at in (source.find('"', position, end), source.find("'", position, end)) if at >= 0), default=-1)
            if quote < 0:
                return end + 1
            closing = self._find(source[quote], quote + 1)
            if closing < 0:
                return end + 1
            position = closing + 1


class _Builder:
    """Text pieces and blocks from the stream of tags."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.length = 0
        self.blocks: list[Block] = []
        self.path: list[tuple[int, str]] = []
        self.title = ""
        self._buffer: list[str] = []
        self._line = 1
        self._hidden: tuple[str, int] | None = None  # the tag that hides and how many of its name are open
        self._in_title = False
        self._pre = 0
        self._cells = 0  # depth of tables
        self._kind = "paragraph"
        self._heading: int | None = None

    def text(self, content: str, line: int) -> None:
        if self._hidden:
            return
        content = clean_text(html.unescape(content))
        if self._in_title:
            self.title += content
        elif content:
            if not self._buffer:
                # Leading line ends belong to the markup before the text.
                line += len(content[: len(content) - len(content.lstrip())].split("\n")) - 1
                self._line = line
                if not self._pre and content.isspace():
                    return
            self._buffer.append(content)

    def open(self, name: str, attributes: str, line: int) -> None:
        if self._hidden:
            if name == self._hidden[0] and not attributes.endswith("/>"):
                self._hidden = (name, min(self._hidden[1] + 1, MAX_HIDDEN_DEPTH))
            return
        if name not in VOID and (name in LEFT_OUT or _HIDDEN.search(attributes) or _NAVIGATION.search(attributes)):
            self._hidden = None if attributes.endswith("/>") else (name, 1)
            return
        if name == "title":
            self._in_title = not self.title
        elif name == "br":
            self._buffer.append("\n" if self._pre else "\x00")
        elif name in ("td", "th") and self._cells:
            if self._buffer and self._buffer[-1] != "\x00":
                self._buffer.append(" | ")
        elif name in HEADINGS:
            self.flush()
            self._heading = HEADINGS[name]
        elif name in BREAKS:
            self._break(name, opening=True)

    def close(self, name: str, line: int) -> None:
        if self._hidden:
            if name == self._hidden[0]:
                self._hidden = (name, self._hidden[1] - 1) if self._hidden[1] > 1 else None
            return
        if name == "title":
            self._in_title = False
        elif name in HEADINGS:
            self.flush()
            self._heading = None
        elif name in BREAKS:
            self._break(name, opening=False)

    def _break(self, name: str, *, opening: bool) -> None:
        if name == "table":
            if not self._cells or (not opening and self._cells == 1):
                self.flush()
            self._cells = max(0, self._cells + (1 if opening else -1))
            self._kind = "table" if self._cells else "paragraph"
        elif self._cells:
            # A table stays one block: rows end lines, everything else inside a cell is space.
            self._buffer.append("\x00" if name in ("tr", "pre") else " ")
        elif name == "pre":
            self.flush()
            self._pre = max(0, self._pre + (1 if opening else -1))
            self._kind = "code" if self._pre else "paragraph"
        elif name == "li":
            self.flush()
            self._kind = "list" if opening else "paragraph"
        elif self._kind == "list" and name in ("p", "div"):
            self._buffer.append(" ")
        elif not self._pre:
            self.flush()

    def flush(self) -> None:
        """End the open block."""
        text = self._tidied("".join(self._buffer))
        self._buffer = []
        if not text.strip():
            return
        kind = "heading" if self._heading else self._kind
        if kind == "heading":
            text = " ".join(text.split())[:500]
            level = self._heading or 1
            self.path = [entry for entry in self.path if entry[0] < level] + [(level, text[:200])]
        elif kind == "list":
            text = "- " + text
        if self.length:
            same_list = kind == "list" and self.blocks and self.blocks[-1].kind == "list"
            self._append("\n" if same_list else "\n\n")
        start = self.length
        self._append(text)
        self.blocks.append(Block(kind, start, self.length, tuple(title for _, title in self.path), self._line))

    def _tidied(self, text: str) -> str:
        if self._kind == "code":
            return text.replace("\x00", "\n").rstrip().lstrip("\n")
        # A line break between two Chinese characters is no space.
        text = _SPACES.sub(" ", _HAN_BREAK.sub("", text))
        lines = (line.strip(" |") if self._kind == "table" else line.strip() for line in text.split("\x00"))
        return "\n".join(line for line in lines if line)

    def _append(self, piece: str) -> None:
        self.pieces.append(piece)
        self.length += len(piece)

    def first_heading(self) -> str | None:
        return next((block.heading_path[-1] for block in self.blocks if block.kind == "heading"), None)
