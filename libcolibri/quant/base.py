"""What a tensor type is: the size of its tiles, and the four ways between float32, ggml blocks and tiles.

In:  float32 matrices (O, I), or ggml blocks (O, I / block_cols, ggml_block_bytes) uint8
Out: tiles (ceil(O / 16), I / block_cols, tile_bytes) uint8, laid out as FORMAT.md section 4 says
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..errors import QuantError
from ..kernels.jit import on_call

TILE_ROWS = 16
CHUNK_WEIGHTS = 1 << 19  # float32 scratch of 2 MB: stays in the second-level cache


class Field(NamedTuple):
    """`bits` bits that a ggml block and a tile have in common; row r of the tile has them at byte tile_byte + r * row_stride."""

    block_byte: int
    block_shift: int
    bits: int
    tile_byte: int
    tile_shift: int
    row_stride: int


@on_call
def _pack_bits(blocks, fields, tiles):
    """Move every field of `blocks` (O, B, n) to the zeroed `tiles` (ceil(O/16), B, m). fields (F, 6) int64."""
    for group in range(tiles.shape[0]):
        rows = min(16, blocks.shape[0] - 16 * group)
        for block in range(tiles.shape[1]):
            tile = tiles[group, block]
            for f in range(fields.shape[0]):
                source, shift, mask = fields[f, 0], np.uint8(fields[f, 1]), np.uint8((1 << fields[f, 2]) - 1)
                target, left, stride = fields[f, 3], np.uint8(fields[f, 4]), fields[f, 5]
                for row in range(rows):
                    value = (blocks[16 * group + row, block, source] >> shift) & mask
                    tile[target + row * stride] |= np.uint8(value << left)


@on_call
def _unpack_bits(tiles, fields, blocks):
    """The inverse of _pack_bits; `blocks` is zeroed by the caller."""
    for group in range(tiles.shape[0]):
        rows = min(16, blocks.shape[0] - 16 * group)
        for block in range(tiles.shape[1]):
            tile = tiles[group, block]
            for f in range(fields.shape[0]):
                target, left, mask = fields[f, 0], np.uint8(fields[f, 1]), np.uint8((1 << fields[f, 2]) - 1)
                source, shift, stride = fields[f, 3], np.uint8(fields[f, 4]), fields[f, 5]
                for row in range(rows):
                    value = (tile[source + row * stride] >> shift) & mask
                    blocks[16 * group + row, block, target] |= np.uint8(value << left)


@on_call
def round_codes(x, offset, inverse, bias, highest, codes):
    """codes = clip(trunc((x - offset) * inverse + bias), 0, highest), sub-block by sub-block.

    x        (n, k)  float32  read-only, n sub-blocks of k weights
    offset   (n,)    float32
    inverse  (n,)    float32  1 / scale, zero for an empty sub-block
    codes    (n, k)  uint8    written
    """
    for n in range(x.shape[0]):
        shift, scale = offset[n], inverse[n]
        for k in range(x.shape[1]):
            value = np.int32((x[n, k] - shift) * scale + bias)
            codes[n, k] = max(np.int32(0), min(highest, value))


def reciprocal(scale: np.ndarray) -> np.ndarray:
    """1 / scale in scale's dtype, zero where scale is zero."""
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def half(values: np.ndarray) -> np.ndarray:
    """values (...,) as float16, refusing what only an infinity could hold."""
    with np.errstate(over="ignore"):
        result = values.astype(np.float16)
    if not np.isfinite(result).all():
        raise QuantError(f"a scale of {np.abs(values).max():.3g} does not fit into float16 (at most 65504): use --quant f32 or bf16")
    return result


def half_bytes(values: np.ndarray) -> np.ndarray:
    """values (n,) -> their float16 bytes (n, 2) uint8."""
    return half(values).reshape(-1, 1).view(np.uint8)


def halves_at(blocks: np.ndarray, byte: int) -> np.ndarray:
    """The float16 at `byte` of every block (n, b) as float32 (n, 1)."""
    return np.ascontiguousarray(blocks[:, byte : byte + 2]).view(np.float16).astype(np.float32)


