"""One question answered: from the documents, from the model alone, or by searching only.

In: the state and a question.  Out: the answer rendered while it is written, and a Turn added to the state.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event
from typing import Any

from ..generation import stats_line
from ..interrupt import cancel_on_interrupt, keys_unseen
from ..progress import ProgressLine
from ..text import one_line
from .render import Renderer
from .sources import from_hits, from_result
from .state import ReplState, Turn

EXCERPT = 160


class Answer:
    """Gathers one answer while it is written.

    Parameters
    ----------
    show : callable
        Called with each piece of text.
    show_reasoning : callable
        Called with each piece of what the model thinks before it answers.
    progress : ProgressLine
        Shows the search and the reading of the prompt; cleared before the first piece.
    """

    def __init__(self, question: str, show: Callable[[str], None], show_reasoning: Callable[[str], None] | None, progress: ProgressLine):
        self.question = question
        self._show, self._show_reasoning, self._progress = show, show_reasoning, progress
        self._n_thoughts = 0
        self._pieces: list[str] = []
        self._hits: Any = ()
        self._stats: Any = None
        self._finish_reason: str | None = None
        self._result: Any = None

    def take_event(self, event: Any) -> None:
        """One of colibri_rag's events, told apart by what it carries."""
        if hasattr(event, "hits"):
            self._hits = event.hits
        elif hasattr(event, "stats"):
            self._read(event.stats)
        elif hasattr(event, "reasoning"):
            self._think(event.reasoning)
        elif hasattr(event, "text"):
            self._write(event.text)
        else:
            self._result = event.result
            self._stats, self._finish_reason = event.result.generation, event.result.finish_reason

    def take_step(self, step: Any) -> None:
        """One of the engine's steps, when it is asked without documents."""
        self._stats, self._finish_reason = step.stats, step.finish_reason
        if step.token_id is None and not step.text and step.finish_reason is None:
            self._read(step.stats)
        else:
            self._think(step.reasoning)
            self._write(step.text)

    def _read(self, stats: Any) -> None:
        self._stats = stats
        self._progress.report("reading the sources", stats.prefilled_tok + stats.reused_tok, stats.prompt_tok)

    def _think(self, piece: str) -> None:
        if not piece:
            return
        self._n_thoughts += 1
        if self._show_reasoning is None:
            self._progress.report("thinking, token", self._n_thoughts, 0)
        else:
            self._progress.clear()
            self._show_reasoning(piece)

    def _write(self, piece: str) -> None:
        if piece:
            self._progress.clear()
            self._pieces.append(piece)
            self._show(piece)

    def turn(self) -> Turn:
        """The finished turn; without a result (stopped for good) nothing in it is checked."""
        result, text = self._result, "".join(self._pieces)
        if result is None:
            only_thought = bool(self._n_thoughts) and not text
            return Turn(
                self.question,
                text,
                from_hits(self._hits),
                finish_reason=self._finish_reason,
                stats=self._stats,
                only_thought=only_thought,
            )
        return Turn(
            self.question,
            text,
            sources=from_result(self._hits, result),
            cited=tuple(citation.number for citation in result.citations),
            unknown=tuple(result.unknown_citations),
            matched=tuple(dict.fromkeys(match.number for match in result.matched)),
            uncited=result.uncited,
            in_documents=not result.unanswerable,
            finish_reason=self._finish_reason,
            stats=self._stats,
            notes=tuple(notes_of(result.retrieval)),
            only_thought=bool(self._n_thoughts) and not text,
        )


def notes_of(retrieval: Any) -> Iterator[str]:
    """What did not fit into the context, in words."""
    if retrieval.n_left_out:
        yield f"{retrieval.n_left_out} of the passages found did not fit into the context: a larger --ctx holds more"
    if retrieval.dropped_history:
        yield f"{retrieval.dropped_history} earlier messages did not fit into the context: /reset begins anew"


