import itertools
import math

import numpy as np
import pytest

from libcolibri.kernels.encoder_kernels import (
    attention_scratch_bytes,
    make_gelu,
    make_pool,
    make_residual_norm,
    make_text_attention,
)
from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.program import Program
from libcolibri.thread_team import Team
from tests.oracle import encoder as reference

KERNELS = KernelSet()


def run(make, slots, parameters=(), threads=2):
    program = Program()
    program.record("tested", KERNELS.get(make, *parameters), slots)
    team = Team(threads)
    try:
        team.run(program.finish())
    finally:
        team.close()


def one(value, dtype=np.int64):
    return np.array([value], dtype)


def test_gelu_is_exact_to_two_millionths():
    x = np.concatenate([np.linspace(-9, 9, 64 * 4096), [-1e30, -50, 0, 50, 1e30] + [0.0] * 59]).astype(np.float32).reshape(-1, 64)
    rows, scratch = x.copy(), np.zeros(2 * 512, np.uint8)
    run(make_gelu, (one(len(x)), rows, 256, 64, 0, scratch, 512), (KERNELS.width,))
    expected = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.ravel().astype(float)]).reshape(x.shape)
    assert np.abs(rows[:-1] - expected[:-1]).max() < 2e-6
    assert rows[-1, :5].tolist() == [0, 0, 0, 50, np.float32(1e30)]


@pytest.mark.parametrize("cols", [16, 48, 64, 384])
def test_layer_norm(cols):
    rng = np.random.default_rng(cols)
    x, residual = (rng.standard_normal((5, cols)).astype(np.float32) * 3 + 1 for _ in range(2))
    weight, bias, out = rng.standard_normal(cols).astype(np.float32), rng.standard_normal(cols).astype(np.float32), np.zeros_like(x)
    rows = np.array([4, 0, 3, 3, 1])
    slots = (one(5), x, cols * 4, residual, cols * 4, rows, cols, weight, bias, one(1e-12, np.float32), out, cols * 4, 0)
    run(make_residual_norm, (*slots, np.zeros(2 * 256, np.uint8), 256), (KERNELS.width,))
    expected = reference.layer_norm(x.astype(np.float64) + residual[rows], weight, bias, 1e-12)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("head", [16, 32, 64])
def test_attention_stays_within_a_text(head):
    rng = np.random.default_rng(head)
    lengths, heads = [1, 16, 7, 33, 4], 3
    starts = np.concatenate([[0], np.cumsum(lengths)])
    q, k, v = (rng.standard_normal((starts[-1], heads * head)).astype(np.float32) for _ in range(3))
    k *= 6  # peaked weights
    out, width, longest = np.zeros_like(q), heads * head * 4, 40
    size = attention_scratch_bytes(longest, head)
    slots = (one(len(lengths)), starts, q, k, v, width, heads, head, one(head**-0.5, np.float32), out, width, longest)
    run(make_text_attention, (*slots, np.zeros(2 * size, np.uint8), size))
    for first, last in itertools.pairwise(starts):
        expected = reference.attention(*(a[first:last].astype(np.float64) for a in (q, k, v)), heads)
        np.testing.assert_allclose(out[first:last], expected, atol=1e-5)


def test_pool():
    x = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    x[5] = 0
    starts, out = np.array([0, 2, 5, 6]), np.zeros((3, 32), np.float32)
    run(make_pool, (one(3), starts, x, 128, 32, 0, 1, out, 128))
    np.testing.assert_allclose(out[0], reference.mean_embedding(x[:2]), atol=1e-6)
    np.testing.assert_allclose(out[1], reference.mean_embedding(x[2:5]), atol=1e-6)
    assert not out[2].any()
    run(make_pool, (one(3), starts, x, 128, 32, 1, 0, out, 128))
    np.testing.assert_array_equal(out, x[[0, 2, 5]])
