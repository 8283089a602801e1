"""How the drives of this machine are read fastest: tested once (drive_probe.py), then remembered in a small file.

In:  a file, folders with the same model
Out: `DriveSettings` of each folder's drive; nothing is ever raised

The file is a JSON object: `format` is "colibri-drives-1", `drives` has an entry per drive, by its device number, with its size (another
drive may get the number at the next start), the settings and the speeds that were seen. It is a help, never needed: entries that are
nonsense are replaced, and a file of another kind is left alone.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .atomic_file import write_atomically
from .drive_probe import DEFAULT_SETTINGS, DriveProbe, DriveSettings, probe_drive
from .errors import ColibriError
from .file_reader import DIRECT_ALIGN
from .format import Manifest

DRIVES_FORMAT = "colibri-drives-1"
MAX_READS, MAX_PIECE_BYTES = 64, 64 << 20
_START = b'{"format":"colibri-drives-'
_LARGEST_FILE = 1 << 20


class KnownDrives:
    """The drives that `path` knows. A drive that it does not know is tested, which takes under half a second.

    remarks   what a user should know about the file, a sentence each
    """

    def __init__(self, path: str | Path, probe: Callable[[Sequence[Path], int], DriveProbe] = probe_drive):
        self.path, self._probe = Path(path), probe
        self.remarks: list[str] = []

    def settings_for(self, folder: Path, manifest: Manifest) -> DriveSettings:
        """How to read the drive of a folder with that model; the default where it cannot be tested."""
        try:
            number, size = os.stat(folder).st_dev, shutil.disk_usage(folder).total
            key = f"{os.major(number)}:{os.minor(number)}" if hasattr(os, "major") else str(number)
        except OSError:
            return DEFAULT_SETTINGS  # whoever opens the folder says why it cannot be
        known = _settings(self._read().get(key), size)
        if known is not None:
            return known
        read_bytes = max(entry.expert_bytes for entry in manifest.experts.values())
        paths = [path for entry in manifest.experts.values() if _is_big_enough(path := folder / entry.file, read_bytes)]
        try:
            found = self._probe(paths, read_bytes) if paths else DriveProbe()
        except (OSError, ColibriError):  # no memory, or a drive whose faults will be met, and told of, when it is read in earnest
            return DEFAULT_SETTINGS
        if found.bytes_s > 0.0:
            self._remember(key, size, found)
        return found.settings

    def _read(self) -> dict[str, Any]:
        """The entries of the file, unchecked; none where there is nothing to be had of it."""
        try:
            with self.path.open("rb") as file:
                data = file.read(_LARGEST_FILE)
            facts = json.loads(data)
            drives = facts["drives"] if facts["format"] == DRIVES_FORMAT else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}
        return drives if isinstance(drives, dict) else {}

    def _remember(self, key: str, size: int, found: DriveProbe) -> None:
        settings = found.settings
        entry = {"total_bytes": size, "direct": settings.direct, "threads": settings.threads, "piece_bytes": settings.piece_bytes}
        entry |= {"bytes_s": round(found.bytes_s), "default_bytes_s": round(found.default_bytes_s)}
        facts = {"format": DRIVES_FORMAT, "drives": self._read() | {key: entry}}
        try:
            if self._is_foreign():
                self._remark("is no file of tested drives and is left alone")
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, (json.dumps(facts, separators=(",", ":")) + "\n").encode())
        except OSError as error:
            self._remark(f"cannot be written ({error.strerror})")

    def _is_foreign(self) -> bool:
        """Whether the file is something that somebody else wrote. Nothing, or zeros, is what a power failure leaves."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            data = file.read(_LARGEST_FILE)
        return bool(data.strip(b"\0")) and not data.startswith(_START[: len(data)])

    def _remark(self, fault: str) -> None:
        text = f"drive settings {self.path}: {fault}; the drive is tested again at the next start"
        if text not in self.remarks:
            self.remarks.append(text)


def _is_big_enough(path: Path, n_bytes: int) -> bool:
    try:
        return path.stat().st_size >= n_bytes
    except OSError:
        return False


def _settings(entry: object, size: int) -> DriveSettings | None:
    """What an entry says of a drive of that size; None where it is nonsense, or another drive's."""
    if not isinstance(entry, dict) or entry.get("total_bytes") != size:
        return None
    direct, threads, piece_bytes = (entry.get(name) for name in ("direct", "threads", "piece_bytes"))
    numbers = [number for number in (threads, piece_bytes) if isinstance(number, int) and not isinstance(number, bool)]
    if not isinstance(direct, bool) or len(numbers) < 2:
        return None
    threads, piece_bytes = numbers
    if not 1 <= threads <= MAX_READS or not DIRECT_ALIGN <= piece_bytes <= MAX_PIECE_BYTES or piece_bytes % DIRECT_ALIGN:
        return None
    return DriveSettings(direct, threads, piece_bytes)
