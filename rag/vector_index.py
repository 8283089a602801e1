"""Nearest vectors by FAISS: a cache beside the store that can always be made again.

In:  Store
Out: (chunk id, cosine) of the nearest chunks; kb.faiss, read only when it matches the store

The file is one JSON line (generation, count, fingerprint, checksum) and then FAISS's own bytes. FAISS never opens the file
itself: its file functions fail on non-ASCII paths on some systems, and it must not see bytes whose checksum is wrong.
"""

import hashlib
import json
import os
import tempfile
import threading
from typing import Any

import numpy as np

from .errors import KnowledgeBaseError
from .store import Store

FILE_VERSION = 1
_FETCH_ROWS = 20_000  # vectors turned to float32 at once while building


def load_faiss() -> Any:
    """The faiss module, limited to one OpenMP thread: a flat search is bound by memory, and two thread pools fight."""
    try:
        import faiss
    except ImportError as error:
        raise KnowledgeBaseError("vector search needs faiss: python3 -m pip install faiss-cpu") from error
    faiss.omp_set_num_threads(1)
    return faiss


class VectorIndex:
    """Inner product over rows of length 1, exact. Usable from several threads."""

    def __init__(self, store: Store, path: str):
        self._store = store
        self._path = path
        self._lock = threading.Lock()
        self._index: Any = None
        self._ids = np.empty(0, dtype=np.int64)  # ascending, what the index holds
        self._generation = -1
        self.rebuilt_because: str | None = None  # why the file could not be used at the last opening, for reports

    def search(self, query: np.ndarray, limit: int, allowed_ids: np.ndarray | None = None) -> list[tuple[int, float]]:
        """(chunk id, cosine) best first, among `allowed_ids` if given.

        query : (dimension,) float32 of length 1
        """
        with self._lock:
            self._refresh()
            if not len(self._ids) or (allowed_ids is not None and not len(allowed_ids)):
                return []
            faiss = load_faiss()
            parameters = None if allowed_ids is None else faiss.SearchParameters(sel=faiss.IDSelectorBatch(allowed_ids))
            rows = np.ascontiguousarray(query, dtype=np.float32)[None, :]  # (1, dimension)
            cosines, ids = self._index.search(rows, min(limit, len(self._ids)), params=parameters)
        return [(int(chunk_id), float(cosine)) for chunk_id, cosine in zip(ids[0], cosines[0], strict=True) if chunk_id >= 0]

    def __len__(self) -> int:
        with self._lock:
            self._refresh()
            return len(self._ids)

    def save(self) -> None:
        """Write the cache file for the store's present state, unless it already holds it."""
        with self._lock:
            self._refresh()
            if _read_header(self._path) == self._facts():
                return
            payload = load_faiss().serialize_index(self._index).tobytes()
            header = self._facts() | {"blake2b": _digest(payload)}
            _write_atomically(self._path, json.dumps(header).encode() + b"\n" + payload)

    def _facts(self) -> dict[str, object]:
        return {
            "colibri_vectors": FILE_VERSION,
            "generation": self._generation,
            "count": len(self._ids),
            "fingerprint": self._store.embedder_fingerprint,
            "dimension": self._store.dimension,
        }

    def _refresh(self) -> None:
        """Follow the store: chunk ids are never used twice and vectors never change, so ids say all."""
        if self._index is not None and self._store.generation == self._generation:
            return
        generation, ids = self._store.vector_ids()
        if self._index is None:
            self._open(generation, ids)
        gone = np.setdiff1d(self._ids, ids, assume_unique=True)
        new = np.setdiff1d(ids, self._ids, assume_unique=True)
        if len(gone):
            self._index.remove_ids(gone)
        for start in range(0, len(new), _FETCH_ROWS):
            part = new[start : start + _FETCH_ROWS]
            known = self._store.vectors(part.tolist())
            # Documents removed by another process since the ids were read are absent here; the next refresh sees it.
            part = np.array([chunk_id for chunk_id in part.tolist() if chunk_id in known], dtype=np.int64)
            if len(part):
                self._index.add_with_ids(np.stack([known[chunk_id] for chunk_id in part.tolist()]), part)
        load_ids = load_faiss().vector_to_array(self._index.id_map)
        self._ids = np.sort(load_ids.astype(np.int64))
        self._generation = generation if len(self._ids) == len(ids) else -1

    def _open(self, generation: int, ids: np.ndarray) -> None:
        """Take the file when it matches the store, else begin with an empty index (filled by _refresh)."""
        faiss = load_faiss()
        self._generation, self._ids = generation, ids
        index, self.rebuilt_because = self._read_file(faiss)
        if index is None:
            index = faiss.IndexIDMap2(faiss.IndexFlatIP(self._store.dimension))
        self._index = index
        self._ids = np.sort(faiss.vector_to_array(index.id_map).astype(np.int64))

    def _read_file(self, faiss: Any) -> tuple[Any, str | None]:
        """(index, None), or (None, why the file is not used)."""
        try:
            with open(self._path, "rb") as file:
                first, payload = file.readline(4096), file.read()
            header = json.loads(first)
        except FileNotFoundError:
            return None, "there was no file"
        except (OSError, ValueError) as error:
            return None, f"the file cannot be read: {error}"
        digest = header.pop("blake2b", None) if isinstance(header, dict) else None
        if header != self._facts():
            return None, "the file is of another state of the documents"
        if digest != _digest(payload):
            return None, "the file is damaged"
        index = faiss.deserialize_index(np.frombuffer(payload, dtype=np.uint8))
        return index, None


def _digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def _read_header(path: str) -> dict[str, object] | None:
    """A cache file's facts without the checksum; None when there are none."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.readline(4096))
    except (OSError, ValueError):  # no file or a damaged one: it will be written
        return None
    if isinstance(header, dict):
        header.pop("blake2b", None)
    return header


def _write_atomically(path: str, data: bytes) -> None:
    """A reader sees the old file or the new one, never a part; a power cut leaves one of them."""
    folder = os.path.dirname(path)
    descriptor, temporary = tempfile.mkstemp(prefix=os.path.basename(path) + ".", suffix=".tmp", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if hasattr(os, "O_DIRECTORY"):  # Windows cannot sync a folder
        folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder_descriptor)
        finally:
            os.close(folder_descriptor)
