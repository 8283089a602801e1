"""Model directory -> weights bound to fields: the last place that knows tensor names.

In:  a model directory with its manifest, `ModelConfig`
Out: `ModelWeights` whose arrays lie in one aligned block of memory; FormatError for any name or shape that the config does not call for

The dense part is read, not mapped: a mapped file cannot have huge pages, and a cut-short file would crash instead of raising.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from .arena import align_up, allocate
from .config import ModelConfig
from .errors import FormatError
from .file_reader import PIECE_BYTES, FileReader, ParallelReader, ReadRequest
from .format import DENSE_NAME, MANIFEST_NAME, ExpertsEntry, Manifest, PartEntry, dense_slots
from .matrix import Matrix
from .weights import AttentionWeights, ExpertLayout, LayerWeights, MlpWeights, ModelWeights, MoeWeights, PartLayout

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
        finally:
            reader.close()
            file.close()

    def _batches(self, file: FileReader) -> list[list[ReadRequest]]:
        batches: list[list[ReadRequest]] = [[]]
        waiting = 0
        for name, offset in self.offsets.items():
            slot = self.slots[name]
            batches[-1].append(ReadRequest(file, slot.start, self.block[offset : offset + slot.nbytes], name))
            waiting += slot.nbytes
            if waiting >= 16 * PIECE_BYTES:
                batches.append([])
                waiting = 0
        return [batch for batch in batches if batch]


def _bind_model(take: _Binder, config: ModelConfig, layouts: dict[int, ExpertLayout]) -> ModelWeights:
    wanted = {i for i, routed in enumerate(config.moe_layers) if routed}
    if wanted != set(layouts):
        raise FormatError(
            f"{take.path.parent}: experts for layers {sorted(layouts)}, the config calls for {sorted(wanted)}; convert the model again"
        )
    embed_tokens = take.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    lm_head = embed_tokens if config.tie_word_embeddings else take.matrix("lm_head.weight", config.vocab_size, config.hidden_size)
    norm = take.vector("model.norm.weight", config.hidden_size)
    layers = [_bind_layer(take, config, i, layouts.get(i)) for i in range(config.num_hidden_layers)]
    return ModelWeights(embed_tokens, norm, lm_head, layers)


def _bind_layer(take: _Binder, config: ModelConfig, index: int, layout: ExpertLayout | None) -> LayerWeights:
    prefix = f"model.layers.{index}."
    return LayerWeights(
        input_layernorm=take.vector(prefix + "input_layernorm.weight", config.hidden_size),
        post_attention_layernorm=take.vector(prefix + "post_attention_layernorm.weight", config.hidden_size),
        attention=_bind_attention(take, config, prefix + "self_attn."),
        mlp=None if layout else _bind_mlp(take, prefix + "mlp.", config.hidden_size, config.intermediate_size),
        moe=_bind_moe(take, config, prefix + "mlp.", layout) if layout else None,
    )


def _bind_attention(take: _Binder, config: ModelConfig, prefix: str) -> AttentionWeights:
    D, q_size, kv_size = config.hidden_size, config.q_size, config.kv_size
    sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": D}
    biased = {"q": config.attention_bias, "k": config.attention_bias, "v": config.attention_bias, "o": config.attention_out_bias}
    biases = {f"{p}_bias": take.vector(f"{prefix}{p}_proj.bias", sizes[p]) for p in sizes if biased[p]}
    norms = {}
    if config.qk_norm is not None:
        q_width, k_width = (config.head_dim, config.head_dim) if config.qk_norm == "head" else (q_size, kv_size)
        norms = {"q_norm": take.vector(prefix + "q_norm.weight", q_width), "k_norm": take.vector(prefix + "k_norm.weight", k_width)}
    return AttentionWeights(
        q_proj=take.matrix(prefix + "q_proj.weight", q_size, D),
        k_proj=take.matrix(prefix + "k_proj.weight", kv_size, D),
        v_proj=take.matrix(prefix + "v_proj.weight", kv_size, D),
        o_proj=take.matrix(prefix + "o_proj.weight", D, q_size),
        **biases,
        **norms,
    )


def _bind_mlp(take: _Binder, prefix: str, hidden: int, width: int) -> MlpWeights:
    return MlpWeights(
        gate_proj=take.matrix(prefix + "gate_proj.weight", width, hidden),
        up_proj=take.matrix(prefix + "up_proj.weight", width, hidden),
        down_proj=take.matrix(prefix + "down_proj.weight", hidden, width),
    )


def _bind_moe(take: _Binder, config: ModelConfig, prefix: str, layout: ExpertLayout) -> MoeWeights:
    D, F = config.hidden_size, config.moe_intermediate_size
    found = [layout.num_experts, *((p.rows, p.cols) for p in (layout.gate_proj, layout.up_proj, layout.down_proj))]
    if found != [config.num_experts, (F, D), (F, D), (D, F)]:
        raise FormatError(
            f"{take.path.parent}: layer {layout.layer} has experts of {found}, "
            f"the config calls for {[config.num_experts, (F, D), (F, D), (D, F)]}; convert the model again"
        )
    shared = config.shared_expert_intermediate_size
    return MoeWeights(
        router=take.matrix(prefix + "gate.weight", config.num_experts, D, type="f32"),
        experts=layout,
        shared=_bind_mlp(take, prefix + "shared_expert.", D, shared) if shared else None,
        shared_gate=take.matrix(prefix + "shared_expert_gate.weight", 1, D, type="f32") if shared else None,
    )


def _layout(layer: int, entry: ExpertsEntry) -> ExpertLayout:
    def part(found: PartEntry) -> PartLayout:
        return PartLayout(found.type, *found.shape, found.offset, found.bytes)

    return ExpertLayout(layer, entry.num_experts, entry.expert_bytes, part(entry.gate_proj), part(entry.up_proj), part(entry.down_proj))
