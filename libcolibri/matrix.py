"""A weight matrix in tiles, as kernels take it."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """`rows` outputs by `cols` inputs in `type`'s tiles (FORMAT.md).

    tiles   uint8 (ceil(rows / 16), cols / block_cols, tile_bytes), C order; kernels use its address, so it must stay alive.
    """

    type: str
    rows: int
    cols: int
    tiles: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes
