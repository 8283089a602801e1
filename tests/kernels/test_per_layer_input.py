"""Gemma's per-layer inputs against float64, with the same bits on every instruction set and thread count."""

import numpy as np

from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.kernels.per_layer_input import make_per_layer_inputs
from libcolibri.program import Program
from libcolibri.recorder import Rows
from libcolibri.simd.isa import available
from libcolibri.thread_team import Team

TOKENS, LAYERS, COLUMNS = 5, 3, 48
NUMBERS = np.array([0.3, 7.0, 2**-0.5, 1e-3], np.float32)


def test_inputs_equal_float64_on_every_path():
    rng = np.random.default_rng(2)
    x, table = (rng.standard_normal((TOKENS, LAYERS, COLUMNS)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(COLUMNS).astype(np.float32)
    a, b, c, epsilon = NUMBERS.astype(np.float64)
    scaled = x.astype(np.float64) * a
    exact = (scaled / np.sqrt((scaled**2).mean(-1, keepdims=True) + epsilon) * weight + b * table) * c
    results = []
    for isa in available():
        for threads in (1, 3):
            rows, own = Rows(TOKENS, LAYERS * COLUMNS), Rows(TOKENS, LAYERS * COLUMNS)
            rows.data[:], own.data[:] = x.reshape(TOKENS, -1), table.reshape(TOKENS, -1)
            program, n_tok, scratch = Program(), np.array([TOKENS], np.int64), np.zeros(256 * threads, np.uint8)
            slots = [n_tok, rows.data, rows.stride, own.data, own.stride, LAYERS, COLUMNS, weight, NUMBERS, scratch, 256]
            program.record("inputs", KernelSet(isa).get(make_per_layer_inputs), slots)
            team = Team(threads)
            team.run(program.finish())
            team.close()
            results.append(rows.data.copy())
    np.testing.assert_allclose(results[0].reshape(exact.shape), exact, atol=2e-6 * np.abs(exact).max())
    assert all((result.view(np.uint32) == results[0].view(np.uint32)).all() for result in results)
