"""One question answered: from the documents, from the model alone, or by searching only.

In: the state and a question.  Out: the answer rendered while it is written, and a Turn added to the state.
"""

import re
import sys
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

from ..generation import stats_line
from ..interrupt import cancel_on_interrupt
from ..progress import ProgressLine
from ..text import one_line
from .render import CITATION, Renderer
from .sources import Source, as_row, from_hits
from .state import ReplState, Turn

EXCERPT = 160
NOT_IN_DOCUMENTS = "The documents do not say."


class WatchedSession:
    """A session that reports each step to `on_step`, so that prefill progress and timing are seen whoever drives it."""

    def __init__(self, session: Any, on_step: Callable[[Any], None]):
        self._session, self._on_step = session, on_step

    def generate(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Session.generate, observed."""
        steps = self._session.generate(*args, **options)
        try:
            for step in steps:
                self._on_step(step)
                yield step
        finally:
            steps.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class Answer:
    """Gathers one answer while it is written.

    Parameters
    ----------
    show : callable
        Called with each piece of text.
    found : callable
        Called with the sources, before the first piece.
    """

    def __init__(self, show: Callable[[str], None], found: Callable[[tuple[Source, ...]], None], progress: ProgressLine):
        self._show, self._found, self._progress = show, found, progress
        self.pieces: list[str] = []
        self.sources: tuple[Source, ...] = ()
        self.result: Any = None
        self.step: Any = None

    def on_step(self, step: Any) -> None:
        """Keep the latest facts; show how far the prompt was read."""
        self.step = step
        if step.token_id is None and not step.text and step.finish_reason is None:
            stats = step.stats
            self._progress.report("reading the sources, tokens", stats.prefilled_tok + stats.reused_tok, stats.prompt_tok)
        else:
            self._progress.clear()

    def retrieved(self, hits: Any) -> None:
        """The sources are known."""
        self._progress.clear()
        self.sources = from_hits(hits)
        self._found(self.sources)

    def text(self, piece: str) -> None:
        """Another piece of the answer."""
        if piece:
            self._progress.clear()
            self.pieces.append(piece)
            self._show(piece)

    def turn(self, question: str, with_documents: bool) -> Turn:
        """The finished turn."""
        text = "".join(self.pieces)
        numbers = (
            {int(number) for citation in CITATION.findall(text) for number in re.findall(r"\d+", citation)} if with_documents else set()
        )
        known = {source.number for source in self.sources}
        return Turn(
            question,
            text,
            sources=self.sources,
            cited=tuple(sorted(numbers & known)),
            unknown=tuple(sorted(numbers - known)),
            in_documents=not with_documents or self.result is None or bool(self.result.answered),
            finish_reason=self.step.finish_reason if self.step else None,
            stats=self.step.stats if self.step else None,
            notes=tuple(self.result.notes) if self.result is not None else (),
        )


def answer(state: ReplState, question: str, gathered: Answer, cancel: Event) -> Turn:
    """Answer `question` with what the state has open, and keep the turn."""
    sampling = state.services.sampling(**state.sampling)
    if state.knowledge_base is None:
        messages = [*state.history(), {"role": "user", "content": question}]
        for step in state.session.generate(messages, sampling, max_tokens=state.max_tokens, cancel=cancel):
            gathered.on_step(step)
            gathered.text(step.text)
    else:
        session = WatchedSession(state.session, gathered.on_step)
        options = {"max_tokens": state.max_tokens} if state.max_tokens else {}
        events = state.knowledge_base.ask(
            session, question, history=state.history(), sampling=sampling, cancel=cancel, scope=state.services.scope(state.scope), **options
        )
        for event in events:
            take_event(event, gathered)
    turn = gathered.turn(question, state.knowledge_base is not None)
    state.keep(turn)
    return turn


def take_event(event: Any, gathered: Answer) -> None:
    """Sort one of colibri_rag's events by what it carries."""
    if hasattr(event, "hits"):
        gathered.retrieved(event.hits)
    elif hasattr(event, "text"):
        gathered.text(event.text)
    else:
        gathered.result = event.result


def ask(state: ReplState, question: str, renderer: Renderer) -> None:
    """Answer a question, or without a chat model show what the documents have."""
    if state.engine is None:
        search(state, question, renderer)
    else:
        answer_aloud(state, question, renderer)


def answer_aloud(state: ReplState, question: str, renderer: Renderer) -> Turn:
    """Answer on the screen. Ctrl-C stops the answer; what was written is kept and marked."""
    writer: Any = renderer.answer(())

    def found(sources: tuple[Source, ...]) -> None:
        nonlocal writer
        writer = renderer.answer(source.number for source in sources)

    with ProgressLine(sys.stderr) as progress, cancel_on_interrupt() as cancel:
        progress.note("searching the documents …" if state.knowledge_base is not None else "reading …")
        gathered = Answer(lambda piece: writer.push(piece), found, progress)
        try:
            turn = answer(state, question, gathered, cancel)
        except KeyboardInterrupt:  # a second Ctrl-C: the work did not listen
            turn = gathered.turn(question, state.knowledge_base is not None)
            state.keep(turn)
            cancel.set()
        finally:
            progress.clear()
            writer.close()
    conclude(turn, renderer, stopped=cancel.is_set())
    return turn


def answer_quietly(state: ReplState, question: str) -> Turn:
    """Answer without showing anything but progress, for --json."""
    with ProgressLine(sys.stderr) as progress, cancel_on_interrupt() as cancel:
        progress.note("searching the documents …" if state.knowledge_base is not None else "reading …")
        return answer(state, question, Answer(lambda piece: None, lambda sources: None, progress), cancel)


def conclude(turn: Turn, renderer: Renderer, stopped: bool) -> None:
    """What stands below an answer: marks, sources, timing."""
    if stopped or turn.finish_reason == "cancelled":
        renderer.note("[stopped: this answer is not complete]")
    elif turn.finish_reason == "length":
        renderer.note("[cut at the token limit: /set max-tokens N, or a larger --ctx]")
    if not turn.in_documents and not turn.answer:
        renderer.say(NOT_IN_DOCUMENTS)
    if turn.unknown:
        numbers = ", ".join(f"[{number}]" for number in turn.unknown)
        renderer.note(f"The answer cites {numbers}, which {'is' if len(turn.unknown) == 1 else 'are'} not among the sources.")
    for remark in turn.notes:
        renderer.note(remark)
    show_cited(turn, renderer)
    if turn.stats is not None:
        renderer.note(stats_line(turn.stats))


def show_cited(turn: Turn, renderer: Renderer) -> None:
    """The cited sources with their places; all of them when the answer cites none."""
    shown = [source for source in turn.sources if source.number in turn.cited]
    if not shown and turn.sources and turn.in_documents:
        renderer.note("The answer cites no source; these were given to the model:")
        shown = list(turn.sources)
    if shown:
        renderer.table(("", "source", "section"), [as_row(source, False) for source in shown])


def search(state: ReplState, query: str, renderer: Renderer, limit: int = 8) -> None:
    """Show what the searches find, without any language model."""
    sources = from_hits(state.knowledge_base.search(query, limit=limit, scope=state.services.scope(state.scope)))
    state.found, state.found_for = sources, query
    if not sources:
        renderer.say(f"nothing found{f' under {state.scope}' if state.scope else ''}")
        return
    for source in sources:
        renderer.say(f"[{source.number}] {source.place}  {source.heading}", "bold")
        renderer.say("    " + one_line(source.text, EXCERPT))
