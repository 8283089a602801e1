"""GGUF files, version 2 and 3: metadata and tensor directory, read strictly.

In:  a path
Out: GgufFile with a memory map; SourceError for anything that is not exactly a GGUF file, never a crash
"""

import hashlib
import math
import mmap
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from libcolibri.errors import SourceError

from .source_types import SOURCE_TYPES

# Ids of ggml's tensor types, for a message that names what is not supported.
GGML_NAMES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k",
    14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs",
    24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 30: "bf16", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4",
    41: "q1_0", 42: "q2_0",
}  # fmt: skip
BY_ID = {fmt.ggml_type: fmt for fmt in SOURCE_TYPES.values()}
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
MAX_DIMS, MAX_NAME_BYTES, MAX_ARRAY_DEPTH = 4, 65535, 4
DEFAULT_ALIGNMENT = 32
MAX_PARTS = 10000


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the directory. shape is outermost first, (O, I) or (E, O, I); start, nbytes are in the file; part counts split files."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    part: int = 0


@dataclass(frozen=True)
class GgufFile:
    """metadata: key -> value (numeric arrays as numpy arrays, other arrays as lists); parts: each file whole, uint8, read-only.

    paths   the file, or all files of a split one in their order; header_sha256 is that of their headers
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    parts: tuple[np.ndarray, ...]
    header_sha256: str

    @property
    def path(self) -> Path:
        """The file, the first one of a split one."""
        return self.paths[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(len(part) for part in self.parts)

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """A tensor's bytes, uint8 view of the map."""
        return self.parts[tensor.part][tensor.start : tensor.start + tensor.nbytes]


class _Reader:
    """A cursor over the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def fault(self, what: str) -> SourceError:
        return SourceError(f"{self.path}: {what}: the file is damaged or cut short, download it again")

    def take(self, size: int, what: str) -> int:
        """Advance by size bytes; returns where they start."""
        start = self.at
        if size > len(self.data) - start:
            raise self.fault(f"{what} needs {size} bytes at byte {start}, the file has {len(self.data)}")
        self.at = start + size
        return start

    def number(self, form: str, what: str) -> Any:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))[0]

    def text(self, what: str, limit: int | None = None) -> str:
        size = self.number("<Q", what)
        if limit is not None and size > limit:
            raise self.fault(f"{what} has {size} bytes, at most {limit} are allowed")
        start = self.take(size, what)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fault(f"{what} is not UTF-8 text") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self._array(what, depth)
        if kind not in SCALARS:
            raise self.fault(f"{what} has unknown value type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.data, dtype, 1, self.take(dtype.itemsize, what))[0].item()

    def _array(self, what: str, depth: int) -> Any:
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            start = self.take(count * dtype.itemsize, what)
            return np.frombuffer(self.data, dtype, count, start).copy()
        if depth >= MAX_ARRAY_DEPTH:
            raise self.fault(f"{what} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        if count * 8 > len(self.data) - self.at:  # every string or array has at least a length
            raise self.fault(f"{what} claims {count} entries, more than the file can hold")
        if kind == STRING:
            return self._strings(count, what)
        return [self.value(kind, what, depth + 1) for _ in range(count)]

    def _strings(self, count: int, what: str) -> list[str]:
        """Vocabularies have 10^5 entries: no method call for each."""
        unpack, data, at, size, result = struct.Struct("<Q").unpack_from, self.data, self.at, len(self.data), []
        try:
            for _ in range(count):
                end = at + 8 + unpack(data, at)[0]
                if end > size:
                    raise self.fault(f"{what} runs past the end of the file")
                result.append(data[at + 8 : end].decode("utf-8"))
                at = end
        except (struct.error, UnicodeDecodeError) as error:
            raise self.fault(f"{what} is cut short or not UTF-8 text") from error
        self.at = at
        return result


def read_gguf(path: str | Path) -> GgufFile:
    """Read a GGUF file's header, of a split file ("-00001-of-00003.gguf", any of them) all headers; tensor data stays on disk."""
    path = Path(path)
    found = _read_one(path)
    count = found.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= MAX_PARTS:
        raise SourceError(f"{path}: metadata split.count is {str(count)[:40]}, expected a number up to {MAX_PARTS}")
    return found if count == 1 else _join(path, count)


