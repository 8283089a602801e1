"""Every switch of attention against float64, and the same bits for every instruction set, thread count and cut into chunks."""

from dataclasses import dataclass

import numpy as np
import pytest

from libcolibri.kernels.kernel_set import KernelSet
from libcolibri.recorder import HeadNorms, Heads, KeysValues, Recorder, Rows, attention_scratch_bytes
from libcolibri.simd.isa import available
from libcolibri.thread_team import Team

KERNELS = {isa: KernelSet(isa) for isa in available()}
BEST, EPSILON, TOKENS = available()[-1], 1e-3, 45


@dataclass(frozen=True)
class Case:
    """Attention with its switches; `ring`: positions that the cache holds, `gate`: None, "sigmoid" within q's rows, "softplus" per head."""

    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 32
    v_dim: int = 32
    rotary: int = 32
    norm: bool = False
    norm_last: bool = False
    v_norm: bool = False
    v_is_k: bool = False
    v_factor: float = 1.0
    q_factors: bool = False
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    window: int = 0
    chunk: int = 0
    ring: int = 48
    gate: str | None = None

    @property
    def q_head(self) -> int:
        """Columns from one head of q to the next."""
        return self.k_dim * (2 if self.gate == "sigmoid" else 1)


CASES = {
    "plain": Case(),
    "different widths, sinks, a ring": Case(kv_heads=1, k_dim=24, v_dim=16, rotary=8, v_factor=0.7, sinks=True, window=8, ring=32),
    "norm before": Case(norm=True),
    "norm after, partial": Case(norm=True, norm_last=True, rotary=20),
    "capped scores": Case(heads=6, kv_heads=2, softcap=5.0, window=9, scale=0.5),
    "chunks on a ring, normed values": Case(chunk=16, v_norm=True, ring=32),
    "no rotation, factors by position": Case(rotary=0, q_factors=True),
    "values from raw keys": Case(kv_heads=1, norm=True, v_norm=True, v_is_k=True, scale=1.0),
    "a gate in q": Case(norm=True, rotary=8, gate="sigmoid"),
    "a gate per head": Case(heads=7, kv_heads=1, v_dim=16, gate="softplus", window=1, ring=16),
    "sinks that dominate": Case(sinks=True, scale=0.01, window=40),
}


class Data:
    """Random inputs of a case."""

    def __init__(self, case: Case):
        rng = np.random.default_rng(3)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        self.q, self.k = normal(TOKENS, case.heads * case.q_head), normal(TOKENS, case.kv_heads * case.k_dim)
        self.v = self.k if case.v_is_k else normal(TOKENS, case.kv_heads * case.v_dim)
        self.norms = (normal(case.k_dim), normal(case.k_dim)) if case.norm else (None, None)
        self.v_norm = np.ones(case.v_dim, np.float32) if case.v_norm else None
        self.table = normal(TOKENS, case.rotary) if case.rotary else None
        self.q_factors = normal(TOKENS) if case.q_factors else None
        self.sinks = normal(case.heads) * 3 if case.sinks else None
        self.gates = normal(TOKENS, case.heads) if case.gate == "softplus" else None


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(EPSILON)) * weight


