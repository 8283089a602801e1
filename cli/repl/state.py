"""What the conversation remembers.

In: the engine, session and knowledge base that the command opened.  Out: one object that commands read and change.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..services import Services
from .sources import Source


@dataclass(frozen=True)
class Turn:
    """One question with its answer and what it stands on."""

    question: str
    answer: str
    sources: tuple[Source, ...] = ()
    cited: tuple[int, ...] = ()  # source numbers the answer cites and that exist
    unknown: tuple[int, ...] = ()  # numbers it cites that do not exist
    matched: tuple[int, ...] = ()  # numbers put by comparing words, not by the model
    uncited: bool = False  # answered from documents, but citing none
    in_documents: bool = True  # False: the documents do not say
    finish_reason: str | None = None
    stats: Any = None  # GenerationStats, None when the model was not asked
    notes: tuple[str, ...] = ()  # such as sources that did not fit
    only_thought: bool = False  # it ended before the answer began


@dataclass
class ReplState:
    """The conversation: what is open, what was said, what is set."""

    services: Services
    engine: Any = None  # None: no chat model, searching only
    session: Any = None
    knowledge_base: Any = None  # None: chat without documents
    encoder: Any = None
    model: Path | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    max_tokens: int | None = None
    thinking: str | None = None  # a setting of the chat template; None: its default, and off for answers from documents
    show_reasoning: bool | None = None  # None: on a terminal only
    scope: str | None = None  # only documents under this path
    turns: list[Turn] = field(default_factory=list)
    found: tuple[Source, ...] = ()  # what /open and /why refer to: the last answer's or search's sources
    found_for: str = ""  # the question or query behind `found`
    running: bool = True

    @property
    def last(self) -> Turn | None:
        return self.turns[-1] if self.turns else None

    def history(self) -> list[dict[str, str]]:
        """Earlier turns as messages; an answer that was never begun is left out with its question."""
        pairs = [(turn.question, turn.answer) for turn in self.turns if turn.answer]
        return [message for question, answer in pairs for message in (_message("user", question), _message("assistant", answer))]

    def template_options(self) -> dict[str, Any]:
        """The chat template's variables for the setting of thinking. Raises TemplateError when it knows no such setting."""
        template = self.engine.chat_template if self.engine is not None else None
        if template is None:
            return {}
        if self.thinking is not None:
            return template.thinking_options(self.thinking)
        if self.knowledge_base is None:
            return {}
        from libcolibri.errors import TemplateError

        try:  # what the documents say needs no long thinking
            return template.thinking_options("off")
        except TemplateError:
            return {}

    def keep(self, turn: Turn) -> None:
        """Add a finished turn."""
        self.turns.append(turn)
        self.found, self.found_for = turn.sources, turn.question

    def open_knowledge_base(self, folder: Path, embedder: Path) -> None:
        """Open the documents and the embedder they were ingested with."""
        self.encoder = self.services.open_encoder(embedder)
        self.encoder.name = embedder.name  # what messages about the knowledge base call it
        self.knowledge_base = self.services.open_knowledge_base(folder, self.encoder)

    def open_model(self, path: Path, on_progress: Callable[[str, int, int], None] | None = None) -> None:
        """Load the chat model and begin a session on it. Pins and mirror belong to the model that was opened first."""
        other = self.model not in (None, path)
        options = {name: value for name, value in self.engine_options.items() if not (other and name in ("pin", "mirror"))}
        self.engine = self.services.open_engine(path, on_progress=on_progress, **options)
        self.session = self.engine.new_session()
        self.model = path

    def close(self) -> None:
        """Close what is open, the engine last."""
        for resource in (self.knowledge_base, self.encoder, self.engine):
            if resource is not None:
                resource.close()
        self.engine = self.session = self.knowledge_base = self.encoder = None


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
