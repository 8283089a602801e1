"""What can go wrong with a knowledge base, one class per subject."""

from libcolibri.errors import ColibriError


class DocumentError(ColibriError):
    """A file cannot be read as a document; `reason` is the same without the path."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"{path!r}: {reason}")
        self.path, self.reason = path, reason


class IngestError(ColibriError):
    """There is nothing to ingest, or what was given cannot be walked."""


class KnowledgeBaseError(ColibriError):
    """The knowledge base's folder is missing, damaged, in use, or of another version."""


class EmbedderMismatchError(KnowledgeBaseError):
    """The knowledge base was made with another embedder: its vectors cannot be compared."""


class ScopeError(ColibriError):
    """A search was restricted to something that does not exist or is malformed."""
