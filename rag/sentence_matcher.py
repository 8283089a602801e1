"""Citations put right while an answer arrives in pieces.

In:  the text of an answer, its citations checked and never cut in two; the words of each source
Out: the same text, at once up to the end of a sentence or its first citation; those are held until the sentence is complete and
     then pass as they are, or with the citation that support.py finds

Left alone: code, tables, headings, lines that end in a colon, and sentences that cite a number which does not exist.
"""

import re
from collections.abc import Mapping

from .support import MatchedCitation, match_sentence

_CITATION = re.compile(r"\s*[\[【［]\s*([0-9]{1,2}(?:\s*[,，、;-]\s*[0-9]{1,2})*)(\??)\s*[\]】］]")
_OPEN_CITATION = re.compile(r"\s*[\[【［][0-9\s,，、;?-]*$")
_END = re.compile(r"[。！？]+[”’」』）)\"']*|[.!?]+[\"')\]”’]*(?=\s|[\[【［])|(?=\n)")
# Where text must wait: a citation may begin, or a sentence may end.
_WAIT = re.compile(r"[\[【［]|[.!?](?=[.!?\"')\]”’]*(?:\s|$|[\[【［]))|[。！？\n]|\s+$")
_SHORT_FORM = re.compile(r"(?:\b(?:e\.g|i\.e|etc|cf|vs|no|approx|[A-Za-z])|^\s*\d+)\.$", re.IGNORECASE)
_STOP = re.compile(r"[.!?。！？]+[\"')\]”’」』）]*\s*$")
_APART = re.compile(r"\s*(?:\||#|[-*_=]{3,}\s*$)")  # rows of tables, headings, rulers


class SentenceMatcher:
    """One answer's matcher.

    Parameters
    ----------
    texts : words of each source, by number
    question : of the answer
    """

    def __init__(self, texts: Mapping[int, set[str]], question: str):
        self._texts, self._question = texts, question
        self._text = ""  # of the sentence that is not finished
        self._n_shown = 0  # characters of it that are out
        self._in_code = False
        self.matched: list[MatchedCitation] = []
        self.of_model: set[int] = set()  # numbers that stand as the model wrote them
        self.first_sentence: dict[int, str] = {}  # by number, the first sentence that carries it, without its citations

    def feed(self, piece: str) -> str:
        """What can be shown by now."""
        self._text += piece
        shown: list[str] = []
        while (end := self._sentence_end()) is not None:
            shown.append(self._finish_sentence(end))
        wait = self._first_wait()
        shown.append(self._text[self._n_shown : wait])
        self._n_shown = wait
        return "".join(shown)

    def finish(self, complete: bool = True) -> str:
        """What was held back at the end; `complete` says whether the last sentence is one, and not cut by a limit."""
        shown: list[str] = []
        while (end := self._sentence_end()) is not None:
            shown.append(self._finish_sentence(end))
        return "".join([*shown, self._finish_sentence(len(self._text), complete)])

    def _sentence_end(self) -> int | None:
        """End of the first sentence with the citations that follow it; None while more of them may come."""
        for found in _END.finditer(self._text):
            is_line_end = not found.group()
            before = self._text[: found.end()]
            if not is_line_end and (_SHORT_FORM.search(before) or before.count("`") % 2 or self._in_code):
                continue
            end = found.end()
            while citation := _CITATION.match(self._text, end):
                end = citation.end()
            rest = self._text[end:]
            if not rest.strip() or _OPEN_CITATION.match(rest):
                return None
            if is_line_end and end == found.end():
                end += len(rest) - len(rest.lstrip("\n"))
            return end
        return None

    def _first_wait(self) -> int:
        if self._in_code or self._text.lstrip().startswith("```"):
            return len(self._text)
        for found in _WAIT.finditer(self._text, self._n_shown):
            return max(self._n_shown, len(self._text[: found.start()].rstrip()))
        return len(self._text)

    def _finish_sentence(self, end: int, complete: bool = True) -> str:
        sentence, self._text = self._text[:end], self._text[end:]
        # Code is shown as it comes, and so may be ahead of its line's end.
        n_shown, self._n_shown = self._n_shown, max(0, self._n_shown - end)
        is_fence = sentence.lstrip().startswith("```")
        if is_fence:
            self._in_code = not self._in_code
        if is_fence or self._in_code or not complete:
            return sentence[n_shown:]
        return self._matched(sentence)[n_shown:]

    def _matched(self, sentence: str) -> str:
        citations = list(_CITATION.finditer(sentence))
        cited = sorted({int(number) for found in citations for number in re.findall(r"[0-9]+", found.group(1))} & set(self._texts))
        plain = _CITATION.sub("", sentence)
        left_alone = _APART.match(sentence) or plain.rstrip().endswith((":", "：")) or any(found.group(2) for found in citations)
        match = None if left_alone else match_sentence(plain.strip(), cited, self._texts, self._question)
        for number in cited if match is None else (match.number,):
            self.first_sentence.setdefault(number, plain.strip())
        if match is None:
            self.of_model.update(cited)
            return sentence
        self.matched.append(match)
        return _with_citation(plain, match.number)


def _with_citation(sentence: str, number: int) -> str:
    """The sentence with a citation before its full stop."""
    stop = _STOP.search(sentence)
    at = stop.start() if stop else len(sentence.rstrip())
    gap = " " if sentence[:at][-1:].isascii() else ""
    return f"{sentence[:at]}{gap}[{number}]{sentence[at:]}"
