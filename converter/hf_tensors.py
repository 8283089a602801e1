"""The tensors of a Hugging Face checkpoint under their own names, scales and weights put together.

In:  where every tensor lies in the shards, config.json's quantization_config
Out: SourceTensor by name: floats as stored, FP8 weights times their scales as f32, MXFP4 blocks as mxfp4; nothing is read yet
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from libcolibri.errors import SourceError
from libcolibri.quant.q4_0 import pair_nibbles
from libcolibri.safetensors_header import TensorSlot

from .source import LazyRows, RowIndex, SourceTensor, computed, tensor_from_bytes

FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
FP8 = "F8_E4M3"
FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
SCALE_NAMES = ("_scale_inv", "_scale")  # behind the weight's name
BLOCKS, SCALES = "_blocks", "_scales"  # of MXFP4
ADVICE = "give the 16-bit checkpoint or a GGUF file"


@dataclass(frozen=True)
class Quantization:
    """What quantization_config says: the method's name, "" for none, and the (rows, columns) that share an FP8 scale, if stated."""

    method: str
    block: tuple[int, int] | None = None


def read_quantization(config: Mapping[str, Any], where: Path) -> Quantization:
    """SourceError for a method that cannot be read."""
    stated = config.get("quantization_config")
    if not stated:
        return Quantization("")
    if not isinstance(stated, Mapping):
        raise SourceError(f"{where}: quantization_config is a {type(stated).__name__}, expected an object")
    method = str(stated.get("quant_method"))
    if method == "mxfp4":
        return Quantization(method)
    if method not in FP8_METHODS or not _is_fp8(stated):
        shown = method[:40] + (f" ({str(stated['format'])[:40]})" if "format" in stated else "")
        raise SourceError(f"{where}: weights quantised by {shown!r} are not supported, only fp8 (e4m3) and mxfp4: {ADVICE}")
    block = stated.get("weight_block_size") or _group(stated).get("block_structure")
    if block is None:
        return Quantization(method)
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise SourceError(f"{where}: weight_block_size is {str(block)[:60]}, expected two positive numbers")
    return Quantization(method, (block[0], block[1]))


