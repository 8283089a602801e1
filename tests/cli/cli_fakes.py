"""Stand-ins for the engine and the knowledge base, with queued replies."""

import signal
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from colibri_cli.paths import Home
from colibri_cli.services import Services
from colibri_rag.answer import RetrievedEvent, refuse, stream_answer
from colibri_rag.prompt import Prompt, Source

from libcolibri.errors import TemplateError
from libcolibri.roofline import Roofline
from libcolibri.stats import ExpertStats, GenerationStats, PhaseStats

# Layer 1 is dense. Of the experts that the prompt read ahead, one was not needed.
PROMPT_EXPERTS = ExpertStats(
    hits=3, misses=5, read_bytes=8_000_000_000, prefetched=4, prefetch_used=3, unused_bytes=1_000_000_000, wait_s=3.0, reading_s=4.0,
    capacity_bytes=9_000_000_000, layers=((1, 3), (0, 0), (2, 2)),
)  # fmt: skip
ANSWER_EXPERTS = ExpertStats(hits=15, misses=1, read_bytes=1_000_000, capacity_bytes=9_000_000_000, layers=((8, 0), (0, 0), (7, 1)))
FAKE_STATS = GenerationStats(
    prompt_tok=10,
    reused_tok=4,
    completion_tok=3,
    ttft_s=5.5,
    prefill=PhaseStats(n_tok=6, passes=2, seconds=5.0, computed_bytes=10_000_000_000, experts=PROMPT_EXPERTS),
    decode=PhaseStats(n_tok=2, passes=2, seconds=0.5, computed_bytes=4_000_000_000, experts=ANSWER_EXPERTS),
)
DENSE_STATS = GenerationStats(prompt_tok=1, completion_tok=1, ttft_s=0.5, prefill=PhaseStats(1, 1, 0.4, 2_000_000_000))


@dataclass(frozen=True)
class FakeStep:
    text: str
    token_id: int | None
    finish_reason: str | None = None
    stats: GenerationStats = FAKE_STATS
    reasoning: str = ""


@dataclass(frozen=True)
class FakeSampling:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None


INTERRUPT = object()  # in a reply: the user presses Ctrl-C here


class Thought(str):
    """A piece of a reply that is reasoning."""


class FakeTemplate:
    """A chat template that can be told to think or not."""

    def thinking_options(self, setting: str) -> dict[str, Any]:
        if setting not in ("on", "off"):
            raise TemplateError("this model's chat template knows no effort of thinking")
        return {"enable_thinking": setting == "on"}


class FakeSession:
    """Yields the engine's next reply, a piece at a time; remembers prompts and options."""

    def __init__(self, engine: "FakeEngine"):
        self.engine = engine
        self.tokens: list[int] = []

    def reset(self) -> None:
        self.engine.resets += 1

    def generate(
        self, prompt: Any, sampling: Any = None, *, max_tokens: Any = None, stop: Any = (), cancel: Any = None, template_options: Any = None
    ) -> Any:
        self.engine.template_options.append(template_options)
        self.engine.prompts.append(prompt)
        self.engine.samplings.append((sampling, max_tokens, stop))
        reply = self.engine.replies.popleft()
        yield FakeStep("", None)
        for index, piece in enumerate(reply):
            if piece is INTERRUPT:
                signal.raise_signal(signal.SIGINT)
                continue
            if isinstance(piece, Exception):
                raise piece
            time.sleep(self.engine.delay_s)
            if cancel is not None and cancel.is_set():
                yield FakeStep("", None, "cancelled")
                return
            yield FakeStep("", index + 100, reasoning=str(piece)) if isinstance(piece, Thought) else FakeStep(piece, index + 100)
        yield FakeStep("", None, "cancelled" if cancel is not None and cancel.is_set() else "stop")


TOKENIZER = SimpleNamespace(encode=lambda text: [len(word) for word in text.split()])


