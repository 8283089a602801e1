"""Bring the knowledge base in step with folders: added, changed, moved and removed documents, by content.

In:  paths
Out: IngestReport; one committed transaction per document, so a killed run goes on where it stopped
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .chunker import Chunk, ChunkConfig, CountTok, chunk_document
from .discover import Discovery, SkippedFile, discover, is_under
from .documents import SUFFIXES, Document, parse_document, read_file
from .embedder import Embedder
from .errors import DocumentError, IngestError
from .store import DocumentRecord, Store, passage_hash

EMBED_BATCH = 32  # chunks embedded between two progress reports and two looks at `cancel`


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """Where an ingest stands. Totals are of the work that is really to be done, not of all files.

    phase : "compare" (files are read and hashed) or "embed" (new and changed documents are cut and embedded)
    """

    phase: str
    path: str
    done_bytes: int
    total_bytes: int
    done_documents: int
    total_documents: int
    n_chunks: int


@dataclass
class IngestReport:
    """What an ingest did, or in a dry run would do; lists hold paths, `moved` holds (old, new)."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    moved: list[tuple[str, str]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)
    ignored: list[SkippedFile] = field(default_factory=list)
    n_chunks: int = 0
    n_embedded: int = 0  # chunks that went through the embedder; the others' vectors were known
    dry_run: bool = False
    cancelled: bool = False

    @property
    def is_complete(self) -> bool:
        """Nothing that should have been read was left out."""
        return not self.skipped and not self.cancelled


OnProgress = Callable[[IngestProgress], None]


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    sha256: str
    n_bytes: int
    modified_s: float


@dataclass
class _Plan:
    write: list[_File] = field(default_factory=list)
    move: list[tuple[DocumentRecord, _File, str]] = field(default_factory=list)  # with the new title
    remove: list[DocumentRecord] = field(default_factory=list)


