"""BERT and XLM-RoBERTa encoders: config, weights bound to fields, and one forward pass as a recorded program.

In:  config.json's keys, tensors by their Hugging Face names, token ids of several texts
Out: one pooled float32 vector per text

A batch is ragged: the tokens of all texts lie one behind the other, and attention stays within a text. The program is recorded
once, for a capacity; the number of tokens, the ids and the texts' starts are read from small arrays at every run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError, FormatError
from ..kernels.activations import BLOCK, COLS
from ..kernels.dots import FLOATS, IDS
from ..kernels.embed import make_embed
from ..kernels.encoder_kernels import attention_scratch_bytes, make_gelu, make_pool, make_quantize, make_residual_norm, make_text_attention
from ..kernels.kernel_set import KernelSet
from ..kernels.matrix import make_product
from ..matrix import Matrix
from ..program import Program
from ..quant import FORMATS
from ..thread_team import Team
from .config_reader import ConfigReader

FAMILIES = ("bert", "xlm-roberta")
POOLINGS = ("mean", "cls")
SETTINGS_KEY = "encoder"  # where a manifest's config keeps what a sentence-transformers folder says beside config.json
# Training, dropout and heads that no embedding goes through.
HARMLESS_HERE = (
    *("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout", "gradient_checkpointing"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Hugging Face's names; pooling, max_tok and the prefixes come from sentence-transformers' files."""

    family: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    first_position: int
    pooling: str
    max_tok: int
    query_prefix: str
    passage_prefix: str

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def parse_encoder_config(raw: Mapping[str, Any], family: str) -> EncoderConfig:
    """Read a config strictly: a key that changes the mathematics is used or refused. raw["encoder"] may hold pooling and prefixes."""
    if family not in FAMILIES:
        raise ConfigError(f"encoder family {family!r} is not supported, only {' and '.join(FAMILIES)}")
    read = ConfigReader(raw, family)
    sizes = {
        key: read.integer(key)
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    }
    read.only("hidden_act", "gelu")
    read.only("position_embedding_type", "absolute")
    read.only("is_decoder", False)
    for key in HARMLESS_HERE:
        read.value(key, None)
    # RoBERTa numbers positions from behind the padding id on, BERT from 0.
    first = read.integer("pad_token_id", 1, least=0) + 1 if family == "xlm-roberta" else 0
    config = EncoderConfig(
        family=family,
        **sizes,
        type_vocab_size=read.integer("type_vocab_size", 2),
        layer_norm_eps=read.number("layer_norm_eps", 1e-12),
        first_position=first,
        **_settings(read.value(SETTINGS_KEY, None) or {}, family, sizes["max_position_embeddings"] - first),
    )
    read.finish()
    _check_sizes(config)
    return config


def _settings(raw: Mapping[str, Any], family: str, positions: int) -> dict[str, Any]:
    """Pooling, longest input and prefixes, with the defaults of a bare config.json: mean, all positions, no prefix."""
    read = ConfigReader(raw, f"{family} {SETTINGS_KEY}")
    read.only("pooling", *POOLINGS)
    read.only("normalize", True)
    settings = {
        "pooling": read.value("pooling", "mean"),
        "max_tok": min(read.integer("max_tok", positions, least=3), positions),
        "query_prefix": read.value("query_prefix", ""),
        "passage_prefix": read.value("passage_prefix", ""),
    }
    for key in ("query_prefix", "passage_prefix"):
        if not isinstance(settings[key], str):
            raise read.refusal(key, settings[key], "a text")
    read.finish()
    return settings


def _check_sizes(config: EncoderConfig) -> None:
    D, H, F = config.hidden_size, config.num_attention_heads, config.intermediate_size
    if D % H or config.head_dim % 16 or F % 16:
        raise ConfigError(
            f"{config.family} config: hidden_size={D} in num_attention_heads={H} heads and intermediate_size={F} are not supported: "
            "a head and intermediate_size must be multiples of 16"
        )


