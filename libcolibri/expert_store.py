"""(layer, expert) -> the expert's bytes on disk. No policy: who wants which expert, and where it goes, is the cache's business.

In:  a model directory, targets of exactly expert_bytes each
Out: filled targets; ExpertReadError naming file, layer and expert
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from .errors import ExpertReadError
from .file_reader import FileReader, ParallelReader, ReadRequest, Reads
from .format import Manifest, expert_offsets

READ_THREADS = 4


class ExpertStore:
    """The expert files of one model, kept open.

    drop_page_cache   go around the system's page cache, or ask it to forget its copy after each read: set when the files do not fit into
                      memory beside the cache, where a second copy of what was just read would only push out something needed

    One caller at a time (the engine's forward lock sees to it); several threads read in parallel.
    """

    def __init__(self, model_dir: Path, manifest: Manifest, *, drop_page_cache: bool = False, threads: int = READ_THREADS):
        self.drop_page_cache = drop_page_cache
        self.expert_bytes = {layer: entry.expert_bytes for layer, entry in sorted(manifest.experts.items())}
        self.num_experts = {layer: entry.num_experts for layer, entry in sorted(manifest.experts.items())}
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

    def start(self, layer: int, expert_ids: Sequence[int], targets: Sequence[np.ndarray]) -> Callable[[], None]:
        """Begin to fill targets[i] (uint8 (expert_bytes,), aligned to 4096) with expert expert_ids[i] of `layer`, all in parallel.

        Returns what waits for them: a call that must be made, once. A read that fails is tried once more in it, since a drive's or a
        network share's hiccup often passes. It raises ExpertReadError; then the targets' contents are undefined. No read is in flight
        after it.
        """
        file = self._files[layer]
        requests = [self._request(file, layer, expert, target) for expert, target in zip(expert_ids, targets, strict=True)]
        reads = self._reader.start(requests)
        return lambda: self._finish(file, requests, reads)

    def read(self, layer: int, expert_ids: Sequence[int], targets: Sequence[np.ndarray]) -> None:
        """`start`, and wait for it."""
        self.start(layer, expert_ids, targets)()

    def _finish(self, file: FileReader, requests: list[ReadRequest], reads: Reads) -> None:
        failed = reads.wait()
        if failed:
            failed = self._reader.read([request for request, _ in failed])
        for request, error in failed:
            raise ExpertReadError(
                f"{file.path}: {request.name} cannot be read ({error}), tried twice; check the drive, then copy or convert the model again"
            ) from error
        if self.drop_page_cache and not file.direct:
            self._forget(file, requests)

    def _request(self, file: FileReader, layer: int, expert: int, target: np.ndarray) -> ReadRequest:
        if target.nbytes != self.expert_bytes[layer]:
            raise ValueError(f"a target of {target.nbytes} bytes for an expert of {self.expert_bytes[layer]}")
        return ReadRequest(file, self._offsets[layer][expert], target, f"layer {layer} expert {expert}")

    def _forget(self, file: FileReader, requests: Iterable[ReadRequest]) -> None:
        for request in requests:
            file.drop_cached(request.offset, request.target.nbytes)

    def close(self) -> None:
        """Wait for reads in flight and close the files."""
        self._reader.close()
        for file in self._files.values():
            file.close()
