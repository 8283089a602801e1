"""The encoder as an embedder."""

import numpy as np
from colibri_rag import EncoderEmbedder
from colibri_rag.relevance import E5, PLAIN


class FakeEncoder:
    dimension, max_tok, fingerprint = 2, 512, "abc"

    def __init__(self, query_prefix="query: ", passage_prefix="passage: "):
        self.query_prefix, self.passage_prefix, self.seen = query_prefix, passage_prefix, []

    def embed(self, texts):
        self.seen += texts
        return np.ones((len(texts), 2), dtype=np.float32) / np.sqrt(2)

    def count_tok(self, text):
        return len(text.split()) + 2


def test_prefixes_and_shapes():
    encoder = FakeEncoder()
    embedder = EncoderEmbedder(encoder)
    assert embedder.embed_passages(["a", "b"]).shape == (2, 2) and embedder.embed_query("c").shape == (2,)
    assert encoder.seen == ["passage: a", "passage: b", "query: c"]
    assert embedder.max_tok < 512 and embedder.count_tok("one two") == 4


def test_prefixes_are_part_of_the_fingerprint():
    assert EncoderEmbedder(FakeEncoder()).fingerprint != EncoderEmbedder(FakeEncoder("", "")).fingerprint


def test_relevance_follows_the_family():
    assert EncoderEmbedder(FakeEncoder()).relevance is E5
    assert EncoderEmbedder(FakeEncoder("", "")).relevance is PLAIN
