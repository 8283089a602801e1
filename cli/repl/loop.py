"""The conversation's loop: read -> dispatch -> render.

In: a reader (`read() -> str`, EOFError at the end, KeyboardInterrupt on Ctrl-C) and a renderer, both parameters.
Out: the conversation, until /quit or the end of the input.
"""

from collections.abc import Callable
from typing import Protocol

from ..errors import user_message
from . import commands
from .answering import ask
from .render import Renderer
from .state import ReplState


class Reader(Protocol):
    """Where lines come from: the editor, or a pipe."""

    def read(self) -> str:
        """The next message, which may hold several lines. Raises EOFError, KeyboardInterrupt."""


def run_loop(state: ReplState, reader: Reader, renderer: Renderer) -> None:
    """Talk until the reader ends or a command says so. An error ends the turn, never the conversation."""
    while state.running:
        try:
            typed = reader.read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            renderer.note("Ctrl-D or /quit leaves")
            continue
        for text in messages(typed):
            if not state.running:
                return
            _guarded(lambda text=text: respond(state, text, renderer), renderer)  # type: ignore[misc]


def messages(text: str) -> list[str]:
    """What was typed, as messages: lines that are slash commands each on their own, if the first line is one; else all of it as one.

    Several lines come together when they are typed while something else runs. A paste that begins with text stays one question.
    """
    lines = text.splitlines()
    if not lines or not commands.is_command(lines[0]):
        return [text] if text else []
    parts: list[str] = []
    joins = False  # whether the line goes on with the question before it
    for line in lines:
        if commands.is_command(line):
            parts.append(line)
        elif joins:
            parts[-1] += f"\n{line}"
        elif line.strip():
            parts.append(line)
        joins = bool(parts) and not commands.is_command(parts[-1])
    return [part.strip() for part in parts]


def respond(state: ReplState, text: str, renderer: Renderer) -> None:
    """Run a slash command, or answer a question."""
    if commands.is_command(text):
        commands.dispatch(state, text, renderer)
    else:
        ask(state, text, renderer)


def _guarded(action: Callable[[], None], renderer: Renderer) -> None:
    try:
        action()
    except KeyboardInterrupt:  # a second Ctrl-C, or one outside an answer
        renderer.note("stopped")
    except BrokenPipeError:
        raise
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        renderer.error(message)
