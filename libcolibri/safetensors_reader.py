"""Whole safetensors files of numpy's types, read and never mapped: a mapped file that is cut short kills the process instead of raising.

In:  a path
Out: arrays by name, and the file's metadata; FormatError for anything that is damaged or ends too early
"""

from pathlib import Path

import numpy as np

from .errors import FormatError
from .file_reader import FileReader
from .safetensors_header import read_header, read_metadata

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Every tensor of the file, in memory of its own, and the metadata."""
    slots, metadata = read_header(path), read_metadata(path)
    arrays: dict[str, np.ndarray] = {}
    try:
        file = FileReader(path)
        try:
            for name, slot in slots.items():
                if slot.dtype not in DTYPES:
                    raise FormatError(f"{path}: tensor {name!r} has type {slot.dtype}, expected one of {', '.join(DTYPES)}")
                arrays[name] = np.empty(slot.shape, DTYPES[slot.dtype])
                if slot.nbytes:
                    file.read_into(memoryview(arrays[name].reshape(-1).view(np.uint8)), slot.start)  # type: ignore[arg-type]
        finally:
            file.close()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error}): copy it again") from error
    return arrays, metadata
