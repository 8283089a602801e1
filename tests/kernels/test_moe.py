"""Feed-forward kernels, dense and of experts, against float64: every activation, biases, odd sizes, and the same bits on every path."""

import numpy as np
import pytest

from libcolibri.kernels import moe
from libcolibri.kernels.dots import IDS
from libcolibri.kernels.ffn import ACTIVATIONS
from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.kernels.norm import make_norm
from libcolibri.matrix import Matrix
from libcolibri.program import Program
from libcolibri.quant import FORMATS
from libcolibri.recorder import Recorder, Rows, wants
from libcolibri.simd.isa import available
from libcolibri.thread_team import Team
from tests.kernels.test_dots import matrix_of, rounded
from tests.oracle.ffn import activated

KERNELS = {isa: KernelSet(isa) for isa in available()}
LIMIT = 1.25


def run(program, threads):
    team = Team(threads)
    team.run(program.finish())
    team.close()


def dense(gate, up, x, activation, biases, isa, threads):
    """The hidden rows of a dense block by Recorder.gate_up."""
    n = len(x)
    source, out, spare = Rows(n, gate.cols), Rows(n, gate.rows), Rows(n, gate.rows)
    source.data[:, : gate.cols] = x
    r = Recorder(KERNELS[isa], threads, n, np.array([n]), 4 * source.padded + 1024)
    given = r.activation("quantize", source, wants([gate, up]))
    r.gate_up("ffn", gate, up, given, out, spare, activation=activation, limit=LIMIT, gate_bias=biases[0], up_bias=biases[1])
    run(r.program, threads)
    return out.data[:, : gate.rows].copy()


def exact_hidden(gate, up, x, activation, biases):
    """gate and up are float64 matrices; up may be None."""
    values = [None if w is None else x @ w.T + (0 if b is None else b) for w, b in zip((gate, up), biases, strict=True)]
    return activated(activation, *values, LIMIT)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize(("rows", "cols", "n"), [(16, 32, 1), (40, 96, 3), (5, 64, 19)])
def test_dense_activations_equal_float64(activation, rows, cols, n):
    gate, wide_gate = matrix_of("f32", rows, cols, seed=1)
    up, wide_up = (None, None) if activation == "relu2" else matrix_of("f32", rows, cols, seed=2)
    rng = np.random.default_rng(n)
    x = (rng.standard_normal((n, cols)) * cols**-0.5 * 2).astype(np.float32)
    biases = [None if m is None else rng.standard_normal(rows).astype(np.float32) for m in (gate, up)]
    for given in ([None, None], biases):
        expected = exact_hidden(wide_gate, wide_up, x.astype(np.float64), activation, given)
        reference = dense(gate, up, x, activation, given, available()[-1], 1)
        np.testing.assert_allclose(reference, expected, rtol=1e-5, atol=1e-5)
        for isa in available():
            got = dense(gate, up, x, activation, given, isa, 3)
            np.testing.assert_array_equal(got.view(np.uint32), reference.view(np.uint32), err_msg=isa.name)


def test_two_tensor_types_give_the_fused_result_of_one():
    """Unfused, an activation has the numbers of the fused kernel: f16 tiles of weights that f16 holds exactly."""
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((2, 24, 64)).astype(np.float16).astype(np.float32)
    x = rng.standard_normal((9, 64)).astype(np.float32) / 8
    gate, up, up_half = (
        Matrix(type, 24, 64, FORMATS[type].quantize(w)) for type, w in (("f32", weights[0]), ("f32", weights[1]), ("f16", weights[1]))
    )
    for activation in ("silu", "gelu_tanh", "clamped_swiglu"):
        fused = dense(gate, up, x, activation, [None, None], available()[-1], 2)
        np.testing.assert_array_equal(dense(gate, up_half, x, activation, [None, None], available()[-1], 2), fused)


