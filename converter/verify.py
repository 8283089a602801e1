"""Read a finished weight file again and compare every tensor with its source.

In:  Plan, folder of the finished files
Out: nothing, or FormatError naming file and tensor
"""

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from libcolibri.errors import FormatError
from libcolibri.format import DENSE_NAME, TensorEntry
from libcolibri.quant import FORMATS, TILE_ROWS
from libcolibri.safetensors_header import read_header

from .plan import ExpertLayer, Plan
from .quantize import row_ranges, vector_values
from .source import SourceTensor

Advance = Callable[[int], None]


def verify_dense(plan: Plan, folder: Path, pool: Executor, advance: Advance) -> None:
    """Compare dense.safetensors with the source; `advance` is told the bytes done."""
    path = folder / DENSE_NAME
    slots, data = read_header(path), np.memmap(path, np.uint8, "r").view(np.ndarray)
    for tensor in plan.dense:
        slot = slots[tensor.name]
        check_tensor(f"{path}: tensor {tensor.name!r}", tensor.entry, tensor.source, data[slot.start : slot.end], pool)
        advance(slot.nbytes)


def verify_experts(layer: ExpertLayer, folder: Path, pool: Executor, advance: Advance) -> None:
    """Compare one expert file with the source."""
    path = folder / layer.file
    slots, data = read_header(path), np.memmap(path, np.uint8, "r").view(np.ndarray)

    def one(expert: int) -> None:
        start = slots[f"experts.{expert}"].start
        for name, part in layer.parts.items():
            raw = data[start + part.offset : start + part.offset + part.bytes]
            what = f"{path}: layer {layer.layer}, expert {expert}, {name}"
            _check_matrix(what, part.type, part.shape, layer.matrices[expert][name], raw)

    for _ in pool.map(one, range(len(layer.matrices))):
        advance(layer.expert_bytes)


def check_tensor(what: str, entry: TensorEntry, source: SourceTensor, raw: np.ndarray, pool: Executor) -> None:
    """Compare one stored tensor, uint8 bytes, with its source."""
    if len(entry.shape) == 1:
        if not np.array_equal(raw.view(np.float32), vector_values(what, source)):
            raise FormatError(f"{what}: read back otherwise than written: the drive or memory is faulty, convert again")
        return
    shape = (entry.shape[0], entry.shape[1])
    groups = raw.reshape(entry.stored_shape)
    fmt = FORMATS[entry.type]

    def one(rows: tuple[int, int]) -> None:
        tiles = groups[rows[0] // TILE_ROWS : -(-rows[1] // TILE_ROWS)]
        _compare(what, fmt.name, tiles, source, *rows)

    list(pool.map(one, row_ranges(*shape)))


def _check_matrix(what: str, kind: str, shape: tuple[int, int], source: SourceTensor, raw: np.ndarray) -> None:
    tiles = raw.reshape(FORMATS[kind].tile_shape(*shape))
    for first, stop in row_ranges(*shape):
        _compare(what, kind, tiles[first // TILE_ROWS : -(-stop // TILE_ROWS)], source, first, stop)


def _compare(what: str, kind: str, tiles: np.ndarray, source: SourceTensor, first: int, stop: int) -> None:
    """Bit for bit when the type stayed; within the type's error bound otherwise."""
    fmt = FORMATS[kind]
    blocks = fmt.unpack(tiles, stop - first)
    if source.type == kind:
        if not np.array_equal(blocks, source.blocks_of(first, stop)):
            raise FormatError(f"{what}: read back otherwise than written: the drive or memory is faulty, convert again")
        return
    wanted = source.read(first, stop)
    error = np.abs(fmt.dequantize_blocks(blocks) - wanted)
    excess = error - fmt.error_bound(wanted)
    if not (excess <= 0).all():
        row, column = np.unravel_index(int(excess.argmax()), excess.shape)  # argmax finds a NaN first
        where = f"weight [{first + row}, {column}]"
        raise FormatError(f"{what}: {where} is off by {error[row, column]:.3g}, more than {kind} allows: convert again")
