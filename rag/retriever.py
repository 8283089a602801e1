"""Questions to chunks: full-text and vector search, fused.

In:  question, scope
Out: Hits in order, each with the ranks and scores of every stage
Reciprocal rank fusion (Cormack, Clarke, Buettcher 2009): score = sum over searches of weight / (60 + rank).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .embedder import Embedder
from .scope import Scope
from .store import ChunkRecord, DocumentRecord, Store
from .text_index import index_tokens, is_cjk, query_tokens
from .vector_index import VectorIndex

RRF_K = 60
CANDIDATES = 50  # of each search
# Of full-text search against vector search. On 120 questions of the Debian FAQ with multilingual-e5-small, MRR (English, Chinese,
# Chinese questions on English text) was 0.58, 0.59, 0.46 with weight 1 and 0.61, 0.62, 0.48 with 0.3; vectors alone 0.60, 0.61,
# 0.49. Words that vectors blur, identifiers and rare names, keep weight 1.
LEXICAL_WEIGHT = 0.3
RARE_SHARE = 0.001  # of all chunks: a word in no more of them is a name
DUPLICATE_JACCARD = 0.85  # shared share of the tokens of two chunks that makes the lower one a repetition


_IDENTIFIER = re.compile(r"[_@]|^-|::|[a-z][0-9]|[0-9][a-z]|\+\+|\w\.\w")


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that was found, and why.

    score : fused; comparable within one search only
    lexical_rank, vector_rank : from 1; None when that search did not return it
    bm25 : higher is better; None as above
    cosine : of question and chunk, known for every hit when there is an embedder
    coverage : 0 to 1, the share of the question's words that the chunk holds, rare words counting more
    repeated_in : (document path, line) of near copies that were left out in favour of this one
    """

    document: DocumentRecord
    chunk: ChunkRecord
    score: float
    lexical_rank: int | None
    bm25: float | None
    vector_rank: int | None
    cosine: float | None
    coverage: float
    repeated_in: tuple[tuple[str, int], ...] = ()


def fuse(rankings: Sequence[Sequence[int]], weights: Sequence[float] = (), k: int = RRF_K) -> dict[int, float]:
    """Reciprocal rank fusion of id lists (of weight 1 unless given), best first; ties by id, so that the order is stable."""
    scores: dict[int, float] = {}
    for ranking, weight in zip(rankings, weights or [1.0] * len(rankings), strict=True):
        for rank, chunk_id in enumerate(ranking, start=1):
            scores[chunk_id] = scores.get(chunk_id, 0.0) + weight / (k + rank)
    return dict(sorted(scores.items(), key=lambda entry: (-entry[1], entry[0])))