def answer(state: ReplState, gathered: Answer, cancel: Event) -> None:
    """Answer with what the state has open; `gathered` takes it in."""
    sampling, template_options = state.services.sampling(**state.sampling), state.template_options()
    if state.knowledge_base is None:
        messages = [*state.history(), {"role": "user", "content": gathered.question}]
        steps = state.session.generate(messages, sampling, max_tokens=state.max_tokens, cancel=cancel, template_options=template_options)
        for step in steps:
            gathered.take_step(step)
        return
    options: dict[str, Any] = {"history": state.history(), "sampling": sampling, "scope": state.services.scope(state.scope)}
    options["template_options"] = template_options
    if state.max_tokens:
        options["max_tokens"] = state.max_tokens
    for event in state.knowledge_base.ask(state.session, gathered.question, cancel=cancel, **options):
        gathered.take_event(event)


def gather(state: ReplState, question: str, show: Callable[[str], None], show_reasoning: Callable[[str], None] | None = None) -> Turn:
    """Answer and keep the turn. Ctrl-C stops the answer; what was written is kept and marked as stopped."""
    with ProgressLine(sys.stderr) as progress, keys_unseen(), cancel_on_interrupt() as cancel:
        progress.note("searching the documents …" if state.knowledge_base is not None else "reading …")
        gathered = Answer(question, show, show_reasoning, progress)
        try:
            answer(state, gathered, cancel)
        except KeyboardInterrupt:  # a second Ctrl-C: the work did not listen
            cancel.set()
    turn = gathered.turn()
    if cancel.is_set() and turn.finish_reason != "stop":
        turn = replace(turn, finish_reason="cancelled")
    state.keep(turn)
    return turn


def ask(state: ReplState, question: str, renderer: Renderer) -> None:
    """Answer a question, or without a chat model show what the documents have."""
    if state.engine is None:
        search(state, question, renderer)
    else:
        answer_aloud(state, question, renderer)


def answer_aloud(state: ReplState, question: str, renderer: Renderer) -> Turn:
    """Answer on the screen, with what stands below the answer."""
    thoughts = renderer.reasoning(state.show_reasoning)
    writer = renderer.answer(cites=state.knowledge_base is not None)

    def show(piece: str) -> None:
        if thoughts is not None:
            thoughts.close()
        writer.push(piece)

    try:
        turn = gather(state, question, show, None if thoughts is None else thoughts.push)
    finally:
        if thoughts is not None:
            thoughts.close()
        writer.close()
    conclude(turn, renderer)
    return turn


def answer_quietly(state: ReplState, question: str) -> Turn:
    """Answer without showing anything but progress, for --json."""
    return gather(state, question, lambda piece: None)


def conclude(turn: Turn, renderer: Renderer) -> None:
    """What stands below an answer: marks, sources, timing."""
    if turn.finish_reason == "cancelled":
        renderer.note("[stopped: this answer is not complete]")
    elif turn.only_thought:
        renderer.note("[the model was still thinking when it was cut: /think off, /set max-tokens N, or a larger --ctx]")
    elif turn.finish_reason == "length":
        renderer.note("[cut at the token limit: /set max-tokens N, or a larger --ctx]")
    if turn.unknown:
        numbers = ", ".join(f"[{number}]" for number in turn.unknown)
        renderer.note(f"The answer cites {numbers}, which {'is' if len(turn.unknown) == 1 else 'are'} not among the sources.")
    if turn.matched:
        numbers = ", ".join(f"[{number}]" for number in turn.matched)
        renderer.note(f"Put by comparing words, where the model cited nothing or a source that shares nothing: {numbers}.")
    for remark in turn.notes:
        renderer.note(remark)
    shown = [source for source in turn.sources if source.number in turn.cited]
    if turn.uncited:
        renderer.note("The answer cites no source, so nothing in it is checked. The model was given:")
        shown = list(turn.sources)
    if shown:
        renderer.sources(shown)
    if turn.stats is not None:
        renderer.note(stats_line(turn.stats))


def excerpt(text: str) -> str:
    """The beginning of a passage on one line, without the heading that is shown beside it."""
    body = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return one_line(body if body.strip() else text, EXCERPT)


def search(state: ReplState, query: str, renderer: Renderer, limit: int = 8) -> None:
    """Show what the searches find, without any language model."""
    sources = from_hits(state.knowledge_base.search(query, limit=limit, scope=state.services.scope(state.scope)))
    state.found, state.found_for = sources, query
    if not sources:
        renderer.say(f"nothing found{f' under {state.scope}' if state.scope else ''}")
        return
    for source in sources:
        renderer.sources([source])
        renderer.say("    " + excerpt(source.text))
