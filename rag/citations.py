"""Citations in an answer that arrives in pieces.

In:  text pieces, cut anywhere
Out: the same text in pieces that never end inside a citation; unknown numbers marked "[9?]"; the numbers that were cited

Recognised: [1]  [1, 2]  [1][2]  [1-3]  and full-width 【1】 ［1］. Nothing inside backticks is a citation, nor is a number above 99.
"""

import re

_OPENERS = r"\[【［"
_CLOSERS = r"\]】］"
_BEGINNING = re.compile(rf"[{_OPENERS}][0-9\s,，、;-]{{0,40}}$")
_TOKEN = re.compile(rf"`+|[{_OPENERS}]\s*[0-9]{{1,2}}(?:\s*[,，、;-]\s*[0-9]{{1,2}})*\s*[{_CLOSERS}]")
_ANY = re.compile(rf"[{_OPENERS}][0-9\s,，、;?-]*[{_CLOSERS}]")


class CitationParser:
    """One answer's parser; sources are numbered 1 to n_sources."""

    def __init__(self, n_sources: int):
        self._n_sources = n_sources
        self._held = ""
        self._fence = ""  # the backticks that opened the code we are in
        self.cited: list[int] = []  # in order of first use
        self.unknown: list[int] = []

    def feed(self, piece: str) -> str:
        """Text that is certain by now; the rest is held back until the next piece."""
        text = self._held + piece
        keep = len(text)
        if found := _BEGINNING.search(text):
            keep = found.start()
        elif text.endswith("`"):
            keep = len(text.rstrip("`"))
        self._held = text[keep:]
        return self._marked(text[:keep])

    def finish(self) -> str:
        """What was held back at the end."""
        text, self._held = self._held, ""
        return self._marked(text)

    def _marked(self, text: str) -> str:
        return _TOKEN.sub(self._replace, text)

    def _replace(self, found: re.Match[str]) -> str:
        token = found.group()
        if token[0] == "`":
            if not self._fence:
                self._fence = token
            elif token == self._fence:
                self._fence = ""
            return token
        if self._fence:
            return token
        numbers = _numbers(token)
        for number in numbers:
            known = 1 <= number <= self._n_sources
            into = self.cited if known else self.unknown
            if number not in into:
                into.append(number)
        if all(1 <= number <= self._n_sources for number in numbers):
            return token
        return "".join(f"[{number}]" if 1 <= number <= self._n_sources else f"[{number}?]" for number in numbers)


def without_citations(text: str) -> str:
    """The text without its citations, those of unknown sources ("[9?]") included."""
    return _ANY.sub("", text)


def _numbers(token: str) -> list[int]:
    """Numbers of one bracket, ranges spelt out."""
    numbers: list[int] = []
    for first, last in re.findall(r"([0-9]{1,2})\s*(?:-\s*([0-9]{1,2}))?", token):
        low, high = int(first), int(last or first)
        numbers.extend(range(low, high + 1) if low <= high else (low, high))
    return numbers
