"""What is done to a checkpoint's tensor on its way to the canonical one: named steps that a family's rules string together.

In:  a tensor as stored, a Rule
Out: canonical tensors by name, still unread: every step works row by row

Steps, applied from left to right:

    plus_one      w + 1: a norm that multiplies by 1 + w
    neg_exp       -exp(w): the decay of a state-space model, stored as its logarithm
    flatten       a vector of all values, row after row
    transpose     (O, I) from (I, O)
    conv          a vector, tap after tap, from (C, 1, taps)
    deinterleave  rows 0, 2, 4, ..., then 1, 3, 5, ...
    split         consecutive rows for the rule's names, as many as each of them has by the config
    absorb        of (heads * nope, latent) before (heads * v, latent): the first part as (heads * latent, nope), the second as it is
    halves        consecutive rows for the rule's names, equally many for each

A rule whose names hold {} is about experts: the tensor's first dimension counts them, {} is their number, and the steps are applied to
every expert alone.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from libcolibri.config import LayerConfig, ModelConfig
from libcolibri.errors import SourceError
from libcolibri.models.family import Rule

from .source import LazyRows, RowIndex, SourceTensor, computed
from .source_types import FLOATS

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
EXPERT = "{}"
# Layouts that many families share; a family's own rules come first.
GENERAL_RULES = (
    Rule(r"(.*\.mlp\.experts)\.gate_up_proj(?:\.weight)?", r"\1.{}.gate_proj.weight \1.{}.up_proj.weight", "halves"),
    Rule(r"(.*\.mlp\.experts)\.down_proj(?:\.weight)?", r"\1.{}.down_proj.weight"),
)

Step = Callable[[SourceTensor, list[int | None]], list[SourceTensor]]


@dataclass(frozen=True)
class Transformer:
    """Applies a family's rules.

    rules     tried in order; the first whose pattern matches the whole name holds
    config    of a decoder: a rule's order may depend on its layer
    shapes    canonical name -> shape of every tensor of the model
    skipped   regular expression for canonical names of tensors that are left out
    """

    rules: tuple[Rule, ...]
    config: ModelConfig | None
    shapes: Mapping[str, tuple[int, ...]]
    skipped: str = ""

    def names_of(self, name: str) -> tuple[list[str], Rule | None]:
        """Canonical names of a stored tensor, {} for an expert's number, and the rule that says so."""
        for rule in self.rules:
            if match := re.fullmatch(rule.pattern, name):
                return match.expand(rule.to).split(), rule
        return [name], None

    def apply(self, name: str, tensor: SourceTensor) -> dict[str, SourceTensor]:
        """The canonical tensors that a stored one stands for. SourceError names it when its shape does not fit the rule."""
        names, rule = self.names_of(name)
        if rule is None:
            return {name: _matrix(tensor)}
        try:
            return self._apply(names, rule, tensor)
        except ValueError as error:
            raise SourceError(f"tensor {name!r} has shape {tensor.shape}: {error}") from error

    def _apply(self, names: list[str], rule: Rule, tensor: SourceTensor) -> dict[str, SourceTensor]:
        if not any(EXPERT in name for name in names):
            return dict(zip(names, self._steps(names, rule, tensor), strict=True))
        if len(tensor.shape) < 3:
            raise ValueError("expected experts times rows times columns")
        result: dict[str, SourceTensor] = {}
        count = tensor.rows // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            own = [name.replace(EXPERT, str(expert)) for name in names]
            parts = self._steps(own, rule, tensor.part(expert * count, (expert + 1) * count))
            result.update(zip(own, parts, strict=True))
        return result

    def _steps(self, names: list[str], rule: Rule, tensor: SourceTensor) -> list[SourceTensor]:
        if rule.order is not None:
            tensor = _take(tensor, np.asarray(rule.order(self._layer_of(names[0]))))
        if rule.columns is not None:
            tensor = _take_columns(tensor, np.asarray(rule.columns(self._layer_of(names[0]))))
        rows = [self.shapes[name][0] if name in self.shapes else None for name in names]
        tensors = [tensor]
        for step in rule.transform.split():
            tensors = [made for one in tensors for made in STEPS[step](one, rows)]
        return [_matrix(made) for made in tensors]

    def _layer_of(self, name: str) -> LayerConfig:
        layer = _LAYER.match(name)
        if layer is None or self.config is None:
            raise ValueError(f"an order needs a layer, {name!r} has none")
        return self.config.layers[int(layer[1])]


def _matrix(tensor: SourceTensor) -> SourceTensor:
    """Leading dimensions become rows: of (E, O, I) matrices on end, of (1, 1, I) one row."""
    if len(tensor.shape) < 3:
        return tensor
    return SourceTensor(tensor.type, (tensor.rows, tensor.cols), tensor.blocks, tensor.row_order)


def _length(tensor: SourceTensor) -> int:
    """What can be put in order and cut: rows of a matrix, elements of a vector."""
    return tensor.cols if len(tensor.shape) == 1 else tensor.rows


