"""Types that can only be read: against the gguf package, and how little the types they are stored as lose of them."""

import numpy as np
import pytest
from colibri_converter.source_types import SOURCE_TYPES
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from libcolibri.quant import FORMATS

READABLE = [name for name in SOURCE_TYPES if name not in FORMATS]
HALF_AT = {"tq1_0": 52, "tq2_0": 64}  # where the float16 scale lies, 0 elsewhere


def random_source_blocks(name, rows, blocks, seed):
    kind, rng = SOURCE_TYPES[name], np.random.default_rng(seed)
    out = rng.integers(0, 256, (rows, blocks, kind.ggml_block_bytes), dtype=np.uint8)
    if name == "iq1_m":  # the scale's highest bits, in the last byte: neither NaN nor infinity
        out[..., -1] = out[..., -1] & 0x0F | 0x20
    elif name != "nvfp4":
        at = HALF_AT.get(name, 0)
        out[..., at : at + 2] = rng.normal(0, 0.01, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return out


@pytest.mark.parametrize("name", READABLE)
def test_dequantize_equals_gguf_bit_for_bit(name):
    kind, ggml = SOURCE_TYPES[name], GGMLQuantizationType[name.upper()]
    assert (kind.block_cols, kind.ggml_block_bytes, kind.ggml_type) == (*GGML_QUANT_SIZES[ggml], ggml)
    blocks = random_source_blocks(name, 9, 40, seed=1)
    if name == "nvfp4":
        blocks[0, 0, :4] = 0, 127, 128, 255
    got, expected = kind.dequantize_blocks(blocks), quants.dequantize(blocks.reshape(9, -1), ggml)
    assert got.dtype == np.float32 and got.tobytes() == expected.astype(np.float32).tobytes()
