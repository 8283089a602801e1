"""What each slash command does.

In: the state, the command's argument, the renderer.  Out: something shown, something changed.
"""

import base64
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from ..generation import stats_lines
from ..options import THINKING
from ..progress import OPENING, ProgressLine
from . import answering
from .render import Renderer
from .sources import Source, Stage
from .state import ReplState, Turn

SETTINGS = {  # name in /set -> (field, type, what it does)
    "temperature": ("temperature", float, "0 is greedy"),
    "top-k": ("top_k", int, "keep the N likeliest tokens, 0 keeps all"),
    "top-p": ("top_p", float, "keep the likeliest tokens up to this mass"),
    "min-p": ("min_p", float, "drop tokens below this share of the likeliest"),
    "repeat-penalty": ("repetition_penalty", float, "1 is none"),
    "seed": ("seed", int, "'none' draws a new one each time"),
    "max-tokens": ("max_tokens", int, "'none' means 512 with documents, else until the model ends"),
}


def sources(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/sources"""
    cited = state.last.cited if state.last and state.last.sources == state.found else ()
    renderer.sources(state.found, cited)
    renderer.note("/open N shows a passage, /why how it was found")


def open_source(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/open N"""
    source = _chosen(state, argument)
    renderer.say(f"[{source.number}] {source.place}", "bold")
    if source.heading:
        renderer.say(source.heading, "italic")
    renderer.passage(source.text)
    for place in source.copies:
        renderer.note(f"the same stands in {place}")


def search(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/search QUERY"""
    if not argument:
        _refuse("what to search for? /search QUERY")
    answering.search(state, argument, renderer)


def why(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/why [N]"""
    chosen = [_chosen(state, argument)] if argument else list(state.found)
    names = [stage.name for stage in chosen[0].stages]
    place = (lambda source: source.short_place) if renderer.console.is_terminal else (lambda source: source.place)
    headings = ["", "source", *names, "together"]
    rows = [[f"[{source.number}]", place(source), *map(_stage, source.stages), f"{source.score:.4f}"] for source in chosen]
    renderer.say(f"Found for: {state.found_for}")
    renderer.table(headings, rows, numeric=range(2, len(headings)))
    renderer.note("rank (score) in each search; coverage: share of the question's words; together: reciprocal rank fusion of the ranks")


def _stage(stage: Stage) -> str:
    if stage.score is None:
        return "-" if stage.rank is None else str(stage.rank)
    return f"{stage.score:.2f}" if stage.name == "coverage" else f"{stage.rank or '-'} ({stage.score:.3f})"


def scope(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/scope [PATH | all]"""
    if argument:
        state.scope = None if argument == "all" else argument
    renderer.say(f"answers come from documents under {state.scope}" if state.scope else "answers come from all documents")


def scope_words(state: ReplState) -> Iterable[str]:
    """The folders that hold documents, and 'all'."""
    if state.knowledge_base is None:
        return ()
    return ["all", *sorted({str(Path(document.path).parent) for document in state.knowledge_base.documents()})]


def model(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/model [MODEL]"""
    if argument:
        path = state.services.home.model(argument)  # refused before the model in use is closed
        with ProgressLine(sys.stderr) as progress, progress.waiting(*OPENING):
            change_model(state, path, progress.report)
    forget_unknown_thinking(state, renderer)
    if state.engine is None:
        renderer.say("no chat model: only searching works; /model MODEL opens one")
    else:
        renderer.say(f"{state.model}")
        for line in (state.engine.plan.line(), *state.engine.remarks):
            renderer.say(line)


def change_model(state: ReplState, path: Path, on_progress: Callable[[str, int, int], None]) -> None:
    """Close the model in use and open another: two at once may not fit into memory. If that fails, the old one comes back."""
    previous, had_engine = state.model, state.engine is not None
    if had_engine:
        state.engine.close()
    state.engine = state.session = None
    state.turns = [replace(turn, stats=None) for turn in state.turns]  # what drive and memory gave belongs to the engine
    try:
        state.open_model(path, on_progress)
    except BaseException:
        if had_engine and previous is not None:
            state.open_model(previous, on_progress)
        raise


def forget_unknown_thinking(state: ReplState, renderer: Renderer) -> None:
    """Give up a setting of thinking that the model now in use does not know."""
    from libcolibri.errors import TemplateError

    try:
        state.template_options()
    except TemplateError as error:
        renderer.note(f"/think {state.thinking} does not apply any more: {error}")
        state.thinking = None


def model_words(state: ReplState) -> Iterable[str]:
    """The names in the models folder."""
    folder = state.services.home.models
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()


def set_value(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/set [NAME [VALUE]]"""
    name, _, value = argument.partition(" ")
    if not name:
        renderer.table(("setting", "value", ""), [(key, _setting(state, key), about) for key, (_, _, about) in SETTINGS.items()])
        return
    if name not in SETTINGS:
        _refuse(f"no setting {name!r}, expected one of {', '.join(SETTINGS)}")
    if value:
        _assign(state, name, value.strip())
    renderer.say(f"{name} {_setting(state, name)}")


def _assign(state: ReplState, name: str, value: str) -> None:
    key, kind, _ = SETTINGS[name]
    if value == "none" and key in ("seed", "max_tokens"):
        parsed: Any = None
    else:
        try:
            parsed = kind(value)
        except ValueError:
            _refuse(f"{name} is {value!r}, expected a {'whole number' if kind is int else 'number'}")
    if key == "max_tokens":
        if parsed is not None and parsed < 1:
            _refuse(f"max-tokens is {parsed}, expected at least 1, or 'none'")
        state.max_tokens = parsed
    else:
        state.services.sampling(**state.sampling | {key: parsed})  # raises if out of range
        state.sampling[key] = parsed


def _setting(state: ReplState, name: str) -> str:
    key = SETTINGS[name][0]
    value = state.max_tokens if key == "max_tokens" else getattr(state.services.sampling(**state.sampling), key)
    return "none" if value is None else str(value)


def set_words(state: ReplState) -> Iterable[str]:
    """The names of settings."""
    return list(SETTINGS)


def think(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/think [on | off | low | medium | high | show | hide]"""
    if argument in ("show", "hide"):
        state.show_reasoning = argument == "show"
    elif argument in THINKING:
        state.engine.chat_template.thinking_options(argument)  # raises if this model's template knows no such setting
        state.thinking = argument
    elif argument:
        _refuse(f"/think {argument}: expected one of {', '.join(think_words(state))}")
    setting = state.thinking or ("off where the model allows it" if state.knowledge_base is not None else "the model's own default")
    shown = {None: "shown on a terminal", True: "shown", False: "hidden"}[state.show_reasoning]
    renderer.say(f"thinking: {setting}; reasoning is {shown}")


def think_words(state: ReplState) -> Iterable[str]:
    """What /think takes."""
    return [*THINKING, "show", "hide"]


def save(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/save [NAME]"""
    if argument.endswith(".md"):
        path = Path(argument).expanduser()
        content = transcript(state.turns)
    else:
        path = _conversation_file(state, argument or "last")
        turns = [asdict(replace(turn, stats=None)) for turn in state.turns]  # timing is of its moment only
        content = json.dumps({"version": 1, "scope": state.scope, "turns": turns}, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8", errors="replace")
    renderer.say(f"saved {path}")


def transcript(turns: Iterable[Turn]) -> str:
    """The conversation as Markdown, cited sources below each answer."""
    parts = []
    for turn in turns:
        cited = "".join(f"- [{source.number}] {source.place} {source.heading}\n" for source in turn.sources if source.number in turn.cited)
        parts.append(f"## {turn.question}\n\n{turn.answer}\n" + (f"\n{cited}" if cited else ""))
    return "\n".join(parts)


def resume(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/resume [NAME]"""
    if not argument:
        names = list(saved_names(state))
        renderer.say("saved: " + ", ".join(names) if names else "nothing saved yet: /save NAME saves the conversation")
        return
    path = _conversation_file(state, argument)
    if not path.is_file():
        _refuse(f"no saved conversation {argument!r}: /resume lists them")
    state.turns, state.scope = _read_conversation(path)
    last = state.last
    state.found, state.found_for = (last.sources, last.question) if last else ((), "")
    renderer.say(f"resumed {argument}: {len(state.turns)} questions" + (f", under {state.scope}" if state.scope else ""))


def _read_conversation(path: Path) -> tuple[list[Turn], str | None]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [_turn(entry) for entry in data["turns"]], data["scope"]
    except (ValueError, KeyError, TypeError) as error:
        _refuse(f"{path} is not a saved conversation ({error}): delete it, or save again")


def _turn(entry: dict[str, Any]) -> Turn:
    sources = tuple(
        Source(**source | {"stages": tuple(Stage(**stage) for stage in source["stages"]), "copies": tuple(source["copies"])})
        for source in entry["sources"]
    )
    lists = {name: tuple(entry.get(name, ())) for name in ("cited", "unknown", "matched", "notes")}
    return Turn(**entry | lists | {"sources": sources})


def saved_names(state: ReplState) -> Iterable[str]:
    """The saved conversations."""
    folder = state.services.home.conversations
    return sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else ()


def _conversation_file(state: ReplState, name: str) -> Path:
    if not re.fullmatch(r"[\w][\w .-]{0,80}", name):
        _refuse(f"{name!r} is no name for a conversation: use letters, digits, '-' and '_', or a path ending in .md")
    return state.services.home.conversations / f"{name}.json"


def retry(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/retry"""
    turn = state.turns.pop()
    try:
        answering.ask(state, turn.question, renderer)
    except BaseException:
        state.turns.append(turn)  # the new attempt failed: the old answer is still there
        raise


def copy(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/copy: the terminal's own clipboard sequence (OSC 52) works over ssh too and needs no helper program."""
    if not renderer.console.is_terminal:
        _refuse("/copy needs a terminal")
    payload = base64.b64encode(state.turns[-1].answer.encode("utf-8", "replace")).decode("ascii")
    renderer.console.file.write(f"\x1b]52;c;{payload}\x07")
    renderer.console.file.flush()
    renderer.say(f"copied {len(state.turns[-1].answer)} characters, if the terminal allows it")


def stats(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/stats"""
    for line in stats_lines(state.turns[-1].stats, state.engine):
        renderer.say(line)
    for line in state.engine.notices:
        renderer.note(line)
    renderer.say(state.engine.plan.line())


def reset(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/reset"""
    state.turns.clear()
    state.found, state.found_for = (), ""
    if state.session is not None:
        state.session.reset()
    renderer.say("a new conversation")


def quit_loop(state: ReplState, argument: str, renderer: Renderer) -> None:
    """/quit"""
    state.running = False


def _chosen(state: ReplState, argument: str) -> Source:
    number = argument.strip("[]")
    by_number = {str(source.number): source for source in state.found}
    if number not in by_number:
        _refuse(f"{argument!r} is not the number of a source, expected 1 to {len(state.found)}" if argument else "which one? /open N")
    return by_number[number]


def _refuse(message: str) -> NoReturn:
    from libcolibri.errors import ConfigError

    raise ConfigError(message)
