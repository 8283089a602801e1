"""Model directory -> weights bound to fields: the last place that knows tensor names.

In:  a model directory with its manifest, `ModelConfig`
Out: `ModelWeights` whose arrays lie in one aligned block of memory; FormatError for any name or shape that the config does not call for

The dense part is read, not mapped: a mapped file cannot have huge pages, and a cut-short file would crash instead of raising.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from .arena import align_up, allocate
from .blocks.base import TensorSpec
from .config import ModelConfig
from .errors import FormatError
from .file_reader import FileReader
from .format import DENSE_NAME, MANIFEST_NAME, ExpertsEntry, Manifest, dense_slots
from .matrix import Matrix
from .parallel_reader import PIECE_BYTES, ParallelReader, ReadRequest
from .weights import ExpertLayout, LayerWeights, ModelWeights, Norm, PartLayout, SublayerWeights

TENSOR_ALIGN = 64  # kernels load whole cache lines
Progress = Callable[[str, int, int], None]  # what, bytes done, bytes in all


def dense_bytes(manifest: Manifest) -> int:
    """Bytes that `load_weights` will keep in memory."""
    return sum(align_up(entry.nbytes, TENSOR_ALIGN) for entry in manifest.tensors.values())


def expert_layouts(manifest: Manifest) -> dict[int, ExpertLayout]:
    """Layout of the routed experts by layer, as the manifest states it."""
    return {layer: _layout(layer, entry) for layer, entry in sorted(manifest.experts.items())}


def load_weights(model_dir: Path, manifest: Manifest, config: ModelConfig, on_progress: Progress | None = None) -> ModelWeights:
    """Read dense.safetensors into memory and bind every tensor.

    on_progress   called as on_progress("weights", bytes done, bytes in all)

    Raises FormatError naming the tensor, and before anything is read if names or shapes do not fit the config.
    """
    binder = _Binder(model_dir, manifest)
    weights = _bind_model(binder, config, expert_layouts(manifest))
    binder.refuse_leftovers()
    binder.read(on_progress)
    return weights


class _Binder:
    """Hands out views of the block of memory by tensor name, then fills the block."""

    def __init__(self, model_dir: Path, manifest: Manifest):
        self.path, self.entries = model_dir / DENSE_NAME, manifest.tensors
        self.slots = dense_slots(model_dir, manifest)
        self.offsets, total = {}, 0
        for name in sorted(self.slots, key=lambda name: self.slots[name].start):
            self.offsets[name] = total
            total += align_up(self.slots[name].nbytes, TENSOR_ALIGN)
        self.block = allocate(total, f"{self.path}: the dense part")
        self.bound: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self.entries

    def matrix(self, name: str, rows: int, cols: int, *, type: str | None = None) -> Matrix:
        """The matrix `name`, refused unless it is (rows, cols) and of `type` where that is given."""
        entry = self._take(name, (rows, cols))
        if type is not None and entry.type != type:
            raise FormatError(f"{self.path}: tensor {name} has type {entry.type}, expected {type}; convert the model again")
        return Matrix(entry.type, rows, cols, self._view(name).reshape(entry.stored_shape))

    def vector(self, name: str, size: int) -> np.ndarray:
        """The float32 vector `name` (size,)."""
        self._take(name, (size,))
        return self._view(name).view(np.float32)

    def spec(self, prefix: str, spec: TensorSpec) -> Matrix | np.ndarray:
        """The tensor that a block declared."""
        if len(spec.shape) == 1:
            return self.vector(prefix + spec.name, spec.shape[0])
        return self.matrix(prefix + spec.name, spec.shape[0], spec.shape[1], type=spec.type)

    def norm(self, config: ModelConfig, prefix: str, name: str | None) -> Norm | None:
        """The norm of the residual stream called `name`; None for none."""
        if name is None:
            return None
        found = {field: self.vector(prefix + spec.name, config.hidden_size) for field, spec in config.vectors_of_norm(name).items()}
        return Norm(config.norm, found["weight"], found.get("bias"))

    def _take(self, name: str, shape: tuple[int, ...]):
        entry = self.entries.get(name)
        if entry is None:
            raise FormatError(f"{self.path}: tensor {name} is missing, expected shape {shape}; convert the model again")
        if entry.shape != shape:
            raise FormatError(f"{self.path}: tensor {name} has shape {entry.shape}, the config calls for {shape}; convert the model again")
        self.bound.add(name)
        return entry

    def _view(self, name: str) -> np.ndarray:
        start = self.offsets[name]
        view = self.block[start : start + self.slots[name].nbytes]
        view.flags.writeable = False
        return view

    def refuse_leftovers(self) -> None:
        # A tensor that nobody binds belongs to equations that would silently be left out.
        if leftover := sorted(set(self.entries) - self.bound):
            more = f" (and {len(leftover) - 1} more)" if len(leftover) > 1 else ""
            raise FormatError(f"{self.path}: tensor {leftover[0]}{more} has no place in a model with this config; check {MANIFEST_NAME}")

    def read(self, on_progress: Progress | None) -> None:
        """Fill the block, a few tensors at a time so that progress can be told."""
        file, reader = FileReader(self.path), ParallelReader()
        done, total = 0, sum(slot.nbytes for slot in self.slots.values())
        try:
            for batch in self._batches(file):
                for request, error in reader.read(batch):
                    raise FormatError(f"{self.path}: tensor {request.name} cannot be read ({error}); copy the model again") from error
                done += sum(request.target.nbytes for request in batch)
                if on_progress is not None:
                    on_progress("weights", done, total)
            if file.changed:
                raise FormatError(f"{self.path}: was written to while it was read: open the model again when that has ended")
        finally:
            reader.close()
            file.close()

    def _batches(self, file: FileReader) -> list[list[ReadRequest]]:
        batches: list[list[ReadRequest]] = [[]]
        waiting = 0
        for name, offset in self.offsets.items():
            slot = self.slots[name]
            batches[-1].append(ReadRequest((file,), slot.start, self.block[offset : offset + slot.nbytes], name))
            waiting += slot.nbytes
            if waiting >= 16 * PIECE_BYTES:
                batches.append([])
                waiting = 0
        return [batch for batch in batches if batch]


def _bind_model(take: _Binder, config: ModelConfig, layouts: dict[int, ExpertLayout]) -> ModelWeights:
    embed_tokens = take.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    _check_experts(take.path.parent, config, layouts)
    lm_head = embed_tokens if config.tie_word_embeddings else take.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
    bias = take.vector("lm_head.bias", config.vocab_size) if config.lm_head_bias else None
    layers = tuple(_bind_layer(take, config, i, layouts.get(i)) for i in range(config.num_hidden_layers))
    return ModelWeights(embed_tokens, take.norm(config, "model.", "norm"), lm_head, layers, bias)


def _bind_layer(take: _Binder, config: ModelConfig, index: int, layout: ExpertLayout | None) -> LayerWeights:
    prefix, layer = f"model.layers.{index}.", config.layers[index]
    sublayers = tuple(
        SublayerWeights(
            fields={field: take.spec(prefix, spec) for field, spec in sub.block.tensors(config.hidden_size).items()},
            input_norm=take.norm(config, prefix, sub.input_norm),
            output_norm=take.norm(config, prefix, sub.output_norm),
            experts=layout if sub.block.experts(config.hidden_size) else None,
        )
        for sub in layer.sublayers
    )
    return LayerWeights(sublayers, None if layer.scalar is None else take.vector(prefix + layer.scalar, 1))


def _check_experts(folder: Path, config: ModelConfig, layouts: dict[int, ExpertLayout]) -> None:
    """Refuse a manifest whose experts are not those that the config calls for."""
    wanted = config.experts
    if set(wanted) != set(layouts):
        raise FormatError(
            f"{folder}: experts for layers {sorted(layouts)}, the config calls for {sorted(wanted)}; convert the model again"
        )
    for layer, shape in wanted.items():
        layout = layouts[layer]
        found = layout.num_experts, tuple((name, (part.rows, part.cols)) for name, part in layout.parts.items())
        if found != (shape.num_experts, shape.parts):
            raise FormatError(
                f"{folder}: layer {layer} has experts of {found}, the config calls for {(shape.num_experts, shape.parts)}; "
                "convert the model again"
            )


def _layout(layer: int, entry: ExpertsEntry) -> ExpertLayout:
    parts = {name: PartLayout(part.type, *part.shape, part.offset, part.bytes) for name, part in entry.parts.items()}
    return ExpertLayout(layer, entry.num_experts, entry.expert_bytes, parts)
