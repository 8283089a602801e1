"""The model directory: its manifest colibri.json, read, written and checked (FORMAT.md sections 2, 3 and 5).

In:  a model directory
Out: Manifest; FormatError names the file, what was found, what was expected
"""

import dataclasses
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import FormatError, QuantError
from .quant import FORMATS
from .safetensors_header import TensorSlot, is_count, read_header, strict_json

FORMAT_VERSION = "1.1"
MANIFEST_NAME = "colibri.json"
DENSE_NAME = "dense.safetensors"
EXPERT_ALIGN = 4096  # direct reads need sectors, and huge pages like round numbers
PART_ALIGN = 64  # a part starts on a cache line
PARTS = ("gate_proj", "up_proj", "down_proj")
OPTIONAL_PARTS = ("gate_proj",)  # experts with relu^2 have none
KINDS = ("decoder", "encoder")
CONVERT_AGAIN = "convert it again: colibri-convert --input SOURCE --output DIR"
READ_BYTES = 1 << 20

Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Type and logical shape of a tensor in dense.safetensors: (O, I) in tiles, or (n,) as float32."""

    type: str
    shape: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file: tiles for a matrix, the vector itself otherwise."""
        if len(self.shape) == 1:
            return self.shape
        return FORMATS[self.type].tile_shape(self.shape[0], self.shape[1])

    @property
    def nbytes(self) -> int:
        return 4 * self.shape[0] if len(self.shape) == 1 else FORMATS[self.type].bytes_of(self.shape[0], self.shape[1])


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One matrix of every expert of a layer: type, (O, I), and its bytes from `offset` of the expert on."""

    type: str
    shape: tuple[int, int]
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ExpertsEntry:
    """The routed experts of one layer: a file of num_experts times expert_bytes. crc32 has one checksum per expert, padding included."""

    file: str
    num_experts: int
    expert_bytes: int
    up_proj: PartEntry
    down_proj: PartEntry
    crc32: tuple[str, ...]
    gate_proj: PartEntry | None = None

    @property
    def parts(self) -> dict[str, PartEntry]:
        """The matrices that an expert has, in their order."""
        return {name: part for name in PARTS if (part := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and sha256 (lower-case hexadecimal) of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """colibri.json. Fields are FORMAT.md section 2; `experts` is keyed by layer number."""

    kind: str
    family: str
    config: dict[str, Any]
    quantization: dict[str, Any]
    tensors: dict[str, TensorEntry]
    experts: dict[int, ExpertsEntry]
    tokenizer: dict[str, Any] | None
    files: dict[str, FileEntry]
    source: dict[str, Any]
    converter_version: str
    format_version: str = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """Hash of weights and config: what depends on them belongs to this model exactly when it is equal."""
        facts = {name: entry.sha256 for name, entry in self.files.items() if name.endswith(".safetensors")}
        return hashlib.sha256(json.dumps([facts, self.config], sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """The text of colibri.json."""
        data = dataclasses.asdict(self)
        for layer, entry in self.experts.items():
            absent = set(OPTIONAL_PARTS) - set(entry.parts)
            data["experts"][layer] = {key: value for key, value in data["experts"][layer].items() if key not in absent}
        return json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def plan_parts(types: dict[str, str], shapes: dict[str, tuple[int, int]]) -> tuple[dict[str, PartEntry], int]:
    """Offsets of gate | up | down, as many of them as there are, inside an expert, and the padded size of an expert in bytes."""
    parts, at = {}, 0
    for name in (name for name in PARTS if name in shapes):
        rows, cols = shapes[name]
        size = FORMATS[types[name]].bytes_of(rows, cols)
        parts[name] = PartEntry(types[name], (rows, cols), at, size)
        at += -(-size // PART_ALIGN) * PART_ALIGN
    return parts, -(-at // EXPERT_ALIGN) * EXPERT_ALIGN


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """sha256 of a file; on_bytes is told the size of every piece read. FormatError when the drive does not give it."""
    digest = hashlib.sha256()
    for piece in _pieces(path):
        digest.update(piece)
        if on_bytes is not None:
            on_bytes(len(piece))
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(READ_BYTES):
                yield piece
    except OSError as error:  # of reading only: what a reader of the pieces raises does not come here
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> FormatError:
    return FormatError(f"{path}: cannot be read ({error.strerror}): check the drive, then copy it again or {CONVERT_AGAIN}")


# --- writing


def write_manifest(model_dir: Path, manifest: Manifest) -> None:
    """Write colibri.json, after checking it as a reader would."""
    text = manifest.to_json()
    parse_manifest(text.encode("utf-8"), str(Path(model_dir) / MANIFEST_NAME))
    (Path(model_dir) / MANIFEST_NAME).write_text(text, encoding="utf-8")


# --- reading


def read_manifest(model_dir: str | Path) -> Manifest:
    """colibri.json of a model directory, fully validated; FormatError otherwise. Other files are not touched (see check_files)."""
    path = Path(model_dir) / MANIFEST_NAME
    if not path.is_file():
        raise FormatError(f"{model_dir}: no {MANIFEST_NAME} in it, so it is no colibri model: give a directory made by colibri-convert")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    return parse_manifest(raw, str(path))


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """A Manifest from the bytes of colibri.json. `where` names the file in errors."""
    data = strict_json(raw, where)
    newer_minor = _check_version(data.get("format_version"), where)
    fields = _take(data, Manifest, where, newer_minor)
    if fields["kind"] not in KINDS:
        raise FormatError(f"{where}: kind {fields['kind']!r} is neither {' nor '.join(KINDS)}: {CONVERT_AGAIN}")
    for name in ("family", "converter_version"):
        _expect(fields[name], str, f"{where}: {name}")
    for name in ("config", "quantization", "tensors", "experts", "files", "source"):
        _expect(fields[name], dict, f"{where}: {name}")
    if fields["tokenizer"] is not None:
        _expect(fields["tokenizer"], dict, f"{where}: tokenizer")
    fields["tensors"] = {n: _tensor_entry(e, f"{where}: tensor {n!r}", newer_minor) for n, e in fields["tensors"].items()}
    fields["files"] = {n: _file_entry(n, e, f"{where}: file {n!r}", newer_minor) for n, e in fields["files"].items()}
    fields["experts"] = {
        _layer_number(n, where): _experts_entry(e, f"{where}: experts of layer {n}", newer_minor) for n, e in fields["experts"].items()
    }
    manifest = Manifest(**fields)
    _check_references(manifest, where)
    return manifest


def _check_version(version: object, where: str) -> bool:
    """Whether the directory has a newer minor version, whose unknown keys are to be ignored."""
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", version) if isinstance(version, str) else None
    if match is None:
        raise FormatError(f"{where}: format_version {str(version)[:40]!r} is none such as {FORMAT_VERSION!r}: {CONVERT_AGAIN}")
    major, minor = (int(part) for part in FORMAT_VERSION.split("."))
    if int(match[1]) != major:
        raise FormatError(f"{where}: model format {version}, this program reads {major}.x: {CONVERT_AGAIN}")
    return int(match[2]) > minor


def _take(data: object, cls: type, where: str, extra_allowed: bool) -> dict[str, Any]:
    """The values of a dataclass's fields out of a JSON object that has exactly them."""
    _expect(data, dict, where)
    assert isinstance(data, dict)
    names = [field.name for field in dataclasses.fields(cls)]
    if missing := [name for name in names if name not in data]:
        raise FormatError(f"{where}: {missing[0]!r} is missing: {CONVERT_AGAIN}")
    if not extra_allowed and (unknown := [name for name in data if name not in names]):
        raise FormatError(f"{where}: unknown key {unknown[0][:40]!r}: {CONVERT_AGAIN}")
    return {name: data[name] for name in names}