@dataclass(frozen=True, slots=True)
class Linear:
    """x -> weight @ x + bias."""

    weight: Matrix
    bias: np.ndarray


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """weight and bias, float32 (D,)."""

    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One transformer layer; each norm follows the residual sum (post-norm)."""

    query: Linear
    key: Linear
    value: Linear
    attention_output: Linear
    attention_norm: LayerNorm
    intermediate: Linear
    output: Linear
    output_norm: LayerNorm


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """positions is (P, D) float32: the position embedding plus the embedding of token type 0, the only type an embedder uses."""

    word_embeddings: Matrix
    positions: np.ndarray
    embeddings_norm: LayerNorm
    layers: tuple[EncoderLayer, ...]


def bind_encoder(tensors: Mapping[str, Matrix | np.ndarray], config: EncoderConfig, where: str) -> EncoderWeights:
    """Bind tensors by name; FormatError for one that is missing, has another shape, or is left over (the unused pooler aside)."""
    take = _Binder(tensors, where)
    D, F = config.hidden_size, config.intermediate_size
    positions = take.table("embeddings.position_embeddings.weight", config.max_position_embeddings, D)
    types = take.table("embeddings.token_type_embeddings.weight", config.type_vocab_size, D)
    weights = EncoderWeights(
        word_embeddings=take.matrix("embeddings.word_embeddings.weight", config.vocab_size, D),
        positions=np.ascontiguousarray(positions + types[0]),
        embeddings_norm=take.norm("embeddings.LayerNorm", D),
        layers=tuple(_bind_layer(take, f"encoder.layer.{i}.", D, F) for i in range(config.num_hidden_layers)),
    )
    take.refuse_leftovers()
    return weights


def _bind_layer(take: "_Binder", prefix: str, D: int, F: int) -> EncoderLayer:
    return EncoderLayer(
        query=take.linear(prefix + "attention.self.query", D, D),
        key=take.linear(prefix + "attention.self.key", D, D),
        value=take.linear(prefix + "attention.self.value", D, D),
        attention_output=take.linear(prefix + "attention.output.dense", D, D),
        attention_norm=take.norm(prefix + "attention.output.LayerNorm", D),
        intermediate=take.linear(prefix + "intermediate.dense", F, D),
        output=take.linear(prefix + "output.dense", D, F),
        output_norm=take.norm(prefix + "output.LayerNorm", D),
    )


class _Binder:
    """Hands out tensors by name and remembers which were taken."""

    def __init__(self, tensors: Mapping[str, Matrix | np.ndarray], where: str):
        self.where = where
        self.tensors = {_plain(name): tensor for name, tensor in tensors.items()}
        self.taken = {name for name in self.tensors if name.startswith("pooler.") or name == "embeddings.position_ids"}

    def _take(self, name: str, shape: tuple[int, ...]) -> Matrix | np.ndarray:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise FormatError(f"{self.where}: tensor {name} is missing, expected shape {shape}; convert the model again")
        found = (tensor.rows, tensor.cols) if isinstance(tensor, Matrix) else tensor.shape
        if found != shape:
            raise FormatError(f"{self.where}: tensor {name} has shape {found}, the config calls for {shape}; convert the model again")
        self.taken.add(name)
        return tensor

    def matrix(self, name: str, rows: int, cols: int) -> Matrix:
        tensor = self._take(name, (rows, cols))
        assert isinstance(tensor, Matrix)  # two dimensions: _take has compared the shape
        return tensor

    def vector(self, name: str, size: int) -> np.ndarray:
        tensor = self._take(name, (size,))
        assert isinstance(tensor, np.ndarray)
        return np.ascontiguousarray(tensor, np.float32)

    def table(self, name: str, rows: int, cols: int) -> np.ndarray:
        """A matrix as float32 (rows, cols)."""
        found = self.matrix(name, rows, cols)
        return FORMATS[found.type].dequantize(found.tiles, rows, cols)

    def linear(self, name: str, rows: int, cols: int) -> Linear:
        return Linear(self.matrix(f"{name}.weight", rows, cols), self.vector(f"{name}.bias", rows))

    def norm(self, name: str, size: int) -> LayerNorm:
        return LayerNorm(self.vector(f"{name}.weight", size), self.vector(f"{name}.bias", size))

    def refuse_leftovers(self) -> None:
        if leftover := sorted(set(self.tensors) - self.taken):
            raise FormatError(f"{self.where}: tensor {leftover[0]} has no place in this encoder ({len(leftover)} such tensors)")


def _plain(name: str) -> str:
    """The tensor's name without the model's own prefix."""
    for prefix in ("bert.", "roberta."):
        name = name.removeprefix(prefix)
    return name


class EncoderProgram:
    """The forward pass over up to `max_tok` tokens of up to `max_tok` texts, with its buffers; one run at a time.

    embeddings of a run are the first rows of `pooled`; `hidden` holds the last hidden states, token by token.
    """

    def __init__(self, config: EncoderConfig, weights: EncoderWeights, max_tok: int, threads: int, kernels: KernelSet):
        self.config, self.weights, self.capacity_tok, self.threads = config, weights, max_tok, threads
        self._kernels, self._width = kernels, kernels.width
        D, F = config.hidden_size, config.intermediate_size
        self._n_tok, self._n_texts = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._ids, self._positions = np.zeros(max_tok, np.int64), np.zeros(max_tok, np.int64)
        self._starts = np.zeros(max_tok + 1, np.int64)
        self._epsilon = np.array([config.layer_norm_eps], np.float32)
        self._scale = np.array([config.head_dim**-0.5], np.float32)
        self._longest = min(max_tok, config.max_position_embeddings - config.first_position)
        self._scratch_bytes = max(attention_scratch_bytes(self._longest, config.head_dim), 4 * max(D, F) + 1024)
        self._scratch = np.zeros(self._scratch_bytes * threads, np.uint8)
        self.hidden, self.pooled = np.zeros((max_tok, D), np.float32), np.zeros((max_tok, D), np.float32)
        self._query, self._key, self._value, self._mixed = (np.zeros((max_tok, D), np.float32) for _ in range(4))
        self._inner = np.zeros((max_tok, F), np.float32)
        self._panels, self._inner_panels = (np.zeros((max_tok, -(-n // COLS) * BLOCK), np.uint8) for n in (D, F))
        self.program = self._record()

    def run(self, team: Team, texts: Sequence[Sequence[int]], times: np.ndarray | None = None) -> np.ndarray:
        """Pooled vectors (len(texts), D) float32, a view of this program's buffer. The ids must fit: see Encoder."""
        lengths = [len(text) for text in texts]
        n_tok = sum(lengths)
        self._starts[1 : len(texts) + 1] = np.cumsum(lengths)
        self._ids[:n_tok] = np.concatenate([np.asarray(text, np.int64) for text in texts])
        self._positions[:n_tok] = np.concatenate([np.arange(length) for length in lengths])
        self._positions[:n_tok] += self.config.first_position
        self._n_tok[0], self._n_texts[0] = n_tok, len(texts)
        team.run(self.program, times=times)
        return self.pooled[: len(texts)]

    def _record(self) -> Program:
        program, D, F = Program(), self.config.hidden_size, self.config.intermediate_size
        scratch = (self._scratch, self._scratch_bytes)
        words = self.weights.word_embeddings
        tiles = words.tiles
        source = (tiles, tiles.nbytes // tiles.shape[0], _tiles_per_group(words))
        program.record("embed", self._kernels.get(make_embed, IDS[words.type]), (self._n_tok, self._ids, *source, self.hidden, D * 4))
        self._norm(program, self.hidden, self.weights.positions, self._positions, self.weights.embeddings_norm)
        for layer in self.weights.layers:
            for linear, out in ((layer.query, self._query), (layer.key, self._key), (layer.value, self._value)):
                self._linear(program, "qkv", linear, self.hidden, self._panels, out, barrier=linear is layer.value)
            self._attend(program)
            if layer.attention_output.weight.type not in FLOATS:
                rows = (self._n_tok, self._mixed, D * 4, D)
                program.record("quantize", self._kernels.get(make_quantize, self._width), (*rows, self._panels, *scratch))
            self._linear(program, "attention output", layer.attention_output, self._mixed, self._panels, self._query)
            self._norm(program, self._query, self.hidden, 0, layer.attention_norm)
            self._linear(program, "intermediate", layer.intermediate, self.hidden, self._panels, self._inner)
            rows = (self._n_tok, self._inner, F * 4, F)
            panels = 0 if layer.output.weight.type in FLOATS else self._inner_panels
            program.record("gelu", self._kernels.get(make_gelu, self._width), (*rows, panels, *scratch))
            self._linear(program, "output", layer.output, self._inner, self._inner_panels, self._query)
            self._norm(program, self._query, self.hidden, 0, layer.output_norm)
        texts, first_only = (self._n_texts, self._starts, self.hidden, D * 4, D), self.config.pooling == "cls"
        program.record("pool", self._kernels.get(make_pool), (*texts, first_only, True, self.pooled, D * 4))
        return program.finish()

    def _norm(self, program: Program, x: np.ndarray, residual: np.ndarray, rows: np.ndarray | int, norm: LayerNorm) -> None:
        """hidden = LayerNorm(x + residual), and its panels when any matrix wants them."""
        D = self.config.hidden_size
        panels: np.ndarray | int = self._panels if self._any_quantized() else 0
        slots = (self._n_tok, x, D * 4, residual, D * 4, rows, D, norm.weight, norm.bias, self._epsilon, self.hidden, D * 4)
        program.record("norm", self._kernels.get(make_residual_norm, self._width), (*slots, panels, self._scratch, self._scratch_bytes))

    def _any_quantized(self) -> bool:
        return any(
            linear.weight.type not in FLOATS
            for layer in self.weights.layers
            for linear in (layer.query, layer.key, layer.value, layer.intermediate)
        )

    def _linear(
        self, program: Program, name: str, linear: Linear, rows: np.ndarray, panels: np.ndarray, out: np.ndarray, *, barrier: bool = True
    ) -> None:
        """out = weight @ x + bias, from float32 rows or int8 panels as the matrix's type wants."""
        matrix = linear.weight
        groups = matrix.tiles.shape[0]
        x, stride = (rows, matrix.cols * 4) if matrix.type in FLOATS else (panels, matrix.cols // COLS * BLOCK)
        slots = (matrix.tiles, groups, matrix.tiles.nbytes // groups, _tiles_per_group(matrix), x, stride, 0, self._n_tok)
        kernel = self._kernels.get(make_product, IDS[matrix.type], self._width, self._kernels.lanes)
        program.record(f"{name} {matrix.type}", kernel, (*slots, out, matrix.rows * 4, linear.bias, 0), barrier=barrier)

    def _attend(self, program: Program) -> None:
        config, D = self.config, self.config.hidden_size
        heads = (config.num_attention_heads, config.head_dim, self._scale)
        slots = (self._n_texts, self._starts, self._query, self._key, self._value, D * 4, *heads, self._mixed, D * 4, self._longest)
        program.record("attention", self._kernels.get(make_text_attention), (*slots, self._scratch, self._scratch_bytes))


def _tiles_per_group(matrix: Matrix) -> int:
    """Tiles in a row group; float types count columns."""
    return matrix.tiles.shape[1]