class Experts:
    """E random experts of one layer, laid out as the cache holds them, with biases, and what their tiles stand for."""

    def __init__(self, type, E, F, D, seed):
        rng = np.random.default_rng(seed)
        self.type, self.E, self.F, self.D = type, E, F, D
        shapes = {"gate": (F, D), "up": (F, D), "down": (D, F)}
        self.exact, self.tiles, self.biases, self.offset, blobs, at = {}, {}, {}, {}, [], 0
        for part, (rows, cols) in shapes.items():
            weights = (rng.standard_normal((E, rows, cols)) * cols**-0.5).astype(np.float32)
            tiles = [FORMATS[type].quantize(w) for w in weights]
            self.exact[part] = np.stack([FORMATS[type].dequantize(t, rows, cols) for t in tiles]).astype(np.float64)
            self.tiles[part] = tiles[0].shape
            padded = np.zeros((E, -(-rows // 16) * 16), np.float32)
            padded[:, :rows] = rng.standard_normal((E, rows))
            self.biases[part] = padded
            self.offset[part] = at
            blobs.append(np.stack([t.reshape(-1).view(np.uint8) for t in tiles]))
            at += blobs[-1].shape[1]
        self.memory = np.ascontiguousarray(np.concatenate(blobs, axis=1))
        self.table = np.array([row.ctypes.data for row in self.memory])

    def part_slots(self, part):
        groups, blocks, tile_bytes = self.tiles[part]
        return [groups, blocks * tile_bytes, blocks]

    def expected(self, x, ids, weights, activation, scale_input):
        out = np.zeros((len(x), self.D))
        quantised = self.type not in ("f32", "f16", "bf16")
        panel = (lambda rows: rounded(rows.astype(np.float32))) if quantised else (lambda rows: rows)
        for t in range(len(x)):
            for e, w in zip(ids[t], weights[t].astype(np.float64), strict=True):
                x_in = panel(x[t : t + 1]) * (w if scale_input else 1)
                gate, up = (x_in @ self.exact[p][e].T + self.biases[p][e, : self.F] for p in ("gate", "up"))
                hidden = panel(activated(activation, gate, up, LIMIT))
                out[t] += ((hidden @ self.exact["down"][e].T)[0] + self.biases["down"][e, : self.D]) * (1 if scale_input else w)
        return out

    def computed(self, x, ids, weights, activation, scale_input, isa, threads):
        """Sort, one wave with everything resident, gather, gate and up, down, combine."""
        kernels, (n, K), E = KERNELS[isa], ids.shape, self.E
        program, quantised = Program(), int(self.type not in ("f32", "f16", "bf16"))
        one, limit, A = np.array([n]), np.array([LIMIT], np.float32), n * K
        slot, source, count, first, done = (np.zeros(size, np.int64) for size in (A, A, E, E, E))
        ready, missing, stamps, clock, counters, fresh = (np.zeros(size, np.int64) for size in (1 + E, 1 + E, E, 1, 2, 1))
        rows, hidden, y, out = Rows(n, self.D), Rows(A, self.F), Rows(A, self.D), Rows(n, self.D)
        rows.data[:, : self.D] = x
        scratch = np.zeros((threads, 4 * max(rows.padded, hidden.padded) + 1024), np.uint8)

        def record(make, slots, *parameters):
            program.record(make.__name__, kernels.get(make, *parameters), slots)

        singles, x_bytes, hidden_panels, hidden_bytes = rows.data, rows.stride, hidden.data, hidden.stride
        if quantised:
            x_bytes, hidden_bytes = self.D // 32 * 48, self.F // 32 * 48
            singles, hidden_panels = np.zeros(n * x_bytes, np.uint8), np.zeros(A * hidden_bytes, np.uint8)
            no_norm = [0, np.zeros(1, np.float32), 0, 0, 0]
            slots = [one, rows.data, rows.stride, self.D, rows.padded, *no_norm, singles, 0, scratch, scratch.shape[1]]
            record(make_norm, slots, 1)
        gathered = np.zeros(A * x_bytes, np.uint8)
        record(moe.make_sort, [one, K, E, ids, slot, count, first, source, done, fresh])
        record(moe.make_wave, [E, count, done, self.table, ready, missing, stamps, clock, counters, fresh])
        record(
            moe.make_gather,
            [ready, count, first, source, K, singles, x_bytes, gathered, self.D, weights if scale_input else 0],
            kernels.width, quantised,
        )  # fmt: skip
        target = (IDS[self.type], kernels.width, kernels.lanes)
        bias_bytes = {part: self.biases[part].strides[0] for part in self.biases}
        record(
            moe.make_expert_gate_up,
            [ready, count, first, self.table, self.offset["gate"], self.offset["up"], *self.part_slots("gate"), gathered, x_bytes,
             hidden.data, hidden.stride, self.biases["gate"], self.biases["up"], bias_bytes["gate"], limit],
            *target, ACTIVATIONS[activation],
        )  # fmt: skip
        if quantised:
            slots = [ready, count, first, hidden.data, hidden.stride, self.F, hidden_panels, hidden_bytes, scratch, scratch.shape[1]]
            record(moe.make_expert_quantize, slots, kernels.width)
        record(
            moe.make_expert_product,
            [ready, count, first, self.table, self.offset["down"], *self.part_slots("down"), hidden_panels, hidden_bytes, y.data, y.stride,
             self.biases["down"], bias_bytes["down"]],
            *target,
        )  # fmt: skip
        slots = [one, K, 0 if scale_input else weights, slot, y.data, y.stride, out.data, out.stride, out.padded, 0, 0, 0, 0, 0, 0]
        record(moe.make_combine, slots)
        run(program, threads)
        assert not out.data[:, self.D :].any(), "padding must stay zero"
        return out.data[:, : self.D].copy()


@pytest.mark.parametrize(("type", "activation", "scale_input"), [
    ("f32", "clamped_swiglu", False), ("f32", "silu", True), ("q8_0", "silu", False), ("q8_0", "gelu_tanh", True),
])  # fmt: skip
def test_experts_equal_float64_on_every_path(type, activation, scale_input):
    E, K, n = 5, 2, 13
    F, D = (64, 96) if type == "q8_0" else (41, 50)
    experts = Experts(type, E, F, D, seed=4)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n, D)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(n)])
    weights = rng.random((n, K)).astype(np.float32)
    exact = experts.expected(x.astype(np.float64), ids, weights, activation, scale_input)
    reference = experts.computed(x, ids, weights, activation, scale_input, available()[-1], 1)
    # An int8 code may round the other way where float32 and float64 differ: one step of 1 in 127.
    np.testing.assert_allclose(reference, exact, atol=2e-5 if type == "f32" else 0.02)
    for isa in available():
        got = experts.computed(x, ids, weights, activation, scale_input, isa, 3)
        np.testing.assert_array_equal(got.view(np.uint32), reference.view(np.uint32), err_msg=isa.name)
    alone = [
        experts.computed(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], activation, scale_input, available()[-1], 2) for t in range(n)
    ]
    np.testing.assert_array_equal(np.concatenate(alone).view(np.uint32), reference.view(np.uint32))