def turned(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """x (T, heads, columns) with its first columns turned by the table (T, rotary): cosines, sines."""
    half = table.shape[1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def prepared(x: np.ndarray, norm: np.ndarray | None, case: Case, data: Data) -> np.ndarray:
    if norm is not None and not case.norm_last:
        x = rms_norm(x, norm)
    if data.table is not None:
        x = turned(x, data.table)
    return rms_norm(x, norm) if norm is not None and case.norm_last else x


def expected(case: Case, data: Data) -> np.ndarray:
    """(T, heads * v_dim) in float64, token by token."""
    q, gate = np.split(data.q.astype(np.float64).reshape(TOKENS, case.heads, case.q_head), [case.k_dim], axis=-1)
    q = prepared(q, data.norms[0], case, data)
    if data.q_factors is not None:
        q = q * data.q_factors[:, None, None]
    k = prepared(data.k.astype(np.float64).reshape(TOKENS, case.kv_heads, case.k_dim), data.norms[1], case, data)
    v = data.v.astype(np.float64).reshape(TOKENS, case.kv_heads, case.v_dim)
    v = (v if data.v_norm is None else rms_norm(v, data.v_norm)) * case.v_factor
    out = np.zeros((TOKENS, case.heads, case.v_dim))
    for p in range(TOKENS):
        first = max(p - case.window + 1 if case.window else 0, p // case.chunk * case.chunk if case.chunk else 0, 0)
        for h in range(case.heads):
            kv = h * case.kv_heads // case.heads
            scores = k[first : p + 1, kv] @ q[p, h] * (case.scale or case.k_dim**-0.5)
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            weights = np.exp(scores)
            sink = 0.0 if data.sinks is None else np.exp(np.float64(data.sinks[h]))
            out[p, h] = weights @ v[first : p + 1, kv] / (weights.sum() + sink)
    if case.gate == "sigmoid":
        out = out / (1 + np.exp(-gate))
    if data.gates is not None:
        out = out * np.log1p(np.exp(data.gates.astype(np.float64)))[:, :, None]
    return out.reshape(TOKENS, -1)


def computed(case: Case, data: Data, kv_dtype=np.float32, isa=BEST, threads: int = 1, chunk_tok: int = TOKENS) -> np.ndarray:
    """float32 (T, heads * v_dim) by recorded kernels, fed chunk_tok tokens at a time."""
    program = Recorded(case, data, np.dtype(kv_dtype), isa, threads, chunk_tok)
    team = Team(threads)
    try:
        return np.concatenate([program.run(team, at, min(chunk_tok, TOKENS - at)) for at in range(0, TOKENS, chunk_tok)])
    finally:
        team.close()


class Recorded:
    """rope_append, attention and gate of one layer."""

    def __init__(self, case: Case, data: Data, kv_dtype: np.dtype, isa, threads: int, chunk_tok: int):
        self.n_tok, self.start = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.sources = {"q": data.q, "k": data.k, "v": data.v} | ({} if data.gates is None else {"gates": data.gates})
        self.rows = {name: Rows(chunk_tok, source.shape[1]) for name, source in self.sources.items()}
        self.out = Rows(chunk_tok, case.heads * case.v_dim)
        self.k = np.full((case.kv_heads, case.ring * case.k_dim), np.nan, kv_dtype)
        self.v = np.full((case.kv_heads, case.ring * case.v_dim), np.nan, kv_dtype)
        self.state = np.array([self.k.ctypes.data, self.v.ctypes.data, self.k.strides[0], self.v.strides[0], case.ring, 0, 0, 0], np.int64)
        heads = Heads(case.heads, case.kv_heads, case.k_dim, case.v_dim, case.q_head)
        r = Recorder(KERNELS[isa], threads, chunk_tok, self.n_tok, attention_scratch_bytes(heads, TOKENS))
        self.program, self.cache, self.heads = r.program, KeysValues(self.state.ctypes.data, kv_dtype, self.start), heads
        q, k, v = self.rows["q"], self.rows["k"], self.rows["v"]
        norms = HeadNorms(EPSILON, *data.norms, data.v_norm, last=case.norm_last)
        r.rope_append(self.cache, heads, q, k, v, norms=norms, table=data.table, v_factor=case.v_factor, q_factors=data.q_factors)
        r.attention(
            self.cache, heads, q, self.out, TOKENS, scale=case.scale or case.k_dim**-0.5, softcap=case.softcap, sinks=data.sinks,
            window=case.window, chunk=case.chunk,
        )  # fmt: skip
        if case.gate == "sigmoid":
            r.gate("gate", self.out, case.heads, q, "sigmoid", first=case.k_dim, gate_head=case.q_head)
        if case.gate == "softplus":
            r.gate("gate", self.out, case.heads, self.rows["gates"], "softplus")
        self.program.finish()

    def run(self, team: Team, at: int, n: int) -> np.ndarray:
        self.n_tok[0], self.start[0] = n, at
        for name, rows in self.rows.items():
            rows.data[:n, : rows.cols] = self.sources[name][at : at + n]
        team.run(self.program)
        return self.out.data[:n, : self.out.cols].copy()


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_float64(name):
    case = CASES[name]
    data = Data(case)
    exact = expected(case, data)
    got = computed(case, data, chunk_tok=1)
    np.testing.assert_allclose(got, exact, atol=4e-6 * np.abs(exact).max(), rtol=0)
    got = computed(case, data, np.float16, chunk_tok=1)
    np.testing.assert_allclose(got, exact, atol=8e-3 * np.abs(exact).max(), rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_path(name):
    """Instruction set, threads, tokens per run: one number. A ring takes as many tokens at once as it has positions beside the window."""
    case = CASES[name]
    data, largest = Data(case), TOKENS if case.ring >= TOKENS else case.ring - (case.window or case.chunk) + 1
    for kv_dtype in (np.float32, np.float16):
        reference = computed(case, data, kv_dtype, chunk_tok=1)
        for isa in available():
            for threads, chunk_tok in ((1, 1), (2, largest), (3, 7)):
                got = computed(case, data, kv_dtype, isa, threads, min(chunk_tok, largest))
                assert (got.view(np.uint32) == reference.view(np.uint32)).all(), (isa.name, threads, chunk_tok)


def test_a_layer_may_read_the_cache_of_another():
    """Without k and v nothing is appended, and q sees what the other layer has stored."""
    case = Case()
    data = Data(case)
    owner = Recorded(case, data, np.dtype(np.float32), BEST, 1, TOKENS)
    team = Team(1)
    expected_out = owner.run(team, 0, TOKENS)
    kept = owner.k.copy()
    r = Recorder(KERNELS[BEST], 1, TOKENS, owner.n_tok, 4096)
    q, out = Rows(TOKENS, data.q.shape[1]), Rows(TOKENS, owner.out.cols)
    q.data[:, : q.cols] = data.q
    r.rope_append(owner.cache, owner.heads, q, None, None, norms=HeadNorms(EPSILON), table=data.table)
    r.attention(owner.cache, owner.heads, q, out, TOKENS, scale=case.k_dim**-0.5)
    team.run(r.program.finish())
    team.close()
    assert (out.data == expected_out).all()
    np.testing.assert_array_equal(owner.k, kept)
