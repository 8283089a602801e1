"""The causal convolution against float64: taps, bias, silu, gates, the carried state; the same bits however a run is cut."""

import numpy as np
import pytest

from libcolibri.kernels.conv import make_causal_conv
from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.program import Program
from libcolibri.simd.isa import Isa, available
from libcolibri.thread_team import Team

KERNELS = {isa: KernelSet(isa) for isa in available()}


def convolve(isa, x, weights, state, bias=None, silu=False, gates=(None, None), threads=1, in_place=False):
    """Run the kernel on float32 (T, channels); `state` (taps - 1, channels) is rewritten."""
    taps, channels = weights.shape
    x = x.copy()
    out = x if in_place else np.full((len(x), channels + 16), np.nan, np.float32)
    slots = [
        np.array([len(x)]), x, x.strides[0], out, out.strides[0], channels, taps, weights, 0 if bias is None else bias, int(silu),
        np.array([state.ctypes.data]), *(0 if gate is None else gate for gate in gates),
    ]  # fmt: skip
    program = Program()
    program.record("conv", KERNELS[isa].get(make_causal_conv), slots)
    team = Team(threads)
    team.run(program.finish())
    team.close()
    return out[:, :channels].copy()


def exact(x, weights, state, bias, silu, gates):
    """The definition, float64."""
    taps = len(weights)
    u = x.astype(np.float64) * (1 if gates[0] is None else gates[0])
    u = np.concatenate([state, u])
    y = sum(weights[j].astype(np.float64) * u[j : j + len(x)] for j in range(taps)) + (0 if bias is None else bias)
    y = y / (1 + np.exp(-y)) if silu else y
    return y * (1 if gates[1] is None else gates[1]), u[len(u) - taps + 1 :]


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(("taps", "channels", "tokens"), [(4, 48, 7), (3, 16, 1), (2, 32, 5), (4, 160, 2)])
@pytest.mark.parametrize("dressed", [False, True])
def test_convolution_equals_float64(isa, taps, channels, tokens, dressed):
    rng = np.random.default_rng(taps * tokens)
    x, before, after = rng.standard_normal((3, tokens, channels)).astype(np.float32)
    weights, state = rng.standard_normal((taps, channels)).astype(np.float32), rng.standard_normal((taps - 1, channels)).astype(np.float32)
    bias, gates = (rng.standard_normal(channels).astype(np.float32), (before, after)) if dressed else (None, (None, None))
    wanted, wanted_state = exact(x, weights, state, bias, dressed, gates)
    got = convolve(isa, x, weights, state, bias, dressed, gates)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    np.testing.assert_allclose(state, wanted_state, atol=1e-6)


def test_bits_do_not_depend_on_the_path():
    """Instruction set, threads, where a run of tokens is cut, in place or not: one number."""
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((13, 80)).astype(np.float32), rng.standard_normal((4, 80)).astype(np.float32)
    state = np.zeros((3, 80), np.float32)
    reference = convolve(Isa.GENERIC, x, weights, state, silu=True)
    for isa in available():
        for threads, cuts in ((1, [13]), (2, [1] * 13), (3, [2, 7, 4])):
            again, done, at = np.zeros((3, 80), np.float32), [], 0
            for n in cuts:
                done.append(convolve(isa, x[at : at + n], weights, again, silu=True, threads=threads, in_place=threads == 2))
                at += n
            assert (np.concatenate(done).view(np.uint32) == reference.view(np.uint32)).all(), (isa.name, threads)
            assert (again.view(np.uint32) == state.view(np.uint32)).all(), (isa.name, threads)
