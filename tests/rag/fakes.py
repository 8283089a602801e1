"""A deterministic embedder and a session with queued replies, for tests of the knowledge base."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
from colibri_rag.relevance import Relevance
from colibri_rag.text_index import index_tokens


class HashingEmbedder:
    """Bag of hashed tokens: texts that share words are near, nothing else is."""

    relevance = Relevance(cosine=0.35, wide_cosine=0.35, cross_cosine=0.35, slack=0.15, sure_coverage=0.5)

    def __init__(self, dimension=256, name="hashing", max_tok=512):
        self.dimension, self.fingerprint, self.max_tok = dimension, f"{name}-{dimension}", max_tok
        self.name, self.n_embedded = self.fingerprint, 0

    def count_tok(self, text):
        return sum(1 for _ in index_tokens(text)) + sum(not c.isalnum() and not c.isspace() for c in text)

    def _embed(self, text):
        vector = np.full(self.dimension, 1e-6, dtype=np.float32)
        for token in index_tokens(text):
            digest = hashlib.blake2b(token.encode(), digest_size=8).digest()
            vector[int.from_bytes(digest[:4], "little") % self.dimension] += 1 if digest[4] & 1 else -1
        return vector / np.linalg.norm(vector)

    def embed_passages(self, passages):
        self.n_embedded += len(passages)
        return np.stack([self._embed(passage) for passage in passages])

    def embed_query(self, query):
        return self._embed(query)


@dataclass
class FakeStats:
    prompt_tok: int = 0
    completion_tok: int = 0


@dataclass
class FakeStep:
    text: str
    token_id: int | None
    finish_reason: str | None
    stats: FakeStats = field(default_factory=FakeStats)
    reasoning: str = ""


class FakeTokenizer:
    def encode(self, text, *, special=False):
        return [ord(character) for character in text[::3]]


@dataclass
class FakeEngine:
    context_length: int = 4096
    tokenizer: object = field(default_factory=FakeTokenizer)


class FakeSession:
    """Replies with `pieces`, one step each, after one prefill step."""

    def __init__(self, pieces, context_length=4096):
        self.pieces, self.engine, self.prompts = list(pieces), FakeEngine(context_length), []

    def generate(self, prompt, sampling=None, *, max_tokens=None, stop=(), cancel=None, template_options=None):
        self.prompts.append(prompt)
        yield FakeStep("", None, None)
        for number, piece in enumerate(self.pieces, start=1):
            if cancel is not None and cancel.is_set():
                yield FakeStep("", None, "cancelled")
                return
            yield FakeStep(piece, number, None)
        yield FakeStep("", None, "stop")
