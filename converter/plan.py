"""Everything a conversion will write, to the byte, before it writes anything.

In:  Source, recipe
Out: Plan: a type for every tensor, the files and their sizes; QuantError or DiskSpaceError instead of a surprise at 95 %
"""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from libcolibri.errors import DiskSpaceError, QuantError
from libcolibri.format import DENSE_NAME, EXPERT_ALIGN, PARTS, PartEntry, TensorEntry, plan_parts
from libcolibri.quant import FORMATS
from libcolibri.safetensors_header import build_header

from .names import EXPERT, expected_tensors
from .source import KEEP, Source, SourceTensor
from .source_types import FLOATS, STORED_AS

RECIPES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m")
MIXTURES = {"q5_k_m": "q5_k", "q4_k_m": "q4_k"}  # recipe -> type of most matrices
ROUNDED_ALREADY = ("mxfp4",)  # a block type would make these weights bigger or worse: all recipes but the floats keep them
DENSE_ALIGN = 64  # tiles start on a cache line
MANIFEST_RESERVE_BYTES = 1 << 20
# What llama.cpp falls back to when the columns are no multiple of 256; without a multiple of 32 only floats remain.
FALLBACKS = {"q4_k": ("q5_0", "f16"), "q5_k": ("q5_1", "f16"), "q6_k": ("q8_0", "f16"), "q8_0": ("f16",)}
_EMBEDDING = ("model.embed_tokens.weight", "embeddings.word_embeddings.weight")
_LAYER = re.compile(r"(?:model\.layers|encoder\.layer)\.(\d+)\.")


@dataclass(frozen=True)
class DenseTensor:
    """A tensor of dense.safetensors: what it will be, and where it comes from."""

    name: str
    entry: TensorEntry
    source: SourceTensor


@dataclass(frozen=True)
class ExpertLayer:
    """An expert file: matrices[e][part] of every expert."""

    layer: int
    parts: dict[str, PartEntry]
    expert_bytes: int
    matrices: tuple[dict[str, SourceTensor], ...]

    @property
    def file(self) -> str:
        return f"experts-{self.layer:05d}.safetensors"

    @property
    def header(self) -> bytes:
        return build_header(((f"experts.{e}", "U8", (self.expert_bytes,)) for e in range(len(self.matrices))), EXPERT_ALIGN)

    @property
    def nbytes(self) -> int:
        return len(self.header) + len(self.matrices) * self.expert_bytes


@dataclass(frozen=True)
class Plan:
    """All jobs of a conversion. weights_bytes counts the safetensors files exactly.

    fallbacks   (tensor, wanted type, type it gets) where the wanted type's blocks do not fit the columns
    restored    (tensor, its type, type it gets) where the source's type has no kernel
    """

    recipe: str
    dense: tuple[DenseTensor, ...]
    experts: tuple[ExpertLayer, ...]
    fallbacks: tuple[tuple[str, str, str], ...]
    restored: tuple[tuple[str, str, str], ...]

    @property
    def dense_header(self) -> bytes:
        def stored(tensor: DenseTensor) -> tuple[str, str, tuple[int, ...]]:
            return tensor.name, "F32" if len(tensor.entry.shape) == 1 else "U8", tensor.entry.stored_shape

        return build_header(map(stored, self.dense), DENSE_ALIGN)

    @property
    def file_bytes(self) -> dict[str, int]:
        """Name -> exact size of every weight file."""
        sizes = {DENSE_NAME: len(self.dense_header) + sum(tensor.entry.nbytes for tensor in self.dense)}
        return sizes | {layer.file: layer.nbytes for layer in self.experts}

    @property
    def weights_bytes(self) -> int:
        return sum(self.file_bytes.values())


def make_plan(source: Source, quant: str | None) -> Plan:
    """Choose every tensor's type. quant None takes the source's own recipe."""
    if quant is None:
        quant = source.recipe
    elif quant not in RECIPES:
        raise QuantError(f"--quant {quant} is unknown, only {', '.join(RECIPES)}")
    chooser = _Chooser(source, quant)
    dense: list[DenseTensor] = []
    experts: dict[int, dict[int, dict[str, tuple[str, SourceTensor]]]] = {}
    for name, tensor in source.tensors.items():
        kind = chooser.type_of(name, tensor)
        if match := EXPERT.fullmatch(name):
            experts.setdefault(int(match[1]), {}).setdefault(int(match[2]), {})[match[3]] = (kind, tensor)
        else:
            dense.append(DenseTensor(name, TensorEntry(kind, tensor.shape), tensor))
    layers = tuple(_expert_layer(layer, [found[e] for e in sorted(found)]) for layer, found in sorted(experts.items()))
    # Vectors are float32 and have any length: behind the tiles, whose sizes are multiples of 32 bytes, they disturb no alignment.
    dense.sort(key=lambda tensor: len(tensor.entry.shape) == 1)
    return Plan(quant, tuple(dense), layers, tuple(chooser.fallbacks), tuple(chooser.restored))


