"""The knowledge base's single source of truth: one SQLite file.

In:  documents, chunks and their vectors, one transaction per document
Out: records, full-text ranks, vectors; a generation counter that changes with every write

Write-ahead logging lets other processes read while one ingests. A Store may be used from several threads; each call is atomic.
"""

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import sqlite_utils

from .chunker import Chunk, passage_text
from .documents import Document
from .errors import EmbedderMismatchError, KnowledgeBaseError
from .schema import migrate, schema_version
from .scope import Scope
from .text_index import TEXT_INDEX_FINGERPRINT, index_text, match_expression

BUSY_TIMEOUT_MS = 30_000  # longer than any single document's transaction
_SQL_VARIABLES = 900  # SQLite builds of old allow 999
HEADING_WEIGHT = 1.5  # of a term in a heading against one in the text, for bm25


@dataclass(frozen=True, slots=True)
class DocumentRecord:
    """A document as the knowledge base knows it."""

    id: int
    path: str
    collection: str
    kind: str
    title: str
    sha256: str
    encoding: str
    size_bytes: int
    modified_s: float
    ingested_s: float
    chunker: str
    n_chunks: int


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk as the knowledge base knows it; start and end are offsets in the document's cleaned text."""

    id: int
    document_id: int
    position: int
    start: int
    end: int
    line: int
    n_tok: int
    heading_path: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts of everything."""

    n_documents: int
    n_chunks: int
    n_vectors: int
    size_bytes: int
    generation: int


def passage_hash(passage: str) -> bytes:
    """Identifies what was embedded, so that an unchanged chunk of a changed document keeps its vector."""
    return hashlib.blake2b(passage.encode("utf-8"), digest_size=16).digest()


class Store:
    """Documents, chunks, vectors and full-text index in `path`."""

    def __init__(self, path: str, connection: sqlite3.Connection):
        self.path = path
        self._db = sqlite_utils.Database(connection)
        self._connection = connection
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: str, *, create: bool) -> "Store":
        """Open the file, making it and its tables when `create` is true.

        Raises KnowledgeBaseError when it does not exist, is no knowledge base, or is locked or damaged.
        """
        if not create and not os.path.exists(path):
            raise KnowledgeBaseError(f"{path!r} does not exist: ingest some documents first")
        try:
            # Autocommit: transactions are begun and ended here and nowhere else.
            connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise KnowledgeBaseError(f"{path!r} cannot be opened: {error}") from error
        try:
            cls._prepare(connection, path)
            store = cls(path, connection)
            store._renew_text_index()
            return store
        except sqlite3.Error as error:
            connection.close()
            raise KnowledgeBaseError(f"{path!r} cannot be used as a knowledge base: {error}") from error
        except BaseException:
            connection.close()
            raise

    @staticmethod
    def _prepare(connection: sqlite3.Connection, path: str) -> None:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA foreign_keys = ON")
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if schema_version(connection) == 0 and tables:
            raise KnowledgeBaseError(f"{path!r} is a SQLite file of something else, not a knowledge base")
        connection.execute("PRAGMA journal_mode = WAL")
        # In WAL a kill loses nothing; a power cut can lose the last documents but never damages the file.
        connection.execute("PRAGMA synchronous = NORMAL")
        migrate(connection)
        connection.execute("CREATE VIRTUAL TABLE IF NOT EXISTS temp.chunk_terms USING fts5vocab(main, chunks_fts, row)")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def discard_if_unused(self) -> None:
        """Close, and delete the file if no document was ever written to it and nobody else has it open."""
        with self._lock:
            unused = False
            try:
                if self.generation == 0:
                    self._connection.execute("PRAGMA busy_timeout = 0")
                    # Leaving write-ahead logging succeeds for the only user of a file.
                    unused = self._connection.execute("PRAGMA journal_mode = DELETE").fetchone()[0] == "delete"
            except sqlite3.OperationalError:
                unused = False  # in use by another process, so it stays
            finally:
                self.close()
            if unused:
                os.unlink(self.path)

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """All or nothing. IMMEDIATE takes the write lock at once; DEFERRED gives several reads one snapshot."""
        with self._lock:
            try:
                self._connection.execute(f"BEGIN {kind}")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException as error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise KnowledgeBaseError(f"{self.path!r}: {error}") from error
                raise

    def _rows(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple]:
        with self._lock:
            try:
                return self._connection.execute(sql, parameters).fetchall()
            except sqlite3.Error as error:
                raise KnowledgeBaseError(f"{self.path!r}: {error}") from error

    # ---- facts: generation, fingerprints

    def fact(self, name: str) -> str | None:
        rows = self._rows("SELECT value FROM facts WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    @property
    def generation(self) -> int:
        """Changes whenever documents do, in whatever process."""
        return int(self.fact("generation") or 0)

    @property
    def embedder_fingerprint(self) -> str:
        return self.fact("embedder") or ""

    @property
    def dimension(self) -> int:
        return int(self.fact("dimension") or 0)

    def name_embedder(self, name: str) -> None:
        """Remember what users call the embedder, for messages, unless it has a name."""
        if self.fact("embedder_name") is None:
            with self._transaction() as connection:
                _set_fact(connection, "embedder_name", name)

    def bind_embedder(self, fingerprint: str, dimension: int, name: str) -> None:
        """Remember the embedder of a new knowledge base; refuse any other afterwards. `name` is for the message alone.

        Raises EmbedderMismatchError.
        """
        if self.embedder_fingerprint == fingerprint and self.dimension == dimension:
            return  # without the write lock: a reader need not wait for whoever ingests
        with self._transaction() as connection:
            known = self.fact("embedder")
            if known is None:
                _set_fact(connection, "embedder", fingerprint)
                _set_fact(connection, "dimension", str(dimension))
            elif known != fingerprint or self.dimension != dimension:
                first, second = self.fact("embedder_name") or known, name
                if first == second:  # two versions of one model
                    first, second = f"{first} {known[:8]}", f"{second} {fingerprint[:8]}"
                raise EmbedderMismatchError(
                    f"{self.path!r} was made with embedder {first!r} ({self.dimension} dimensions), now {second!r} "
                    f"({dimension} dimensions) is in use: open it with the first, or ingest the documents into a new folder"
                )

    def _renew_text_index(self) -> None:
        """Index all chunks again when the tokeniser has changed since they were."""
        if self.fact("text_index") == TEXT_INDEX_FINGERPRINT:
            return
        with self._transaction() as connection:
            if self.fact("text_index") is not None:
                connection.execute("INSERT INTO chunks_fts (chunks_fts) VALUES ('delete-all')")
                rows = connection.execute("SELECT id, heading_path, text FROM chunks")
                connection.executemany(
                    "INSERT INTO chunks_fts (rowid, heading, body) VALUES (?, ?, ?)",
                    ((chunk_id, *_index_columns(json.loads(path), text)) for chunk_id, path, text in rows.fetchall()),
                )
            _set_fact(connection, "text_index", TEXT_INDEX_FINGERPRINT)

    # ---- writing

    def put_document(
        self, document: Document, chunks: Sequence[Chunk], vectors: np.ndarray | None, *, collection: str, chunker: str
    ) -> int:
        """Write one document with its chunks, vectors and index entries, in place of an earlier one of the same path.

        Parameters
        ----------
        vectors : (len(chunks), dimension) float32, rows of length 1; None in a knowledge base without an embedder

        Returns the document's id. One transaction: after a kill either all of it is there or nothing.
        """
        with self._transaction() as connection:
            old = connection.execute("SELECT id FROM documents WHERE path = ?", (document.path,)).fetchone()
            if old:
                _delete_document(connection, old[0])
            row = (document.path, collection, document.kind, document.title, document.sha256, document.encoding, document.size_bytes)
            cursor = connection.execute(
                "INSERT INTO documents (path, collection, kind, title, sha256, encoding, size_bytes, modified_s, ingested_s, chunker) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*row, document.modified_s, time.time(), chunker),
            )
            document_id = int(cursor.lastrowid or 0)
            for position, chunk in enumerate(chunks):
                vector = None if vectors is None else vectors[position]
                _insert_chunk(connection, document_id, position, chunk, document.title, vector)
            _next_generation(connection)
        return document_id

    def move_document(self, document_id: int, path: str, title: str, modified_s: float, collection: str) -> None:
        """The same content under another path: chunks and vectors stay."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE documents SET path = ?, title = ?, modified_s = ?, collection = ? WHERE id = ?",
                (path, title, modified_s, collection, document_id),
            )
            _next_generation(connection)

    def remove_document(self, document_id: int) -> None:
        with self._transaction() as connection:
            _delete_document(connection, document_id)
            _next_generation(connection)

    # ---- reading

    def documents(self, scope: Scope | None = None) -> list[DocumentRecord]:
        """Documents by path."""
        condition, parameters = (scope or Scope()).condition()
        rows = self._rows(
            "SELECT id, path, collection, kind, title, sha256, encoding, size_bytes, modified_s, ingested_s, chunker, "
            "(SELECT count(*) FROM chunks WHERE document_id = documents.id) "
            f"FROM documents WHERE {condition} ORDER BY path",
            parameters,
        )
        return [DocumentRecord(*row) for row in rows]

    def chunks(self, chunk_ids: Sequence[int]) -> dict[int, ChunkRecord]:
        """Chunks by id; ids that are gone are left out."""
        found: dict[int, ChunkRecord] = {}
        for marks, part in _batches(chunk_ids):
            rows = self._rows(
                f"SELECT id, document_id, position, start, end, line, n_tok, heading_path, text FROM chunks WHERE id IN ({marks})", part
            )
            for row in rows:
                found[row[0]] = _chunk_record(row)
        return found

    def documents_by_id(self, document_ids: Sequence[int]) -> dict[int, DocumentRecord]:
        found: dict[int, DocumentRecord] = {}
        for marks, part in _batches(document_ids):
            rows = self._rows(
                "SELECT id, path, collection, kind, title, sha256, encoding, size_bytes, modified_s, ingested_s, chunker, "
                f"(SELECT count(*) FROM chunks WHERE document_id = documents.id) FROM documents WHERE id IN ({marks})",
                part,
            )
            found.update({row[0]: DocumentRecord(*row) for row in rows})
        return found

    def lexical_search(self, tokens: Sequence[str], limit: int, scope: Scope | None = None) -> list[tuple[int, float]]:
        """(chunk id, bm25) best first; a higher score is better. The scope is part of the search."""
        expression = match_expression(tokens)
        if not expression:
            return []
        sql = f"SELECT rowid, -bm25(chunks_fts, {HEADING_WEIGHT}, 1.0) AS score FROM chunks_fts WHERE chunks_fts MATCH ?"
        parameters: list[object] = [expression]
        if scope is not None and not scope.is_empty:
            condition, more = scope.condition()
            sql += f" AND rowid IN (SELECT chunks.id FROM chunks JOIN documents ON documents.id = document_id WHERE {condition})"
            parameters += more
        return self._rows(sql + " ORDER BY score DESC, rowid LIMIT ?", [*parameters, limit])

    def document_frequencies(self, tokens: Sequence[str]) -> dict[str, int]:
        """In how many chunks each token occurs; absent ones are left out."""
        found: dict[str, int] = {}
        for marks, part in _batches(tokens):
            found.update(self._rows(f"SELECT term, doc FROM temp.chunk_terms WHERE term IN ({marks})", part))
        return found

    def chunk_ids(self, scope: Scope) -> np.ndarray:
        """int64 ids of the chunks in a scope."""
        condition, parameters = scope.condition()
        rows = self._rows(f"SELECT chunks.id FROM chunks JOIN documents ON documents.id = document_id WHERE {condition}", parameters)
        return np.array([row[0] for row in rows], dtype=np.int64)

    def n_chunks(self) -> int:
        return int(self._rows("SELECT count(*) FROM chunks")[0][0])

    def vectors(self, chunk_ids: Sequence[int]) -> dict[int, np.ndarray]:
        """(dimension,) float32 vectors by chunk id."""
        found: dict[int, np.ndarray] = {}
        for marks, part in _batches(chunk_ids):
            rows = self._rows(f"SELECT chunk_id, vector FROM vectors WHERE chunk_id IN ({marks})", part)
            found.update({chunk_id: _vector(blob) for chunk_id, blob in rows})
        return found

    def vectors_by_passage(self, hashes: Sequence[bytes]) -> dict[bytes, np.ndarray]:
        """Vectors already known for passages, by their hash."""
        found: dict[bytes, np.ndarray] = {}
        for marks, part in _batches(hashes):
            rows = self._rows(
                f"SELECT passage_hash, vector FROM chunks JOIN vectors ON chunk_id = chunks.id WHERE passage_hash IN ({marks})", part
            )
            found.update({digest: _vector(blob) for digest, blob in rows})
        return found

    def vector_ids(self) -> tuple[int, np.ndarray]:
        """(generation, int64 ids of all vectors in ascending order), both of one moment."""
        with self._transaction("DEFERRED"):
            generation = self.generation
            ids = self._rows("SELECT chunk_id FROM vectors ORDER BY chunk_id")
        return generation, np.array([row[0] for row in ids], dtype=np.int64)

    def stats(self) -> StoreStats:
        with self._transaction("DEFERRED"):
            tables = ("documents", "chunks", "vectors")
            documents, chunks, vectors = (int(self._rows(f"SELECT count(*) FROM {table}")[0][0]) for table in tables)
            size_bytes = self._rows("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")[0][0]
            return StoreStats(documents, chunks, vectors, int(size_bytes), self.generation)


