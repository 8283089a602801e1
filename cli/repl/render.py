"""What a conversation looks like.

In: pieces of an answer as they come, sources, tables, messages.  Out: text on a rich Console.

An answer is written word by word and never redrawn: rows are filled by the screen's own width, a word is printed once it is
complete, so that nothing appears twice however tall the answer is or however the window changes. Only a table waits for its
last row. In a pipe the text is passed on as it comes.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..text import neutralise, one_line
from .sources import Source

NARROW_COLUMNS = 72
LONGEST_WORD = 512  # characters kept back before a word without end is shown

_CITATION = re.compile(r"[\[【［][\d\s,，、;-]+\??[\]】］]")  # a number that is no source's ends in a question mark
_INLINE = re.compile(rf"(\*\*|`|{_CITATION.pattern})")
_OPEN_CITATION = re.compile(r"[\[【［][\d\s,，、;-]+$")  # '[1,' must not be taken for a finished word
_CLOSING = "。，、；：？！）》」』】］〉…—～”’"
_OPENING = "（《「『【［〈“‘"
_BULLET = re.compile(r"[-*+•]$|\d{1,3}[.)]$")


class AnswerWriter:
    """Wraps, styles and prints one answer while it is being written.

    Parameters
    ----------
    console : Console
        A terminal; its width is asked for at every word, so that a resized window wraps right from the next word on.
    cites : bool
        Whether [1] is a citation: known ones are highlighted, '[9?]' (no such source) is red.
    """

    def __init__(self, console: Console, cites: bool = True):
        self._console, self._cites = console, cites
        self._word = ""  # what came since the last space
        self._spaces = 0  # spaces before it
        self._column = 0
        self._code_block = False
        self._table: list[str] = []
        self._start_line()

    def _start_line(self) -> None:
        self._first = True  # no word of this line was printed yet
        self._indent = 0  # where its wrapped rows begin
        self._style = ""
        self._bold = self._code = self._in_table = False

    def push(self, piece: str) -> None:
        """Add text as the model writes it."""
        for character in neutralise(piece).expandtabs(4):
            if character == "\n":
                self._end_line()
            elif self._code_block or self._in_table:
                self._word += character
            elif character == " ":
                self._space()
            else:
                if not self._joins(character) or len(self._word) >= LONGEST_WORD:
                    self._take_word()
                self._word += character
                if self._first and self._word == "|" and not self._spaces:
                    self._in_table = True

    def close(self) -> None:
        """Print what is left and end the row."""
        if self._word or self._column:
            self._end_line()
        self._flush_table()

    def _joins(self, character: str) -> bool:
        """Whether a row must not end between the word so far and `character`. Wide (CJK) characters are words of their own,
        but closing punctuation never begins a row and opening punctuation never ends one."""
        if not self._word or character in _CLOSING or self._word[-1] in _OPENING or cell_len(character) == 0:
            return True
        return cell_len(self._word[-1]) < 2 and cell_len(character) < 2

    def _space(self) -> None:
        if _OPEN_CITATION.search(self._word) or (self._first and self._word.startswith("```")):
            self._word += " "
            return
        self._take_word()
        self._spaces += 1

    def _end_line(self) -> None:
        if self._in_table:
            self._table.append(self._word)
        elif self._code_block or self._word.startswith("```"):
            self._code_line(self._word)
        else:
            self._flush_table()
            self._take_word()
            self._newline()
        self._word, self._spaces = "", 0
        self._start_line()

    def _code_line(self, line: str) -> None:
        """A line inside ``` fences goes out as it is; the terminal wraps what is too long, copying stays exact."""
        self._flush_table()
        if line.strip().startswith("```"):
            self._code_block = not self._code_block
            if self._code_block and (language := line.strip().strip("`").strip()):
                self._console.out(language, style="dim", highlight=False)
        else:
            self._console.out(" " * self._spaces + line, style="green", highlight=False)
        self._column = 0

    def _take_word(self) -> None:
        """Print the finished word, on this row if it fits."""
        word, self._word = self._word, ""
        if not word or (self._first and self._begin_line(word)):
            return
        pieces = self._styled(word)
        width = sum(cell_len(text) for text, _ in pieces)
        if not width:
            return
        limit = max(self._console.width - 1, 8)  # some consoles end a row by themselves when its last column is filled
        if self._column + self._spaces + width > limit and self._column > self._indent:
            self._newline()
            self._pad(self._indent)
        else:
            self._pad(self._spaces)
        self._spaces, self._first = 0, False
        for text, style in pieces:
            self._print_hard(text, style, limit)

    def _begin_line(self, word: str) -> bool:
        """Read the line's marker, if `word` is one: heading, bullet, quotation. True when nothing of it is to be printed as it is."""
        if re.fullmatch(r"#{1,6}", word):
            self._style = "bold underline" if len(word) == 1 else "bold"
            self._first, self._spaces = False, -1  # the space after the marks is no indentation
            return True
        indent = min(self._spaces, 16)
        self._spaces = indent
        if word == ">":
            self._style, self._indent = "italic", indent + 2
        elif _BULLET.match(word):
            self._indent = indent + cell_len(word) + 1
            self._pad(indent)
            self._emit("•" if word in "-*+" else word, "bold cyan")
            self._spaces, self._first = 0, False
            return True
        else:
            self._indent = indent
        return False

    def _styled(self, word: str) -> list[tuple[str, str]]:
        """`word` cut into (text, style), its ** and ` taken out."""
        pieces = []
        for part in _INLINE.split(word):
            if part == "`":
                self._code = not self._code
            elif part == "**" and not self._code:
                self._bold = not self._bold
            elif self._cites and not self._code and _CITATION.fullmatch(part):
                pieces.append((part, "bold red" if "?" in part else "bold cyan"))
            elif part:
                pieces.append((part, "green" if self._code else f"{self._style} bold" if self._bold else self._style))
        return pieces

    def _print_hard(self, text: str, style: str, limit: int) -> None:
        """Print a word, broken where the row ends when it is longer than a row."""
        while self._column + cell_len(text) > limit and limit > self._column:
            cut = _cut(text, limit - self._column)
            if not cut and self._column > self._indent:
                self._newline()
                self._pad(self._indent)
                continue
            cut = max(cut, 1)
            self._emit(text[:cut], style)
            text = text[cut:]
            self._newline()
            self._pad(self._indent)
        self._emit(text, style)

    def _emit(self, text: str, style: str) -> None:
        if text:
            self._console.out(text, style=style or None, highlight=False, end="")
            self._column += cell_len(text)

    def _pad(self, columns: int) -> None:
        self._emit(" " * columns, "")

    def _newline(self) -> None:
        self._console.out("", end="\n")
        self._column = 0

    def _flush_table(self) -> None:
        """Print the table collected so far; rows without a ruler line are no table and go out as they came."""
        lines, self._table = self._table, []
        if not lines:
            return
        rows = [[cell.strip().replace("**", "").replace("`", "") for cell in line.strip().strip("|").split("|")] for line in lines]
        if len(rows) < 2 or not all(re.fullmatch(r":?-+:?", cell) for cell in rows[1]):
            for line in lines:
                self._console.out(line, highlight=False)
            return
        table = Table()
        for cell in rows[0]:
            table.add_column(Text(cell))
        for row in rows[2:]:
            table.add_row(*(Text(cell) for cell in row[: len(rows[0])]))
        self._console.print(table)