def _group(stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """compressed-tensors: what its first group says of weights."""
    for group in (stated.get("config_groups") or {}).values():
        return group.get("weights") or {}
    return {}


def _is_fp8(stated: Mapping[str, Any]) -> bool:
    if stated.get("quant_method") != "compressed-tensors":
        return stated.get("fmt", "e4m3") == "e4m3"
    return stated.get("format") == "float-quantized" and _group(stated).get("num_bits") == 8


def stored_tensors(slots: Mapping[str, tuple[Path, TensorSlot]], quantization: Quantization) -> dict[str, SourceTensor]:
    """Every weight of the shards; scales and what belongs to activations are part of no result."""
    files = _Files(slots)
    companions = _companions(slots, quantization)
    tensors = {}
    for name, (path, slot) in slots.items():
        if name in companions:
            continue
        what = f"{path}: tensor {name!r}"
        if slot.dtype in FLOATS:
            if 0 in slot.shape or not slot.shape:
                raise SourceError(f"{what} has shape {slot.shape}, expected a vector or a matrix")
            tensors[name] = tensor_from_bytes(FLOATS[slot.dtype], slot.shape, files.raw(name))
        elif slot.dtype == FP8:
            tensors[name] = _fp8(what, name, slot.shape, files, quantization.block)
        elif quantization.method == "mxfp4" and name.endswith(BLOCKS) and slot.dtype == "U8":
            tensors[name] = _mxfp4(what, name, slot.shape, files)
        else:
            raise SourceError(f"{what} has type {slot.dtype}, only {', '.join((*FLOATS, FP8))} can be converted: {ADVICE}")
    return tensors


class _Files:
    """Memory maps of the shards, opened when first needed."""

    def __init__(self, slots: Mapping[str, tuple[Path, TensorSlot]]):
        self.slots = slots
        self.maps: dict[Path, np.ndarray] = {}

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8 view of the map."""
        path, slot = self.slots[name]
        if path not in self.maps:
            self.maps[path] = np.memmap(path, np.uint8, "r").view(np.ndarray)
        return self.maps[path][slot.start : slot.end]

    def values(self, name: str) -> np.ndarray:
        """A small float tensor, float32 in its own shape."""
        path, slot = self.slots[name]
        if slot.dtype not in FLOATS:
            raise SourceError(f"{path}: tensor {name!r} has type {slot.dtype}, only {', '.join(FLOATS)} can be scales: {ADVICE}")
        return tensor_from_bytes(FLOATS[slot.dtype], (1, *slot.shape), self.raw(name)).read().reshape(slot.shape)


def _companions(slots: Mapping[str, tuple[Path, TensorSlot]], quantization: Quantization) -> set[str]:
    """Names that are read together with a weight, or only matter to 8-bit activations."""
    found: set[str] = set()
    if quantization.method == "mxfp4":
        found |= {name.removesuffix(BLOCKS) + SCALES for name in slots if name.endswith(BLOCKS)}
    elif quantization.method:
        weights = [name for name, (_, slot) in slots.items() if slot.dtype == FP8]
        found |= {weight + suffix for weight in weights for suffix in SCALE_NAMES}
        found |= {name for name in slots if name.endswith((".input_scale", ".input_scale_ub", ".activation_scale"))}
    return found


def _fp8(what: str, name: str, shape: tuple[int, ...], files: _Files, block: tuple[int, int] | None) -> SourceTensor:
    """float32 weight times the scale of its block, row or tensor. shape (O, I), or (E, O, I)."""
    scale_name = next((name + suffix for suffix in SCALE_NAMES if name + suffix in files.slots), None)
    if scale_name is None:
        raise SourceError(f"{what} is FP8 without scales beside it: a file of the checkpoint is missing or incomplete")
    codes, table = files.raw(name).reshape(-1, shape[-1]), _fp8_values()
    scales, rows, cols = files.values(scale_name), shape[-2], shape[-1]
    count = len(codes) // rows
    if scales.size == count:
        block = rows, cols
    elif block is None and scales.size == count * rows:  # blocks may be as many as rows: only what is not said is concluded
        block = 1, cols
    grid = (-(-rows // block[0]), -(-cols // block[1])) if block else None
    if block is None or scales.size != count * grid[0] * grid[1]:  # type: ignore[index]
        wanted = f"weight_block_size {block} says {grid}" if block else "no weight_block_size is given"
        raise SourceError(f"{what} of shape {shape} has scales of shape {files.slots[scale_name][1].shape}, {wanted}: {ADVICE}")
    scales = scales.reshape(-1, grid[1])  # type: ignore[index]
    column_block = np.arange(cols) // block[1]

    def values(index: RowIndex) -> np.ndarray:
        matrix, row = np.divmod(np.arange(len(codes))[index], rows)
        return table[codes[index]] * scales[matrix * grid[0] + row // block[0]][:, column_block]  # type: ignore[index]

    return computed(shape, values)


def _fp8_values() -> np.ndarray:
    """What the 256 codes of e4m3 stand for, float32: a sign, four bits of exponent, three of mantissa; no infinity, all ones is NaN."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


def _mxfp4(what: str, name: str, shape: tuple[int, ...], files: _Files) -> SourceTensor:
    """(..., O, blocks, 16) bytes with the codes of neighbours and (..., O, blocks) exponents -> mxfp4 (..., O, 32 blocks)."""
    scales = name.removesuffix(BLOCKS) + SCALES
    if scales not in files.slots or files.slots[scales][1].dtype != "U8" or files.slots[scales][1].shape != shape[:-1] or shape[-1] != 16:
        raise SourceError(f"{what} of shape {shape} has no {scales.rpartition('.')[2]} of shape {shape[:-1]}: the checkpoint is damaged")
    count = shape[-2]
    packed, exponents = files.raw(name).reshape(-1, count, 16), files.raw(scales).reshape(-1, count)

    def blocks(index: RowIndex) -> np.ndarray:
        rows = packed[index]
        codes = np.stack([rows & 15, rows >> 4], axis=-1).reshape(-1, 32)
        return np.concatenate([exponents[index][..., None], pair_nibbles(codes).reshape(*rows.shape)], axis=-1)

    return SourceTensor("mxfp4", (*shape[:-2], 32 * count), LazyRows(blocks))