class Ingest:
    """One run; see KnowledgeBase.ingest for the parameters."""

    def __init__(
        self,
        store: Store,
        embedder: Embedder | None,
        config: ChunkConfig,
        *,
        collection: str,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
    ):
        self._store, self._embedder, self._collection = store, embedder, collection
        max_tok = min(config.max_tok, embedder.max_tok) if embedder else config.max_tok
        self._config = replace(config, max_tok=max_tok)
        self._count_tok = embedder.count_tok if embedder else count_words
        self._on_progress = on_progress or (lambda progress: None)
        self._cancel = cancel or threading.Event()
        self._report = IngestReport()

    def run(self, paths: Sequence[str], *, dry_run: bool, remove_missing: bool) -> IngestReport:
        found = discover(paths)
        self._report = IngestReport(skipped=found.skipped, ignored=found.ignored, dry_run=dry_run)
        known = {record.path: record for record in self._store.documents() if any(is_under(record.path, root) for root in found.roots)}
        _check_found(found, known)
        files = list(self._hash_files(found.files))
        plan = self._plan(files, found, known, remove_missing and not self._cancel.is_set())
        if dry_run:
            self._try_out(plan)
        else:
            self._apply(plan)
        return self._report

    # ---- what is to be done

    def _hash_files(self, paths: Sequence[str]) -> Iterator[_File]:
        done_bytes = 0
        for index, path in enumerate(paths):
            if self._is_cancelled():
                return
            self._on_progress(IngestProgress("compare", path, done_bytes, 0, index, len(paths), 0))
            try:
                data, modified_s = read_file(path)
            except DocumentError as error:
                self._report.skipped.append(SkippedFile(path, error.reason))
                continue
            done_bytes += len(data)
            yield _File(path, hashlib.sha256(data).hexdigest(), len(data), modified_s)

    def _plan(self, files: list[_File], found: Discovery, known: dict[str, DocumentRecord], remove_missing: bool) -> _Plan:
        plan, report = _Plan(), self._report
        present = {file.path for file in files} | {skipped.path for skipped in report.skipped}
        gone = [
            record
            for path, record in known.items()
            if path not in present and path not in found.files and not any(is_under(path, folder) for folder in found.unlisted)
        ]
        gone_by_hash = {record.sha256: record for record in gone}
        for file in files:
            record = known.get(file.path)
            current = record is not None and record.sha256 == file.sha256 and record.chunker == self._config.fingerprint
            if current and record is not None and record.collection == self._collection:
                report.unchanged.append(file.path)
            elif current and record is not None:
                plan.move.append((record, file, record.title))
                report.changed.append(file.path)
            elif record is not None:
                plan.write.append(file)
                report.changed.append(file.path)
            elif remove_missing and (move := self._moved_from(gone_by_hash, file)):
                plan.move.append(move)
                report.moved.append((move[0].path, file.path))
            else:
                plan.write.append(file)
                report.added.append(file.path)
        if remove_missing:
            moved = {record.id for record, _, _ in plan.move}
            plan.remove = [record for record in gone if record.id not in moved]
            report.removed = [record.path for record in plan.remove]
        return plan

    def _moved_from(self, gone_by_hash: dict[str, DocumentRecord], file: _File) -> tuple[DocumentRecord, _File, str] | None:
        """A document of the same content whose file is gone, with its new title (which may come from the file name)."""
        record = gone_by_hash.get(file.sha256)
        if record is None or record.chunker != self._config.fingerprint:
            return None
        try:
            document = parse_document(file.path, *read_file(file.path))
        except DocumentError:
            return None  # read again, and reported, as an added document
        if document.kind != record.kind or document.sha256 != record.sha256:
            return None
        return gone_by_hash.pop(file.sha256), file, document.title

    def _try_out(self, plan: _Plan) -> None:
        """Read what would be written, so that a dry run names the files that the real one skips."""
        for index, file in enumerate(plan.write):
            if self._is_cancelled():
                return
            self._on_progress(IngestProgress("compare", file.path, 0, 0, index, len(plan.write), 0))
            self._parse(file, count_words)  # whether there is text does not depend on who counts

    # ---- doing it

    def _apply(self, plan: _Plan) -> None:
        for record, file, title in plan.move:
            self._store.move_document(record.id, file.path, title, file.modified_s, self._collection)
        total_bytes = sum(file.n_bytes for file in plan.write)
        done_bytes = 0
        for index, file in enumerate(plan.write):
            if self._is_cancelled():
                break
            progress = IngestProgress("embed", file.path, done_bytes, total_bytes, index, len(plan.write), self._report.n_chunks)
            self._on_progress(progress)
            self._write(file, progress)
            done_bytes += file.n_bytes
        else:
            # Last, so that a document cut out of a removed one finds its vectors still there.
            for record in plan.remove:
                self._store.remove_document(record.id)
            n = len(plan.write)
            self._on_progress(IngestProgress("embed", "", total_bytes, total_bytes, n, n, self._report.n_chunks))
        if self._report.cancelled:
            self._forget_undone(plan)

    def _parse(self, file: _File, count_tok: CountTok) -> tuple[Document, list[Chunk]] | None:
        """A document and its chunks, at least one; None for a file that is skipped."""
        try:
            document = parse_document(file.path, *read_file(file.path))
        except DocumentError as error:
            self._skip(file.path, error.reason)
            return None
        chunks = chunk_document(document, count_tok, self._config)
        if not chunks:
            self._skip(file.path, "contains no text")
            return None
        return document, chunks

    def _write(self, file: _File, progress: IngestProgress) -> None:
        parsed = self._parse(file, self._count_tok)
        if parsed is None:
            return
        document, chunks = parsed
        vectors = self._embed(document, chunks, progress)
        if self._report.cancelled:
            return
        self._store.put_document(document, chunks, vectors, collection=self._collection, chunker=self._config.fingerprint)
        self._report.n_chunks += len(chunks)

    def _embed(self, document: Document, chunks: list[Chunk], progress: IngestProgress) -> np.ndarray | None:
        """(len(chunks), dimension) float32; only passages that are new to the knowledge base are computed."""
        if self._embedder is None:
            return None
        passages = [chunk.with_headings(document.title) for chunk in chunks]
        hashes = [passage_hash(passage) for passage in passages]
        known = self._store.vectors_by_passage(hashes)
        # Texts of like length in one batch waste no padding.
        missing = sorted((i for i in range(len(passages)) if hashes[i] not in known), key=lambda i: len(passages[i]))
        n_characters = sum(len(passages[i]) for i in missing)
        n_done = 0
        for start in range(0, len(missing), EMBED_BATCH):
            if self._is_cancelled():
                return None
            batch = missing[start : start + EMBED_BATCH]
            vectors = self._embedder.embed_passages([passages[i] for i in batch])
            known.update(zip((hashes[i] for i in batch), vectors, strict=True))
            self._report.n_embedded += len(batch)
            n_done += sum(len(passages[i]) for i in batch)  # by length, which is what embedding takes time for
            done = min(progress.done_bytes + int(n_done / n_characters * document.size_bytes), progress.total_bytes)
            self._on_progress(replace(progress, done_bytes=done, n_chunks=progress.n_chunks + start + len(batch)))
        return np.stack([known[digest] for digest in hashes])

    def _skip(self, path: str, reason: str) -> None:
        report = self._report
        report.skipped.append(SkippedFile(path, reason))
        for paths in (report.added, report.changed):
            if path in paths:
                paths.remove(path)

    def _is_cancelled(self) -> bool:
        if self._cancel.is_set():
            self._report.cancelled = True
        return self._report.cancelled

    def _forget_undone(self, plan: _Plan) -> None:
        """After a cancel the report names only what was committed."""
        done = {record.path: record.sha256 for record in self._store.documents()}
        undone = {file.path for file in plan.write if done.get(file.path) != file.sha256}
        self._report.added = [path for path in self._report.added if path not in undone]
        self._report.changed = [path for path in self._report.changed if path not in undone]
        self._report.removed = [path for path in self._report.removed if path not in done]


def _check_found(found: Discovery, known: dict[str, DocumentRecord]) -> None:
    """Refuse what would empty the knowledge base by accident or do nothing at all."""
    for root in found.missing:
        # A document that was deleted is removed; a folder that is gone may be a drive that is not mounted.
        if root not in known:
            hint = "; to take its documents out, remove it by its path" if any(is_under(path, root) for path in known) else ""
            raise IngestError(f"{root!r} does not exist{hint}")
    if not found.files and not found.skipped and not known:
        where = ", ".join(repr(root) for root in found.roots) or "no path"
        types = " ".join(sorted(suffix for suffix in SUFFIXES if suffix))
        raise IngestError(f"no documents in {where} ({len(found.ignored)} other files ignored); supported types: {types}")


def count_words(text: str) -> int:
    """A rough token count for knowledge bases without an embedder: words, and characters of scripts without spaces."""
    wide = sum(character >= "\u2e80" for character in text)
    return len(text.split()) * 4 // 3 + wide
