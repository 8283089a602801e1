"""Norms of the residual stream against float64: true column counts that are no whole vectors, private and shared outputs."""

import numpy as np
import pytest

from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.kernels.norm import make_layer_norm, make_norm
from libcolibri.program import Program
from libcolibri.recorder import Rows, padded_vector
from libcolibri.simd.isa import available
from libcolibri.thread_team import Team
from tests.oracle import decoder, encoder

KERNELS = {isa: KernelSet(isa) for isa in available()}


def normed(isa, make, x, weight, bias, threads, private):
    """Rows out (threads or 1, T, padded)."""
    n, cols = x.shape
    rows = Rows(n, cols)
    rows.data[:, :cols] = x
    out = np.full((threads if private else 1, *rows.data.shape), np.nan, np.float32)
    scratch = np.zeros((threads, 4 * rows.padded + 512), np.uint8)
    slots = [
        np.array([n]), rows.data, rows.stride, cols, rows.padded, padded_vector(weight), np.array([1e-3], np.float32), out, rows.stride,
        out[0].nbytes if private else 0, 0, 0, scratch, scratch.shape[1], *([] if bias is None else [padded_vector(bias)]),
    ]  # fmt: skip
    program, team = Program(), Team(threads)
    program.record("norm", KERNELS[isa].get(make, 1), slots)
    team.run(program.finish())
    team.close()
    return out


@pytest.mark.parametrize("cols", [1, 16, 40, 63, 64, 100, 384])
@pytest.mark.parametrize("isa", available())
def test_norms_equal_float64(isa, cols):
    rng = np.random.default_rng(cols)
    x = (rng.standard_normal((5, cols)) * 3 + 1).astype(np.float32)
    weight, bias = rng.standard_normal((2, cols)).astype(np.float32)
    wide = x.astype(np.float64)
    for make, shift, exact in (
        (make_norm, None, decoder.rms_norm(wide, weight, 1e-3)),
        (make_layer_norm, bias, encoder.layer_norm(wide, weight, bias, 1e-3)),
    ):
        shared = normed(isa, make, x, weight, shift, threads=2, private=False)
        np.testing.assert_allclose(shared[0, :, :cols], exact, atol=1e-5)
        assert not shared[0, :, cols:].any(), "padding must stay zero"
        np.testing.assert_array_equal(normed(isa, make, x, weight, shift, threads=2, private=True), shared.repeat(2, 0))
