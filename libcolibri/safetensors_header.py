"""Headers of safetensors files, read and written by ourselves because byte offsets matter here.

In:  a path
Out: where every tensor lies in the file; FormatError for anything that is not exactly so
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import FormatError

MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor's type, shape and place: bytes start <= b < end of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def strict_json(raw: bytes, what: str, *, bare_constants: bool = False) -> dict[str, Any]:
    """A JSON object in UTF-8 without duplicate keys; FormatError otherwise.

    bare_constants   Python's Infinity and NaN, which are not JSON, are read as {"__float__": "Infinity"}, as newer writers spell them
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"duplicate key {next(n for n in names if names.count(n) > 1)!r}")
        return result

    def constant(text: str) -> dict[str, str]:
        if bare_constants:
            return {"__float__": text}
        raise ValueError(f"{text} is not JSON")

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON ({error}): the file is damaged") from error
    if not isinstance(value, dict):
        raise FormatError(f"{what} holds a JSON {type(value).__name__}, expected an object: the file is damaged")
    return value


def is_count(value: object) -> bool:
    """A non-negative integer; JSON's true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_header(path: Path) -> dict[str, TensorSlot]:
    """Tensors of a safetensors file by name.

    Checked: header length and JSON, known dtypes, shape * item size == bytes (in unbounded integers), every offset inside the file,
    no overlap, no hole, no bytes missing or left over. FormatError names file and tensor.
    """
    header, data_start, size = _load(path)
    header.pop("__metadata__", None)
    slots = {name: _slot(f"{path}: tensor {name!r}", entry, data_start) for name, entry in header.items()}
    _check_cover(path, slots, data_start, size)
    return slots


def read_metadata(path: Path) -> dict[str, str]:
    """The strings that a safetensors file says about itself; FormatError when they are none."""
    metadata = _load(path)[0].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: its metadata is no table of strings: the file is damaged")
    return metadata


def _load(path: Path) -> tuple[dict[str, Any], int, int]:
    """The JSON header, where the data begins, and the size of the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise FormatError(f"{path}: a header of {length} bytes exceeds its {size} bytes: the file is damaged or cut short")
            raw = file.read(length)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}): check that the file exists and is readable") from error
    return strict_json(raw, f"{path}: the header"), 8 + length, size


def _slot(what: str, entry: object, data_start: int) -> TensorSlot:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{what}: expected dtype, shape and data_offsets, found {str(entry)[:80]}: the file is damaged")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise FormatError(f"{what}: dtype {str(dtype)[:20]!r} is not supported, only {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(is_count, shape)):
        raise FormatError(f"{what}: shape {str(shape)[:80]} is not a list of at most 8 sizes: the file is damaged")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)) or offsets[0] > offsets[1]:
        raise FormatError(f"{what}: data_offsets {str(offsets)[:80]} are not a range: the file is damaged")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        raise FormatError(f"{what}: {dtype} {shape} needs {expected} bytes, found {offsets[1] - offsets[0]}: the file is damaged")
    return TensorSlot(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _check_cover(path: Path, slots: dict[str, TensorSlot], data_start: int, size: int) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    at = data_start
    for name, slot in sorted(slots.items(), key=lambda item: (item[1].start, item[1].end)):
        if slot.start != at:
            fault = "overlaps another tensor" if slot.start < at else f"leaves {slot.start - at} bytes unused before it"
            raise FormatError(f"{path}: tensor {name!r} {fault}: the file is damaged")
        if slot.end > size:
            raise FormatError(f"{path}: tensor {name!r} ends at byte {slot.end}, the file has {size}: it is cut short, copy it again")
        at = slot.end
    if at != size:
        raise FormatError(f"{path}: {size - at} bytes follow the last tensor: the file is damaged")


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], align: int = 8) -> bytes:
    """The leading bytes of a safetensors file of (name, dtype, shape) back to back; their length is a multiple of `align`."""
    entries, at = {}, 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % align)
    return struct.pack("<Q", len(text)) + text
