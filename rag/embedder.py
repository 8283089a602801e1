"""Texts to vectors: what retrieval needs of an embedding model.

In:  passages and queries as text
Out: float32 vectors of length 1; a fingerprint that changes when vectors would
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .relevance import E5, PLAIN, Relevance


class Embedder(Protocol):
    """An embedding model. Passages and queries may be embedded differently."""

    @property
    def dimension(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Stable between runs; equal only when vectors are comparable."""
        ...

    @property
    def name(self) -> str:
        """What a user knows it by, for messages; says nothing about its vectors."""
        ...

    @property
    def max_tok(self) -> int:
        """Longest input in tokens, prefixes included."""
        ...

    @property
    def relevance(self) -> Relevance:
        """What its cosines mean."""
        ...

    def count_tok(self, text: str) -> int: ...

    def embed_passages(self, passages: Sequence[str]) -> np.ndarray:
        """(len(passages), dimension) float32, rows of length 1."""
        ...

    def embed_query(self, query: str) -> np.ndarray:
        """(dimension,) float32 of length 1."""
        ...


class TextEncoder(Protocol):
    """What is used of libcolibri.encoder.Encoder."""

    dimension: int
    max_tok: int
    fingerprint: str
    query_prefix: str
    passage_prefix: str

    def embed(self, texts: list[str]) -> np.ndarray: ...

    def count_tok(self, text: str) -> int: ...


class EncoderEmbedder:
    """An Embedder over colibri's own encoder, with the prefixes its model was trained with.

    name : of the model, for messages; None takes the encoder's own `name`, if whoever opened it gave it one, else its fingerprint
    """

    def __init__(self, encoder: TextEncoder, name: str | None = None):
        self._encoder = encoder
        self.name: str = name or getattr(encoder, "name", None) or encoder.fingerprint
        # Special tokens and the prefix take room in every input.
        self._overhead_tok = encoder.count_tok(max(encoder.query_prefix, encoder.passage_prefix, key=len)) + 4

    @property
    def dimension(self) -> int:
        return self._encoder.dimension

    @property
    def fingerprint(self) -> str:
        return f"{self._encoder.fingerprint}|{self._encoder.query_prefix}|{self._encoder.passage_prefix}"

    @property
    def max_tok(self) -> int:
        return max(self._encoder.max_tok - self._overhead_tok, 8)

    @property
    def relevance(self) -> Relevance:
        """The e5 family, told by its prefix, puts all cosines between 0.7 and 1; plain sentence encoders do not."""
        return E5 if self._encoder.query_prefix.startswith("query:") else PLAIN

    def count_tok(self, text: str) -> int:
        return self._encoder.count_tok(text)

    def embed_passages(self, passages: Sequence[str]) -> np.ndarray:
        return np.asarray(self._encoder.embed([self._encoder.passage_prefix + passage for passage in passages]), dtype=np.float32)

    def embed_query(self, query: str) -> np.ndarray:
        return np.asarray(self._encoder.embed([self._encoder.query_prefix + query])[0], dtype=np.float32)
