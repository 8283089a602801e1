"""(layer, expert) -> the expert's bytes on disk. No policy: who wants which expert, and where it goes, is the cache's business.

In:  a model directory, targets of exactly expert_bytes each
Out: filled targets; ExpertReadError naming file, layer and expert
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .errors import ExpertReadError
from .file_reader import FileReader, ParallelReader, ReadRequest, Reads, WrongBytesError
from .format import Manifest, expert_offsets

READ_THREADS = 4


class ExpertStore:
    """The expert files of one model, kept open.

    drop_page_cache   go around the system's page cache, or ask it to forget its copy after each read: set when the files do not fit into
                      memory beside the cache, where a second copy of what was just read would only push out something needed
    verify            compare every expert that is read with its checksum in the manifest. Without it, that is done for files that were
                      written to since they were opened, so that a model that is replaced while it runs cannot make up tokens

    One caller at a time (the engine's forward lock sees to it); several threads read in parallel.
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
        self._reader = ParallelReader(threads)
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

    def start(self, layer: int, expert_ids: Sequence[int], targets: Sequence[np.ndarray], *, urgent: bool = True) -> "Reading":
        """Begin to fill targets[i] (uint8 (expert_bytes,), aligned to 4096) with expert expert_ids[i] of `layer`, all in parallel."""
        file = self._files[layer]
        requests = [self._request(file, layer, expert, target) for expert, target in zip(expert_ids, targets, strict=True)]
        return Reading(self, file, requests, self._reader.start(requests))

    def read(self, layer: int, expert_ids: Sequence[int], targets: Sequence[np.ndarray]) -> None:
        """`start`, and wait for it."""
        self.start(layer, expert_ids, targets).wait()

    def _finish(self, file: FileReader, requests: list[ReadRequest], reads: Reads) -> None:
        failed = self._failures(file, requests, reads)
        if failed:
            again = [request for request, _ in failed]
            self._forget(file, again)  # or the same bytes might be answered from memory
            failed = self._failures(file, again, self._reader.start(again))
        for request, error in failed:
            raise ExpertReadError(_failure_text(file, request, error)) from error
        if self.drop_page_cache and not file.direct:
            self._forget(file, requests)

    def _failures(self, file: FileReader, requests: list[ReadRequest], reads: Reads) -> list[tuple[ReadRequest, OSError]]:
        """Wait; the requests that could not be read, or whose bytes are wrong."""
        failed = reads.wait()
        if self._verify or file.changed:
            bad = {id(request) for request, _ in failed}
            failed += self._reader.check([request for request in requests if id(request) not in bad])
        return failed

    def _request(self, file: FileReader, layer: int, expert: int, target: np.ndarray) -> ReadRequest:
        if target.nbytes != self.expert_bytes[layer]:
            raise ValueError(f"a target of {target.nbytes} bytes for an expert of {self.expert_bytes[layer]}")
        return ReadRequest(file, self._offsets[layer][expert], target, f"layer {layer} expert {expert}", self._sums[layer][expert])

    def _forget(self, file: FileReader, requests: Iterable[ReadRequest]) -> None:
        for request in requests:
            file.drop_cached(request.offset, request.target.nbytes)

    def close(self) -> None:
        """Wait for reads in flight and close the files."""
        self._reader.close()
        for file in self._files.values():
            file.close()


class Reading:
    """Reads in flight; their targets belong to them until `wait` has returned or raised ExpertReadError."""

    def __init__(self, store: ExpertStore, file: FileReader, requests: list[ReadRequest], reads: Reads):
        self._store, self._file, self._requests, self._reads = store, file, requests, reads

    def is_done(self) -> bool:
        """Whether `wait` need not wait."""
        return self._reads.is_done()

    def promote(self) -> None:
        """Somebody waits for it now."""

    def wait(self) -> None:
        """Return when all is read. A read that fails is tried once more, since a drive's or a network share's hiccup often passes.

        Raises ExpertReadError; then the targets' contents are undefined.
        """
        self._store._finish(self._file, self._requests, self._reads)


def _failure_text(file: FileReader, request: ReadRequest, error: OSError) -> str:
    if file.changed:
        advice = "the file was changed while the model was open: copy or convert the model again, then open it anew"
    elif isinstance(error, WrongBytesError):
        advice = "`colibri verify` reads the whole model: test the drive and the memory, then copy or convert the model again"
    else:
        advice = "check the drive, then copy or convert the model again"
    verb = "has wrong bytes" if isinstance(error, WrongBytesError) else "cannot be read"
    return f"{file.path}: {request.name} {verb} ({error}), tried twice; {advice}"
