"""Records the mixture-of-experts half of a layer: route, waves of resident experts, weighted sum (kernels/moe.py)."""

from typing import Protocol

import numpy as np

from ..arena import allocate
from ..config import ModelConfig
from ..kernels import moe
from ..kernels.activations import BLOCK, COLS
from ..kernels.dots import FLOATS, IDS
from ..kernels.norm import make_norm
from ..quant import FORMATS
from ..recorder import Activation, Recorder, Rows, padded, wants
from ..weights import MoeWeights, PartLayout


class ResidentExperts(Protocol):
    """What native code reads and writes of the expert cache: int64 arrays (num_experts,) of a layer, and the clock of the stamps."""

    def table(self, layer: int) -> np.ndarray: ...

    def stamps(self, layer: int) -> np.ndarray: ...

    @property
    def clock(self) -> np.ndarray: ...


class MoeState:
    """Routing state and buffers that all MoE layers of a program share; ids and weights are kept layer by layer."""

    def __init__(self, config: ModelConfig, max_tok: int):
        D, F, E, K = config.hidden_size, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok
        n = max_tok * K
        self.logits = Rows(max_tok, E)
        self.ids = np.zeros((config.num_hidden_layers, max_tok, K), np.int64)
        self.weights = np.zeros((config.num_hidden_layers, max_tok, K), np.float32)
        self.slot, self.token = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.count, self.first, self.done = (np.zeros(E, np.int64) for _ in range(3))
        self.ready, self.missing = np.zeros(1 + E, np.int64), np.zeros(1 + E, np.int64)
        self.fresh, self.counters = np.zeros(1, np.int64), np.zeros(2, np.int64)
        self.gathered = allocate(n * row_bytes(D), "activations")
        self.hidden, self.spare, self.outputs = Rows(n, F), Rows(n, F), Rows(n, D)
        self.hidden_panels = allocate(n * (F // COLS * BLOCK), "activations")
        self.shared = Rows(max_tok, D)
        self.shared_hidden = Rows(max_tok, max(1, config.shared_expert_intermediate_size))
        self.shared_spare = Rows(max_tok, max(1, config.shared_expert_intermediate_size))
        self.shared_gate = Rows(max_tok, 1)

    @staticmethod
    def bytes_for(config: ModelConfig, max_tok: int) -> int:
        """Bytes of the buffers, before they are made (the tables are small)."""
        n, D, F = max_tok * config.num_experts_per_tok, config.hidden_size, config.moe_intermediate_size
        shared = max(1, config.shared_expert_intermediate_size)
        per_row = row_bytes(D) + (2 * padded(F) + padded(D)) * 4 + F // COLS * BLOCK
        return n * per_row + max_tok * 4 * (padded(D) + 2 * padded(shared) + 16 + padded(config.num_experts))


def row_bytes(cols: int) -> int:
    """Bytes of a gathered row, float32 or panels, whichever is larger."""
    return max(padded(cols) * 4, cols // COLS * BLOCK)


def record_moe(
    r: Recorder, config: ModelConfig, layer: int, weights: MoeWeights, norm: np.ndarray, x: Rows, state: MoeState, resident: ResidentExperts
) -> tuple[int, int]:
    """Record the block; returns the operations (wave, wave end) at which a replay may stop for missing experts.

    x += sum of the chosen experts' outputs (+ the shared expert's), each applied to RMSNorm(x).
    """
    parts = weights.experts.gate_proj, weights.experts.up_proj
    quantised = {part.type not in FLOATS for part in parts}
    shared_inputs = [weights.shared.gate_proj, weights.shared.up_proj] if weights.shared else []
    wanted = wants([weights.router, weights.shared_gate, *shared_inputs])
    normed = r.activation("norm", x, wanted | {"rows"}, norm, config.rms_norm_eps)
    r.product("router", weights.router, normed, state.logits)
    _record_routing(r, config, layer, state)
    shared = _record_shared(r, weights, normed, state)
    singles = _singles(r, normed, x) if True in quantised else normed
    wave = r.program.record("wave", r.kernels.get(moe.make_wave), [
        config.num_experts, state.count, state.done, resident.table(layer), state.ready, state.missing, resident.stamps(layer),
        resident.clock, state.counters, state.fresh,
    ])  # fmt: skip
    for part, out in zip(parts, (state.hidden, state.spare), strict=True):
        if parts[0].type == parts[1].type:
            _record_gate_up(r, weights, normed, singles, state, resident.table(layer))
            break
        x_in, x_bytes = _record_gather(r, part.type, part.cols, normed, singles, state)
        _record_expert_product(r, part, x_in, x_bytes, out, state, resident.table(layer))
    else:
        slots = [state.ready, state.count, state.first, state.hidden.data, state.spare.data, state.hidden.stride, state.hidden.padded]
        r.program.record("experts silu", r.kernels.get(moe.make_expert_activate), slots)
    _record_down(r, weights.experts.down_proj, state, resident.table(layer))
    end = r.program.record("wave end", r.kernels.get(moe.make_wave_end), [state.ready, state.done, state.missing])
    slots = [
        r.n_tok, config.num_experts_per_tok, state.weights[layer], state.slot, state.outputs.data, state.outputs.stride, x.data,
        x.stride, x.padded, *shared,
    ]  # fmt: skip
    r.program.record("combine", r.kernels.get(moe.make_combine), slots)
    return wave, end


def _record_routing(r: Recorder, config: ModelConfig, layer: int, state: MoeState) -> None:
    E, K = config.num_experts, config.num_experts_per_tok
    ids, weights = state.ids[layer], state.weights[layer]
    slots = [r.n_tok, state.logits.data, state.logits.stride, E, K, int(config.norm_topk_prob), ids, weights]
    r.program.record("route", r.kernels.get(moe.make_route), slots)
    slots = [r.n_tok, K, E, ids, state.slot, state.count, state.first, state.token, state.done, state.fresh]
    r.program.record("sort", r.kernels.get(moe.make_sort), slots)


def _record_shared(r: Recorder, weights: MoeWeights, normed: Activation, state: MoeState) -> list:
    """The shared expert as a dense MLP; returns combine's slots for it."""
    if weights.shared is None:
        return [0, 0, 0, 0]
    shared = weights.shared
    r.gate_up("shared gate+up", shared.gate_proj, shared.up_proj, normed, state.shared_hidden, state.shared_spare)
    opened = r.activation("shared quantize", state.shared_hidden, wants([shared.down_proj]))
    r.product("shared down", shared.down_proj, opened, state.shared, barrier=weights.shared_gate is None)
    if weights.shared_gate is None:
        return [state.shared.data, state.shared.stride, 0, 0]
    r.product("shared gate", weights.shared_gate, normed, state.shared_gate)
    return [state.shared.data, state.shared.stride, state.shared_gate.data, state.shared_gate.stride]


def _singles(r: Recorder, normed: Activation, x: Rows) -> Activation:
    """The normed rows as one-token panels, which can be regrouped by expert. Every thread gathers any token: always shared."""
    assert normed.rows is not None
    panels = r.shared_buffer("singles", x.cols // COLS * BLOCK)
    slots = [
        r.n_tok, normed.rows, normed.rows_stride, x.cols, x.padded, 0, r.scalar(0.0), 0, 0, 0, panels, 0, r.scratch, r.scratch_bytes,
    ]  # fmt: skip
    r.program.record("quantize", r.kernels.get(make_norm, 1), slots)
    return Activation(normed.rows, normed.rows_stride, 0, panels, x.cols // COLS * BLOCK, 0)


def _record_gather(r: Recorder, type: str, cols: int, normed: Activation, singles: Activation, state: MoeState) -> tuple[np.ndarray, int]:
    """Input rows of this wave's experts; returns them and the bytes of a row."""
    quantised = type not in FLOATS
    source, size = (singles.panels, singles.panel_bytes) if quantised else (normed.rows, normed.rows_stride)
    slots = [state.ready, state.count, state.first, state.token, source, size, state.gathered, cols]
    r.program.record("gather", r.kernels.get(moe.make_gather, r.kernels.width, int(quantised)), slots)
    return state.gathered, size


def _part_slots(part: PartLayout) -> list[int]:
    """Row groups, bytes of a row group, tiles of a row group."""
    groups, blocks, tile_bytes = FORMATS[part.type].tile_shape(part.rows, part.cols)
    return [groups, blocks * tile_bytes, blocks]


def _record_gate_up(r: Recorder, weights: MoeWeights, normed: Activation, singles: Activation, state: MoeState, table: np.ndarray) -> None:
    gate, up = weights.experts.gate_proj, weights.experts.up_proj
    x, x_bytes = _record_gather(r, gate.type, gate.cols, normed, singles, state)
    slots = [
        state.ready, state.count, state.first, table, gate.offset, up.offset, *_part_slots(gate), x, x_bytes, state.hidden.data,
        state.hidden.stride,
    ]  # fmt: skip
    kernel = r.kernels.get(moe.make_expert_gate_up, IDS[gate.type], r.kernels.width, r.kernels.lanes)
    r.program.record(f"experts gate+up {gate.type}", kernel, slots)


def _record_expert_product(
    r: Recorder, part: PartLayout, x: np.ndarray, x_bytes: int, out: Rows, state: MoeState, table: np.ndarray
) -> None:
    slots = [state.ready, state.count, state.first, table, part.offset, *_part_slots(part), x, x_bytes, out.data, out.stride]
    kernel = r.kernels.get(moe.make_expert_product, IDS[part.type], r.kernels.width, r.kernels.lanes)
    r.program.record(f"experts product {part.type}", kernel, slots)


def _record_down(r: Recorder, part: PartLayout, state: MoeState, table: np.ndarray) -> None:
    x, x_bytes = state.hidden.data, state.hidden.stride
    if part.type not in FLOATS:
        x_bytes = part.cols // COLS * BLOCK
        slots = [
            state.ready, state.count, state.first, state.hidden.data, state.hidden.stride, part.cols, state.hidden_panels, x_bytes,
            r.scratch, r.scratch_bytes,
        ]  # fmt: skip
        r.program.record("experts quantize", r.kernels.get(moe.make_expert_quantize, r.kernels.width), slots)
        x = state.hidden_panels
    _record_expert_product(r, part, x, x_bytes, state.outputs, state, table)
