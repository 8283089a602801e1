"""A drive that misbehaves, for programs that a test starts: tests/io_shim.c, built when it is first needed.

In: a folder for the library, its control file and its log. Out: `Drive`; `missing()` says in one line why there can be none.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("io_shim.c")


def missing() -> str | None:
    """None where a drive can be made; otherwise why not."""
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return "only where programs are linked with glibc on Linux"
    if compiler() is None:
        return "no C compiler (cc)"
    return None


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


class Drive:
    """What the expert files of a program lie on. `set` changes it at any time, `log` has a letter per read since the last `set`."""

    def __init__(self, folder: Path, files: str = "experts-"):
        self.library, self.control, self._log = folder / "io_shim.so", folder / "control", folder / "log"
        self._files = files
        if not self.library.exists():
            options = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread"]
            built = subprocess.run([str(compiler()), *options, "-o", self.library, SOURCE], capture_output=True, text=True)
            assert built.returncode == 0, built.stderr
        self.set()

    def set(self, **faults: int) -> None:
        """From now on exactly these faults (see io_shim.c)."""
        text = " ".join([f"files={self._files}", *(f"{name}={value}" for name, value in faults.items())])
        unfinished = self.control.with_suffix(".new")
        unfinished.write_text(text)
        unfinished.replace(self.control)  # a read sees the old faults or the new ones
        self._log.unlink(missing_ok=True)

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def environment(self) -> dict[str, str]:
        """For a program that is to have this drive."""
        return {**os.environ, "LD_PRELOAD": str(self.library), "SHIM_CONTROL": str(self.control), "SHIM_LOG": str(self._log)}