def _take(tensor: SourceTensor, order: np.ndarray) -> SourceTensor:
    """Rows of a matrix, or elements of a vector, in another order."""
    length = _length(tensor)
    if sorted(order.tolist()) != list(range(length)):
        raise ValueError(f"the config says {len(order)} rows")
    return _elements(tensor, order) if len(tensor.shape) == 1 else _matrix(tensor).reordered(order)


def _take_columns(tensor: SourceTensor, order: np.ndarray) -> SourceTensor:
    """Columns of a matrix in another order, of any type: values that share a scale are read as float32."""
    if sorted(order.tolist()) != list(range(tensor.cols)):
        raise ValueError(f"the config says {len(order)} columns")
    return _mapped(lambda w: w[:, order], tensor, [])[0]


def _elements(vector: SourceTensor, index: RowIndex) -> SourceTensor:
    count = len(np.arange(vector.cols)[index])
    return computed((count,), lambda rows: vector.read()[:, index][rows])


def _mapped(function: Callable[[np.ndarray], np.ndarray], tensor: SourceTensor, rows: list[int | None]) -> list[SourceTensor]:
    tensor = _matrix(tensor)

    def values(index: RowIndex) -> np.ndarray:
        wanted = np.arange(tensor.rows)[index]
        return function(tensor.read() if len(tensor.shape) == 1 else tensor.reordered(wanted).read())

    return [computed(tensor.shape, values)]


def _flatten(tensor: SourceTensor, rows: list[int | None]) -> list[SourceTensor]:
    return [computed((tensor.rows * tensor.cols,), lambda index: tensor.read().reshape(1, -1)[index])]


def _transpose(tensor: SourceTensor, rows: list[int | None]) -> list[SourceTensor]:
    if tensor.type not in FLOATS or not isinstance(tensor.blocks, np.ndarray):
        raise ValueError("weights with scales cannot be transposed")
    columns, order = tensor.blocks.swapaxes(0, 1), tensor.row_order
    blocks = columns if order is None else LazyRows(lambda index: columns[index][:, order])
    return [SourceTensor(tensor.type, (tensor.cols, tensor.rows), blocks)]


def _conv(tensor: SourceTensor, rows: list[int | None]) -> list[SourceTensor]:
    return [computed((tensor.rows * tensor.cols,), lambda index: tensor.read().T.reshape(1, -1)[index])]


def _deinterleave(tensor: SourceTensor, rows: list[int | None]) -> list[SourceTensor]:
    length = _length(tensor)
    return [_take(tensor, np.concatenate([np.arange(0, length, 2), np.arange(1, length, 2)]))]


def _cut(tensor: SourceTensor, counts: list[int]) -> list[SourceTensor]:
    length = _length(tensor)
    if sum(counts) != length:
        raise ValueError(f"the config says {' + '.join(map(str, counts))} rows")
    starts = np.cumsum([0, *counts]).tolist()
    ranges = list(pairwise(starts))
    if len(tensor.shape) == 1:
        return [_elements(tensor, slice(first, stop)) for first, stop in ranges]
    return [_matrix(tensor).part(first, stop) for first, stop in ranges]


def _split(tensor: SourceTensor, rows: list[int | None]) -> list[SourceTensor]:
    counts = [count for count in rows if count is not None]
    if len(counts) < len(rows):
        raise ValueError("the config has no such tensors")
    return _cut(tensor, counts)


def _absorb(tensor: SourceTensor, rows: list[int | None]) -> list[SourceTensor]:
    """Matrices that expand a latent to a key, head by head, as those that carry a query back into latent columns."""
    if None in rows or len(rows) != 2:
        raise ValueError("the config has no such tensors")
    latent, expanded = tensor.cols, tensor.rows - int(rows[1] or 0)
    heads = int(rows[0] or 0) // latent
    if heads < 1 or expanded < heads or expanded % heads:
        raise ValueError(f"the config says {heads} heads over {latent} columns and {rows[1]} rows of values")
    nope, stored = expanded // heads, _matrix(tensor)

    def values(index: RowIndex) -> np.ndarray:
        wanted = np.arange(heads * latent)[index]
        needed, place = np.unique(wanted // latent, return_inverse=True)
        keys = stored.reordered((needed[:, None] * nope + np.arange(nope)).reshape(-1)).read()
        return keys.reshape(len(needed), nope, latent).swapaxes(1, 2)[place, wanted % latent]

    return [computed((heads * latent, nope), values), stored.part(expanded, tensor.rows)]


def _halves(tensor: SourceTensor, rows: list[int | None]) -> list[SourceTensor]:
    length = _length(tensor)
    return _cut(tensor, [length // len(rows)] * len(rows))


STEPS: dict[str, Step] = {
    "plus_one": partial(_mapped, lambda w: w + np.float32(1)),
    "neg_exp": partial(_mapped, lambda w: -np.exp(w)),
    "flatten": _flatten,
    "transpose": _transpose,
    "conv": _conv,
    "deinterleave": _deinterleave,
    "split": _split,
    "absorb": _absorb,
    "halves": _halves,
}