def _chunk_record(row: tuple) -> ChunkRecord:
    chunk_id, document_id, position, start, end, line, n_tok, path, text = row
    return ChunkRecord(chunk_id, document_id, position, start, end, line, n_tok, tuple(json.loads(path)), text)


def _vector(blob: bytes) -> np.ndarray:
    return np.frombuffer(blob, dtype="<f2").astype(np.float32)


def _batches(values: Sequence) -> Iterator[tuple[str, list]]:
    """(question marks, values) in parts that SQLite accepts as variables."""
    for start in range(0, len(values), _SQL_VARIABLES):
        part = list(values[start : start + _SQL_VARIABLES])
        yield ",".join("?" * len(part)), part


def _set_fact(connection: sqlite3.Connection, name: str, value: str) -> None:
    connection.execute("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", (name, value))


def _next_generation(connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO facts (name, value) VALUES ('generation', '1') ON CONFLICT (name) DO UPDATE SET value = CAST(value AS INTEGER) + 1"
    )


def _index_columns(heading_path: Sequence[str], text: str) -> tuple[str, str]:
    return index_text(" ".join(heading_path)), index_text(text)


def _insert_chunk(
    connection: sqlite3.Connection, document_id: int, position: int, chunk: Chunk, title: str, vector: np.ndarray | None
) -> None:
    digest = passage_hash(passage_text(title, chunk.heading_path, chunk.text))
    path = json.dumps(chunk.heading_path, ensure_ascii=False)
    cursor = connection.execute(
        "INSERT INTO chunks (document_id, position, start, end, line, n_tok, heading_path, text, passage_hash) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (document_id, position, chunk.start, chunk.end, chunk.line, chunk.n_tok, path, chunk.text, digest),
    )
    chunk_id = cursor.lastrowid
    columns = _index_columns(chunk.heading_path, chunk.text)
    connection.execute("INSERT INTO chunks_fts (rowid, heading, body) VALUES (?, ?, ?)", (chunk_id, *columns))
    if vector is not None:
        blob = np.ascontiguousarray(vector, dtype="<f2").tobytes()
        connection.execute("INSERT INTO vectors (chunk_id, vector) VALUES (?, ?)", (chunk_id, blob))


def _delete_document(connection: sqlite3.Connection, document_id: int) -> None:
    # A contentless index forgets a row only when told exactly what it was given.
    rows = connection.execute("SELECT id, heading_path, text FROM chunks WHERE document_id = ?", (document_id,)).fetchall()
    for chunk_id, path, text in rows:
        columns = _index_columns(json.loads(path), text)
        connection.execute("INSERT INTO chunks_fts (chunks_fts, rowid, heading, body) VALUES ('delete', ?, ?, ?)", (chunk_id, *columns))
    connection.execute("DELETE FROM documents WHERE id = ?", (document_id,))
