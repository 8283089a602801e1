"""`colibri-chat`: questions answered from one's own documents.

In: a chat model, an embedder, a knowledge base; questions from the keyboard, a pipe or --once.
Out: answers with checked citations; with --once an exit code that says whether the documents had the answer.
"""

import sys
from pathlib import Path
from typing import Any

import click

from ..errors import INTERRUPTED, NOT_IN_DOCUMENTS, reports_errors
from ..options import Number, command, engine_arguments, engine_options, json_option, sampling_options, take_sampling, thinking_options
from ..services import Services
from ..text import to_json


@command(NOT_IN_DOCUMENTS, name="colibri-chat")
@click.option("-m", "--model", metavar="MODEL", help="Chat model's directory or name.  [default: named in models/default-chat]")
@click.option("--embedder", metavar="MODEL", help="Embedder's directory or name.  [default: named in models/default-embed]")
@click.option("--kb", metavar="DIR", help="Knowledge base.  [default: kb/default in the user's folder]")
@click.option("--no-rag", is_flag=True, help="Chat without documents.")
@click.option("--scope", metavar="PATH", help="Answer from documents under PATH only.")
@click.option("--once", metavar="QUESTION", help="Answer one question and exit; '-' reads it from standard input.")
@engine_options
@sampling_options
@thinking_options("off with documents, else the model's own")
@click.option(
    "-n", "--max-tokens", type=Number(int, 1), metavar="N", help="Longest answer.  [default: 512 with documents, else until the model ends]"
)
@json_option
@click.pass_context
@reports_errors
def main(ctx: click.Context, **options: Any) -> None:
    """Ask questions, answered from the documents put in with colibri-ingest.

    Every answer names its sources; /help lists what else can be done. With --once, or in a pipe (one question a line), the
    output is plain text. The user's folder is ~/.colibri, or $COLIBRI_HOME.
    """
    if options["as_json"] and options["once"] is None:
        raise click.UsageError("--json works with --once QUESTION")
    if options["scope"] and options["no_rag"]:
        raise click.UsageError("--scope restricts documents, --no-rag has none: give one of them")
    once = sys.stdin.read() if options["once"] == "-" else options["once"]
    if once is not None and not once.strip():
        raise click.UsageError("the question is empty")
    services = ctx.obj or Services()
    paths = find_paths(services, options, once is not None)
    state = open_state(services, paths, options)
    try:
        if once is not None:
            raise SystemExit(answer_once(state, once.strip(), options["as_json"]))
        converse(state)
    finally:
        state.close()


def find_paths(services: Services, options: dict[str, Any], needs_model: bool) -> dict[str, Path | None]:
    """Every path, looked up before anything is loaded, so that what is missing is said at once.

    Without a chat model an interactive session can still search, so only --once and --no-rag need one.
    """
    home = services.home
    paths: dict[str, Path | None] = {"kb": None, "embedder": None}
    if not options["no_rag"]:
        paths = {"kb": home.knowledge_base(options["kb"]), "embedder": home.embedder(options["embedder"])}
    searching_only = not (options["model"] or needs_model or options["no_rag"] or (home.models / "default-chat").exists())
    return paths | {"model": None if searching_only else home.chat_model(options["model"])}


def open_state(services: Services, paths: dict[str, Path | None], options: dict[str, Any]) -> Any:
    """Open the knowledge base and the model, with progress; close what was opened if a later one fails."""
    from ..progress import COMPILING, OPENING, ProgressLine
    from ..repl.state import ReplState

    sampling = {name: value for name, value in take_sampling(options).items() if value is not None}
    services.sampling(**sampling)
    state = ReplState(services, sampling=sampling, max_tokens=options["max_tokens"], scope=options["scope"])
    state.engine_options = engine_arguments(options, services.home)
    state.thinking, state.show_reasoning = options["thinking"], options["show_reasoning"]
    try:
        with ProgressLine(sys.stderr) as progress:
            if paths["kb"] is not None and paths["embedder"] is not None:
                with progress.waiting("opening the knowledge base", COMPILING):
                    state.open_knowledge_base(paths["kb"], paths["embedder"])
            if paths["model"] is not None:
                with progress.waiting(*OPENING):
                    state.open_model(paths["model"], progress.report)
                state.template_options()  # a setting that the model does not know is refused now, not at the first question
    except BaseException:
        state.close()
        raise
    return state


def answer_once(state: Any, question: str, as_json: bool) -> int:
    """Answer one question; returns the exit code."""
    from ..repl.answering import answer_aloud, answer_quietly
    from ..repl.render import Renderer
    from ..repl.sources import turn_as_json

    if as_json:
        turn = answer_quietly(state, question)
        click.echo(to_json(turn_as_json(turn, state.engine)))
    else:
        turn = answer_aloud(state, question, Renderer.for_streams(sys.stdout, sys.stderr))
    if turn.finish_reason == "cancelled":
        return INTERRUPTED
    return 0 if turn.in_documents else NOT_IN_DOCUMENTS


def converse(state: Any) -> None:
    """The interactive loop, on the terminal or over a pipe."""
    from ..repl.editor import Editor, PipeReader
    from ..repl.loop import run_loop
    from ..repl.render import Renderer

    renderer = Renderer.for_streams(sys.stdout, sys.stderr)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if state.engine is not None:
        for line in (state.engine.plan.line(), *state.engine.remarks):
            renderer.note(line)
    if interactive:
        renderer.note(greeting(state))
    run_loop(state, Editor(state, state.services.home.history_file) if interactive else PipeReader(sys.stdin), renderer)


def greeting(state: Any) -> str:
    """What is open, in two lines."""
    if state.knowledge_base is None:
        about = "No documents: answers come from the model alone."
    else:
        documents = len(list(state.knowledge_base.documents()))
        about = f"{documents} document{'' if documents == 1 else 's'}."
    if state.engine is None:
        about += " No chat model: questions only search the documents (`python3 bootstrap.py demo` makes one)."
    return f"{about}\nAsk a question, or /help. Ctrl-D leaves."
