"""The knowledge base as a program uses it: ingest, search, ask.

In:  a folder, an embedder, paths of documents, questions
Out: reports, hits, and answers whose citations were checked
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from libcolibri.errors import ConfigError

from .answer import AnswerEvent, AnswerSession, RetrievedEvent, refuse, stream_answer
from .chunker import ChunkConfig
from .embedder import Embedder
from .errors import KnowledgeBaseError
from .ingest import Ingest, IngestReport, OnProgress
from .prompt import Message, build_prompt, question_language
from .relevance import Relevance, is_answerable, is_wide, shares_words
from .retriever import Hit, Retriever
from .scope import Scope
from .store import DocumentRecord, Store, StoreStats
from .vector_index import VectorIndex

DATABASE_NAME = "kb.sqlite"
INDEX_NAME = "kb.faiss"
IN_MEMORY = ":memory:"  # SQLite's own name for it
NO_EMBEDDER = "none"
DEFAULT_ANSWER_TOK = 512
DEFAULT_SOURCES = 3  # for 13 of 13 answerable questions the best three held the document with the answer; each more costs time


class KnowledgeBase:
    """Documents that can be searched and asked, in one folder. Made by `open`; usable from several threads."""

    def __init__(self, folder: str, store: Store, embedder: Embedder | None, chunks: ChunkConfig, relevance: Relevance):
        self.folder = folder
        self._store = store
        self._embedder = embedder
        self._chunks = chunks
        self._relevance = relevance
        self._index = VectorIndex(store, os.path.join(folder, INDEX_NAME)) if embedder else None
        self._retriever = Retriever(store, self._index, embedder)
        self._made = self._made_folder = False  # by this opening: then closing takes away what was never used

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        embedder: Embedder | None,
        *,
        create: bool = True,
        chunks: ChunkConfig | None = None,
        relevance: Relevance | None = None,
    ) -> "KnowledgeBase":
        """Open or make the knowledge base in `folder`.

        Parameters
        ----------
        folder : ":memory:" for one that is gone when it is closed, such as to find out what an ingest would do
        embedder : the model its vectors are made with, always the same one; None for full-text search alone
        create : make it when it does not exist; if it is closed without having got a document nothing is left behind
        chunks : how documents are cut; another setting cuts them again at the next ingest
        relevance : when a question counts as answerable; None takes what was measured for the embedder

        Raises KnowledgeBaseError, and EmbedderMismatchError when it was made with another embedder.
        """
        in_memory = os.fspath(folder) == IN_MEMORY
        folder = IN_MEMORY if in_memory else os.path.abspath(os.fspath(folder))
        made = create and not in_memory and not os.path.exists(os.path.join(folder, DATABASE_NAME))
        made_folder = made and not os.path.exists(folder)
        if create and not in_memory:
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise KnowledgeBaseError(f"{folder!r} cannot be made: {error.strerror or error}") from error
        store = Store.open(IN_MEMORY if in_memory else os.path.join(folder, DATABASE_NAME), create=create or in_memory)
        try:
            if embedder is None:
                store.bind_embedder(NO_EMBEDDER, 0, NO_EMBEDDER)
            else:
                store.bind_embedder(embedder.fingerprint, embedder.dimension, embedder.name)
            relevance = relevance or (embedder.relevance if embedder else Relevance())
            base = cls(folder, store, embedder, chunks or ChunkConfig(), relevance)
            base._made, base._made_folder = made, made_folder
            return base
        except BaseException:
            store.close()
            raise

    def __enter__(self) -> "KnowledgeBase":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Everything written is already committed; a knowledge base made here that got no document is deleted."""
        if not self._made:
            self._store.close()
            return
        self._made = False
        self._store.discard_if_unused()
        if self._made_folder and not os.listdir(self.folder):
            os.rmdir(self.folder)

    def ingest(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        on_progress: OnProgress | None = None,
        dry_run: bool = False,
        remove_missing: bool = True,
        collection: str = "default",
        cancel: threading.Event | None = None,
    ) -> IngestReport:
        """Bring the knowledge base in step with files and folders.

        Parameters
        ----------
        on_progress : called with IngestProgress, often
        dry_run : find out what would be done, by reading the documents, and write nothing
        remove_missing : take out documents under `paths` whose files are gone (a moved file keeps its chunks)
        collection : a name by which searches can be restricted
        cancel : when set, stop after the present batch; what is committed stays

        Each document is committed on its own: a run that was killed goes on where it stopped. Files that cannot be read are
        reported in `skipped`; an earlier version of such a file stays. Raises IngestError when there is nothing to ingest or a
        path does not exist.
        """
        run = Ingest(self._store, self._embedder, self._chunks, collection=collection, on_progress=on_progress, cancel=cancel)
        report = run.run([os.fspath(path) for path in paths], dry_run=dry_run, remove_missing=remove_missing)
        if not dry_run and self._store.generation:
            self._store.name_embedder(self._embedder.name if self._embedder else NO_EMBEDDER)
            self._save_index()
        return report

    def search(self, query: str, limit: int = 8, scope: Scope | None = None) -> list[Hit]:
        """At most `limit` chunks for a query, best first. Needs no language model."""
        return self._retriever.search(query, limit, scope)

    def relevant(self, question: str, hits: Sequence[Hit]) -> list[Hit]:
        """Those hits of a question that may hold its answer; none means that the documents do not have it."""
        wide = is_wide(question)
        shared = shares_words(question, ((hit.chunk.text, hit.coverage) for hit in hits), self._relevance)
        return [
            hit
            for hit in hits
            if (shared or is_wide(hit.chunk.text) != wide)
            and is_answerable(question, hit.chunk.text, hit.cosine, hit.coverage, self._relevance)
        ]

    def ask(
        self,
        session: AnswerSession,
        question: str,
        *,
        history: Sequence[Message] = (),
        sampling: Any = None,
        max_tokens: int = DEFAULT_ANSWER_TOK,
        limit: int = DEFAULT_SOURCES,
        scope: Scope | None = None,
        cancel: threading.Event | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Iterator[AnswerEvent]:
        """Answer a question from the documents, as a stream of events that ends with DoneEvent.

        Parameters
        ----------
        session : libcolibri's Session; its engine's tokenizer counts, its context length is the budget
        history : earlier {"role", "content"} messages, oldest first
        sampling : SamplingParams; None is greedy
        max_tokens : longest answer
        limit : most sources given to the model
        template_options : variables of the chat template, such as a switch for thinking

        When the search finds nothing relevant the model is not asked. Raises ContextLengthError when the question does not fit,
        ConfigError when the model has no tokenizer, KnowledgeBaseError when there are no documents at all.
        """
        tokenizer = session.engine.tokenizer
        if tokenizer is None:
            raise ConfigError("the answering model has no tokenizer: convert it again with its tokenizer file")
        started_s = time.perf_counter()
        hits = tuple(self.search(question, limit, scope))
        if not hits and not self._store.n_chunks():
            raise KnowledgeBaseError(f"the knowledge base in {self.folder!r} is empty: ingest some documents first")
        answerable = bool(self.relevant(question, hits))
        search_s = time.perf_counter() - started_s
        yield RetrievedEvent(hits, answerable)
        if not answerable:
            yield from refuse(question_language(question), hits, started_s)
            return
        budget_tok = session.engine.context_length - max_tokens
        prompt = build_prompt(question, hits, history, lambda text: len(tokenizer.encode(text)), budget_tok)
        yield from stream_answer(
            session,
            prompt,
            question=question,
            sampling=sampling,
            max_tokens=max_tokens,
            cancel=cancel,
            template_options=template_options,
            search_s=search_s,
            n_hits=len(hits),
        )

    def documents(self, scope: Scope | None = None) -> list[DocumentRecord]:
        """All documents, by path."""
        return self._store.documents(scope)

    def remove(self, path: str | os.PathLike[str]) -> list[str]:
        """Take out a document, or every document under a folder; returns their paths. The files themselves are not touched."""
        records = self._store.documents(Scope(path_prefix=os.fspath(path)))
        if not records:
            raise KnowledgeBaseError(f"{os.fspath(path)!r} is not in the knowledge base: its documents are listed by `documents`")
        for record in records:
            self._store.remove_document(record.id)
        self._save_index()
        return [record.path for record in records]

    def _save_index(self) -> None:
        if self._index is not None and self.folder != IN_MEMORY:
            self._index.save()

    def stats(self) -> StoreStats:
        """Counts of documents, chunks and vectors, the file's size and the generation."""
        return self._store.stats()
