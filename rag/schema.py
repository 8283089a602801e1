"""The knowledge base's tables, as numbered migrations.

In:  an open SQLite connection in autocommit mode
Out: the same, with the newest schema; PRAGMA user_version is the number of migrations applied

A migration, once released, is never edited: a new one is added.
"""

import sqlite3

from .errors import KnowledgeBaseError
from .text_index import TOKENIZER

_TABLES = (
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    # AUTOINCREMENT: ids are never used twice, so an id that is gone from here is gone from a vector index as well.
    """CREATE TABLE documents (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        path TEXT NOT NULL UNIQUE,
        collection TEXT NOT NULL,
        kind TEXT NOT NULL,
        title TEXT NOT NULL,
        sha256 TEXT NOT NULL,
        encoding TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        modified_s REAL NOT NULL,
        ingested_s REAL NOT NULL,
        chunker TEXT NOT NULL
    )""",
    "CREATE INDEX documents_sha256 ON documents (sha256)",
    """CREATE TABLE chunks (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        document_id INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        start INTEGER NOT NULL,
        end INTEGER NOT NULL,
        line INTEGER NOT NULL,
        n_tok INTEGER NOT NULL,
        heading_path TEXT NOT NULL,
        text TEXT NOT NULL,
        passage_hash BLOB NOT NULL
    )""",
    "CREATE UNIQUE INDEX chunks_document ON chunks (document_id, position)",
    "CREATE INDEX chunks_passage_hash ON chunks (passage_hash)",
    # float16, dimension x 2 bytes
    "CREATE TABLE vectors (chunk_id INTEGER PRIMARY KEY REFERENCES chunks (id) ON DELETE CASCADE, vector BLOB NOT NULL)",
    # Contentless: the tokens can always be made again from chunks.text, which is also how a row is taken out.
    f'CREATE VIRTUAL TABLE chunks_fts USING fts5(heading, body, content=\'\', tokenize="{TOKENIZER}")',
)


def _m001_tables(connection: sqlite3.Connection) -> None:
    for statement in _TABLES:
        connection.execute(statement)


MIGRATIONS = (_m001_tables,)


def schema_version(connection: sqlite3.Connection) -> int:
    """How many migrations a database has seen; 0 for an empty file."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the schema to the newest version, all or nothing.

    Raises KnowledgeBaseError when a newer colibri wrote the file.
    """
    if schema_version(connection) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Read again under the lock: another process may have migrated meanwhile.
        version = schema_version(connection)
        if version > len(MIGRATIONS):
            raise KnowledgeBaseError(
                f"the knowledge base has schema version {version}, this colibri knows up to {len(MIGRATIONS)}: use the newer colibri"
            )
        for migration in MIGRATIONS[version:]:
            migration(connection)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
