"""(layer, expert) -> the expert's bytes on disk. No policy: who wants which expert, and where it goes, is the cache's business.

In:  a model directory, targets of exactly expert_bytes each
Out: filled targets; ExpertReadError naming file, layer and expert
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .drive import Drive
from .errors import ExpertReadError
from .file_reader import FileReader
from .format import Manifest, expert_offsets
from .parallel_reader import READ_THREADS, ParallelReader, ReadRequest, Reads


class ExpertStore:
    """The expert files of one model, kept open.

    drop_page_cache   go around the system's page cache, or ask it to forget its copy after each read: set when the files do not fit into
                      memory beside the cache, where a second copy of what was just read would only push out something needed

    Any thread may call any method but `close`; several threads read in parallel.
    """

    def __init__(self, model_dir: Path, manifest: Manifest, *, drop_page_cache: bool = False, threads: int = READ_THREADS):
        self.drop_page_cache = drop_page_cache
        self.expert_bytes = {layer: entry.expert_bytes for layer, entry in sorted(manifest.experts.items())}
        self.num_experts = {layer: entry.num_experts for layer, entry in sorted(manifest.experts.items())}
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

    def start(self, layer: int, expert_ids: Sequence[int], targets: Sequence[np.ndarray], urgent: bool = True) -> "Reading":
        """Begin to fill targets[i] (uint8 (expert_bytes,), aligned to 4096) with expert expert_ids[i] of `layer`, all in parallel.

        urgent   somebody waits for them. What is not urgent is read only while nothing urgent waits for the drive, and becomes urgent
                 with `Reading.promote` or `Reading.wait`.

        Any number of readings may be under way. Every one must be waited for, once, before its targets are used for anything else.
        """
        file = self._files[layer]
        requests = [self._request(file, layer, expert, target) for expert, target in zip(expert_ids, targets, strict=True)]
        return Reading(self, file, requests, self._reader.start(requests, urgent))

    def read(self, layer: int, expert_ids: Sequence[int], targets: Sequence[np.ndarray]) -> None:
        """`start`, and wait for it."""
        self.start(layer, expert_ids, targets).wait()

    def _request(self, file: FileReader, layer: int, expert: int, target: np.ndarray) -> ReadRequest:
        if target.nbytes != self.expert_bytes[layer]:
            raise ValueError(f"a target of {target.nbytes} bytes for an expert of {self.expert_bytes[layer]}")
        return ReadRequest((file,), self._offsets[layer][expert], target, f"layer {layer} expert {expert}")

    def close(self) -> None:
        """Wait for reads in flight and close the files; readings that have not begun fail."""
        self._reader.close()
        for file in self._files.values():
            file.close()


class Reading:
    """Experts on their way from the drive; made by `ExpertStore.start`."""

    def __init__(self, store: ExpertStore, file: FileReader, requests: list[ReadRequest], reads: Reads):
        self._store, self._file, self._requests, self._reads = store, file, requests, reads

    def promote(self) -> None:
        """Make it urgent: somebody will wait for it now."""
        self._reads.promote()

    def is_done(self) -> bool:
        """Whether nothing is left to read, so that `wait` returns, or raises, at once. Does not block."""
        return self._reads.is_done()

    def wait(self) -> None:
        """Return when all targets are filled; makes it urgent. No read is in flight after it.

        Raises ExpertReadError when an expert cannot be read, even at a second attempt; then the targets' contents are undefined.
        """
        for request, error in self._reads.wait():
            raise ExpertReadError(
                f"{self._file.path}: {request.name} cannot be read ({error}), tried twice; check the drive, then copy or convert the model "
                "again"
            ) from error
        if self._store.drop_page_cache and not self._file.direct:
            for request in self._requests:
                self._file.drop_cached(request.offset, request.target.nbytes)