def _expect(value: object, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        raise FormatError(f"{where} is {str(value)[:40]!r}, expected {kind.__name__}: {CONVERT_AGAIN}")


def _count(value: object, where: str, least: int = 0) -> int:
    if not is_count(value) or value < least:  # type: ignore[operator]
        raise FormatError(f"{where} is {str(value)[:40]!r}, expected a whole number of at least {least}: {CONVERT_AGAIN}")
    return value  # type: ignore[return-value]


def _shape(value: object, where: str, dims: tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) not in dims:
        raise FormatError(f"{where} has shape {str(value)[:40]}, expected {' or '.join(map(str, dims))} sizes: {CONVERT_AGAIN}")
    return tuple(_count(size, f"{where}: a size", 1) for size in value)


def _check_type(kind: object, shape: tuple[int, ...], where: str) -> None:
    if not isinstance(kind, str) or kind not in FORMATS:
        raise FormatError(f"{where} has type {str(kind)[:20]!r}, this program knows {', '.join(FORMATS)}: {CONVERT_AGAIN}")
    if len(shape) == 1 and kind != "f32":
        raise FormatError(f"{where} is a vector of type {kind}, vectors are f32: {CONVERT_AGAIN}")
    if len(shape) == 2:
        try:
            FORMATS[kind].tile_shape(shape[0], shape[1])
        except QuantError as error:
            raise FormatError(f"{where}: {error}; {CONVERT_AGAIN}") from error


def _tensor_entry(data: object, where: str, extra: bool) -> TensorEntry:
    fields = _take(data, TensorEntry, where, extra)
    shape = _shape(fields["shape"], where, (1, 2))
    _check_type(fields["type"], shape, where)
    return TensorEntry(fields["type"], shape)


def _part_entry(data: object, where: str, extra: bool) -> PartEntry:
    fields = _take(data, PartEntry, where, extra)
    rows, cols = _shape(fields["shape"], where, (2,))
    _check_type(fields["type"], (rows, cols), where)
    return PartEntry(fields["type"], (rows, cols), _count(fields["offset"], f"{where}: offset"), _count(fields["bytes"], f"{where}: bytes"))


def _experts_entry(data: object, where: str, extra: bool) -> ExpertsEntry:
    _expect(data, dict, where)
    assert isinstance(data, dict)
    fields = _take(dict.fromkeys(OPTIONAL_PARTS) | data, ExpertsEntry, where, extra)
    _expect(fields["file"], str, f"{where}: file")
    count = _count(fields["num_experts"], f"{where}: num_experts", 1)
    _count(fields["expert_bytes"], f"{where}: expert_bytes", 1)
    present = [name for name in PARTS if name in data]
    parts = {name: _part_entry(fields[name], f"{where}: {name}", extra) for name in present}
    planned, expert_bytes = plan_parts({n: p.type for n, p in parts.items()}, {n: p.shape for n, p in parts.items()})
    if planned != parts or expert_bytes != fields["expert_bytes"]:
        raise FormatError(f"{where}: offsets and sizes are not those of the format (an expert has {expert_bytes} bytes): {CONVERT_AGAIN}")
    sums = fields["crc32"]
    if not isinstance(sums, list) or len(sums) != count or not all(isinstance(s, str) and re.fullmatch("[0-9a-f]{8}", s) for s in sums):
        raise FormatError(f"{where}: crc32 is no list of {count} checksums: {CONVERT_AGAIN}")
    return ExpertsEntry(fields["file"], count, expert_bytes, **parts, crc32=tuple(sums))


def _file_entry(name: str, data: object, where: str, extra: bool) -> FileEntry:
    if not re.fullmatch(r"[\w][\w.+ -]{0,200}", name) or ".." in name or name == MANIFEST_NAME:
        raise FormatError(f"{where} is no plain file name: {CONVERT_AGAIN}")
    fields = _take(data, FileEntry, where, extra)
    if not isinstance(fields["sha256"], str) or not re.fullmatch("[0-9a-f]{64}", fields["sha256"]):
        raise FormatError(f"{where}: sha256 {str(fields['sha256'])[:80]!r} is none: {CONVERT_AGAIN}")
    return FileEntry(_count(fields["bytes"], f"{where}: bytes"), fields["sha256"])


def _layer_number(text: str, where: str) -> int:
    if not re.fullmatch(r"0|[1-9]\d{0,5}", text):
        raise FormatError(f"{where}: {text[:40]!r} is no layer number: {CONVERT_AGAIN}")
    return int(text)


def _check_references(manifest: Manifest, where: str) -> None:
    """Every file that is spoken of is listed."""
    named = [DENSE_NAME, *(entry.file for entry in manifest.experts.values())]
    if manifest.tokenizer is not None:
        named.append(str(manifest.tokenizer.get("file")))
    for name in named:
        if name not in manifest.files:
            raise FormatError(f"{where}: {name!r} is not among its files: {CONVERT_AGAIN}")
    if len({entry.file for entry in manifest.experts.values()}) != len(manifest.experts):
        raise FormatError(f"{where}: two layers share one expert file: {CONVERT_AGAIN}")


# --- checking the files


def check_files(model_dir: str | Path, manifest: Manifest) -> None:
    """Cheap check before loading: every file is there, has its size, and its header says what the manifest says. Reads no weights."""
    folder = Path(model_dir)
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise FormatError(f"{path}: missing from the model: copy it again or {CONVERT_AGAIN}")
        if (size := path.stat().st_size) != entry.bytes:
            raise FormatError(f"{path}: has {size} bytes, expected {entry.bytes}: it is damaged, copy it again or {CONVERT_AGAIN}")
    dense_slots(folder, manifest)
    for layer in manifest.experts:
        expert_offsets(folder, manifest, layer)


def dense_slots(model_dir: str | Path, manifest: Manifest) -> dict[str, TensorSlot]:
    """Where the tensors of dense.safetensors lie; FormatError when they are not those of the manifest."""
    path = Path(model_dir) / DENSE_NAME
    slots = read_header(path)
    if odd := set(slots) ^ set(manifest.tensors):
        raise FormatError(f"{path}: tensor {min(odd)!r} is not in both the file and {MANIFEST_NAME}: {CONVERT_AGAIN}")
    for name, entry in manifest.tensors.items():
        expected = ("F32" if len(entry.shape) == 1 else "U8", entry.stored_shape)
        if (slots[name].dtype, slots[name].shape) != expected:
            raise FormatError(
                f"{path}: tensor {name!r} is {slots[name].dtype} {slots[name].shape}, expected {expected[0]} {expected[1]}: {CONVERT_AGAIN}"
            )
    return slots


def expert_offsets(model_dir: str | Path, manifest: Manifest, layer: int) -> list[int]:
    """File offset of every expert of a layer, multiples of 4096; FormatError when the file is laid out otherwise."""
    entry = manifest.experts[layer]
    path = Path(model_dir) / entry.file
    slots = read_header(path)
    offsets = []
    for expert in range(entry.num_experts):
        slot = slots.get(f"experts.{expert}")
        if slot is None or slot.dtype != "U8" or slot.shape != (entry.expert_bytes,) or slot.start % EXPERT_ALIGN:
            raise FormatError(f"{path}: expert {expert} is missing or not {entry.expert_bytes} aligned bytes: {CONVERT_AGAIN}")
        offsets.append(slot.start)
    if len(slots) != entry.num_experts:
        raise FormatError(f"{path}: has {len(slots)} tensors, expected {entry.num_experts} experts: {CONVERT_AGAIN}")
    return offsets


def verify(model_dir: str | Path, on_progress: Progress | None = None) -> Manifest:
    """Read every byte of a model directory and compare with the manifest.

    Returns the manifest. FormatError names the damaged file and, for an expert file, the experts that are damaged.
    """
    folder, manifest = Path(model_dir), read_manifest(model_dir)
    check_files(folder, manifest)
    total, done = sum(entry.bytes for entry in manifest.files.values()), 0
    for name, entry in manifest.files.items():

        def advance(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            if on_progress is not None:
                on_progress(name, done, total)

        if sha256_of(folder / name, advance) != entry.sha256:
            detail = _damaged_experts(folder, manifest, name)
            raise FormatError(f"{folder / name}: its contents are damaged{detail}: copy it again or {CONVERT_AGAIN}")
    return manifest


def _damaged_experts(folder: Path, manifest: Manifest, name: str) -> str:
    """Which experts of a damaged expert file differ from their checksums, for the message."""
    for layer, entry in manifest.experts.items():
        if entry.file != name:
            continue
        with (folder / name).open("rb") as file:
            bad = []
            for expert, offset in enumerate(expert_offsets(folder, manifest, layer)):
                file.seek(offset)
                if f"{zlib.crc32(file.read(entry.expert_bytes)):08x}" != entry.crc32[expert]:
                    bad.append(expert)
        listed = ", ".join(map(str, bad[:8])) + (f" and {len(bad) - 8} more" if len(bad) > 8 else "")
        return f" (layer {layer}, expert {listed})" if bad else f" (header of layer {layer})"
    return ""
