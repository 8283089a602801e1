"""Token ids of a generation -> text by channel, with stop strings watched for in the answer.

In: token ids one by one. Out: `Piece`s; text that may be the start of a stop string or of a marker is held back.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from .reasoning import ANSWER, REASONING, TOOL_CALL, ReasoningSplitter


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain with a token. stopped: a stop string has come, which is no part of it."""

    text: str = ""
    reasoning: str = ""
    tool_call: str = ""
    stopped: bool = False

    def __add__(self, other: "Piece") -> "Piece":
        texts = (self.text + other.text, self.reasoning + other.reasoning, self.tool_call + other.tool_call)
        return Piece(*texts, self.stopped or other.stopped)


class TextFilter(Protocol):
    """Turns token ids into text and watches for stop strings."""

    def push(self, token_id: int) -> Piece: ...

    def flush(self) -> Piece: ...


class NoText:
    """The text of a model without a tokenizer."""

    def push(self, token_id: int) -> Piece:
        return Piece()

    def flush(self) -> Piece:
        return Piece()


class StoppableText:
    """Text stream of a tokenizer, told apart by channel, behind stop strings.

    stream    .push(token id), .flush() -> text
    stops     .push(text) -> (text, stopped), .flush() -> text
    splitter  tells channels apart; without sections all text is the answer's
    """

    def __init__(self, stream: Any, stops: Any, splitter: ReasoningSplitter):
        self._stream, self._stops, self._splitter = stream, stops, splitter

    def push(self, token_id: int) -> Piece:
        """What is certain with this token."""
        return self._piece(self._splitter.push(self._stream.push(token_id)))

    def flush(self) -> Piece:
        """What was held back and turned out to be no stop string and no marker."""
        piece = self._piece(self._splitter.push(self._stream.flush()) + self._splitter.flush())
        return piece if piece.stopped else piece + Piece(self._stops.flush())

    def _piece(self, parts: list[tuple[str, str]]) -> Piece:
        of = {channel: "".join(text for found, text in parts if found == channel) for channel in (ANSWER, REASONING, TOOL_CALL)}
        text, stopped = self._stops.push(of[ANSWER])
        return Piece(text, of[REASONING], of[TOOL_CALL], stopped)
