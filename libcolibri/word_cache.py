"""Ids of words that came before: texts repeat their words, and looking one up is many times faster than encoding it.

In: a word and how to encode it. Out: its ids.
"""

from collections.abc import Callable, Sequence

MAX_WORDS, MAX_WORD_CHARS = 100_000, 64


class WordCache:
    """Ids by word; emptied when it is full. Threads may share one: the worst is that two encode the same word."""

    def __init__(self) -> None:
        self._ids: dict[str, Sequence[int]] = {}

    def get(self, word: str, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
        """The ids of a word, encoded if it is new."""
        found = self._ids.get(word)
        if found is None:
            found = encode(word)
            if len(word) <= MAX_WORD_CHARS:
                if len(self._ids) >= MAX_WORDS:
                    self._ids.clear()
                self._ids[word] = found
        return found
