"""f32, f16 and bf16: one column per tile, 16 rows of it side by side."""

import numpy as np

from .base import TILE_ROWS, Format, half


class FloatFormat(Format):
    """A tile is one column of 16 rows; packing is a transposition, and "quantising" a cast."""

    def are_finite(self, blocks: np.ndarray) -> bool:
        """Whether no weight is NaN or infinity: an exponent of ones only."""
        element, exponent = {"f32": ("<u4", 0x7F800000), "f16": ("<u2", 0x7C00), "bf16": ("<u2", 0x7F80)}[self.name]
        return bool((np.ascontiguousarray(blocks).view(element) & exponent != exponent).all())

    def _pack(self, blocks: np.ndarray, tiles: np.ndarray) -> None:
        element = f"u{self.ggml_block_bytes}"
        source, target = blocks.view(element)[..., 0], tiles.view(element)  # (O, I), (groups, I, 16)
        whole = len(source) // TILE_ROWS
        target[:whole] = source[: whole * TILE_ROWS].reshape(whole, TILE_ROWS, source.shape[1]).transpose(0, 2, 1)
        if len(source) % TILE_ROWS:
            target[whole, :, : len(source) % TILE_ROWS] = source[whole * TILE_ROWS :].T

    def _unpack(self, tiles: np.ndarray, blocks: np.ndarray) -> None:
        element = f"u{self.ggml_block_bytes}"
        source, target = tiles.view(element), blocks.view(element)[..., 0]  # (groups, I, 16), (O, I)
        for group, tile in enumerate(source):
            rows = target[group * TILE_ROWS : (group + 1) * TILE_ROWS]
            rows[:] = tile.T[: len(rows)]


def _f32_to_blocks(weights: np.ndarray) -> np.ndarray:
    return weights.view(np.uint8)


def _f32_from_blocks(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.float32)


def _f16_to_blocks(weights: np.ndarray) -> np.ndarray:
    return half(weights).view(np.uint8)


def _f16_from_blocks(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bf16_to_blocks(weights: np.ndarray) -> np.ndarray:
    """Round to nearest even. Weights are finite here, so no NaN has to be kept quiet."""
    bits = weights.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16).view(np.uint8)


def _bf16_from_blocks(blocks: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


# max_error: half a unit in the last place.
F32 = FloatFormat("f32", 1, 0, 4, _f32_from_blocks, 64, (), (), _f32_to_blocks, 0.0, 0.0)
F16 = FloatFormat("f16", 1, 1, 2, _f16_from_blocks, 32, (), (), _f16_to_blocks, 2**-11, 2**-25)
BF16 = FloatFormat("bf16", 1, 30, 2, _bf16_from_blocks, 32, (), (), _bf16_to_blocks, 2**-8, 2**-134)
