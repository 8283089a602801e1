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
            text = reader.read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            renderer.note("Ctrl-D or /quit leaves")
            continue
        if text:
            _guarded(lambda text=text: respond(state, text, renderer), renderer)  # type: ignore[misc]


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
