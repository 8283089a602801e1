"""Which documents a search looks at.

In:  what the user restricts a search to
Out: an SQL condition on the documents table, applied inside both searches
"""

import os
from dataclasses import dataclass

from .errors import ScopeError

_KINDS = ("text", "markdown", "html", "code")


@dataclass(frozen=True, slots=True)
class Scope:
    """Restrictions that all hold; None restricts nothing.

    path_prefix : a file or folder; a folder means everything under it
    collection : the name given at ingest
    kind : "text", "markdown", "html" or "code"
    modified_after_s, modified_before_s : file modification time, seconds since 1970
    """

    path_prefix: str | None = None
    collection: str | None = None
    kind: str | None = None
    modified_after_s: float | None = None
    modified_before_s: float | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in _KINDS:
            raise ScopeError(f"document type {self.kind!r} does not exist: choose one of {', '.join(_KINDS)}")

    @property
    def is_empty(self) -> bool:
        return self == Scope()

    def condition(self) -> tuple[str, list[object]]:
        """(SQL condition over documents, its parameters)."""
        clauses: list[str] = []
        parameters: list[object] = []
        if self.path_prefix is not None:
            path = os.path.abspath(self.path_prefix)
            folder = path.rstrip(os.sep) + os.sep
            # Compared by substr, not LIKE: file names contain % and _ too.
            clauses.append("(documents.path = ? OR substr(documents.path, 1, ?) = ?)")
            parameters += [path, len(folder), folder]
        for column, value in (("collection", self.collection), ("kind", self.kind)):
            if value is not None:
                clauses.append(f"documents.{column} = ?")
                parameters.append(value)
        if self.modified_after_s is not None:
            clauses.append("documents.modified_s >= ?")
            parameters.append(self.modified_after_s)
        if self.modified_before_s is not None:
            clauses.append("documents.modified_s < ?")
            parameters.append(self.modified_before_s)
        return " AND ".join(clauses) or "1", parameters