class Retriever:
    """Searches one store; index and embedder are None in a knowledge base without vectors."""

    def __init__(self, store: Store, index: VectorIndex | None, embedder: Embedder | None):
        self._store, self._index, self._embedder = store, index, embedder

    def search(self, query: str, limit: int, scope: Scope | None = None) -> list[Hit]:
        """At most `limit` hits, best first, without near copies."""
        if limit < 1 or not query.strip():
            return []
        candidates = max(CANDIDATES, 2 * limit)
        tokens = query_tokens(query)
        lexical = self._store.lexical_search(tokens, candidates, scope)
        nearest, query_vector = self._nearest(query, candidates, scope)
        frequencies, n_chunks = self._store.document_frequencies(tokens), self._store.n_chunks()
        weights = (lexical_weight(tokens, frequencies, n_chunks), 1.0)
        scores = fuse([[chunk_id for chunk_id, _ in lexical], [chunk_id for chunk_id, _ in nearest]], weights)
        hits = self._hits(scores, lexical, nearest, token_weights(tokens, frequencies, n_chunks), query_vector)
        return drop_repetitions(hits, limit)

    def _nearest(self, query: str, limit: int, scope: Scope | None) -> tuple[list[tuple[int, float]], np.ndarray | None]:
        if self._embedder is None or self._index is None:
            return [], None
        vector = self._embedder.embed_query(query)
        allowed = None if scope is None or scope.is_empty else self._store.chunk_ids(scope)
        return self._index.search(vector, limit, allowed), vector

    def _hits(
        self,
        scores: Mapping[int, float],
        lexical: Sequence[tuple[int, float]],
        nearest: Sequence[tuple[int, float]],
        weights: Mapping[str, float],
        query_vector: np.ndarray | None,
    ) -> list[Hit]:
        ids = list(scores)
        chunks = self._store.chunks(ids)
        documents = self._store.documents_by_id(sorted({chunk.document_id for chunk in chunks.values()}))
        lexical_ranks = {chunk_id: (rank, score) for rank, (chunk_id, score) in enumerate(lexical, start=1)}
        vector_ranks = {chunk_id: (rank, cosine) for rank, (chunk_id, cosine) in enumerate(nearest, start=1)}
        vectors = self._store.vectors([i for i in ids if i not in vector_ranks]) if query_vector is not None else {}
        hits = []
        for chunk_id in ids:
            chunk = chunks.get(chunk_id)
            # Another process may have removed a document since it was found.
            if chunk is None or chunk.document_id not in documents:
                continue
            lexical_rank, bm25 = lexical_ranks.get(chunk_id, (None, None))
            vector_rank, cosine = vector_ranks.get(chunk_id, (None, None))
            if cosine is None and query_vector is not None and chunk_id in vectors:
                cosine = float(vectors[chunk_id] @ query_vector)
            coverage = covered_share(weights, chunk)
            document = documents[chunk.document_id]
            hits.append(Hit(document, chunk, scores[chunk_id], lexical_rank, bm25, vector_rank, cosine, coverage))
        return hits


def token_weights(tokens: Sequence[str], frequencies: Mapping[str, int], n_chunks: int) -> dict[str, float]:
    """Inverse document frequency of each token; a word that occurs nowhere weighs most."""
    return {token: math.log(1 + n_chunks / (1 + frequencies.get(token, 0))) for token in tokens}


def lexical_weight(tokens: Sequence[str], frequencies: Mapping[str, int], n_chunks: int) -> float:
    """Weight of full-text search in the fusion: 1 when the question names something by an identifier or a rare word."""
    most = max(1, int(RARE_SHARE * n_chunks))
    for token in tokens:
        frequency = frequencies.get(token, 0)
        if frequency and not is_cjk(token) and (frequency <= most or _IDENTIFIER.search(token)):
            return 1.0
    return LEXICAL_WEIGHT


def covered_share(weights: Mapping[str, float], chunk: ChunkRecord) -> float:
    """Share of the weight of the question's tokens that occur in the chunk or its headings."""
    total = sum(weights.values())
    if not total:
        return 0.0
    present = set(index_tokens(" ".join(chunk.heading_path) + "\n" + chunk.text))
    covered = 0.0
    for token, weight in weights.items():
        if token in present or (len(token) == 1 and not token.isascii() and any(token in other for other in present)):
            covered += weight
    return covered / total


def drop_repetitions(hits: Sequence[Hit], limit: int) -> list[Hit]:
    """The first `limit` hits that are not near copies of a better one; copies are named in its `repeated_in`."""
    kept: list[Hit] = []
    shingles: list[set[str]] = []
    for hit in hits:
        tokens = set(index_tokens(hit.chunk.text))
        twin = next((i for i, other in enumerate(shingles) if _is_repetition(tokens, other, hit, kept[i])), None)
        if twin is not None:
            copy = (hit.document.path, hit.chunk.line)
            kept[twin] = replace(kept[twin], repeated_in=(*kept[twin].repeated_in, copy))
        elif len(kept) < limit:
            kept.append(hit)
            shingles.append(tokens)
    return kept


def _is_repetition(tokens: set[str], other: set[str], hit: Hit, kept: Hit) -> bool:
    if hit.chunk.text == kept.chunk.text:
        return True
    # Short texts share most of their words without saying the same.
    if min(len(tokens), len(other)) < 12:
        return False
    return len(tokens & other) / len(tokens | other) >= DUPLICATE_JACCARD
