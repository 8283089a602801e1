"""The selective state update and its gated norm against float64, and the same bits for every instruction set, chunk and thread count."""

from dataclasses import dataclass

import numpy as np
import pytest

from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.kernels.mamba import make_gated_norm, make_selective_scan
from libcolibri.program import Program
from libcolibri.simd.isa import Isa, available
from libcolibri.thread_team import Team

KERNELS = {isa: KernelSet(isa) for isa in available()}


@dataclass(frozen=True)
class Scan:
    """A random sequence for `heads` heads in `groups` groups; every array float32."""

    heads: int
    groups: int
    head_dim: int
    d_state: int
    tokens: int
    limits: tuple[float, float] = (0.0, np.inf)

    def inputs(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self.heads, self.tokens])
        width = self.heads * self.head_dim + 2 * self.groups * self.d_state
        return {
            "x": rng.standard_normal((self.tokens, width)).astype(np.float32),
            "dt": rng.uniform(-9, 3, (self.tokens, self.heads)).astype(np.float32),
            "A": -rng.uniform(0.2, 16, self.heads).astype(np.float32),
            "D": rng.standard_normal(self.heads).astype(np.float32),
            "bias": rng.standard_normal(self.heads).astype(np.float32),
        }

    def exact(self, initial: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """y (tokens, heads, head_dim) and the last state (heads, head_dim, d_state), float64, from equations written for whole heads."""
        given = {name: value.astype(np.float64) for name, value in self.inputs().items()}
        x, b, c = np.split(given["x"], [self.heads * self.head_dim, self.heads * self.head_dim + self.groups * self.d_state], axis=1)
        group_of = np.repeat(np.arange(self.groups), self.heads // self.groups)
        x = x.reshape(self.tokens, self.heads, self.head_dim)
        b, c = (part.reshape(self.tokens, self.groups, self.d_state)[:, group_of] for part in (b, c))
        dt = np.clip(np.logaddexp(given["dt"] + given["bias"], 0), *self.limits)
        h, y = initial.astype(np.float64), []
        for t in range(self.tokens):
            decay = np.exp(dt[t] * given["A"])[:, None, None]
            h = decay * h + dt[t][:, None, None] * x[t][:, :, None] * b[t][:, None, :]
            y.append((h @ c[t][:, :, None])[..., 0] + given["D"][:, None] * x[t])
        return np.array(y), h

    def to_slices(self, state: np.ndarray) -> np.ndarray:
        """(heads, head_dim, d_state) in the order of the kernel."""
        return np.ascontiguousarray(state.reshape(self.heads, -1, 16, self.d_state).transpose(0, 1, 3, 2)).astype(np.float32)

    def run(self, isa: Isa, threads: int, chunks: list[int], initial: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """y and the last state by the kernel, `chunks` tokens at a time."""
        given, state = self.inputs(), self.to_slices(initial)
        out = np.zeros((self.tokens, self.heads * self.head_dim), np.float32)
        where, limits = np.array([state.ctypes.data], np.int64), np.array(self.limits, np.float32)
        team, begin, kernel = Team(threads), 0, KERNELS[isa].get(make_selective_scan)
        for n in chunks:
            x, dt, y = (rows[begin : begin + n] for rows in (given["x"], given["dt"], out))
            program = Program()
            slots = [
                np.array([n], np.int64), x, x.strides[0], dt, dt.strides[0], given["A"], given["D"], given["bias"], limits, self.heads,
                self.groups, self.head_dim, self.d_state, where, y, y.strides[0],
            ]  # fmt: skip
            program.record("scan", kernel, slots)
            team.run(program.finish())
            begin += n
        team.close()
        assert begin == self.tokens
        return out, state


def initial_state(scan: Scan) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((scan.heads, scan.head_dim, scan.d_state)).astype(np.float32)


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(
    "scan",
    [
        Scan(heads=1, groups=1, head_dim=16, d_state=4, tokens=1),
        Scan(heads=6, groups=2, head_dim=48, d_state=20, tokens=13),
        Scan(heads=8, groups=8, head_dim=64, d_state=128, tokens=7, limits=(1e-2, 0.5)),
    ],
)
def test_scan_equals_float64(scan, isa):
    initial = initial_state(scan)
    y, state = scan.run(isa, 1, [scan.tokens], initial)
    exact_y, exact_state = scan.exact(initial)
    np.testing.assert_allclose(y.reshape(exact_y.shape), exact_y, atol=2e-6 * np.abs(exact_y).max(), rtol=0)
    np.testing.assert_allclose(state, scan.to_slices(exact_state), atol=2e-6 * np.abs(exact_state).max(), rtol=0)


def test_scan_gives_the_same_bits_whatever_the_chunks_threads_and_instructions():
    scan = Scan(heads=6, groups=3, head_dim=32, d_state=24, tokens=13)
    initial = initial_state(scan)
    y, state = scan.run(Isa.GENERIC, 1, [13], initial)
    for isa in available():
        for threads, chunks in ((1, [1] * 13), (2, [5, 1, 7]), (3, [12, 1])):
            got_y, got_state = scan.run(isa, threads, chunks, initial)
            assert (got_y.view(np.uint32) == y.view(np.uint32)).all(), (isa, threads)
            assert (got_state.view(np.uint32) == state.view(np.uint32)).all(), (isa, threads)


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(("groups", "cols", "threads"), [(1, 16, 1), (3, 48, 2), (8, 512, 3)])
def test_gated_norm_equals_float64(groups, cols, threads, isa):
    rng = np.random.default_rng(cols)
    x, gate = rng.standard_normal((2, 7, groups * cols)).astype(np.float32)
    weight = rng.standard_normal(groups * cols).astype(np.float32)
    v = (x.astype(np.float64) * gate / (1 + np.exp(-gate.astype(np.float64)))).reshape(7, groups, cols)
    exact = (v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-5)).reshape(7, -1) * weight
    slots = [
        np.array([7], np.int64), x, x.strides[0], gate, gate.strides[0], groups, cols, weight, np.array([1e-5], np.float32),
        np.zeros((threads, 256), np.uint8), 256,
    ]  # fmt: skip
    program, team = Program(), Team(threads)
    program.record("norm", KERNELS[isa].get(make_gated_norm), slots)
    team.run(program.finish())
    team.close()
    np.testing.assert_allclose(x, exact, atol=2e-6 * np.abs(exact).max(), rtol=0)