def _join(path: Path, count: int) -> GgufFile:
    """All parts of a split file as one; metadata are those of the first."""
    name = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if name is None or int(name[2]) != count:
        raise SourceError(f"{path}: is one of {count} parts, but not called so: name them as they came, ...-00001-of-{count:05d}.gguf")
    paths = [path.with_name(f"{name[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [part for part in paths if not part.is_file()]:
        raise SourceError(f"{missing[0]}: missing, {path.name} is one of {count} parts: the download is incomplete")
    tensors: dict[str, GgufTensor] = {}
    parts = [_read_one(part) for part in paths]
    for number, part in enumerate(parts):
        if part.metadata.get("split.count") != count or part.metadata.get("split.no") != number:
            says = f"part {part.metadata.get('split.no')} of {part.metadata.get('split.count')}"
            raise SourceError(f"{part.path}: says that it is {says}, counting from 0, expected {number} of {count}: give it its own name")
        for tensor in part.tensors.values():
            if tensor.name in tensors:
                raise SourceError(f"{part.path}: tensor {tensor.name!r} is also in {paths[tensors[tensor.name].part].name}")
            tensors[tensor.name] = replace(tensor, part=number)
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise SourceError(f"{path}: {count} parts have {len(tensors)} tensors, the first says {total}: parts of two downloads are mixed")
    digest = hashlib.sha256("".join(part.header_sha256 for part in parts).encode()).hexdigest()
    return GgufFile(tuple(paths), parts[0].metadata, tensors, tuple(part.parts[0] for part in parts), digest)


def _read_one(path: Path) -> GgufFile:
    """One file's header."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read ({error}): check that the file exists, is readable and not empty") from error
    reader = _Reader(path, data)
    tensor_count, pair_count = _read_prefix(reader)
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = reader.text("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise reader.fault(f"metadata key {key[:60]!r} appears twice")
        metadata[key] = reader.value(reader.number("<I", key), f"metadata {key[:60]!r}")
    entries = _read_directory(reader, tensor_count)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or not 0 < alignment <= 1 << 20 or alignment % 8:
        raise reader.fault(f"general.alignment is {str(alignment)[:40]}, expected a multiple of 8")
    data_start = -(-reader.at // alignment) * alignment
    tensors = _place(reader, entries, data_start, alignment)
    digest = hashlib.sha256(data[: reader.at]).hexdigest()
    return GgufFile((path,), metadata, tensors, (np.frombuffer(data, np.uint8),), digest)


def _read_prefix(reader: _Reader) -> tuple[int, int]:
    magic = reader.take(4, "the file's magic")
    if reader.data[magic : magic + 4] != b"GGUF":
        raise SourceError(f"{reader.path}: not a GGUF file (it does not begin with 'GGUF')")
    version = reader.number("<I", "the GGUF version")
    if version not in (2, 3):
        kind = "big-endian" if version & 0xFFFF == 0 and version else f"version {version}"
        raise SourceError(f"{reader.path}: GGUF {kind} is not supported, only little-endian versions 2 and 3")
    tensor_count, pair_count = reader.number("<Q", "the number of tensors"), reader.number("<Q", "the number of metadata pairs")
    if tensor_count * 24 + pair_count * 13 > len(reader.data):  # the least that an entry can take
        raise reader.fault(f"{tensor_count} tensors and {pair_count} metadata pairs do not fit into {len(reader.data)} bytes")
    return tensor_count, pair_count


def _read_directory(reader: _Reader, count: int) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """name -> (type id, shape outermost first, offset)."""
    entries: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(count):
        name = reader.text("a tensor's name", MAX_NAME_BYTES)
        if name in entries:
            raise reader.fault(f"tensor {name[:60]!r} appears twice")
        dims = reader.number("<I", f"tensor {name[:60]!r}")
        if not 1 <= dims <= MAX_DIMS:
            raise reader.fault(f"tensor {name[:60]!r} has {dims} dimensions, expected 1 to {MAX_DIMS}")
        shape = tuple(reader.number("<Q", f"tensor {name[:60]!r}") for _ in range(dims))
        kind, offset = reader.number("<I", f"tensor {name[:60]!r}"), reader.number("<Q", f"tensor {name[:60]!r}")
        entries[name] = kind, shape[::-1], offset
    return entries


def _place(reader: _Reader, entries: dict[str, tuple[int, tuple[int, ...], int]], data_start: int, alignment: int) -> dict[str, GgufTensor]:
    """Sizes and places; refuses unknown types, misfitting rows, and tensors that leave the file or overlap."""
    tensors, end_before, size = {}, data_start, len(reader.data)
    for name, (kind, shape, offset) in sorted(entries.items(), key=lambda item: item[1][2]):
        fmt = BY_ID.get(kind)
        if fmt is None:
            found = GGML_NAMES.get(kind, f"number {kind}")
            known = ", ".join(SOURCE_TYPES)
            raise SourceError(f"{reader.path}: tensor {name[:60]!r} has type {found}, which is not supported, only {known}")
        if min(shape) < 1 or shape[-1] % fmt.block_cols:
            raise reader.fault(f"tensor {name[:60]!r} has shape {shape}, {fmt.name} rows are positive multiples of {fmt.block_cols}")
        nbytes = math.prod(shape) // fmt.block_cols * fmt.ggml_block_bytes
        start = data_start + offset
        if offset % alignment or start < end_before:
            raise reader.fault(f"tensor {name[:60]!r} lies at offset {offset}, which overlaps another or is no multiple of {alignment}")
        if start + nbytes > size:
            raise reader.fault(f"tensor {name[:60]!r} ends at byte {start + nbytes}, the file has {size}")
        tensors[name] = GgufTensor(name, fmt.name, shape, start, nbytes)
        end_before = start + nbytes
    return tensors
