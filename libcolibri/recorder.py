"""What models record programs with: buffers, and one method per kind of operation.

With one token (`private`) every rank does the cheap operations (norm, rounding) redundantly into memory of its own and no barrier
follows; with many tokens ranks share them. Matrix products always share rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .arena import align_up, allocate
from .kernels.activations import BLOCK, COLS
from .kernels.attention import GATES, KV_F16, KV_F32, make_attention, make_gate, make_rope_append
from .kernels.dots import FLOATS, IDS
from .kernels.elementwise import make_activate, make_add_vector, make_clip
from .kernels.embed import make_embed
from .kernels.ffn import ACTIVATIONS
from .kernels.kernel_set import KernelSet
from .kernels.matrix import make_gate_up, make_head_product, make_product
from .kernels.mla import make_head_panels, make_latent_append, make_latent_attention, make_latent_query
from .kernels.norm import make_layer_norm, make_norm
from .kernels.residual import make_add_scaled, make_scale, make_softcap
from .matrix import Matrix
from .program import Program
from .weights import Norm

LANES = 16


def padded(cols: int) -> int:
    """Columns of a float32 row in memory: whole vectors."""
    return align_up(cols, LANES)


def padded_vector(values: np.ndarray) -> np.ndarray:
    """A float32 vector with zeros up to a whole number of vectors."""
    out = np.zeros(padded(len(values)), np.float32)
    out[: len(values)] = values
    return out


class Rows:
    """float32 (n, cols), each row padded with zeros to whole vectors."""

    def __init__(self, n: int, cols: int):
        self.cols, self.padded = cols, padded(cols)
        self.data = allocate(n * self.padded * 4, "activations").view(np.float32).reshape(n, self.padded)
        self.stride = self.padded * 4


@dataclass(frozen=True)
class Activation:
    """The input of matrix products: float32 rows, int8 panels, or both; `private` bytes apart for each rank (0: shared)."""

    rows: np.ndarray | None
    rows_stride: int
    rows_private: int
    panels: np.ndarray | None
    panel_bytes: int  # per token
    panels_private: int


def wants(matrices: Iterable[Matrix | None]) -> frozenset[str]:
    """Which forms of an activation these matrices multiply."""
    return frozenset("rows" if m.type in FLOATS else "panels" for m in matrices if m is not None)


@dataclass(frozen=True)
class Heads:
    """Numbers of query and of key/value heads, columns of a head of q and k, of v, and from one head of q to the next."""

    q: int
    kv: int
    cols: int
    v_cols: int
    q_step: int


@dataclass(frozen=True)
class HeadNorms:
    """Weights of the norms of single heads, None for no norm; those of q and k come after the rotation if `last`."""

    epsilon: float
    q: np.ndarray | None = None
    k: np.ndarray | None = None
    v: np.ndarray | None = None
    last: bool = False


@dataclass(frozen=True)
class KeysValues:
    """The cache of a layer: address of its state descriptor, element type, and int64 (1,) with the first position of the run."""

    descriptor: int
    dtype: np.dtype
    start: np.ndarray

    @property
    def format(self) -> int:
        """The kernels' number for the element type."""
        return kv_format(self.dtype)


