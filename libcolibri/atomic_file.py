"""A file that is complete or not there: written beside its place, then renamed into it.

In: a path and bytes. Out: the file; OSError leaves the old one as it was and nothing beside it.
"""

import os
import threading
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` (where it is a link, what it leads to). Processes and threads that write at once do not mix: the last one wins.

    What is there and no ordinary file, such as a device, is written to as it is.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    partial = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
