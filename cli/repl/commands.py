"""Slash commands: one table that drives /help, completion and dispatch.

In: a line that begins with a slash, the state.  Out: the command's effect, rendered; a suggestion for a command that does not exist.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import actions
from .render import Renderer
from .state import ReplState

Run = Callable[[ReplState, str, Renderer], None]
Condition = Callable[[ReplState], str | None]


def _always(state: ReplState) -> str | None:
    return None


def _no_words(state: ReplState) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Command:
    """One slash command.

    missing(state) is None when the command can run, else what it lacks, in words that follow "/name needs".
    words(state) are completions of its argument.
    """

    name: str
    usage: str  # its argument, '' if it takes none
    help: str
    run: Run
    missing: Condition = _always
    words: Callable[[ReplState], Iterable[str]] = _no_words

    def available(self, state: ReplState) -> bool:
        """Can it run now?"""
        return self.missing(state) is None

    @property
    def synopsis(self) -> str:
        return f"/{self.name} {self.usage}".rstrip()


def _documents(state: ReplState) -> str | None:
    return None if state.knowledge_base is not None else "a knowledge base: start without --no-rag"


def _found(state: ReplState) -> str | None:
    return None if state.found else "sources: ask a question or use /search first"


def _model(state: ReplState) -> str | None:
    return None if state.engine is not None else "a chat model: start with --model"


def _template(state: ReplState) -> str | None:
    return _model(state) or (None if state.engine.chat_template is not None else "a model with a chat template")


def _turn(state: ReplState) -> str | None:
    return None if state.turns else "an answer: ask a question first"


def _timed(state: ReplState) -> str | None:
    return None if state.turns and state.turns[-1].stats is not None else "an answer by the model: ask a question first"


def _numbers(state: ReplState) -> Iterable[str]:
    return [str(source.number) for source in state.found]


def _help(state: ReplState, argument: str, renderer: Renderer) -> None:
    name = argument.lstrip("/")
    if name and (command := find(name)) is None:
        _unknown(name, state, renderer)
    elif name and command is not None:
        renderer.say(command.synopsis, "bold")
        renderer.say(f"  {command.help}")
        if lack := command.missing(state):
            renderer.note(f"  not now: it needs {lack}")
    else:
        renderer.table(("command", "what it does"), [(command.synopsis, command.help) for command in available(state)])
        if later := [f"/{command.name}" for command in COMMANDS if not command.available(state)]:
            renderer.note(f"Not now: {' '.join(later)}")
        renderer.note("Enter sends, Alt-Enter or Ctrl-J starts a new line, Ctrl-C stops an answer, Ctrl-D leaves.")


COMMANDS = (
    Command("help", "[COMMAND]", "Show the commands that can be used now, or explain one.", _help, words=lambda state: _names(state)),
    Command("sources", "", "List the sources of the last answer; a star marks those it cites.", actions.sources, _found),
    Command("open", "N", "Show the whole passage of source N and where it stands.", actions.open_source, _found, _numbers),
    Command("search", "QUERY", "Search the documents, without the language model.", actions.search, _documents),
    Command("why", "[N]", "Show how the sources were found: each search's rank and score.", actions.why, _found, _numbers),
    Command(
        "scope", "[PATH | all]", "Answer from documents under PATH only; 'all' lifts it.", actions.scope, _documents, actions.scope_words
    ),
    Command("model", "[MODEL]", "Show the model and its memory plan, or change to MODEL.", actions.model, words=actions.model_words),
    Command("set", "[NAME [VALUE]]", "Show or change a setting, such as temperature.", actions.set_value, _model, actions.set_words),
    Command(
        "think",
        "[on | off | low | medium | high | show | hide]",
        "Show or change whether a reasoning model thinks first, and whether its reasoning is shown.",
        actions.think,
        _template,
        actions.think_words,
    ),
    Command("save", "[NAME]", "Save the conversation; with a name ending in .md as a text to read.", actions.save, _turn),
    Command("resume", "[NAME]", "Continue a saved conversation, or list them.", actions.resume, words=actions.saved_names),
    Command("retry", "", "Ask the last question again.", actions.retry, _turn),
    Command("copy", "", "Copy the last answer to the clipboard, through the terminal.", actions.copy, _turn),
    Command("stats", "", "Show the last answer's speed, what experts and drive did, and the memory in use.", actions.stats, _timed),
    Command("reset", "", "Forget the conversation; documents and settings stay.", actions.reset),
    Command("quit", "", "Leave.", actions.quit_loop),
)


def _names(state: ReplState) -> list[str]:
    return [command.name for command in COMMANDS]


def available(state: ReplState) -> list[Command]:
    """The commands that can run now."""
    return [command for command in COMMANDS if command.available(state)]


def find(name: str) -> Command | None:
    """The command called `name`, or the only one whose name begins with it."""
    exact = [command for command in COMMANDS if command.name == name]
    begins = [command for command in COMMANDS if name and command.name.startswith(name)]
    return exact[0] if exact else begins[0] if len(begins) == 1 else None


def is_command(text: str) -> bool:
    """Is it a command? '/etc/fstab: what is it?' is a question, and so is a pasted text of several lines."""
    return re.match(r"/[A-Za-z?]*(\s|$)", text) is not None and "\n" not in text.strip()


def dispatch(state: ReplState, text: str, renderer: Renderer) -> None:
    """Run the command in `text`, or say why not."""
    name, _, argument = text.strip()[1:].partition(" ")
    command = find("help" if name in ("", "?") else name.lower())
    if command is None:
        _unknown(name, state, renderer)
    elif lack := command.missing(state):
        renderer.error(f"/{command.name} needs {lack}")
    else:
        command.run(state, argument.strip(), renderer)


def _unknown(name: str, state: ReplState, renderer: Renderer) -> None:
    begins = [command.name for command in COMMANDS if command.name.startswith(name)]
    near = begins or difflib.get_close_matches(name.lower(), _names(state), n=1)
    hint = f"did you mean {' or '.join('/' + word for word in near)}?" if near else "/help lists them"
    renderer.error(f"no command /{name}: {hint}")
