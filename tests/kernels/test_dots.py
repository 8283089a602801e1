"""Matrix products of every tensor type against float64, and the same bits on every instruction set, panel width and thread count."""

import numpy as np
import pytest

from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.matrix import Matrix
from libcolibri.quant import FORMATS
from libcolibri.recorder import Recorder, Rows, wants
from libcolibri.simd.isa import Isa, available
from libcolibri.thread_team import Team
from tests.random_blocks import random_blocks

FLOATS = ("f32", "f16", "bf16")
QUANTISED = [name for name in FORMATS if name not in FLOATS]
KERNELS = {isa: KernelSet(isa) for isa in available()}


def matrix_of(type: str, rows: int, cols: int, seed: int) -> tuple[Matrix, np.ndarray]:
    """A random matrix in tiles, and what its tiles stand for, float64."""
    fmt = FORMATS[type]
    tiles = fmt.pack(random_blocks(type, rows, cols // fmt.block_cols, np.random.default_rng(seed)))
    return Matrix(type, rows, cols, tiles), fmt.dequantize(tiles, rows, cols).astype(np.float64)


def multiply(matrix: Matrix, x: np.ndarray, isa: Isa, threads: int = 1, bias: np.ndarray | None = None) -> np.ndarray:
    """matrix @ x by recorded kernels, float32 (T, O)."""
    n = len(x)
    source, out = Rows(n, matrix.cols), Rows(n, matrix.rows)
    source.data[:, : matrix.cols] = x
    recorder = Recorder(KERNELS[isa], threads, n, np.array([n], np.int64), 4 * source.padded + 1024)
    given = recorder.activation("quantize", source, wants([matrix]))
    recorder.product("product", matrix, given, out, bias=bias)
    team = Team(threads)
    try:
        team.run(recorder.program.finish())
    finally:
        team.close()
    return out.data.copy()


def rounded(x: np.ndarray) -> np.ndarray:
    """x as the int8 panels hold it, float64: an independent statement of the rule in FORMAT.md."""
    blocks = x.reshape(len(x), -1, 32)
    peak = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    codes = np.rint(blocks * inverse)
    return (codes.astype(np.float64) * (peak / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize("type", FORMATS)
@pytest.mark.parametrize(("rows", "cols", "n"), [(16, 256, 1), (40, 512, 3), (1, 256, 8), (35, 768, 13)])
def test_product_equals_float64(type, rows, cols, n):
    matrix, weights = matrix_of(type, rows, cols, seed=rows)
    x = np.random.default_rng(n).standard_normal((n, cols)).astype(np.float32)
    exact = (x.astype(np.float64) if type in FLOATS else rounded(x)) @ weights.T
    got = multiply(matrix, x, available()[-1])
    np.testing.assert_allclose(got[:, :rows], exact, atol=2e-6 * cols**0.5 * np.abs(exact).max(), rtol=0)
    assert not got[:, rows:].any(), "rows beyond the matrix must be zero"


@pytest.mark.parametrize("type", FORMATS)
def test_bits_do_not_depend_on_the_path(type):
    """Instruction set, panel width, place in a batch, threads: one number."""
    matrix, _ = matrix_of(type, 52, 512, seed=3)
    x = (np.random.default_rng(4).standard_normal((21, 512)) * 10.0 ** np.arange(-10, 11)[:, None] / 1e3).astype(np.float32)
    reference = multiply(matrix, x, Isa.GENERIC)
    for isa in available():
        for threads in (1, 2, 3):
            got = multiply(matrix, x, isa, threads)
            assert (got.view(np.uint32) == reference.view(np.uint32)).all(), (isa.name, threads)
        alone = np.concatenate([multiply(matrix, row[None], isa) for row in x])
        assert (alone.view(np.uint32) == reference.view(np.uint32)).all(), isa.name


@pytest.mark.parametrize("type", QUANTISED)
def test_extreme_codes_do_not_saturate(type):
    """Every code byte at its extremes against activations at +-127: 16-bit sums of the AVX2 path must hold them."""
    fmt = FORMATS[type]
    rng = np.random.default_rng(0)
    x = np.where(rng.random((9, 512)) < 0.5, -1, 1).astype(np.float32)
    x[0], x[1] = 1, -1
    for fill in (0x00, 0xFF, 0x80, 0x7F):
        blocks = np.full((16, 512 // fmt.block_cols, fmt.ggml_block_bytes), fill, np.uint8)
        for at in fmt.half_scales:
            blocks[..., at : at + 2] = np.frombuffer(np.float16(1.0).tobytes(), np.uint8)
        if type == "mxfp4":
            blocks[..., 0] = 128
        tiles = fmt.pack(blocks)
        matrix = Matrix(type, 16, 512, tiles)
        exact = rounded(x) @ fmt.dequantize(tiles, 16, 512).astype(np.float64).T
        reference = multiply(matrix, x, Isa.GENERIC)
        np.testing.assert_allclose(reference, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max() + 1e-6)
        for isa in available():
            assert (multiply(matrix, x, isa).view(np.uint32) == reference.view(np.uint32)).all(), (isa.name, fill)


def test_bias_and_zero_input():
    matrix, _ = matrix_of("q4_k", 16, 256, seed=1)
    bias = np.arange(16, dtype=np.float32)
    got = multiply(matrix, np.zeros((5, 256), np.float32), available()[-1], bias=bias)
    assert (got == bias).all()