def _cut(text: str, columns: int) -> int:
    """How many characters of `text` fit into `columns`."""
    used = 0
    for index, character in enumerate(text):
        used += cell_len(character)
        if used > columns:
            return index
    return len(text)


class PlainWriter:
    """The answer as it comes, for a pipe: no wrapping, no styles, no terminal control."""

    def __init__(self, console: Console):
        self._console = console
        self._last = "\n"

    def push(self, piece: str) -> None:
        """Pass the piece on at once."""
        text = neutralise(piece)
        if text:
            self._console.file.write(text)
            self._console.file.flush()
            self._last = text[-1]

    def close(self) -> None:
        """End the last line."""
        if self._last != "\n":
            self._console.file.write("\n")
            self._console.file.flush()
            self._last = "\n"


class ReasoningWriter:
    """What a model thinks before it answers, dimmed, as it comes; once closed it is quiet until new text comes."""

    def __init__(self, console: Console):
        self._console = console
        self._open = False

    def push(self, piece: str) -> None:
        """Show the piece at once."""
        if text := neutralise(piece):
            self._open = True
            self._write(text)

    def close(self) -> None:
        """End it; an empty line sets the answer apart."""
        if self._open:
            self._open = False
            self._write("\n\n")

    def _write(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.out(text, style="dim", highlight=False, end="")
        else:
            self._console.file.write(text)
            self._console.file.flush()


class Renderer:
    """Everything the conversation prints: answers on `console`, notes and errors on `notes`."""

    def __init__(self, console: Console, notes: Console):
        self.console, self.notes = console, notes

    @classmethod
    def for_streams(cls, out: Any, err: Any) -> "Renderer":
        """Consoles for two streams; rich honours NO_COLOR and drops styles when a stream is no terminal."""
        options: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
        return cls(Console(file=out, **options), Console(file=err, **options))

    def answer(self, cites: bool) -> AnswerWriter | PlainWriter:
        """A writer for one answer; `cites` says whether it stands on numbered sources."""
        return AnswerWriter(self.console, cites) if self.console.is_terminal else PlainWriter(self.console)

    def reasoning(self, wanted: bool | None) -> ReasoningWriter | None:
        """A writer for what comes before an answer, None when it is not to be shown. None asks for it on a terminal."""
        show = self.console.is_terminal and self.notes.is_terminal if wanted is None else wanted
        return ReasoningWriter(self.notes) if show else None

    def say(self, text: str, style: str = "") -> None:
        """A line of the conversation itself, such as a command's result."""
        self._print(self.console, text, style)

    def note(self, text: str) -> None:
        """A remark beside the conversation: prose, wrapped at words."""
        self._print(self.notes, text, "dim", soft_wrap=False)

    def error(self, text: str) -> None:
        """One line about what went wrong."""
        self._print(self.notes, f"error: {one_line(text)}", "red")

    def sources(self, sources: Iterable[Source], starred: Iterable[int] = ()) -> None:
        """Sources with their places, a star at those in `starred`; number, place and section (if it has one) between tabs in a pipe."""
        marked = set(starred)
        for source in sources:
            number = f"[{source.number}]{'*' if source.number in marked else ''}"
            place, heading = one_line(source.place), one_line(source.heading)
            if not self.console.is_terminal:
                self.say("\t".join(filter(None, (number, place, heading))))
                continue
            line = Text.assemble((f"{number} ", "bold cyan"), (place, "bold"))
            fits = cell_len(line.plain) + cell_len(heading) + 2 <= self.console.width
            self.console.print(line, Text(heading, "dim"), sep="  " if fits else "\n    ", soft_wrap=True)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> None:
        """A table on a terminal, entry by entry in a narrow one, tab-separated lines in a pipe. `numeric` columns align right."""
        if not self.console.is_terminal:
            for row in rows:
                self.say("\t".join(one_line(cell) for cell in row))
            return
        if len(headings) > 3 and self.console.width < NARROW_COLUMNS:
            for row in rows:
                self.say(f"{row[0]} {row[1]}", "bold")
                self._print(
                    self.console, "  " + ", ".join(f"{name} {cell}" for name, cell in zip(headings[2:], row[2:], strict=True)), "", False
                )
            return
        right = set(numeric)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="right" if index in right else "left", no_wrap=index in right or not heading, overflow="fold")
        for row in rows:
            table.add_row(*(Text(one_line(cell)) for cell in row))
        self.console.print(table)

    def passage(self, text: str) -> None:
        """Document text, made harmless, wrapped by the terminal only so that it can be copied."""
        for line in neutralise(text).splitlines():
            self.console.out("  " + line, highlight=False)

    def _print(self, console: Console, text: str, style: str, soft_wrap: bool = True) -> None:
        if console.is_terminal:
            console.print(Text(neutralise(text), style=style), soft_wrap=soft_wrap)  # a path cut by us could not be copied
        else:  # as it is: rich would turn tabs into spaces
            console.file.write(neutralise(text) + "\n")
            console.file.flush()
