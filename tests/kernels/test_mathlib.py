"""The vector functions against float64."""

import numpy as np
import pytest

from libcolibri.kernels.jit import kernel
from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.kernels.mathlib import exp, sigmoid, silu, softplus, tanh
from libcolibri.program import Program
from libcolibri.simd.isa import available
from libcolibri.simd.registers import load_f32, store_f32
from libcolibri.simd.scalars import get_i64
from libcolibri.thread_team import Team

EXACT = {
    "exp": np.exp,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


def make_functions(isa):
    @kernel
    def functions(operands, rank, threads):
        """Writes EXACT's functions of n float32 (whole vectors), a row each."""
        n, x, out = get_i64(operands), get_i64(operands + 8), get_i64(operands + 16)
        for i in range(n // 16):
            v = load_f32(x + i * 64)
            store_f32(out + i * 64, exp(v))
            store_f32(out + (n + i * 16) * 4, silu(v))
            store_f32(out + (2 * n + i * 16) * 4, softplus(v))
            store_f32(out + (3 * n + i * 16) * 4, sigmoid(v))
            store_f32(out + (4 * n + i * 16) * 4, tanh(v))
        return 0

    return functions


@pytest.mark.parametrize("isa", available())
def test_functions_are_close_in_relative_terms(isa):
    x = np.concatenate([np.linspace(-80, 80, 4096), np.geomspace(1e-6, 1, 512), -np.geomspace(1e-6, 1, 512)]).astype(np.float32)
    out = np.zeros((len(EXACT), len(x)), np.float32)
    program = Program()
    program.record("functions", KernelSet(isa).get(make_functions), [len(x), x, out])
    team = Team(1)
    team.run(program.finish())
    team.close()
    for got, (name, exact) in zip(out, EXACT.items(), strict=True):
        np.testing.assert_allclose(got, exact(x.astype(np.float64)), rtol=5e-7, atol=1e-37, err_msg=name)
