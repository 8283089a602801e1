"""(layer, expert) -> the expert's bytes on disk. No policy: who wants which expert, and where it goes, is the cache's business.

In:  a model directory, targets of exactly expert_bytes each
Out: filled targets; ExpertReadError naming file, layer and expert
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .drive import Drive
from .errors import ExpertReadError
from .file_reader import FileReader, WrongBytesError
from .format import Manifest, expert_offsets
from .parallel_reader import READ_THREADS, ParallelReader, ReadRequest, Reads


class ExpertStore:
    """The expert files of one model, kept open.

    drop_page_cache   go around the system's page cache, or ask it to forget its copy after each read: set when the files do not fit into
                      memory beside the cache, where a second copy of what was just read would only push out something needed
    verify            compare every expert that is read with its checksum in the manifest. Without it, that is done for files that were
                      written to since they were opened, so that a model that is replaced while it runs cannot make up tokens

    Any thread may call any method but `close`; several threads read in parallel.
    """

    def __init__(
        self, model_dir: Path, manifest: Manifest, *, drop_page_cache: bool = False, verify: bool = False, threads: int = READ_THREADS
    ):  # fmt: skip
        self.drop_page_cache, self._verify = drop_page_cache, verify
        self.expert_bytes = {layer: entry.expert_bytes for layer, entry in sorted(manifest.experts.items())}
        self.num_experts = {layer: entry.num_experts for layer, entry in sorted(manifest.experts.items())}
        self._sums = {layer: entry.crc32 for layer, entry in manifest.experts.items()}
        self._offsets = {layer: expert_offsets(model_dir, manifest, layer) for layer in self.expert_bytes}
        self._files: dict[int, FileReader] = {}
        self._reader = ParallelReader([Drive(str(model_dir), threads)])
        try:
            for layer in self.expert_bytes:
                self._files[layer] = FileReader(model_dir / manifest.experts[layer].file, direct=drop_page_cache)
        except OSError as error:
            self.close()
            raise ExpertReadError(
                f"{error.filename}: the expert file of a layer cannot be opened ({error.strerror}); copy it again"
            ) from error

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(self.expert_bytes[layer] * self.num_experts[layer] for layer in self.expert_bytes)

    @property
    def reading_s(self) -> float:
        """Seconds so far in which at least one read was under way."""
        return self._reader.together.busy_s

    @property
    def best_bytes_s(self) -> float:
        """The most bytes/s that the reads themselves have reached (`Drive.best`); 0 before the first."""
        return self._reader.together.best

    def start(self, layer: int, expert_ids: Sequence[int], targets: Sequence[np.ndarray], urgent: bool = True) -> "Reading":
        """Begin to fill targets[i] (uint8 (expert_bytes,), aligned to 4096) with expert expert_ids[i] of `layer`, all in parallel.

        urgent   somebody waits for them. What is not urgent is read only while nothing urgent waits for the drive, and becomes urgent
                 with `Reading.promote` or `Reading.wait`.

        Any number of readings may be under way. Every one must be waited for, once, before its targets are used for anything else.
        """
        file = self._files[layer]
        requests = [self._request(file, layer, expert, target) for expert, target in zip(expert_ids, targets, strict=True)]
        return Reading(self, requests, self._reader.start(requests, urgent))

    def read(self, layer: int, expert_ids: Sequence[int], targets: Sequence[np.ndarray]) -> None:
        """`start`, and wait for it."""
        self.start(layer, expert_ids, targets).wait()

    def _request(self, file: FileReader, layer: int, expert: int, target: np.ndarray) -> ReadRequest:
        if target.nbytes != self.expert_bytes[layer]:
            raise ValueError(f"a target of {target.nbytes} bytes for an expert of {self.expert_bytes[layer]}")
        return ReadRequest((file,), self._offsets[layer][expert], target, f"layer {layer} expert {expert}", self._sums[layer][expert])

    def finish(self, requests: list[ReadRequest], reads: Reads) -> None:
        """The rest of `Reading.wait`."""
        failed = reads.wait()
        bad = {id(request) for request, _ in failed}
        failed += self._wrong([request for request in requests if id(request) not in bad])
        for request, error in failed:
            raise ExpertReadError(_failure_text(request, error)) from error
        if self.drop_page_cache:
            self._forget(request for request in requests if not _files(request)[0].direct)

    def _wrong(self, requests: list[ReadRequest]) -> list[tuple[ReadRequest, OSError]]:
        """Those that have wrong bytes, even when they are read once more; nothing where nobody wants to know."""
        if not self._verify:
            requests = [request for request in requests if any(file.changed for file in _files(request))]
        wrong = self._reader.check(requests)
        if not wrong:
            return []
        again = [request for request, _ in wrong]
        self._forget(again)  # or the same bytes might be answered from memory
        failed = self._reader.read(again)
        bad = {id(request) for request, _ in failed}
        return failed + self._reader.check([request for request in again if id(request) not in bad])

    def _forget(self, requests: Iterable[ReadRequest]) -> None:
        for request in requests:
            for file in _files(request):
                file.drop_cached(request.offset, request.target.nbytes)

    def close(self) -> None:
        """Wait for reads in flight and close the files; readings that have not begun fail."""
        self._reader.close()
        for file in self._files.values():
            file.close()


class Reading:
    """Experts on their way from the drive; made by `ExpertStore.start`."""

    def __init__(self, store: ExpertStore, requests: list[ReadRequest], reads: Reads):
        self._store, self._requests, self._reads = store, requests, reads

    def promote(self) -> None:
        """Make it urgent: somebody will wait for it now."""
        self._reads.promote()

    def is_done(self) -> bool:
        """Whether nothing is left to read. Does not block."""
        return self._reads.is_done()

    def wait(self) -> None:
        """Return when all targets are filled; makes it urgent. No read is in flight after it.

        Raises ExpertReadError when an expert cannot be read, or is wrong, even at a second attempt; then the targets' contents are
        undefined.
        """
        self._store.finish(self._requests, self._reads)


def _files(request: ReadRequest) -> list[FileReader]:
    return [file for file in request.files if file is not None]


def _failure_text(request: ReadRequest, error: OSError) -> str:
    file = _files(request)[0]
    if file.changed:
        advice = "the file was changed while the model was open: copy or convert the model again, then open it anew"
    elif isinstance(error, WrongBytesError):
        advice = "`colibri verify` reads the whole model: test the drive and the memory, then copy or convert the model again"
    else:
        advice = "check the drive, then copy or convert the model again"
    verb = "has wrong bytes" if isinstance(error, WrongBytesError) else "cannot be read"
    return f"{file.path}: {request.name} {verb} ({error}), tried twice; {advice}"
