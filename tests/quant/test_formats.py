"""Tensor types against the gguf package, which is ggml's own reference in numpy."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from libcolibri.errors import QuantError
from libcolibri.quant import FORMATS, TILE_ROWS
from tests.random_blocks import random_blocks

SIMPLE = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
K_TYPES = ("q4_k", "q5_k", "q6_k")
ROUNDED = tuple(name for name, fmt in FORMATS.items() if fmt.to_blocks)
BLOCKS = tuple(name for name in FORMATS if name not in ("f32", "f16", "bf16"))
# RMSE of llama.cpp's quantiser on the weights of `gaussian` below, libgguf 0.2.2 without an importance matrix.
REFERENCE_RMSE = {"q4_k": 0.003559567, "q5_k": 0.0018023412, "q6_k": 0.0008854273}


def ggml_type(name):
    return GGMLQuantizationType[name.upper()]


def gaussian():
    return np.random.default_rng(5).normal(0, 0.05, (128, 2048)).astype(np.float32)


def same_bits(a, b):
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_ggmls(name):
    fmt = FORMATS[name]
    assert (fmt.block_cols, fmt.ggml_block_bytes) == GGML_QUANT_SIZES[ggml_type(name)]
    assert fmt.ggml_type == ggml_type(name)
    assert fmt.bytes_of(17, 512) == np.prod(fmt.tile_shape(17, 512)) == 2 * 512 // fmt.block_cols * fmt.tile_bytes


@pytest.mark.parametrize("name", BLOCKS)
def test_every_bit_of_a_block_has_one_place_in_a_tile(name):
    fmt = FORMATS[name]
    source, target = set(), set()
    for field in fmt.fields:
        for bit in range(field.bits):
            source.add((field.block_byte, field.block_shift + bit))
            for row in range(TILE_ROWS):
                target.add((field.tile_byte + row * field.row_stride, field.tile_shift + bit))
    assert len(source) == 8 * fmt.ggml_block_bytes
    assert len(target) == TILE_ROWS * len(source)
    assert max(byte for byte, _ in target) < fmt.tile_bytes


@pytest.mark.parametrize("rows", [1, 15, 16, 37])
@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_equals_gguf_bit_for_bit(name, rows):
    fmt = FORMATS[name]
    blocks = random_blocks(name, rows, 512 // fmt.block_cols, np.random.default_rng(rows))
    expected = quants.dequantize(blocks.reshape(rows, -1), ggml_type(name))
    assert same_bits(fmt.dequantize(fmt.pack(blocks), rows, 512), expected)


@pytest.mark.parametrize("name", SIMPLE)
def test_quantize_equals_gguf_bit_for_bit(name):
    fmt, weights = FORMATS[name], gaussian()[:19]
    weights[3, :64] = 0
    weights[4, :32] *= 1e-6
    expected = quants.quantize(weights, ggml_type(name))
    assert same_bits(fmt.quantize_blocks(weights), expected)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(FORMATS)), rows=st.integers(1, 40), blocks=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_unpack_is_the_inverse_of_pack(name, rows, blocks, seed):
    fmt = FORMATS[name]
    source = random_blocks(name, rows, blocks, np.random.default_rng(seed))
    tiles = fmt.pack(source)
    assert tiles.shape == fmt.tile_shape(rows, blocks * fmt.block_cols)
    assert np.array_equal(fmt.unpack(tiles, rows), source)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_beyond_the_matrix_are_zero(name):
    fmt = FORMATS[name]
    blocks = random_blocks(name, 17, 2, np.random.default_rng(1))
    assert not fmt.unpack(fmt.pack(blocks), 32)[17:].any()


@pytest.mark.parametrize("name", FORMATS)
def test_pack_into_a_given_array_clears_what_was_there(name):
    fmt = FORMATS[name]
    blocks = random_blocks(name, 17, 2, np.random.default_rng(1))
    out = np.full(fmt.tile_shape(17, 2 * fmt.block_cols), 255, np.uint8)
    assert fmt.pack(blocks, out) is out
    assert np.array_equal(out, fmt.pack(blocks))


@pytest.mark.parametrize("name", K_TYPES)
def test_k_types_are_as_good_as_the_reference_quantiser(name):
    fmt, weights = FORMATS[name], gaussian()
    error = fmt.dequantize_blocks(fmt.quantize_blocks(weights)) - weights
    assert np.sqrt(np.mean(error**2)) < 1.03 * REFERENCE_RMSE[name]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(ROUNDED)),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1e-30, 1e-6, 1e-3, 1, 100]),
    shift=st.floats(-3, 3),
)
def test_error_stays_within_the_bound(name, seed, scale, shift):
    fmt = FORMATS[name]
    rng = np.random.default_rng(seed)
    weights = ((rng.standard_t(3, (3, 512)) + shift) * scale).astype(np.float32)
    weights[1, ::7] = 0
    error = np.abs(fmt.dequantize(fmt.quantize(weights), 3, 512) - weights)
    assert (error <= fmt.error_bound(weights)).all()


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("value", [0.0, 0.25, -0.25])
def test_constant_rows(name, value):
    fmt = FORMATS[name]
    weights = np.full((2, 256), value, np.float32)
    assert np.allclose(fmt.dequantize(fmt.quantize(weights), 2, 256), weights, atol=fmt.error_bound(weights).max())


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_damaged_weights_are_refused(name, value):
    weights = np.zeros((2, 256), np.float32)
    weights[1, 3] = value
    with pytest.raises(QuantError, match="NaN or infinity"):
        FORMATS[name].quantize(weights)


def test_weights_beyond_float16_are_refused():
    weights = np.full((1, 256), 1e30, np.float32)
    with pytest.raises(QuantError, match="65504"):
        FORMATS["q8_0"].quantize(weights)


DAMAGE = {"f32": [(2, b"\xc0\x7f")], "bf16": [(0, b"\xc0\x7f")], "f16": [(0, b"\x00\x7e")], "mxfp4": [(0, b"\xff")]}  # NaN


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_scales_are_found(name):
    blocks = random_blocks(name, 3, 2, np.random.default_rng(4))
    assert FORMATS[name].are_finite(blocks)
    for at, nan in DAMAGE.get(name) or [(at, b"\x00\x7e") for at in FORMATS[name].half_scales]:
        spoiled = blocks.copy()
        spoiled[1, 1, at : at + len(nan)] = np.frombuffer(nan, np.uint8)
        assert not FORMATS[name].are_finite(spoiled)


def test_types_that_only_come_ready_made_say_so():
    with pytest.raises(QuantError, match="iq4_nl"):
        FORMATS["iq4_nl"].quantize(np.zeros((1, 32), np.float32))


@pytest.mark.parametrize(("name", "cols"), [("q8_0", 48), ("q4_k", 128), ("q6_k", 320), ("q4_0", 0)])
def test_columns_must_fit_the_block(name, cols):
    with pytest.raises(QuantError, match="multiple of"):
        FORMATS[name].tile_shape(4, cols)


def test_read_only_memory_maps_are_packed(tmp_path):
    blocks = random_blocks("q4_k", 20, 2, np.random.default_rng(2))
    blocks.tofile(tmp_path / "blocks")
    mapped = np.memmap(tmp_path / "blocks", np.uint8, "r", shape=blocks.shape)
    assert np.array_equal(FORMATS["q4_k"].pack(mapped), FORMATS["q4_k"].pack(blocks))
