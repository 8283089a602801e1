"""A second copy of a model's expert files, on another drive: which of them can be read.

In:  a folder, and the model that it should be a copy of
Out: `Mirror`: open files by layer, and in `remark` what a user should know. Whatever is wrong with the folder, nothing is raised
"""

import os
from collections.abc import Callable
from pathlib import Path

from .drive_probe import DEFAULT_SETTINGS, DriveSettings
from .errors import FormatError
from .file_reader import FileReader
from .format import MANIFEST_NAME, Manifest, expert_offsets, read_manifest


class Mirror:
    """The expert files of `folder` that are as large as the model's and laid out alike, opened.

    offsets        by layer, where the model's own files have their experts
    settings_for   how to read a folder's drive; asked when the folder has been found to be a copy

    Their contents are not looked at: who reads compares them with the manifest's checksums.
    """

    def __init__(
        self, folder: Path, model_dir: Path, manifest: Manifest, offsets: dict[int, list[int]],
        settings_for: Callable[[Path], DriveSettings],
    ):  # fmt: skip
        self.folder, self.settings = folder, DEFAULT_SETTINGS
        self.files: dict[int, FileReader] = {}
        self.remark: str | None = None
        fault = _fault_of(folder, model_dir, manifest)
        if fault is not None:
            self.remark = f"mirror {folder}: {fault}; experts are read from {model_dir} alone"
            return
        self.settings = settings_for(folder)
        faults = [fault for layer in offsets if (fault := self._open(layer, manifest, offsets[layer])) is not None]
        if faults:
            self.remark = (
                f"mirror {folder}: {len(faults)} of {len(offsets)} expert files cannot be used, the first {faults[0]}; "
                f"their experts are read from {model_dir} alone"
            )
        elif _same_drive(folder, model_dir):
            self.remark = f"mirror {folder}: is on the same drive as {model_dir}, so that reading becomes no faster"

    def _open(self, layer: int, manifest: Manifest, offsets: list[int]) -> str | None:
        """Open a layer's file; what is wrong with it where that is not possible."""
        name = manifest.experts[layer].file
        path = self.folder / name
        try:
            expected, found = manifest.files[name].bytes, path.stat().st_size
            if found != expected:
                return f"{name} (has {found} bytes, expected {expected})"
            if expert_offsets(self.folder, manifest, layer) != offsets:
                return f"{name} (is laid out otherwise)"
            self.files[layer] = FileReader(path, direct=self.settings.direct)
        except FileNotFoundError:
            return f"{name} (missing)"
        except FormatError:
            return f"{name} (cannot be read, or its header is damaged)"
        except OSError as error:
            return f"{name} ({error.strerror})"
        return None

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _fault_of(folder: Path, model_dir: Path, manifest: Manifest) -> str | None:
    """Why the folder is no copy of the model; None where it says that it is one."""
    try:
        if not folder.exists():
            return "is not there"
        if os.path.samefile(folder, model_dir):
            return "is the model's own folder and no second copy"
        if not (folder / MANIFEST_NAME).exists():
            return f"has no {MANIFEST_NAME}, so it is no copy of the model"
        same = read_manifest(folder).fingerprint == manifest.fingerprint
    except FormatError:
        return f"its {MANIFEST_NAME} cannot be read or is damaged"
    except OSError as error:
        return f"cannot be opened ({error.strerror})"
    return None if same else "holds another model"


def _same_drive(folder: Path, model_dir: Path) -> bool:
    try:
        return os.stat(folder).st_dev == os.stat(model_dir).st_dev
    except OSError:
        return False
