"""(layer, expert) -> the expert's bytes on disk. No policy: who wants which expert, and where it goes, is the cache's business.

In:  a model directory, maybe a second copy of it on another drive, targets of exactly expert_bytes each
Out: filled targets; ExpertReadError naming file, layer and expert
"""

import errno
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .drive import FAULTS_TO_GIVE_UP, Drive
from .drive_probe import DEFAULT_SETTINGS, DriveSettings
from .errors import ExpertReadError
from .file_reader import FileReader, WrongBytesError
from .format import Manifest, expert_offsets
from .mirror import Mirror
from .parallel_reader import ParallelReader, ReadRequest, Reads

_Expert = tuple[int, int]  # layer, expert
_MIRROR = 1  # the mirror's number among the drives


class ExpertStore:
    """The expert files of one model, kept open.

    drop_page_cache   go around the system's page cache, or ask it to forget its copy after each read: set when the files do not fit into
                      memory beside the cache, where a second copy of what was just read would only push out something needed
    verify            compare every expert that is read with its checksum in the manifest. Without it, that is done for files that were
                      written to since they were opened, so that a model that is replaced while it runs cannot make up tokens
    mirror            a folder with the same model on another drive: both are read, the faster one more. What is wrong with it is in
                      `remarks` (Mirror). A copy may be unfinished or damaged, so what it gives is compared with its checksum when it gives
                      that for the first time

    settings_for      how to read the drive of a folder, around the page cache or not where `drop_page_cache` is set; None: the default

    `settings` is how the model's own drive is read. An expert that is wrong on one drive is from then on read from the other; a drive that
    fails again and again is given up while the other one does not. `notices` says so. Any thread may call any method but `close`; several
    threads read in parallel.
    """

    def __init__(
        self, model_dir: Path, manifest: Manifest, *, drop_page_cache: bool = False, verify: bool = False,
        mirror: Path | None = None, settings_for: Callable[[Path], DriveSettings] | None = None,
    ):  # fmt: skip
        self.drop_page_cache, self._verify = drop_page_cache, verify
        self.expert_bytes = {layer: entry.expert_bytes for layer, entry in sorted(manifest.experts.items())}
        self.num_experts = {layer: entry.num_experts for layer, entry in sorted(manifest.experts.items())}
        self._sums = {layer: entry.crc32 for layer, entry in manifest.experts.items()}
        self._offsets = {layer: expert_offsets(model_dir, manifest, layer) for layer in self.expert_bytes}
        self._files: dict[int, tuple[FileReader | None, ...]] = {}
        how = settings_for or (lambda folder: DEFAULT_SETTINGS)
        how_to_read = how if drop_page_cache else lambda folder: replace(how(folder), direct=False)
        self.settings = settings = how_to_read(model_dir)
        self._mirror = None if mirror is None else Mirror(mirror, model_dir, manifest, self._offsets, how_to_read)
        copies = [] if self._mirror is None or not self._mirror.files else [self._mirror]
        self._proven: dict[_Expert, int] = {}  # pieces of the mirror that had their checksum, a bit each
        self._trusted: dict[_Expert, int] = {}  # the drive to read an expert from that is wrong on the other
        self._wrong_files: dict[Path, str] = {}
        drives = [Drive(str(model_dir), settings.threads), *(Drive(str(copy.folder), copy.settings.threads) for copy in copies)]
        self._reader = ParallelReader(drives, settings.piece_bytes)
        try:
            for layer in self.expert_bytes:
                own = FileReader(model_dir / manifest.experts[layer].file, direct=settings.direct)
                self._files[layer] = (own, *(copy.files.get(layer) for copy in copies))
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

    @property
    def drives(self) -> tuple[Drive, ...]:
        """The model's own drive, and the mirror's where there is one that can be used."""
        return self._reader.drives

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a user should know about the mirror as it was found, a sentence."""
        return () if self._mirror is None or self._mirror.remark is None else (self._mirror.remark,)

    @property
    def notices(self) -> tuple[str, ...]:
        """What happened to the drives since then, a sentence each; nothing while there is one only: its faults are errors."""
        given_up = [
            f"{drive.name}: {_why(drive.fault)}; "
            f"what {self.drives[1 - number].name} has is read from there alone since then"
            for number, drive in enumerate(self.drives)
            if drive.fault is not None
        ]
        return (*given_up, *self._wrong_files.values())

    def start(self, layer: int, expert_ids: Sequence[int], targets: Sequence[np.ndarray], urgent: bool = True) -> "Reading":
        """Begin to fill targets[i] (uint8 (expert_bytes,), aligned to 4096) with expert expert_ids[i] of `layer`, all in parallel.

        urgent   somebody waits for them. What is not urgent is read only while nothing urgent waits for the drive, and becomes urgent
                 with `Reading.promote` or `Reading.wait`.

        Any number of readings may be under way. Every one must be waited for, once, before its targets are used for anything else.
        """
        pairs = zip(expert_ids, targets, strict=True)
        wanted = [_Wanted((layer, expert), self._request(layer, expert, target)) for expert, target in pairs]
        return Reading(self, wanted, self._reader.start([one.request for one in wanted], urgent))

    def read(self, layer: int, expert_ids: Sequence[int], targets: Sequence[np.ndarray]) -> None:
        """`start`, and wait for it."""
        self.start(layer, expert_ids, targets).wait()

    def _request(self, layer: int, expert: int, target: np.ndarray) -> ReadRequest:
        if target.nbytes != self.expert_bytes[layer]:
            raise ValueError(f"a target of {target.nbytes} bytes for an expert of {self.expert_bytes[layer]}")
        files, name = self._files[layer], f"layer {layer} expert {expert}"
        request = ReadRequest(files, self._offsets[layer][expert], target, name, self._sums[layer][expert])
        trusted = self._trusted.get((layer, expert))
        return request if trusted is None else _from_one(request, trusted)

    def finish(self, wanted: list["_Wanted"], reads: Reads) -> None:
        """The rest of `Reading.wait`."""
        failed = {id(request): error for request, error in reads.wait()}
        wrong = self._wrong([one for one in wanted if id(one.request) not in failed], reads)
        for one in wanted:
            error = failed.get(id(one.request))
            errors = {} if error is None else reads.errors(one.request) or {0: error}
            # Bytes that nobody could read were perhaps asked of one drive only.
            if one in wrong or (errors and one.expert in self._trusted):
                errors = self._read_again(one, reads.filled(one.request))
            if errors:
                files = self._files[one.expert[0]]
                raise ExpertReadError(_failure_text(one.request.name, files, errors)) from next(iter(errors.values()))
        if self.drop_page_cache:
            self._forget((one.request for one in wanted), direct=False)

    def _wrong(self, wanted: list["_Wanted"], reads: Reads) -> list["_Wanted"]:
        """Those that have wrong bytes, among those whose bytes have to be compared."""
        from_mirror = [reads.filled(one.request).get(_MIRROR, 0) for one in wanted]
        suspects = [
            one
            for one, pieces in zip(wanted, from_mirror, strict=True)
            if self._verify or pieces & ~self._proven.get(one.expert, 0) or any(file.changed for file in _files(one.request))
        ]
        bad = {id(request) for request, _ in self._reader.check([one.request for one in suspects])}
        for one, pieces in zip(wanted, from_mirror, strict=True):
            if pieces and one in suspects and id(one.request) not in bad:
                self._proven[one.expert] = self._proven.get(one.expert, 0) | pieces
        return [one for one in suspects if id(one.request) in bad]

    def _read_again(self, one: "_Wanted", filled: dict[int, int]) -> dict[int, OSError]:
        """Fill the target with bytes that have their checksum, from whichever drive has them; how each drive failed where none has.

        filled   by drive, the pieces of it that were wrong together: who gave least is asked first
        """
        whole = replace(one.request, files=self._files[one.expert[0]])
        numbers = [number for number, file in enumerate(whole.files) if file is not None]
        self._forget([whole])  # or the same bytes might be answered from memory
        errors: dict[int, OSError] = {}
        for number in sorted(numbers, key=lambda number: filled.get(number, 0).bit_count()):
            alone = _from_one(whole, number)
            failed = self._reader.read([alone]) or self._reader.check([alone])
            if not failed:
                self._blame(one, [other for other in numbers if other != number and _gave_wrong(other, errors, filled)], number)
                return {}
            errors[number] = failed[0][1]
        return errors

    def _blame(self, one: "_Wanted", drives: list[int], trusted: int) -> None:
        """From now on the expert is read from the drive whose bytes were right."""
        for drive in drives:
            self._trusted[one.expert] = trusted
            file = self._files[one.expert[0]][drive]
            assert file is not None, "a drive that does not have a file gave nothing"
            reason = "was changed while the model was open, and gave" if file.changed else "gave"
            advice = f"{self.drives[trusted].name} has the right ones: copy it again"
            self._wrong_files.setdefault(file.path, f"{file.path}: {reason} wrong bytes for {one.request.name}; {advice}")

    def _forget(self, requests: Iterable[ReadRequest], direct: bool = True) -> None:
        """Have the system forget its copies. direct: of files that are read around them, too."""
        for request in requests:
            for file in _files(request):
                if direct or not file.direct:
                    file.drop_cached(request.offset, request.target.nbytes)

    def close(self) -> None:
        """Wait for reads in flight and close the files; readings that have not begun fail."""
        self._reader.close()
        for files in self._files.values():
            if files[0] is not None:
                files[0].close()
        if self._mirror is not None:
            self._mirror.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """An expert that is being read."""

    expert: _Expert
    request: ReadRequest


class Reading:
    """Experts on their way from the drive; made by `ExpertStore.start`."""

    def __init__(self, store: ExpertStore, wanted: list[_Wanted], reads: Reads):
        self._store, self._wanted, self._reads = store, wanted, reads

    def promote(self) -> None:
        """Make it urgent: somebody will wait for it now."""
        self._reads.promote()

    def is_done(self) -> bool:
        """Whether nothing is left to read. Does not block."""
        return self._reads.is_done()

    def wait(self) -> None:
        """Return when all targets are filled; makes it urgent. No read is in flight after it.

        Raises ExpertReadError when an expert cannot be read, or is wrong, even at a second attempt and on every drive; then the
        targets' contents are undefined.
        """
        self._store.finish(self._wanted, self._reads)


def _files(request: ReadRequest) -> list[FileReader]:
    return [file for file in request.files if file is not None]


def _from_one(request: ReadRequest, number: int) -> ReadRequest:
    return replace(request, files=tuple(file if i == number else None for i, file in enumerate(request.files)))


def _why(fault: OSError) -> str:
    """Why a drive was given up."""
    return "does not answer" if fault.errno == errno.ETIMEDOUT else f"{FAULTS_TO_GIVE_UP} reads in a row failed ({fault})"


def _gave_wrong(drive: int, errors: dict[int, OSError], filled: dict[int, int]) -> bool:
    """Whether a drive gave wrong bytes alone, or was part of what was wrong and not asked again."""
    return isinstance(errors[drive], WrongBytesError) if drive in errors else drive in filled


def _failure_text(name: str, files: Sequence[FileReader | None], errors: dict[int, OSError]) -> str:
    """The error of a drive whose file was changed comes first."""
    failed = [(file, error) for number, error in sorted(errors.items()) if (file := files[number]) is not None]
    (file, error), *others = sorted(failed, key=lambda one: not one[0].changed)
    if file.changed:
        advice = "the file was changed while the model was open: copy or convert the model again, then open it anew"
    elif isinstance(error, WrongBytesError):
        advice = "`colibri verify` reads the whole model: test the drive and the memory, then copy or convert the model again"
    else:
        advice = "check the drive, then copy or convert the model again"
    also = "".join(f", and {other.path} {_verb(fault)} ({fault})" for other, fault in others)
    return f"{file.path}: {name} {_verb(error)} ({error}), tried twice{also}; {advice}"


def _verb(error: OSError) -> str:
    return "has wrong bytes" if isinstance(error, WrongBytesError) else "cannot be read"
