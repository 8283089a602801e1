"""Records the mixture-of-experts half of a layer: route, waves of resident experts, weighted sum (kernels/moe.py)."""

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..kernels import moe
from ..kernels.activations import BLOCK, COLS
from ..kernels.dots import FLOATS, IDS
from ..kernels.norm import make_norm
from ..quant import FORMATS
from ..recorder import Activation, Recorder, Rows, wants
from ..weights import PartLayout
from .base import Block, ExpertShape, TensorSpec
from .mlp import Mlp
from .moe_state import MoeState
from .site import Site


@dataclass(frozen=True, slots=True)
class MoE(Block):
    """out = weighted sum of the chosen experts' outputs (+ the shared expert's), all applied to the normed x.

    norm_topk_prob   softmax over all experts, the top num_experts_per_tok, divided by their sum if norm_topk_prob
    shared           an expert that every token uses; with shared_gate it is scaled by sigmoid(shared_expert_gate(x))

    Raises ConfigError for numbers that do not fit together.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    shared: Mlp | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(f"num_experts_per_tok={self.num_experts_per_tok}: expected 1 to num_experts={self.num_experts}")
        if self.moe_intermediate_size < 1:
            raise ConfigError(f"moe_intermediate_size={self.moe_intermediate_size}: expected at least 1")

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        specs = {"router": TensorSpec("mlp.gate.weight", (self.num_experts, hidden_size), "f32")}
        if self.shared is not None:
            specs |= self.shared.tensors(hidden_size)
        if self.shared_gate:
            specs["shared_gate"] = TensorSpec("mlp.shared_expert_gate.weight", (1, hidden_size), "f32")
        return specs

    def experts(self, hidden_size: int) -> ExpertShape:
        F = self.moe_intermediate_size
        parts = (("gate_proj", (F, hidden_size)), ("up_proj", (F, hidden_size)), ("down_proj", (hidden_size, F)))
        return ExpertShape(self.num_experts, self.num_experts_per_tok, parts)

    def rows(self, hidden_size: int) -> dict[str, int]:
        shared = {} if self.shared is None else self.shared.rows(hidden_size) | {"shared": hidden_size}
        return shared | ({"shared_gate": 1} if self.shared_gate else {})

    def moe_state(self, hidden_size: int, max_tok: int, num_layers: int) -> MoeState:
        """Buffers for all layers of this block."""
        return MoeState(hidden_size, self.moe_intermediate_size, self.num_experts, self.num_experts_per_tok, max_tok, num_layers)

    def moe_state_bytes(self, hidden_size: int, max_tok: int) -> int:
        """Bytes of `moe_state`, before it is made."""
        return MoeState.bytes_for(hidden_size, self.moe_intermediate_size, self.num_experts, self.num_experts_per_tok, max_tok)

    def record(self, r: Recorder, site: Site) -> None:
        assert site.experts is not None and site.moe is not None and site.resident is not None
        state, layout = site.moe, site.experts
        parts = layout.gate_proj, layout.up_proj
        normed = site.input(r, self._wanted(site))
        r.product("router", site.matrix("router"), normed, state.logits)
        self._record_routing(r, site.layer, state)
        shared = self._record_shared(r, site, normed)
        singles = _singles(r, normed, site.x) if any(part.type not in FLOATS for part in parts) else normed
        table = site.resident.table(site.layer)
        wave = r.program.record("wave", r.kernels.get(moe.make_wave), [
            self.num_experts, state.count, state.done, table, state.ready, state.missing, site.resident.stamps(site.layer),
            site.resident.clock, state.counters, state.fresh,
        ])  # fmt: skip
        _record_hidden(r, parts, normed, singles, state, table)
        _record_down(r, layout.down_proj, state, table)
        end = r.program.record("wave end", r.kernels.get(moe.make_wave_end), [state.ready, state.done, state.missing])
        site.faults.update({wave: wave, end: wave})
        onto = [0, 0] if site.onto is None else [site.onto.data, site.onto.stride]
        slots = [
            r.n_tok, self.num_experts_per_tok, state.weights[site.layer], state.slot, state.outputs.data, state.outputs.stride,
            site.out.data, site.out.stride, site.out.padded, *shared, *onto,
        ]  # fmt: skip
        r.program.record("combine", r.kernels.get(moe.make_combine), slots)

    def _wanted(self, site: Site) -> frozenset[str]:
        wanted = wants([site.matrix("router")]) | {"rows"}
        return wanted if self.shared is None else wanted | self.shared.wanted(site)

    def _record_routing(self, r: Recorder, layer: int, state: MoeState) -> None:
        E, K = self.num_experts, self.num_experts_per_tok
        ids, weights = state.ids[layer], state.weights[layer]
        slots = [r.n_tok, state.logits.data, state.logits.stride, E, K, int(self.norm_topk_prob), ids, weights]
        r.program.record("route", r.kernels.get(moe.make_route), slots)
        slots = [r.n_tok, K, E, ids, state.slot, state.count, state.first, state.token, state.done, state.fresh]
        r.program.record("sort", r.kernels.get(moe.make_sort), slots)

    def _record_shared(self, r: Recorder, site: Site, normed: Activation) -> list:
        """The shared expert as a dense MLP; returns combine's slots for it."""
        if self.shared is None:
            return [0, 0, 0, 0]
        out = site.rows("shared")
        self.shared.record_on(r, site, normed, out, None, barrier=not self.shared_gate)
        if not self.shared_gate:
            return [out.data, out.stride, 0, 0]
        opened = site.rows("shared_gate")
        r.product("shared gate", site.matrix("shared_gate"), normed, opened)
        return [out.data, out.stride, opened.data, opened.stride]


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


def _record_hidden(
    r: Recorder, parts: tuple[PartLayout, PartLayout], normed: Activation, singles: Activation, state: MoeState, table: np.ndarray
) -> None:
    """hidden = silu(gate @ x) * (up @ x) of this wave's experts, in one pass where both have the same tensor type."""
    if parts[0].type == parts[1].type:
        return _record_gate_up(r, *parts, normed, singles, state, table)
    for part, out in zip(parts, (state.hidden, state.spare), strict=True):
        x, x_bytes = _record_gather(r, part.type, part.cols, normed, singles, state)
        _record_expert_product(r, part, x, x_bytes, out, state, table)
    slots = [state.ready, state.count, state.first, state.hidden.data, state.spare.data, state.hidden.stride, state.hidden.padded]
    r.program.record("experts silu", r.kernels.get(moe.make_expert_activate), slots)


def _record_gate_up(
    r: Recorder, gate: PartLayout, up: PartLayout, normed: Activation, singles: Activation, state: MoeState, table: np.ndarray
) -> None:
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
