"""Files under the paths a user gave.

In:  paths of files and folders
Out: files to read in a stable order; what is not read, with the reason

Symbolic links are followed, each folder once, so that loops end; not those to folders outside the path given.
Hidden files and folders are left out.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

from .documents import kind_of


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A path that was not read, and why."""

    path: str
    reason: str


@dataclass
class Discovery:
    """Result of a walk.

    files : absolute paths, sorted
    skipped : documents and folders that should have been readable but are not
    ignored : what is no document by its type (images, programs, pipes), the same file by another name, links that lead outside
    roots : the given paths, absolute
    unlisted : folders that could not be listed; nothing is known about what is below them
    missing : given paths that do not exist
    """

    files: list[str] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)
    ignored: list[SkippedFile] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class _Walk:
    def __init__(self) -> None:
        self.found = Discovery()
        self.seen: dict[tuple[int, int], str] = {}

    def visit(self, path: str, *, named: bool) -> None:
        """Take one file, or queue a folder's content; `named` files are read whatever their type."""
        pending = [(path, named)]
        root = os.path.realpath(path)
        while pending:
            path, named = pending.pop()
            try:
                facts = os.stat(path)
            except OSError as error:
                self.found.skipped.append(SkippedFile(path, f"cannot be read: {error.strerror or error}"))
                continue
            if stat.S_ISDIR(facts.st_mode) and not named and _leads_outside(path, root):
                self.found.ignored.append(SkippedFile(path, "is a link to a folder outside the path given: give that folder itself"))
            elif stat.S_ISDIR(facts.st_mode):
                pending.extend((child, False) for child in self._children(path, facts))
            else:
                self._file(path, facts, named)

    def _children(self, path: str, facts: os.stat_result) -> list[str]:
        if self._known(path, facts):
            return []
        try:
            names = sorted(os.listdir(path), reverse=True)  # popped from the end
        except OSError as error:
            self.found.skipped.append(SkippedFile(path, f"folder cannot be listed: {error.strerror or error}"))
            self.found.unlisted.append(path)
            return []
        return [os.path.join(path, name) for name in names if not name.startswith(".")]

    def _file(self, path: str, facts: os.stat_result, named: bool) -> None:
        if not stat.S_ISREG(facts.st_mode):
            self.found.ignored.append(SkippedFile(path, "is no regular file"))
        elif kind_of(path) is None and not named:
            self.found.ignored.append(SkippedFile(path, f"type {os.path.splitext(path)[1]} is not supported"))
        elif not _is_utf8(path):
            self.found.skipped.append(SkippedFile(path, "its name is not valid UTF-8; rename it"))
        elif other := self._known(path, facts):
            if other != path:
                self.found.ignored.append(SkippedFile(path, f"is the same file as {other!r}"))
        else:
            self.found.files.append(path)

    def _known(self, path: str, facts: os.stat_result) -> str | None:
        """The path under which this file or folder was met before. Some file systems have no inode numbers (0)."""
        if not facts.st_ino:
            return None
        key = (facts.st_dev, facts.st_ino)
        if key in self.seen:
            return self.seen[key]
        self.seen[key] = path
        return None


def discover(paths: Sequence[str]) -> Discovery:
    """Walk files and folders. Nothing is opened but folders."""
    walk = _Walk()
    for path in paths:
        root = os.path.abspath(os.fspath(path))
        walk.found.roots.append(root)
        if os.path.lexists(root):
            walk.visit(root, named=True)
        else:
            walk.found.missing.append(root)
    walk.found.files.sort()
    return walk.found


def is_under(path: str, root: str) -> bool:
    """Whether a path is `root` or inside it."""
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _leads_outside(path: str, root: str) -> bool:
    """Whether a path is a link to something that is not below `root` (both ends resolved)."""
    return os.path.islink(path) and not is_under(os.path.realpath(path), root)


def _is_utf8(path: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in path)
