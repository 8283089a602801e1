"""Latent attention from projections to the heads' values, against float64 with expanded keys and values."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from libcolibri.kernels.dots import FLOATS, IDS
from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.kernels.matrix import make_head_product
from libcolibri.kernels.mla import make_head_panels, make_latent_append, make_latent_attention, make_latent_query
from libcolibri.program import Program
from libcolibri.recorder import Rows, kv_format, padded
from libcolibri.rope import RopeConfig, rope_tables
from libcolibri.simd.isa import Isa, available
from libcolibri.thread_team import Team
from tests.kernels.test_dots import matrix_of

KERNELS = {isa: KernelSet(isa) for isa in available()}
EPSILON = np.array([1e-6], np.float32)
SCRATCH_BYTES = 1 << 16


@dataclass(frozen=True)
class Shape:
    """Sizes of one latent attention; `rotated` false: no rotary embedding."""

    heads: int
    nope: int
    rotary: int
    latent: int
    v_dim: int
    type: str = "f32"
    group: int = 1
    rotated: bool = True

    @property
    def cols(self) -> int:
        return self.latent + padded(self.rotary)


SHAPES = [
    Shape(heads=4, nope=16, rotary=8, latent=32, v_dim=16, group=4),
    Shape(heads=3, nope=48, rotary=10, latent=48, v_dim=32, group=1, rotated=False),
    Shape(heads=6, nope=32, rotary=32, latent=64, v_dim=16, group=2),
    Shape(heads=8, nope=64, rotary=64, latent=96, v_dim=32, type="q8_0", group=8),
]


class Layer:
    """Random weights and inputs of a layer."""

    def __init__(self, shape: Shape, tokens: int):
        self.shape, rng = shape, np.random.default_rng(shape.heads)
        self.q = rng.standard_normal((tokens, shape.heads * (shape.nope + shape.rotary))).astype(np.float32)
        self.kv = rng.standard_normal((tokens, shape.latent + shape.rotary)).astype(np.float32)
        self.norm = rng.uniform(0.5, 1.5, shape.latent).astype(np.float32)
        self.k_b, self.k_exact = matrix_of(shape.type, shape.heads * shape.latent, shape.nope, seed=1)
        self.v_b, self.v_exact = matrix_of(shape.type, shape.heads * shape.v_dim, shape.latent, seed=2)
        self.scale = np.array([(shape.nope + shape.rotary) ** -0.5 / 4], np.float32)
        cos, sin = rope_tables(RopeConfig(), shape.rotary, tokens)
        self.table = np.ascontiguousarray(np.concatenate([cos, sin], axis=1))


class Runner:
    """Latent attention over a cache that grows from call to call."""

    def __init__(self, layer: Layer, isa: Isa, threads: int, kv_dtype: type, capacity: int):
        self.layer, self.threads, self.kernels, self.kv_dtype = layer, threads, KERNELS[isa], kv_dtype
        self.cache = np.full((capacity, layer.shape.cols), np.nan, kv_dtype)
        self.state = np.array([self.cache.ctypes.data, 0, 0, 0, capacity, 0, 0, 0], np.int64)
        self.scratch = np.zeros(threads * SCRATCH_BYTES, np.uint8)
        self.start = np.zeros(1, np.int64)

    def __call__(self, tokens: int) -> np.ndarray:
        """Values of all heads for the next `tokens` tokens, float32 (tokens, heads * v_dim)."""
        layer, s, at = self.layer, self.layer.shape, int(self.start[0])
        q, kv = Rows(tokens, layer.q.shape[1]), Rows(tokens, layer.kv.shape[1])
        q.data[:, : q.cols], kv.data[:, : kv.cols] = layer.q[at : at + tokens], layer.kv[at : at + tokens]
        query, out = Rows(tokens, s.heads * s.cols), Rows(tokens, s.heads * s.v_dim)
        self.program, self.n_tok = Program(), np.array([tokens], np.int64)
        self._append(q, kv, query)
        self._product(layer.k_b, q, (s.nope + s.rotary) * 4, query, s.cols * 4)
        self._attend(query)
        self._product(layer.v_b, query, s.cols * 4, out, s.v_dim * 4)
        team = Team(self.threads)
        try:
            team.run(self.program.finish())
        finally:
            team.close()
        self.start[0] += tokens
        return out.data[:, : out.cols].copy()

    def _record(self, make, parameters, slots):
        self.program.record(make.__name__, self.kernels.get(make, *parameters), slots)

    def _append(self, q: Rows, kv: Rows, query: Rows) -> None:
        layer, s = self.layer, self.layer.shape
        table, scratch = layer.table if s.rotated else 0, [self.scratch, SCRATCH_BYTES]
        slots = [self.n_tok, self.start, kv.data, kv.stride, s.latent, s.rotary, layer.norm, EPSILON, table, self.state, *scratch]
        self._record(make_latent_append, [kv_format(np.dtype(self.kv_dtype))], slots)
        slots = [self.n_tok, self.start, q.data, q.stride, s.heads, s.nope, s.rotary, table, query.data, query.stride, s.latent]
        self._record(make_latent_query, [], slots)

    def _product(self, matrix, x: Rows, x_head: int, out: Rows, out_head: int) -> None:
        heads, (groups, blocks, tile_bytes) = self.layer.shape.heads, matrix.tiles.shape
        given, stride = x.data, x.stride
        if matrix.type not in FLOATS:
            stride = matrix.cols // 32 * 48
            given = np.zeros(stride * x.data.shape[0] * heads, np.uint8)
            between = stride * x.data.shape[0]
            slots = [self.n_tok, x.data, x.stride, heads, x_head, matrix.cols, given, between, self.scratch, SCRATCH_BYTES]
            self._record(make_head_panels, [self.kernels.width], slots)
            x_head = between
        slots = [
            matrix.tiles, groups, blocks * tile_bytes, blocks, groups // heads, given, stride, x_head, self.n_tok,
            out.data, out.stride, out_head,
        ]  # fmt: skip
        self._record(make_head_product, [IDS[matrix.type], self.kernels.width, self.kernels.lanes], slots)

    def _attend(self, query: Rows) -> None:
        layer, s = self.layer, self.layer.shape
        slots = [
            self.n_tok, self.start, query.data, query.stride, s.heads, s.latent, s.cols, self.state, layer.scale,
            self.scratch, SCRATCH_BYTES, 4 * padded(len(self.cache)) + 64,
        ]  # fmt: skip
        self._record(make_latent_attention, [kv_format(np.dtype(self.kv_dtype)), s.group], slots)


def rotated(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """RoPE of (T, ..., columns), pairs (i, i + half)."""
    half = x.shape[-1] // 2
    table = table.astype(np.float64).reshape(len(x), *(1,) * (x.ndim - 2), 2 * half)
    cos, sin, a, b = table[..., :half], table[..., half:], x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def exact(layer: Layer) -> np.ndarray:
    """The definition, with a key and a value of its own for every head, float64 (T, heads * v_dim)."""
    s, tokens = layer.shape, len(layer.q)
    q = layer.q.astype(np.float64).reshape(tokens, s.heads, -1)
    kv = layer.kv.astype(np.float64)
    latent = kv[:, : s.latent] / np.sqrt((kv[:, : s.latent] ** 2).mean(-1, keepdims=True) + EPSILON[0]) * layer.norm
    q_rotary, k_rotary = q[..., s.nope :], kv[:, s.latent :]
    if s.rotated:
        q_rotary, k_rotary = rotated(q_rotary, layer.table), rotated(k_rotary, layer.table)
    keys = np.einsum("hcn,pc->phn", layer.k_exact.reshape(s.heads, s.latent, s.nope), latent)
    values = np.einsum("hvc,pc->phv", layer.v_exact.reshape(s.heads, s.v_dim, s.latent), latent)
    scores = np.einsum("thn,phn->htp", q[..., : s.nope], keys) + np.einsum("thr,pr->htp", q_rotary, k_rotary)
    scores = np.where(np.tri(tokens, dtype=bool), scores * layer.scale[0], -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("htp,phv->thv", weights / weights.sum(-1, keepdims=True), values).reshape(tokens, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(np.float32, 2e-5), (np.float16, 2e-3)])
@pytest.mark.parametrize("tokens", [1, 21, 131])
def test_equals_float64(shape, kv_dtype, tolerance, tokens):
    layer = Layer(shape, tokens)
    expected = exact(layer)
    got = Runner(layer, available()[-1], 1, kv_dtype, tokens)(tokens)
    if shape.type not in FLOATS:
        tolerance = 0.05  # activations are rounded to 8 bits, twice
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kv_dtype", [np.float32, np.float16])
def test_bits_do_not_depend_on_the_path(shape, kv_dtype):
    """Instruction set, threads, chunks: one number."""
    layer = Layer(shape, 133)
    reference = Runner(layer, Isa.GENERIC, 1, kv_dtype, 133)(133)
    for isa in available():
        for threads, chunks in ((1, [133]), (3, [70, 1, 1, 61]), (2, [1] * 18 + [115])):
            run = Runner(layer, isa, threads, kv_dtype, 133)
            got = np.concatenate([run(n) for n in chunks])
            assert (got.view(np.uint32) == reference.view(np.uint32)).all(), (isa.name, threads)


def test_heads_per_pass_do_not_change_bits():
    wide, narrow = SHAPES[3], replace(SHAPES[3], group=1)
    runs = [Runner(Layer(shape, 70), available()[-1], 1, np.float16, 70)(70) for shape in (wide, narrow)]
    assert (runs[0].view(np.uint32) == runs[1].view(np.uint32)).all()
