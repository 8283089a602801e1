"""Gemma's small E-models: every layer gets an input of its own from the token, beside the residual stream."""

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..kernels.per_layer_input import make_per_layer_inputs
from ..recorder import LANES, Recorder, padded_vector, wants
from .base import Block, TensorSpec
from .site import Site


@dataclass(frozen=True, slots=True)
class PerLayerInputs(Block):
    """Prepares the inputs of all layers, P columns each, and adds nothing: the first sublayer of the first layer.

    inputs[l] = (rms_norm(projection(x)[l] / sqrt(D)) + sqrt(P) * table[token][l]) / sqrt(2), with x the embeddings
    """

    vocab_size: int
    num_layers: int
    columns: int
    eps: float

    def __post_init__(self) -> None:
        if self.columns % LANES:
            raise ConfigError(f"hidden_size_per_layer_input={self.columns} is not supported, only multiples of {LANES}")

    @property
    def row(self) -> int:
        """Columns of the inputs of all layers."""
        return self.num_layers * self.columns

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        return {
            "table": TensorSpec("embed_tokens_per_layer.weight", (self.vocab_size, self.row)),
            "projection": TensorSpec("per_layer_model_projection.weight", (self.row, hidden_size)),
            "norm": TensorSpec("per_layer_projection_norm.weight", (self.columns,)),
        }

    def rows(self, hidden_size: int) -> dict[str, int]:
        return {"per_layer_inputs": self.row, "own_inputs": self.row}

    def record(self, r: Recorder, site: Site) -> None:
        inputs, own, projection = site.rows("per_layer_inputs"), site.rows("own_inputs"), site.matrix("projection")
        norm = site.vector("norm")
        assert norm is not None
        r.embed("per-layer table", site.matrix("table"), site.ids, own)
        r.product("per-layer projection", projection, site.input(r, wants([projection])), inputs)
        numbers = np.array([site.x.cols**-0.5, self.columns**0.5, 2**-0.5, self.eps], np.float32)
        slots = [
            r.n_tok, inputs.data, inputs.stride, own.data, own.stride, self.num_layers, self.columns, padded_vector(norm), numbers,
            r.scratch, r.scratch_bytes,
        ]  # fmt: skip
        r.program.record("per-layer inputs", r.kernels.get(make_per_layer_inputs), slots)


@dataclass(frozen=True, slots=True)
class PerLayerInput(Block):
    """out = projection(gelu(gate(x)) * inputs[layer]); `inputs` are those that PerLayerInputs has prepared, P columns for each layer."""

    num_layers: int
    columns: int

    def tensors(self, hidden_size: int) -> dict[str, TensorSpec]:
        return {
            "gate": TensorSpec("per_layer_input_gate.weight", (self.columns, hidden_size)),
            "projection": TensorSpec("per_layer_projection.weight", (hidden_size, self.columns)),
        }

    def rows(self, hidden_size: int) -> dict[str, int]:
        return {"per_layer_inputs": self.num_layers * self.columns, "per_layer_gate": self.columns}

    def record(self, r: Recorder, site: Site) -> None:
        gate, projection, opened = site.matrix("gate"), site.matrix("projection"), site.rows("per_layer_gate")
        r.product("per-layer gate", gate, site.input(r, wants([gate])), opened)
        r.activate("per-layer input", opened, site.rows("per_layer_inputs"), "gelu_tanh", first=site.layer * self.columns)
        x = r.activation("quantize", opened, wants([projection]))
        r.product("per-layer output", projection, x, site.out, onto=site.onto)
