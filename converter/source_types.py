"""Tensor types of checkpoints: those of model directories, and those that can be read but have no kernel here.

In:  ggml blocks
Out: float32 weights, bit for bit what ggml's reference gives
"""

import numpy as np

from libcolibri.quant import FORMATS, BlockType
from libcolibri.quant.base import halves_at
from libcolibri.quant.mxfp4 import VALUES as FP4_VALUES

from .codebooks import codebook

DELTA = np.float32(0.125)  # by which iq1 types shift a group's codebook entries, up or down
_BITS = np.arange(8, dtype=np.uint8)


def _signs(bits: np.ndarray) -> np.ndarray:
    """Bytes (...) -> float32 (..., 8): -1 where a bit is set, lowest bit first."""
    return np.where(bits[..., None] >> _BITS & 1, np.float32(-1), np.float32(1))


def _seven_signs(codes: np.ndarray) -> np.ndarray:
    """Seven sign bits (...) -> signs (..., 8): the eighth makes the number of minus signs even."""
    parity = codes ^ codes >> 4
    parity = parity ^ parity >> 2
    parity = (parity ^ parity >> 1) & 1
    return _signs((codes | parity << 7).astype(np.uint8))


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Bytes (n, k) -> four-bit numbers (n, 2k), low half of a byte first."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)


def _words(blocks: np.ndarray, start: int, stop: int, kind: str) -> np.ndarray:
    """Bytes start <= b < stop of every block as little-endian integers (n, k)."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(kind)


def _with_signs(scale: np.ndarray, entries: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """(scale * entry) * sign for 256 weights: scale (n, s), each over 256 / s neighbours, entries and signs in order."""
    n = len(scale)
    scaled = scale[..., None] * entries.reshape(n, scale.shape[1], -1)
    return scaled.reshape(n, 256) * signs.reshape(n, 256)


def _iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 2, 66, "<u4").reshape(-1, 8, 2)  # for 32 weights: four codes; four times seven signs and a scale
    codes = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    signs = words[..., 1, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    scale = halves_at(blocks, 0) * (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    return _with_signs(scale, codebook("iq2_xxs")[codes], _seven_signs(signs))


def _iq2_xs(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 2, 66, "<u2")
    scale = halves_at(blocks, 0) * (np.float32(0.5) + _nibbles(blocks[:, 66:])) * np.float32(0.25)
    return _with_signs(scale, codebook("iq2_xs")[words & 511], _seven_signs(words >> 9))


def _iq2_s(blocks: np.ndarray) -> np.ndarray:
    high = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 32).astype(np.uint16)
    scale = halves_at(blocks, 0) * (np.float32(0.5) + _nibbles(blocks[:, 74:])) * np.float32(0.25)
    return _with_signs(scale, codebook("iq2_s")[blocks[:, 2:34] | high << 8], _signs(blocks[:, 34:66]))


def _iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 66, 98, "<u4")  # for 32 weights: four times seven signs and a scale
    signs = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    scale = halves_at(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return _with_signs(scale, codebook("iq3_xxs")[blocks[:, 2:66]], _seven_signs(signs))


def _iq3_s(blocks: np.ndarray) -> np.ndarray:
    high = (blocks[:, 66:74, None] >> _BITS & 1).reshape(-1, 64).astype(np.uint16)
    scale = halves_at(blocks, 0) * (2 * _nibbles(blocks[:, 106:]) + 1)
    return _with_signs(scale, codebook("iq3_s")[blocks[:, 2:66] | high << 8], _signs(blocks[:, 74:106]))


def _shifted(scale: np.ndarray, entries: np.ndarray, down: np.ndarray) -> np.ndarray:
    """scale * (entry +- DELTA) for 256 weights in groups of 8: scale (n, s) for neighbours, entries (n, 32, 8), down (n, 32) bool."""
    n = len(scale)
    shifted = entries + np.where(down, -DELTA, DELTA)[..., None]
    return (scale[..., None] * shifted.reshape(n, scale.shape[1], -1)).reshape(n, 256)


def _iq1_s(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 34, 50, "<u2")  # for 32 weights: high bits of four codes, a scale, the direction of the shift
    high = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 32)
    scale = halves_at(blocks, 0) * (2 * (words >> 12 & 7) + 1)
    down = np.repeat(words >> 15 == 1, 4, axis=1)
    return _shifted(scale, codebook("iq1_s")[blocks[:, 2:34] | high << 8], down)


def _iq1_m(blocks: np.ndarray) -> np.ndarray:
    words = _words(blocks, 48, 56, "<u2")  # twelve bits of four scales each, and four bits of the float16 d
    bits = (words >> 12).astype(np.uint16)
    d = (bits[:, 0] | bits[:, 1] << 4 | bits[:, 2] << 8 | bits[:, 3] << 12).view(np.float16).astype(np.float32)[:, None]
    scale = d * (2 * (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7) + 1).reshape(-1, 16)
    high = _nibbles(blocks[:, 32:48]).astype(np.uint16)
    return _shifted(scale, codebook("iq1_s")[blocks[:, :32] | (high & 7) << 8], high >> 3 == 1)


def _tq1_0(blocks: np.ndarray) -> np.ndarray:
    """Five ternary digits in a byte, as the leading digits of byte / 256 in base three."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8).reshape(1, 5, 1)
    parts = [blocks[:, None, :32] * powers, blocks[:, None, 32:48] * powers, blocks[:, None, 48:52] * powers[:, :4]]  # modulo 256
    digits = np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1).astype(np.uint16) * 3 >> 8
    return halves_at(blocks, 52) * (digits.astype(np.float32) - np.float32(1))


