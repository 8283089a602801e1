"""Records the mixture-of-experts half of a layer: route, waves of resident experts, weighted sum (kernels/moe.py)."""

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..kernels import moe
from ..kernels.activations import BLOCK, COLS
from ..kernels.dots import FLOATS, IDS
from ..kernels.ffn import ACTIVATIONS
from ..kernels.norm import make_norm
from ..kernels.router import route_scratch_bytes
from ..quant import FORMATS
from ..recorder import LANES, Activation, Recorder, Rows, wants
from ..weights import PartLayout
from .base import Block, ExpertShape, TensorSpec
from .mlp import Mlp, check_activation, ffn_parts
from .moe_state import MoeState, RoutingState
from .router import Router
from .site import Site


@dataclass(frozen=True, slots=True)
class MoE(Block):
    """out = weighted sum of the chosen experts' outputs (+ the shared expert's), all applied to the normed x.

    activation       of the experts, one of kernels/ffn.py with its limit; relu2 has no gate_proj
    bias             the experts' matrices have biases
    scale_input      the weights multiply the experts' inputs instead of their outputs
    shared           an expert that every token uses; with shared_gate it is scaled by sigmoid(shared_expert_gate(x))

    Raises ConfigError for numbers that do not fit together.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    router: Router
    shared: Mlp | None = None
    shared_gate: bool = False
    activation: str = "silu"
    limit: float = 0.0
    bias: bool = False
    scale_input: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(f"num_experts_per_tok={self.num_experts_per_tok}: expected 1 to num_experts={self.num_experts}")
        if self.moe_intermediate_size < 1:
            raise ConfigError(f"moe_intermediate_size={self.moe_intermediate_size}: expected at least 1")
        check_activation(self.activation, self.limit)
        self.router.check(self.num_experts, self.num_experts_per_tok)

    @property
    def routed(self) -> "MoE":
        return self

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        specs = self.router.tensors(self.num_experts, hidden_size)
        if self.bias:
            for part, (rows, _) in self._parts(hidden_size).items():
                specs[f"{part}.bias"] = TensorSpec(f"mlp.experts.{part}.bias", (self.num_experts * rows,))
        if self.shared is not None:
            specs |= self.shared.tensors(hidden_size)
        if self.shared_gate:
            specs["shared_gate"] = TensorSpec("mlp.shared_expert_gate.weight", (1, hidden_size), "f32")
        return specs

    def _parts(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        return ffn_parts(self.activation, hidden_size, self.moe_intermediate_size)

    def experts(self, hidden_size: int) -> ExpertShape:
        return ExpertShape(self.num_experts, self.num_experts_per_tok, tuple(self._parts(hidden_size).items()))

    def rows(self, hidden_size: int) -> dict[str, int]:
        shared = {} if self.shared is None else self.shared.rows(hidden_size) | {"shared": hidden_size}
        return shared | ({"shared_gate": 1} if self.shared_gate else {})

    def scratch_bytes(self, hidden_size: int, context_length: int) -> int:
        return max(Block.scratch_bytes(self, hidden_size, context_length), route_scratch_bytes(self.num_experts))

    def moe_state(self, hidden_size: int, max_tok: int, num_layers: int) -> MoeState:
        """Buffers for all layers of this block."""
        return MoeState(hidden_size, self.moe_intermediate_size, self.num_experts, self.num_experts_per_tok, max_tok, num_layers)

    def moe_state_bytes(self, hidden_size: int, max_tok: int) -> int:
        """Bytes of `moe_state`, before it is made."""
        return MoeState.bytes_for(hidden_size, self.moe_intermediate_size, self.num_experts, self.num_experts_per_tok, max_tok)

    def record(self, r: Recorder, site: Site) -> None:
        x = site.input(r, self.router_wanted(site) | self.experts_wanted(site))
        self.record_routing(r, site, x)
        self.record_experts(r, site, x, site.out, site.onto)

    def router_wanted(self, site: Site) -> frozenset[str]:
        """Forms of the router's input."""
        return wants([site.matrix("router")])

    def experts_wanted(self, site: Site) -> frozenset[str]:
        """Forms of the experts' input."""
        wanted = frozenset(["rows"])
        return wanted if self.shared is None else wanted | self.shared.wanted(site)

    def record_guess(self, r: Recorder, site: Site, state: RoutingState) -> None:
        """What the layer would choose if its input were the residual stream as it is now, into `state`: the guess of a layer before."""
        self.record_choice(r, site, site.input(r, self.router_wanted(site)), state)

    def record_choice(self, r: Recorder, site: Site, x: Activation, state: RoutingState) -> None:
        """Choose experts by the router's input x."""
        r.product("router", site.matrix("router"), x, state.logits)
        self.router.record(r, site, self.num_experts, self.num_experts_per_tok, state)

    def record_routing(self, r: Recorder, site: Site, x: Activation) -> None:
        """Choose experts by the router's input x and sort the tokens by expert."""
        assert site.moe is not None
        E, K, state = self.num_experts, self.num_experts_per_tok, site.moe
        self.record_choice(r, site, x, state)
        ids = state.ids[site.layer]
        slots = [r.n_tok, K, E, ids, state.slot, state.count, state.first, state.source, state.done, state.fresh]
        r.program.record("sort", r.kernels.get(moe.make_sort), slots)

    def record_experts(self, r: Recorder, site: Site, x: Activation, out: Rows, onto: Rows | None) -> None:
        """out = the chosen experts' (and the shared expert's) outputs for x (+ onto)."""
        assert site.experts is not None and site.moe is not None and site.resident is not None
        state, table = site.moe, site.resident.table(site.layer)
        shared = self._record_shared(r, site, x)
        weights = state.weights[site.layer]
        wave_of = Wave(r, site, state, table, self, x, weights if self.scale_input else 0)
        wave = r.program.record("wave", r.kernels.get(moe.make_wave), [
            self.num_experts, state.count, state.done, table, state.ready, state.missing, site.resident.stamps(site.layer),
            site.resident.clock, state.counters[site.layer], state.fresh,
        ])  # fmt: skip
        wave_of.record()
        end = r.program.record("wave end", r.kernels.get(moe.make_wave_end), [state.ready, state.done, state.missing])
        site.faults.update({wave: wave, end: wave})
        slots = [
            r.n_tok, self.num_experts_per_tok, 0 if self.scale_input else weights, state.slot, state.outputs.data, state.outputs.stride,
            out.data, out.stride, out.padded, *shared, *([0, 0] if onto is None else [onto.data, onto.stride]),
        ]  # fmt: skip
        r.program.record("combine", r.kernels.get(moe.make_combine), slots)

    def _record_shared(self, r: Recorder, site: Site, x: Activation) -> list:
        """The shared expert as a dense MLP; returns combine's slots for it."""
        if self.shared is None:
            return [0, 0, 0, 0]
        out = site.rows("shared")
        self.shared.record_on(r, site, x, out, None, barrier=not self.shared_gate)
        if not self.shared_gate:
            return [out.data, out.stride, 0, 0]
        opened = site.rows("shared_gate")
        r.product("shared gate", site.matrix("shared_gate"), x, opened)
        return [out.data, out.stride, opened.data, opened.stride]


