"""Stop strings in streamed text.

In: pieces of text as they are generated. Out: the text that may be shown, without the stop string or anything behind it.
"""

from collections.abc import Sequence

from .errors import ConfigError


class StopStrings:
    """Finds the first of several strings in text that arrives in pieces.

    Only what may be the beginning of a stop string is held back. State of one answer: make one for each.
    """

    def __init__(self, stop: str | Sequence[str] = ()):
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(string, str) and string for string in strings):
            raise ConfigError(f"stop is {strings!r}, expected non-empty strings")
        self._strings, self._held, self.stopped = strings, "", False

    def push(self, text: str) -> tuple[str, bool]:
        """(text to show now, whether a stop string was found). After a find everything is swallowed."""
        if self.stopped:
            return "", True
        text = self._held + text
        starts = [start for string in self._strings if (start := text.find(string)) >= 0]
        if starts:
            self._held, self.stopped = "", True
            return text[: min(starts)], True
        cut = len(text) - self._tail_to_hold(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _tail_to_hold(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(string.startswith(tail) for string in self._strings):
                return length
        return 0