class FakeEngine:
    """An engine that says what it was told to say."""

    def __init__(self, *replies: Any, tokenizer: Any = TOKENIZER, delay_s: float = 0.0):
        self.replies = deque([reply] if isinstance(reply, str) else reply for reply in replies)
        self.prompts: list[Any] = []
        self.samplings: list[Any] = []
        self.template_options: list[Any] = []
        self.resets, self.closed, self.delay_s = 0, False, delay_s
        self.tokenizer, self.chat_template, self.context_length = tokenizer, FakeTemplate(), 4096
        self.remarks: tuple[str, ...] = ()
        self.notices: tuple[str, ...] = ()
        self.plan = SimpleNamespace(line=lambda: "plan: 1.0 GB dense, 2.0 GB experts")

    def roofline(self, phase: PhaseStats) -> Roofline:
        return Roofline(phase, drive_bytes_s=2e9, memory_bytes_s=1e10)

    def new_session(self) -> FakeSession:
        return FakeSession(self)

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class FakeServices:
    """What `services()` builds on: keeps what was opened with which options."""

    engine: Any = None
    knowledge_base: Any = None
    longest_context: int = 4096
    opened: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)

    def services(self, home: Path, **replaced: Any) -> Services:
        """Services over the fakes, with a user's folder at `home`."""

        def open_engine(path: Path, on_progress: Any = None, **options: Any) -> Any:
            self.opened.append((path, options))
            if on_progress:
                on_progress("reading weights", 1, 2)
            return self.engine

        tokenizer = None if self.engine is not None and self.engine.tokenizer is None else {"file": "tokenizer.json"}
        base = {
            "sampling": FakeSampling,
            "scope": lambda path: path,
            "open_knowledge_base": lambda folder, embedder, create=False: self.knowledge_base,
            "read_manifest": lambda path: SimpleNamespace(tokenizer=tokenizer),
            "longest_context": lambda manifest: self.longest_context,
        }
        replaced = base | replaced
        return Services(
            open_engine=open_engine,
            open_encoder=lambda path: SimpleNamespace(close=lambda: None),
            home=Home(home),
            **replaced,
        )


def make_home(folder: Path, *, chat: bool = True, embed: bool = True, kb: bool = True) -> Path:
    """A user's folder with default models and a knowledge base, all empty."""
    for name, wanted in (("chat", chat), ("embed", embed)):
        if wanted:
            model = folder / "models" / f"a-{name}-model"
            model.mkdir(parents=True)
            (model / "colibri.json").write_text("{}")
            (folder / "models" / f"default-{name}").write_text(f"{model}\n")
    if kb:
        (folder / "kb" / "default").mkdir(parents=True)
        (folder / "kb" / "default" / "kb.sqlite").write_bytes(b"")
    return folder


def fake_hit(
    path: str, text: str, heading_path: tuple[str, ...] = (), line: int = 1, cosine: float | None = None, copies: Any = ()
) -> SimpleNamespace:
    """A hit of the word search; of the vector search too when it has a cosine."""
    return SimpleNamespace(
        document=SimpleNamespace(path=path, title=path, id=1, kind="text"),
        chunk=SimpleNamespace(text=text, heading_path=heading_path, line=line, id=hash((path, line, text))),
        score=0.03,
        lexical_rank=1,
        bm25=4.5,
        vector_rank=None if cosine is None else 1,
        cosine=cosine,
        coverage=0.5,
        repeated_in=copies,
    )


class FakeKnowledgeBase:
    """Finds the same hits for everything; answers with the session's reply."""

    def __init__(self, *hits: Any, answered: bool = True, report: Any = None):
        self.hits, self.answered, self.report = list(hits), answered, report
        self.asked: list[dict[str, Any]] = []
        self.searched: list[tuple[str, Any]] = []
        self.ingested: list[dict[str, Any]] = []
        self.closed = False

    def search(self, query: str, limit: int = 8, scope: Any = None) -> list[Any]:
        self.searched.append((query, scope))
        return self.hits[:limit]

    def ask(self, session: Any, question: str, *, history: Any = (), **options: Any) -> Any:
        self.asked.append({"question": question, "history": list(history), **options})
        yield RetrievedEvent(tuple(self.hits), self.answered)
        if not self.answered:
            yield from refuse("en", self.hits, 0.0)
            return
        sources = tuple(Source(number, hit) for number, hit in enumerate(self.hits, 1))
        prompt = Prompt([{"role": "user", "content": question}], sources, (), 0, 10, "en")
        yield from stream_answer(
            session,
            prompt,
            question=question,
            sampling=None,
            max_tokens=None,
            cancel=options.get("cancel"),
            template_options=options.get("template_options"),
            search_s=0.1,
            n_hits=len(self.hits),
        )

    def documents(self) -> list[Any]:
        return [hit.document for hit in self.hits]

    def ingest(self, paths: Any, on_progress: Any = None, **options: Any) -> Any:
        self.ingested.append({"paths": paths, **options})
        return self.report

    def close(self) -> None:
        self.closed = True
