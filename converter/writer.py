"""Write the weight files of a plan into a working folder beside the output, resumable file by file.

In:  Plan, output path
Out: finished files with their sizes and checksums; a file either is complete under its name or is not there
"""

import errno
import hashlib
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from libcolibri.errors import ColibriError, DiskSpaceError, FormatError, SourceError
from libcolibri.format import DENSE_NAME, FORMAT_VERSION, MANIFEST_NAME, FileEntry, parse_manifest

from .plan import ExpertLayer, Plan
from .quantize import convert_rows, row_ranges, vector_values

STATE_NAME = "conversion.json"
PENDING = 4  # pieces in flight: enough for every thread, few enough for memory
FULL_DRIVE = (errno.ENOSPC, errno.EDQUOT)

Advance = Callable[[int], None]
Buffer = bytes | np.ndarray


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A weight file that is complete. crc32 has a checksum per expert, none for dense.safetensors."""

    bytes: int
    sha256: str
    crc32: tuple[str, ...] = ()

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.bytes, self.sha256)


class WorkFolder:
    """The hidden sibling of the output in which a model comes into being.

    It keeps what is finished of an interrupted conversion of the same source with the same options; anything else in it is deleted.
    """

    def __init__(self, output: Path, identity: str):
        self.path = output.with_name(f".{output.name}.converting")
        self.identity = f"{FORMAT_VERSION} {identity}"
        self.finished: dict[str, FinishedFile] = {}

    def finished_before(self) -> dict[str, FinishedFile]:
        """Files that an earlier attempt has left complete. Changes nothing on the drive."""
        try:
            state = json.loads((self.path / STATE_NAME).read_text(encoding="utf-8"))
            files = {name: FinishedFile(f["bytes"], f["sha256"], tuple(f["crc32"])) for name, f in state["files"].items()}
            same = state["identity"] == self.identity
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}  # no earlier attempt, or one that died while writing its notes: start over
        if not same:
            return {}
        return {name: file for name, file in files.items() if _has_size(self.path / name, file.bytes)}

    def open(self) -> None:
        """Create the folder, or clear out what cannot be used again."""
        self.finished = self.finished_before()
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in self.path.iterdir():
            if entry.name not in self.finished:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self._note()

    def add(self, name: str, pieces: Iterable[Buffer], advance: Advance) -> None:
        """Write a file piece by piece and note it as finished once it is on the drive."""
        unfinished, digest, size = self.path / f"{name}.partial", hashlib.sha256(), 0
        with unfinished.open("wb") as file:
            for piece in pieces:
                view = memoryview(piece).cast("B")  # type: ignore[arg-type]
                file.write(view)
                digest.update(view)
                size += len(view)
                advance(len(view))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path / name)
        self.finished[name] = FinishedFile(size, digest.hexdigest())

    def add_experts(self, layer: ExpertLayer, pool: Executor, advance: Advance) -> None:
        """Write an expert file, with a checksum for every expert."""
        sums: list[str] = []
        self.add(layer.file, expert_pieces(layer, pool, sums), advance)
        self.finished[layer.file] = FinishedFile(self.finished[layer.file].bytes, self.finished[layer.file].sha256, tuple(sums))
        self._note()

    def add_dense(self, plan: Plan, pool: Executor, advance: Advance) -> None:
        """Write dense.safetensors."""
        self.add(DENSE_NAME, dense_pieces(plan, pool), advance)
        self._note()

    def _note(self) -> None:
        """Record what is finished; replaced in one step, so that a crash leaves the old notes or the new ones."""
        text = json.dumps({"identity": self.identity, "files": {name: asdict(file) for name, file in self.finished.items()}})
        unfinished = self.path / f"{STATE_NAME}.partial"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self.path / STATE_NAME)

    def publish(self, output: Path) -> None:
        """Move the complete model to its place; an older model there disappears only after that."""
        (self.path / STATE_NAME).unlink()
        if not output.exists():
            self.path.rename(output)
            return
        old = output.with_name(f".{output.name}.replaced")
        if old.exists():
            shutil.rmtree(old)
        output.rename(old)
        try:
            self.path.rename(output)
        except BaseException:
            old.rename(output)
            raise
        shutil.rmtree(old)

    def drop_partial(self) -> None:
        """Delete the file that was being written when something went wrong; finished ones stay for the next attempt."""
        for path in self.path.glob("*.partial"):
            path.unlink()


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def in_order(pool: Executor, tasks: Iterable[Callable[[], np.ndarray]]) -> Iterator[np.ndarray]:
    """Results of the tasks in their order, computed on the pool, at most PENDING ahead."""
    pending: deque[Future[np.ndarray]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(task))
            if len(pending) >= PENDING:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def dense_pieces(plan: Plan, pool: Executor) -> Iterator[Buffer]:
    """The bytes of dense.safetensors, header first."""

    def tasks() -> Iterator[Callable[[], np.ndarray]]:
        for tensor in plan.dense:
            if len(tensor.entry.shape) == 1:
                yield partial(vector_values, tensor.name, tensor.source)
                continue
            for first, stop in row_ranges(*tensor.entry.shape):
                yield partial(convert_rows, tensor.name, tensor.source, tensor.entry.type, first, stop)

    yield plan.dense_header
    yield from in_order(pool, tasks())


def expert_pieces(layer: ExpertLayer, pool: Executor, sums: list[str]) -> Iterator[Buffer]:
    """The bytes of an expert file, header first; `sums` collects the crc32 of every expert."""

    def expert_bytes(expert: int) -> np.ndarray:
        out = np.zeros(layer.expert_bytes, np.uint8)
        for name, part in layer.parts.items():
            source = layer.matrices[expert][name]
            what = f"layer {layer.layer}, expert {expert}, {name}"
            at = part.offset
            for first, stop in row_ranges(*part.shape):
                tiles = convert_rows(what, source, part.type, first, stop).reshape(-1)
                out[at : at + len(tiles)] = tiles
                at += len(tiles)
        return out

    yield layer.header
    for piece in in_order(pool, (partial(expert_bytes, e) for e in range(len(layer.matrices)))):
        sums.append(f"{zlib.crc32(piece.data):08x}")
        yield piece


def check_output(output: Path, force: bool) -> None:
    """SourceError unless `output` may be written: absent, empty, or a colibri model and `force`."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise SourceError(f"{output}: is no folder: choose another --output")
    if not output.exists() or not any(output.iterdir()):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise SourceError(f"{output}: is not empty and no colibri model: nothing in it is touched, choose another --output")
    if not force:
        raise SourceError(f"{output}: holds a model already: choose another --output, or replace it with --force")
    if foreign := _foreign_files(output):
        raise SourceError(f"{output}: {foreign[0]!r} in it is no part of the model, so --force deletes nothing: choose another --output")


def _foreign_files(output: Path) -> list[str]:
    """Files that a model directory would not have; unknown when its manifest cannot be read."""
    try:
        known = set(parse_manifest((output / MANIFEST_NAME).read_bytes(), str(output)).files)
    except FormatError:
        return []  # a damaged or newer model is what --force is for
    return sorted(entry.name for entry in output.iterdir() if entry.name not in known and entry.name != MANIFEST_NAME)


def readable_os_error(error: OSError, work: Path) -> ColibriError:
    """An OSError while writing, in one line."""
    if error.errno in FULL_DRIVE:
        return DiskSpaceError(f"the drive of {work} is full: free some space and run the same command again, it goes on where it stopped")
    return SourceError(f"{error.filename or work}: {error.strerror or error}: check drive and permissions, then run the same command again")
