"""Reading what the user types.

In: keys (or lines of a pipe).  Out: one message per call, its line breaks kept.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from . import commands
from .state import ReplState


class SlashCompleter(Completer):
    """Completes command names from the table, and arguments where a command knows them."""

    def __init__(self, state: ReplState):
        self._state = state

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if "\n" in text or not text.startswith("/"):
            return
        name, space, argument = text[1:].partition(" ")
        if not space:
            for command in commands.available(self._state):
                if command.name.startswith(name):
                    yield Completion(command.name, start_position=-len(name), display=f"/{command.name}", display_meta=command.help)
            return
        for word in _argument_words(self._state, name):
            if word.startswith(argument):
                yield Completion(word, start_position=-len(argument))


def _argument_words(state: ReplState, name: str) -> Iterable[str]:
    command = commands.find(name)
    return command.words(state) if command else ()


def key_bindings() -> KeyBindings:
    """Enter sends; Alt-Enter and Ctrl-J start a new line; a paste keeps its lines whatever they are."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class Editor:
    """A prompt with history, completion and multi-line paste.

    Parameters
    ----------
    history_file : Path or None
        Created if it is not there; None keeps the history in memory.
    input, output
        prompt_toolkit's, for tests; None means the terminal.
    """

    def __init__(self, state: ReplState, history_file: Path | None, *, input: Any = None, output: Any = None):
        self._session: PromptSession[str] = PromptSession(
            message=lambda: f"{state.scope} > " if state.scope else "> ",
            multiline=True,
            prompt_continuation=lambda width, line_number, is_soft_wrap: "" if is_soft_wrap else "  ",
            history=_history(history_file),
            completer=SlashCompleter(state),
            complete_while_typing=False,
            key_bindings=key_bindings(),
            input=input,
            output=output,
        )

    def read(self) -> str:
        """The next message. Raises EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C."""
        return self._session.prompt()


def _history(path: Path | None) -> History:
    """A history file readable by its owner only, as it holds what was asked."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:  # a read-only home: the conversation still works
        return InMemoryHistory()
    return FileHistory(path)


class PipeReader:
    """Messages from standard input when it is no terminal: one per line."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def read(self) -> str:
        """The next line, without a byte order mark. Raises EOFError at the end."""
        line = self._stream.readline()
        if not line:
            raise EOFError
        return re.sub("^\ufeff", "", line.rstrip("\n"))