def nibble_column(column: int) -> tuple[int, int]:
    """(byte of row 0, shift) of a 4-bit column inside consecutive nibble vectors."""
    return 64 * (column // 8) + column % 4, 4 * (column % 8 // 4)


def half_fields(block_byte: int, tile_byte: int) -> list[Field]:
    """The two bytes of a float16 per row."""
    return [Field(block_byte + i, 0, 8, tile_byte + i, 0, 2) for i in range(2)]


def readonly(array: np.ndarray) -> np.ndarray:
    """A view that numba types as read-only, so that memory maps and fresh arrays share one compiled kernel."""
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class BlockType:
    """A type that can be read: what GGUF files call it, and what its blocks stand for.

    name             lower-case ggml name
    block_cols       columns of a block; a matrix's I must be a multiple
    ggml_type        id of the type in GGUF files
    ggml_block_bytes bytes of one row's block in GGUF files
    from_blocks      (n, ggml_block_bytes) uint8 -> (n, block_cols) float32
    """

    name: str
    block_cols: int
    ggml_type: int
    ggml_block_bytes: int
    from_blocks: Callable[[np.ndarray], np.ndarray]

    def dequantize_blocks(self, blocks: np.ndarray) -> np.ndarray:
        """ggml blocks (O, B, ggml_block_bytes) -> float32 (O, B * block_cols), bit for bit what ggml's reference gives."""
        flat = blocks.reshape(-1, self.ggml_block_bytes)
        out = np.empty((len(flat), self.block_cols), np.float32)
        step = max(1, CHUNK_WEIGHTS // self.block_cols)
        for start in range(0, len(flat), step):
            out[start : start + step] = self.from_blocks(flat[start : start + step])
        return out.reshape(blocks.shape[0], -1)


@dataclass(frozen=True)
class Format(BlockType):
    """A tensor type of model directories: it has tiles, and kernels that multiply by them.

    tile_bytes   bytes of 16 rows x block_cols columns, row padding included
    fields       how the bits of a block lie in a tile
    half_scales  the bytes of a block at which a float16 scale lies
    to_blocks    (n, block_cols) float32 -> (n, ggml_block_bytes) uint8; None for a type that only comes ready-made
    max_error    bound of |w - dequantize(quantize(w))| over a block's largest |w|, float16 rounding of scales included
    tiny_error   bound of what float16 subnormals add: half their spacing, 2**-25, times the largest factor of a scale
    """

    tile_bytes: int
    fields: Sequence[Field]
    half_scales: tuple[int, ...] = ()
    to_blocks: Callable[[np.ndarray], np.ndarray] | None = None
    max_error: float = 0.0
    tiny_error: float = 0.0

    @property
    def bits_per_weight(self) -> float:
        return self.tile_bytes * 8 / (TILE_ROWS * self.block_cols)

    @cached_property
    def _field_table(self) -> np.ndarray:
        """(F, 6) int64, ordered by tile byte."""
        return np.array(sorted(self.fields, key=lambda field: field.tile_byte), dtype=np.int64).reshape(-1, 6)

    def tile_shape(self, rows: int, cols: int) -> tuple[int, int, int]:
        """Shape of the tiles of a (rows, cols) matrix; QuantError when the type cannot hold it."""
        if rows < 1 or cols < 1 or cols % self.block_cols:
            raise QuantError(f"a matrix of {rows} x {cols} cannot be {self.name}: columns must be a positive multiple of {self.block_cols}")
        return -(-rows // TILE_ROWS), cols // self.block_cols, self.tile_bytes

    def bytes_of(self, rows: int, cols: int) -> int:
        """Bytes of the tiles of a (rows, cols) matrix."""
        groups, blocks, tile = self.tile_shape(rows, cols)
        return groups * blocks * tile

    def pack(self, blocks: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Lossless: ggml blocks (O, B, ggml_block_bytes) uint8 -> tiles (ceil(O/16), B, tile_bytes) uint8, into `out` if given."""
        rows, count, size = blocks.shape
        if size != self.ggml_block_bytes:
            raise QuantError(f"{self.name} blocks have {size} bytes, expected {self.ggml_block_bytes}")
        shape = self.tile_shape(rows, count * self.block_cols)
        if out is None:
            out = np.zeros(shape, np.uint8)
        elif out.shape != shape:
            raise QuantError(f"{self.name} tiles have shape {out.shape}, expected {shape}")
        else:
            out[:] = 0
        self._pack(readonly(np.ascontiguousarray(blocks)), out)
        return out

    def unpack(self, tiles: np.ndarray, rows: int) -> np.ndarray:
        """The inverse of `pack`: tiles -> ggml blocks (rows, B, ggml_block_bytes) uint8."""
        groups, count, size = tiles.shape
        if size != self.tile_bytes or groups != -(-rows // TILE_ROWS):
            raise QuantError(f"{self.name} tiles of shape {tiles.shape} do not hold {rows} rows of {self.tile_bytes}-byte tiles")
        blocks = np.zeros((rows, count, self.ggml_block_bytes), np.uint8)
        self._unpack(readonly(np.ascontiguousarray(tiles)), blocks)
        return blocks

    def _pack(self, blocks: np.ndarray, tiles: np.ndarray) -> None:
        _pack_bits(blocks, readonly(self._field_table), tiles)

    def _unpack(self, tiles: np.ndarray, blocks: np.ndarray) -> None:
        _unpack_bits(tiles, readonly(self._field_table), blocks)

    def are_finite(self, blocks: np.ndarray) -> bool:
        """Whether no scale (or, of a float type, no weight) in ggml blocks (..., ggml_block_bytes) is NaN or infinity."""
        return all(bool((blocks[..., at + 1] & 0x7C != 0x7C).all()) for at in self.half_scales)

    def quantize_blocks(self, weights: np.ndarray) -> np.ndarray:
        """float32 (O, I) -> ggml blocks (O, I / block_cols, ggml_block_bytes); QuantError for NaN or infinite weights."""
        rows, cols = weights.shape
        if self.to_blocks is None:
            raise QuantError(f"weights cannot be rounded to {self.name}, a type that is only taken over from checkpoints: choose another")
        self.tile_shape(rows, cols)
        if not (np.isfinite(weights.max()) and np.isfinite(weights.min())):
            raise QuantError(f"the weights contain NaN or infinity, which {self.name} cannot hold: the checkpoint is damaged")
        flat = np.ascontiguousarray(weights, dtype=np.float32).reshape(-1, self.block_cols)
        out = np.empty((len(flat), self.ggml_block_bytes), np.uint8)
        step = max(1, CHUNK_WEIGHTS // self.block_cols)
        for start in range(0, len(flat), step):
            out[start : start + step] = self.to_blocks(flat[start : start + step])
        return out.reshape(rows, cols // self.block_cols, self.ggml_block_bytes)

    def error_bound(self, weights: np.ndarray) -> np.ndarray:
        """Largest |w - dequantize(quantize(w))| that rounding explains, for every weight (O, I) float32."""
        rows, cols = weights.shape
        largest = np.abs(weights).reshape(rows, -1, self.block_cols).max(axis=2, keepdims=True)  # (O, B, 1)
        bound = largest * np.float32(self.max_error) + np.float32(self.tiny_error)
        return np.broadcast_to(bound, (rows, cols // self.block_cols, self.block_cols)).reshape(rows, cols)

    def dequantize(self, tiles: np.ndarray, rows: int, cols: int) -> np.ndarray:
        """tiles -> float32 (rows, cols), bit for bit what ggml's reference gives."""
        if tiles.shape != self.tile_shape(rows, cols):
            raise QuantError(f"{self.name} tiles have shape {tiles.shape}, expected {self.tile_shape(rows, cols)} for {rows} x {cols}")
        return self.dequantize_blocks(self.unpack(tiles, rows))

    def quantize(self, weights: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """float32 (O, I) -> tiles, into `out` if given."""
        return self.pack(self.quantize_blocks(weights), out)