def _tq2_0(blocks: np.ndarray) -> np.ndarray:
    codes = blocks[:, :64].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    return halves_at(blocks, 64) * (codes.reshape(-1, 256).astype(np.float32) - np.float32(1))


def _nvfp4(blocks: np.ndarray) -> np.ndarray:
    """Four times 16 four-bit floats whose scale is an unsigned float of four exponent and three mantissa bits."""
    exponent, mantissa = blocks[:, :4] >> 3 & 15, (blocks[:, :4] & 7).astype(np.float32)
    normal = (np.float32(1) + mantissa / np.float32(8)) * np.exp2(exponent.astype(np.float32) - np.float32(7))
    scale = np.where(exponent == 0, mantissa * np.float32(2**-9), normal) * np.float32(0.5)
    scale = np.where(np.isin(blocks[:, :4], (0, 127)), np.float32(0), scale)
    packed = blocks[:, 4:].reshape(-1, 4, 8)
    codes = np.concatenate([packed & 15, packed >> 4], axis=2)
    return (scale[..., None] * np.array(FP4_VALUES, np.float32)[codes]).reshape(-1, 64)


_READABLE = (
    BlockType("iq2_xxs", 256, 16, 66, _iq2_xxs),
    BlockType("iq2_xs", 256, 17, 74, _iq2_xs),
    BlockType("iq3_xxs", 256, 18, 98, _iq3_xxs),
    BlockType("iq1_s", 256, 19, 50, _iq1_s),
    BlockType("iq3_s", 256, 21, 110, _iq3_s),
    BlockType("iq2_s", 256, 22, 82, _iq2_s),
    BlockType("iq1_m", 256, 29, 56, _iq1_m),
    BlockType("tq1_0", 256, 34, 54, _tq1_0),
    BlockType("tq2_0", 256, 35, 66, _tq2_0),
    BlockType("nvfp4", 64, 40, 36, _nvfp4),
)
FLOATS = ("f32", "f16", "bf16")
SOURCE_TYPES: dict[str, BlockType] = {**FORMATS, **{kind.name: kind for kind in _READABLE}}

# What a type without a kernel is stored as: the smallest type whose rounding adds less than 5 % to the error that the type itself has made
# (measured on heavy-tailed weights: iq1, tq 0 to 1 %, iq2 1 to 3 %, iq3_xxs 5 %, iq3_s 3 % as q5_k and 9 % as q4_k, nvfp4 2 %).
STORED_AS = {
    "iq1_s": "q4_k",
    "iq1_m": "q4_k",
    "tq1_0": "q4_k",
    "tq2_0": "q4_k",
    "iq2_xxs": "q4_k",
    "iq2_xs": "q4_k",
    "iq2_s": "q4_k",
    "iq3_xxs": "q4_k",
    "iq3_s": "q5_k",
    "nvfp4": "q6_k",
}