def _expert_layer(layer: int, experts: list[dict[str, tuple[str, SourceTensor]]]) -> ExpertLayer:
    """One layout for all experts of a layer."""
    types = {part: experts[0][part][0] for part in PARTS if part in experts[0]}
    for part, kind in types.items():
        if odd := {expert[part][0] for expert in experts} - {kind}:
            raise QuantError(f"layer {layer}: experts have {part} as {kind} and as {min(odd)}: choose one type for all with --quant")
    shapes = {part: (experts[0][part][1].rows, experts[0][part][1].cols) for part in types}
    parts, expert_bytes = plan_parts(types, shapes)
    return ExpertLayer(layer, parts, expert_bytes, tuple({part: expert[part][1] for part in types} for expert in experts))


class _Chooser:
    """The type of every tensor under a recipe."""

    def __init__(self, source: Source, recipe: str):
        self.source, self.recipe = source, recipe
        self.fallbacks: list[tuple[str, str, str]] = []
        self.restored: list[tuple[str, str, str]] = []
        self.num_layers = source.config["num_hidden_layers"]
        self.expected = expected_tensors(source.kind, source.config, source.path)
        self.has_head = "lm_head.weight" in source.tensors
        self.has_8_experts = max((int(match[2]) for match in map(EXPERT.fullmatch, source.tensors) if match), default=0) == 7

    def type_of(self, name: str, tensor: SourceTensor) -> str:
        if len(tensor.shape) == 1:
            return "f32"
        if (only := self.expected[name].type) is not None:
            return only
        if tensor.type in ROUNDED_ALREADY and self.recipe not in FLOATS:
            return tensor.type
        if self.recipe != KEEP:
            return self._fitting(name, tensor, self._wanted(name))
        if tensor.type in FORMATS:
            return tensor.type
        kind = self._fitting(name, tensor, STORED_AS[tensor.type])
        self.restored.append((name, tensor.type, kind))
        return kind

    def _fitting(self, name: str, tensor: SourceTensor, wanted: str) -> str:
        """The wanted type, or what stands in for it when its blocks do not fit the columns."""
        for kind in (wanted, *FALLBACKS.get(wanted, ())):
            if tensor.cols % FORMATS[kind].block_cols == 0:
                if kind != wanted:
                    self.fallbacks.append((name, wanted, kind))
                return kind
        raise QuantError(f"tensor {name!r} with {tensor.cols} columns cannot be {wanted}")

    def _wanted(self, name: str) -> str:
        """Mixtures: q6_k for the head and, in about half of the layers, for the tensors that suffer most; q4_k or q5_k for the rest."""
        most = MIXTURES.get(self.recipe)
        if most is None:
            return self.recipe
        if name == "lm_head.weight" or (name in _EMBEDDING and not self.has_head):
            return "q6_k"
        match = _LAYER.match(name)
        if match is None:
            return most
        value = name.endswith((".v_proj.weight", ".self.value.weight"))
        if self.has_8_experts and name.endswith((".v_proj.weight", ".k_proj.weight", ".o_proj.weight")):
            return "q6_k" if name.endswith(".o_proj.weight") else "q8_0"  # next to 8 experts these matrices cost nothing
        down = name.endswith((".down_proj.weight",)) or re.fullmatch(r"encoder\.layer\.\d+\.output\.dense\.weight", name)
        return "q6_k" if (value or down) and _more_bits(int(match[1]), self.num_layers) else most


def _more_bits(layer: int, num_layers: int) -> bool:
    """The first and last eighth of the layers and every third between, as llama.cpp spends its bits."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def check_disk_space(folder: Path, needed_bytes: int, what: str) -> None:
    """DiskSpaceError unless the drive of `folder` has needed_bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        drive = f"the drive of {folder}, which has {_size(free)} free"
        raise DiskSpaceError(f"{what} needs {_size(needed_bytes)} more on {drive}: free some or use another drive")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def needed_bytes(plan: Plan, done: Iterable[str]) -> int:
    """Bytes still to be written when the files `done` are there already."""
    done = set(done)
    return sum(size for name, size in plan.file_bytes.items() if name not in done) + MANIFEST_RESERVE_BYTES