class Recorder:
    """Records one program for up to `max_tok` tokens; the number of tokens of a run is read from `n_tok`."""

    def __init__(self, kernels: KernelSet, threads: int, max_tok: int, n_tok: np.ndarray, scratch_bytes: int):
        self.kernels, self.threads, self.max_tok, self.n_tok = kernels, threads, max_tok, n_tok
        self.private = max_tok == 1
        self.program = Program()
        self.scratch_bytes = align_up(scratch_bytes, 64)
        self.scratch = allocate(self.scratch_bytes * threads, "scratch")
        self._buffers: dict[tuple, np.ndarray] = {}

    def _buffer(self, kind: str, row_bytes: int) -> np.ndarray:
        """Memory for one activation, shared by all operations with the same kind and size (they never overlap in time)."""
        key = kind, row_bytes
        if key not in self._buffers:
            copies = self.threads if self.private else self.max_tok
            self._buffers[key] = allocate(row_bytes * copies, "activations")
        return self._buffers[key]

    def shared_buffer(self, kind: str, row_bytes: int) -> np.ndarray:
        """Memory for `max_tok` rows that all ranks share, whatever the mode."""
        key = kind + " shared", row_bytes
        if key not in self._buffers:
            self._buffers[key] = allocate(row_bytes * self.max_tok, "activations")
        return self._buffers[key]

    def scalar(self, value: float) -> np.ndarray:
        """A float32 operand, which goes by address."""
        return np.array([value], np.float32)

    def activation(
        self, name: str, x: Rows, wanted: frozenset[str], norm: Norm | None = None, *, settled: bool = False
    ) -> Activation:  # fmt: skip
        """Norm (none: as it is) and rounding of x, in the wanted forms: "rows", "panels".

        settled   ranks may read each other's copies: they meet after it
        """
        weight, epsilon = (None, 0.0) if norm is None else (padded_vector(norm.weight), norm.config.eps)
        rows, rows_stride, rows_private = self._row_target(x, wanted, weight)
        panels, panel_bytes, panels_private = None, x.cols // COLS * BLOCK, 0
        if "panels" in wanted:
            panels = self._buffer("panels", panel_bytes)
            panels_private = panel_bytes if self.private else 0
        done = Activation(rows, rows_stride, rows_private, panels, panel_bytes, panels_private)
        if weight is None and panels is None:
            return done
        row_slots: list = [0, rows_stride, 0]
        if weight is not None and rows is not None:
            row_slots = [rows, rows_stride, rows_private]
        slots = [
            self.n_tok, x.data, x.stride, x.cols, x.padded, 0 if weight is None else weight, self.scalar(epsilon), *row_slots,
            0 if panels is None else panels, panels_private, self.scratch, self.scratch_bytes,
        ]  # fmt: skip
        self._record_norm(name, self.kernels.width, slots, None if norm is None else norm.bias, barrier=settled or not self.private)
        return done

    def _record_norm(self, name: str, width: int, slots: list, bias: np.ndarray | None, *, barrier: bool = True) -> None:
        """RMS norm, or with a bias LayerNorm; `slots` are those of make_norm."""
        if bias is None:
            self.program.record(name, self.kernels.get(make_norm, width), slots, barrier=barrier)
        else:
            self.program.record(name, self.kernels.get(make_layer_norm, width), [*slots, padded_vector(bias)], barrier=barrier)

    def _row_target(self, x: Rows, wanted: frozenset[str], weight: np.ndarray | None) -> tuple[np.ndarray | None, int, int]:
        """float32 rows of an activation: x itself when there is no norm, else a buffer."""
        if "rows" not in wanted:
            return None, x.stride, 0
        if weight is None:
            return x.data, x.stride, 0
        return self._buffer("rows", x.stride), x.stride, x.stride if self.private else 0

    def _input_slots(self, matrix_type: str, x: Activation) -> list:
        """x, bytes of x per token, bytes of x per rank."""
        if matrix_type in FLOATS:
            return [x.rows, x.rows_stride, x.rows_private]
        return [x.panels, x.panel_bytes, x.panels_private]

    def product(
        self, name: str, matrix: Matrix, x: Activation, out: Rows, *, bias: np.ndarray | None = None, onto: Rows | None = None,
        barrier: bool = True,
    ) -> None:  # fmt: skip
        """out = matrix @ x, plus a bias, a residual, or both."""
        groups, blocks, tile_bytes = matrix.tiles.shape
        base: list = [0, 0]
        if bias is not None:
            base = [padded_vector(bias), 0]
        if onto is not None:  # the kernel adds one thing; the other one follows
            base = [onto.data, onto.stride]
        given = self._input_slots(matrix.type, x)
        slots = [matrix.tiles, groups, blocks * tile_bytes, blocks, *given, self.n_tok, out.data, out.stride, *base]
        kernel = self.kernels.get(make_product, IDS[matrix.type], self.kernels.width, self.kernels.lanes)
        both = bias is not None and onto is not None
        self.program.record(f"{name} {matrix.type}", kernel, slots, barrier=barrier or both)
        if bias is not None and onto is not None:
            self.add_vector(f"{name} bias", out, bias)

    def gate_up(
        self, name: str, gate: Matrix, up: Matrix | None, x: Activation, out: Rows, spare: Rows, *, activation: str = "silu",
        limit: float = 0.0, gate_bias: np.ndarray | None = None, up_bias: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """out = an activation of kernels/ffn.py applied to gate @ x and up @ x (no up: to gate @ x), each plus its bias.

        `spare` has out's shape and is used when the two tensor types differ.
        """
        kind, bound = ACTIVATIONS[activation], self.scalar(limit)
        if up is None or gate.type != up.type:
            self.product(f"{name} gate", gate, x, out, bias=gate_bias, barrier=up is None)
            if up is not None:
                self.product(f"{name} up", up, x, spare, bias=up_bias)
            self.activate(name, out, None if up is None else spare, activation, limit=limit)
            return
        groups, blocks, tile_bytes = gate.tiles.shape
        biases = [0 if bias is None else padded_vector(bias) for bias in (gate_bias, up_bias)]
        slots = [
            gate.tiles, up.tiles, groups, blocks * tile_bytes, blocks, *self._input_slots(gate.type, x), self.n_tok, out.data, out.stride,
            *biases, bound,
        ]  # fmt: skip
        kernel = self.kernels.get(make_gate_up, IDS[gate.type], self.kernels.width, self.kernels.lanes, kind)
        self.program.record(f"{name} {gate.type}", kernel, slots)

    def activate(self, name: str, gate: Rows, up: Rows | None, activation: str, *, limit: float = 0.0, first: int = 0) -> None:
        """gate = an activation of kernels/ffn.py applied to gate and the columns of up from `first` on."""
        slots = [
            self.n_tok, gate.data, gate.stride, *([0, 0] if up is None else [up.data[:, first:], up.stride]), gate.padded,
            self.scalar(limit),
        ]  # fmt: skip
        self.program.record(f"{name} {activation}", self.kernels.get(make_activate, ACTIVATIONS[activation]), slots)

    def embed(self, name: str, table: Matrix, ids: np.ndarray, out: Rows) -> None:
        """out[t] = row ids[t] of the table."""
        _, blocks, tile_bytes = table.tiles.shape
        slots = [self.n_tok, ids, table.tiles, blocks * tile_bytes, blocks, out.data, out.stride]
        self.program.record(name, self.kernels.get(make_embed, IDS[table.type]), slots)

    def norm_in_place(self, name: str, x: Rows, weight: np.ndarray, epsilon: float, bias: np.ndarray | None = None) -> None:
        """RMS norm, with a bias LayerNorm, of whole rows where they are; ranks share tokens. The weight is padded."""
        slots = [
            self.n_tok, x.data, x.stride, x.cols, x.padded, weight, self.scalar(epsilon), x.data, x.stride, 0, 0, 0, self.scratch,
            self.scratch_bytes,
        ]  # fmt: skip
        self._record_norm(name, 1, slots, bias)

    def scale(self, name: str, x: Rows, factor: np.ndarray) -> None:
        """x *= factor, float32 (1,)."""
        self.program.record(name, self.kernels.get(make_scale), [self.n_tok, x.data, x.stride, x.padded, factor])

    def softcap(self, name: str, x: Rows, cap: float) -> None:
        """x = cap * tanh(x / cap)."""
        self.program.record(name, self.kernels.get(make_softcap), [self.n_tok, x.data, x.stride, x.padded, self.scalar(cap)])

    def add_normed(self, name: str, x: Rows, y: Rows, norm: Norm | None, factor: float) -> None:
        """x += factor * norm(y); y is overwritten."""
        if norm is not None:
            self.norm_in_place(f"{name} norm", y, padded_vector(norm.weight), norm.config.eps, norm.bias)
        slots = [self.n_tok, x.data, x.stride, x.padded, self.scalar(factor), y.data, y.stride]
        self.program.record(name, self.kernels.get(make_add_scaled), slots)

    def add_vector(self, name: str, x: Rows, vector: np.ndarray) -> None:
        """x += vector in every row."""
        self.program.record(name, self.kernels.get(make_add_vector), [self.n_tok, x.data, x.stride, x.padded, padded_vector(vector)])

    def clip(self, name: str, x: Rows, limit: float, *, barrier: bool = True) -> None:
        """x to [-limit, limit]."""
        slots = [self.n_tok, x.data, x.stride, x.padded, self.scalar(limit)]
        self.program.record(name, self.kernels.get(make_clip), slots, barrier=barrier)

    def rope_append(
        self, cache: KeysValues, heads: Heads, q: Rows, k: Rows | None, v: Rows | None, *, norms: HeadNorms, table: np.ndarray | None,
        v_factor: float = 1.0, q_factors: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Turn q and k by their positions and append k and v to the cache.

        k, v        None: nothing is appended; v may be k's rows
        table       float32 (positions, rotary columns) from rope.py; None: nothing turns
        v_factor    v is multiplied by it
        q_factors   float32 (positions,) that q is multiplied by
        """
        weights = [0 if weight is None else weight for weight in (norms.q, norms.k, norms.v)]
        slots = [
            self.n_tok, cache.start, q.data, q.stride, 4 * heads.q_step, heads.q, *_rows_slots(k), *_rows_slots(v),
            0 if k is None else heads.kv, heads.cols, heads.v_cols, *((0, 0) if table is None else (table, table.shape[1])), *weights,
            int(norms.last), self.scalar(norms.epsilon), 0 if q_factors is None else q_factors, self.scalar(v_factor), cache.descriptor,
            self.scratch, self.scratch_bytes,
        ]  # fmt: skip
        self.program.record("rope + append", self.kernels.get(make_rope_append, cache.format), slots)

    def attention(
        self, cache: KeysValues, heads: Heads, q: Rows, out: Rows, context_length: int, *, scale: float, softcap: float | None = None,
        sinks: np.ndarray | None = None, window: int | None = None, chunk: int | None = None,
    ) -> None:  # fmt: skip
        """out = attention of q over the cache.

        scale           of q . k
        softcap         scores become softcap * tanh(score / softcap)
        sinks           float32 (heads,): one more score per head, whose value is 0
        window, chunk   positions from p - window + 1 on, from the last multiple of chunk on; None: all
        """
        slots = [
            self.n_tok, cache.start, q.data, q.stride, 4 * heads.q_step, heads.q, heads.kv, heads.cols, heads.v_cols, cache.descriptor,
            self.scalar(scale), self.scalar(softcap or 0.0), 0 if sinks is None else sinks, window or 0, chunk or 0, out.data, out.stride,
            self.scratch, self.scratch_bytes, scores_row_bytes(context_length),
        ]  # fmt: skip
        self.program.record("attention", self.kernels.get(make_attention, cache.format, head_bundle(heads.q // heads.kv)), slots)

    def head_product(self, name: str, matrix: Matrix, heads: int, x: Rows, x_head: int, out: Rows, out_head: int) -> None:
        """out[head] = the head's rows of the matrix @ x[head]; x_head, out_head: columns from one head to the next."""
        groups, blocks, tile_bytes = matrix.tiles.shape
        given, stride, between = x.data, x.stride, 4 * x_head
        if matrix.type not in FLOATS:
            stride = matrix.cols // COLS * BLOCK
            between = stride * self.max_tok
            given = self.shared_buffer("head panels", stride * heads)
            slots = [self.n_tok, x.data, x.stride, heads, 4 * x_head, matrix.cols, given, between, self.scratch, self.scratch_bytes]
            self.program.record(f"{name} quantize", self.kernels.get(make_head_panels, self.kernels.width), slots)
        slots = [
            matrix.tiles, groups, blocks * tile_bytes, blocks, groups // heads, given, stride, between, self.n_tok, out.data, out.stride,
            4 * out_head,
        ]  # fmt: skip
        kernel = self.kernels.get(make_head_product, IDS[matrix.type], self.kernels.width, self.kernels.lanes)
        self.program.record(f"{name} {matrix.type}", kernel, slots)

    def latent_append(
        self, start: np.ndarray, x: Rows, latent: int, weight: np.ndarray, epsilon: float, table: np.ndarray | None, descriptor: int,
        kv_dtype: np.dtype,
    ) -> None:  # fmt: skip
        """Append [norm(latent columns) | rotated columns] of x to the layer's cache."""
        slots = [
            self.n_tok, start, x.data, x.stride, latent, x.cols - latent, weight, self.scalar(epsilon), 0 if table is None else table,
            descriptor, self.scratch, self.scratch_bytes,
        ]  # fmt: skip
        self.program.record("append", self.kernels.get(make_latent_append, kv_format(kv_dtype)), slots)

    def latent_query(self, start: np.ndarray, q: Rows, heads: int, nope: int, table: np.ndarray | None, out: Rows, latent: int) -> None:
        """The rotary columns of every head's query, behind its latent columns in out."""
        rotary = q.cols // heads - nope
        slots = [
            self.n_tok, start, q.data, q.stride, heads, nope, rotary, 0 if table is None else table, out.data, out.stride, latent,
        ]  # fmt: skip
        self.program.record("rope", self.kernels.get(make_latent_query), slots)

    def latent_attention(
        self, start: np.ndarray, query: Rows, heads: int, latent: int, row: int, descriptor: int, kv_dtype: np.dtype, scale: float,
        scores_row_bytes: int, group: int,
    ) -> None:  # fmt: skip
        """Each head's query becomes, in its latent columns, its weighted sum of latents."""
        slots = [
            self.n_tok, start, query.data, query.stride, heads, latent, row, descriptor, self.scalar(scale), self.scratch,
            self.scratch_bytes, scores_row_bytes,
        ]  # fmt: skip
        self.program.record("attention", self.kernels.get(make_latent_attention, kv_format(kv_dtype), group), slots)

    def gate(self, name: str, x: Rows, heads: int, gates: Rows, function: str, *, first: int = 0, gate_head: int = 0) -> None:
        """x *= function(gates), "sigmoid" or "softplus", head by head.

        first, gate_head   column of the first head's gates, columns from one head's gates to the next; 0: one gate per head
        """
        slots = [
            self.n_tok, x.data, x.stride, heads, x.cols // heads, gates.data[:, first:], gates.stride, 4 * (gate_head or 1),
            int(gate_head == 0), GATES[function],
        ]  # fmt: skip
        self.program.record(name, self.kernels.get(make_gate), slots)


def _rows_slots(rows: Rows | None) -> list:
    """Address and stride."""
    return [0, 0] if rows is None else [rows.data, rows.stride]


def kv_format(dtype: np.dtype) -> int:
    """The kernels' number for a cache element type."""
    return KV_F32 if dtype == np.float32 else KV_F16


def head_bundle(heads_per_kv: int) -> int:
    """Query heads that share a pass over K and V: the largest divisor up to 8."""
    return max(n for n in range(1, min(8, heads_per_kv) + 1) if heads_per_kv % n == 0)


def scores_row_bytes(context_length: int) -> int:
    """Room for the scores of one head over all positions."""
    return align_up(context_length, LANES) * 4 + 64


def attention_scratch_bytes(heads: Heads, context_length: int) -> int:
    """Scratch that `rope_append` and `attention` need of each thread."""
    scores = head_bundle(heads.q // heads.kv) * scores_row_bytes(context_length) + 64
    return max(scores, 8 * max(heads.cols, heads.v_cols) + 512)