class Wave:
    """Records what a wave of resident experts computes: hidden rows from their inputs, then outputs.

    x          the experts' input for every token
    factors    routing weights that multiply it, or 0
    """

    def __init__(
        self, r: Recorder, site: Site, state: MoeState, table: np.ndarray, block: MoE, x: Activation, factors: np.ndarray | int
    ):  # fmt: skip
        # Experts' rows are gathered by whichever rank comes first, from the first rank's copy of x.
        assert r.program.is_settled
        assert site.experts is not None
        self.r, self.site, self.state, self.table, self.block, self.x, self.factors = r, site, state, table, block, x, factors
        self.parts = site.experts.parts
        self.inputs = [part for name, part in self.parts.items() if name != "down_proj"]
        if any(part.type not in FLOATS for part in self.inputs):
            self.x = _singles(r, x, site.x)

    def record(self) -> None:
        """Operations of one wave."""
        self._record_hidden()
        self._record_down()

    def _record_hidden(self) -> None:
        """In one pass where gate and up have the same tensor type."""
        r, state, kind = self.r, self.state, ACTIVATIONS[self.block.activation]
        limit = r.scalar(self.block.limit)
        if len(self.inputs) == 2 and self.inputs[0].type == self.inputs[1].type:
            return self._record_gate_up(kind, limit)
        for name, out in zip([name for name in self.parts if name != "down_proj"], (state.hidden, state.spare), strict=False):
            self._record_product(name, *self._record_gather(self.parts[name]), out)
        up = state.spare.data if len(self.inputs) == 2 else 0
        slots = [state.ready, state.count, state.first, state.hidden.data, up, state.hidden.stride, state.hidden.padded, limit]
        r.program.record(f"experts {self.block.activation}", r.kernels.get(moe.make_expert_activate, kind), slots)
        return None

    def _record_gather(self, part: PartLayout) -> tuple[np.ndarray, int]:
        """Input rows of this wave's experts in the form that the part multiplies; returns them and the bytes of a row."""
        r, state, x = self.r, self.state, self.x
        quantised = part.type not in FLOATS
        source, size = (x.panels, x.panel_bytes) if quantised else (x.rows, x.rows_stride)
        slots = [
            state.ready, state.count, state.first, state.source, self.block.num_experts_per_tok, source, size, state.gathered, part.cols,
            self.factors,
        ]  # fmt: skip
        r.program.record("gather", r.kernels.get(moe.make_gather, r.kernels.width, int(quantised)), slots)
        return state.gathered, size

    def _record_gate_up(self, kind: int, limit: np.ndarray) -> None:
        r, state, (gate, up) = self.r, self.state, self.inputs
        x, x_bytes = self._record_gather(gate)
        (gate_bias, _), (up_bias, bias_bytes) = self._biases("gate_proj"), self._biases("up_proj")
        slots = [
            state.ready, state.count, state.first, self.table, gate.offset, up.offset, *_part_slots(gate), x, x_bytes, state.hidden.data,
            state.hidden.stride, gate_bias, up_bias, bias_bytes, limit,
        ]  # fmt: skip
        kernel = r.kernels.get(moe.make_expert_gate_up, IDS[gate.type], r.kernels.width, r.kernels.lanes, kind)
        r.program.record(f"experts gate+up {gate.type}", kernel, slots)

    def _record_product(self, name: str, x: np.ndarray, x_bytes: int, out: Rows) -> None:
        r, state, part = self.r, self.state, self.parts[name]
        slots = [
            state.ready, state.count, state.first, self.table, part.offset, *_part_slots(part), x, x_bytes, out.data, out.stride,
            *self._biases(name),
        ]  # fmt: skip
        kernel = r.kernels.get(moe.make_expert_product, IDS[part.type], r.kernels.width, r.kernels.lanes)
        r.program.record(f"experts {name} {part.type}", kernel, slots)

    def _record_down(self) -> None:
        r, state, part = self.r, self.state, self.parts["down_proj"]
        x, x_bytes = state.hidden.data, state.hidden.stride
        if part.type not in FLOATS:
            x, x_bytes = state.hidden_panels, part.cols // COLS * BLOCK
            slots = [
                state.ready, state.count, state.first, state.hidden.data, state.hidden.stride, part.cols, x, x_bytes, r.scratch,
                r.scratch_bytes,
            ]  # fmt: skip
            r.program.record("experts quantize", r.kernels.get(moe.make_expert_quantize, r.kernels.width), slots)
        self._record_product("down_proj", x, x_bytes, state.outputs)

    def _biases(self, name: str) -> tuple[np.ndarray | int, int]:
        """The biases of all experts, rows padded to whole vectors, and the bytes of a row; 0, 0 for none."""
        flat = self.site.vector(f"{name}.bias")
        if flat is None:
            return 0, 0
        rows = flat.reshape(self.block.num_experts, -1)
        if rows.shape[1] % LANES:
            rows = np.pad(rows, [(0, 0), (0, -rows.shape[1] % LANES)])
        return rows, rows.strides[0]


def _singles(r: Recorder, normed: Activation, x: Rows) -> Activation:
    """The normed rows as one-token panels, which can be regrouped by expert. Every thread gathers any token: always shared."""
    assert normed.rows is not None
    panels = r.shared_buffer("singles", x.cols // COLS * BLOCK)
    slots = [
        r.n_tok, normed.rows, normed.rows_stride, x.cols, x.padded, 0, r.scalar(0.0), 0, 0, 0, panels, 0, r.scratch, r.scratch_bytes,
    ]  # fmt: skip
    r.program.record("quantize", r.kernels.get(make_norm, 1), slots)
    return Activation(normed.rows, normed.rows_stride, 0, panels, x.cols // COLS * BLOCK, 0)


def _part_slots(part: PartLayout) -> list[int]:
    """Row groups, bytes of a row group, tiles of a row group."""
    groups, blocks, tile_bytes = FORMATS[part.type].tile_shape(part.rows, part.cols)
    return [groups, blocks * tile_bytes, blocks]
