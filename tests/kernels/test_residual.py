"""Multipliers and caps of residual stream and logits against float64."""

import numpy as np
import pytest

from libcolibri.blocks.base import NormConfig
from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.recorder import Recorder, Rows
from libcolibri.simd.isa import available
from libcolibri.thread_team import Team
from libcolibri.weights import Norm


@pytest.mark.parametrize("isa", available(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("cols", [16, 37, 64])
@pytest.mark.parametrize("threads", [1, 3])
def test_scale_softcap_and_normed_sum(isa, cols, threads):
    rng, n = np.random.default_rng(cols), 5
    x, y = Rows(n, cols), Rows(n, cols)
    a, b = (rng.normal(0.0, 20.0, (n, cols)) for _ in range(2))
    x.data[:, :cols], y.data[:, :cols] = a, b
    norm = Norm(NormConfig(1e-3), rng.normal(1.0, 0.1, cols).astype(np.float32))
    team = Team(threads)
    r = Recorder(KernelSet(isa), threads, n, np.array([n]), 4 * x.padded + 1088)
    r.scale("scale", x, r.scalar(0.75))
    r.softcap("softcap", x, 30.0)
    r.add_normed("add", x, y, norm, -0.5)
    team.run(r.program.finish(), 0)
    team.close()
    expected = 30.0 * np.tanh(0.75 * a / 30.0) - 0.5 * b / np.sqrt((b * b).mean(1, keepdims=True) + 1e-3) * norm.weight
    np.testing.assert_allclose(x.data[:, :cols], expected, rtol=1e-6, atol=1e-5)
    assert not x.data[:, cols:].any()
