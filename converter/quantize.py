"""One matrix, row range by row range, from the source's blocks to the target's tiles.

In:  SourceTensor, target type
Out: tiles uint8; the same blocks in other order when the type stays, quantised from float32 otherwise
"""

from collections.abc import Iterator

import numpy as np

from libcolibri.errors import QuantError
from libcolibri.quant import FORMATS, TILE_ROWS

from .source import SourceTensor

CHUNK_WEIGHTS = 1 << 21  # 8 MB of float32 for each thread


def row_ranges(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """Whole row groups of about CHUNK_WEIGHTS weights: (first, stop)."""
    step = max(1, CHUNK_WEIGHTS // (cols * TILE_ROWS)) * TILE_ROWS
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def convert_rows(name: str, source: SourceTensor, kind: str, first: int, stop: int) -> np.ndarray:
    """Tiles of rows first <= r < stop of `source` as type `kind`. QuantError names the tensor."""
    fmt = FORMATS[kind]
    try:
        if source.type == kind:
            blocks = source.blocks_of(first, stop)
            if not fmt.are_finite(blocks):
                raise QuantError("scales contain NaN or infinity: the checkpoint is damaged")
            return fmt.pack(blocks)
        return fmt.quantize(source.read(first, stop))
    except QuantError as error:
        raise QuantError(f"tensor {name!r}: {error}") from error


def vector_values(name: str, source: SourceTensor) -> np.ndarray:
    """A vector as float32 (n,)."""
    values = source.read()[0]
    if not np.isfinite(values).all():
        raise QuantError(f"tensor {name!r}: NaN or infinity in it: the checkpoint is damaged")
    return values
