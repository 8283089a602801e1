"""The offline knowledge base: documents in, hits and cited answers out.

    discover -> documents -> chunker -> embedder -> store (SQLite) + vector_index (FAISS)
    question -> retriever -> prompt -> answer

    with KnowledgeBase.open(folder, embedder) as kb:
        kb.ingest(["notes/"])
        hits = kb.search("How is the cache sized?")
"""

from .answer import AnswerEvent, AnswerResult, Citation, DoneEvent, PrefillEvent, ReasoningEvent, RetrievalStats, RetrievedEvent, TextEvent
from .chunker import ChunkConfig
from .discover import SkippedFile
from .documents import Document, read_document
from .embedder import Embedder, EncoderEmbedder
from .errors import DocumentError, EmbedderMismatchError, IngestError, KnowledgeBaseError, ScopeError
from .ingest import IngestProgress, IngestReport
from .knowledge_base import KnowledgeBase
from .relevance import Relevance
from .retriever import Hit
from .scope import Scope
from .store import ChunkRecord, DocumentRecord, StoreStats

__all__ = [
    "AnswerEvent", "AnswerResult", "ChunkConfig", "ChunkRecord", "Citation", "Document", "DocumentError", "DocumentRecord", "DoneEvent",
    "Embedder", "EmbedderMismatchError", "EncoderEmbedder", "Hit", "IngestError", "IngestProgress", "IngestReport", "KnowledgeBase",
    "KnowledgeBaseError", "PrefillEvent", "ReasoningEvent", "Relevance", "RetrievalStats", "RetrievedEvent", "Scope", "ScopeError",
    "SkippedFile", "StoreStats", "TextEvent", "read_document",
]  # fmt: skip
