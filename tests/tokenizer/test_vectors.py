"""Ids equal those of the reference libraries, for every split pattern and every kind of vocabulary."""

import json
from pathlib import Path

import pytest

from libcolibri.pre_tokenizers import supported_names
from libcolibri.sentencepiece_model import unigram_model
from libcolibri.tokenizer import Tokenizer
from libcolibri.tokenizer_build import tokenizer_files_from_gguf

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizer"
VECTORS = json.loads((FIXTURES / "vectors.json").read_text())


def metadata(name: str) -> dict:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def rebuilt(name: str, **more: object) -> Tokenizer:
    return Tokenizer.from_json(tokenizer_files_from_gguf(metadata(name) | more)["tokenizer.json"])


def assert_same(tokenizer: Tokenizer, expected: list[list[int]]) -> None:
    different = [text for text, ids in zip(VECTORS["texts"], expected, strict=True) if tokenizer.encode(text) != ids]
    assert not different, f"{len(different)} of {len(expected)} texts differ, first {different[0]!r}"


@pytest.mark.parametrize("name", supported_names())
def test_byte_level(name):
    expected = VECTORS["byte_level"][VECTORS["byte_level_same_as"][name]]
    assert_same(rebuilt("byte_level", **{"tokenizer.ggml.pre": name}), expected)


def test_sentencepiece_from_gguf():
    assert_same(rebuilt("sentencepiece"), VECTORS["sentencepiece"])


def test_sentencepiece_model_file():
    assert_same(Tokenizer.from_sentencepiece((FIXTURES / "sentencepiece.model").read_bytes()), VECTORS["sentencepiece"])


def test_wordpiece():
    assert_same(rebuilt("wordpiece"), VECTORS["wordpiece"])


def test_unigram():
    unigram = metadata("unigram")
    model = unigram_model(unigram["pieces"], unigram["scores"], unigram["types"])
    assert_same(Tokenizer.from_sentencepiece(model), VECTORS["unigram"])


def test_unigram_as_tokenizer_json():
    unigram = metadata("unigram")
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    content = {
        "added_tokens": [{"id": 1, "content": "<s>", "special": True}],
        "normalizer": {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        "pre_tokenizer": space,
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": list(map(list, zip(unigram["pieces"], unigram["scores"], strict=True)))},
    }
    tokenizer = Tokenizer.from_json(json.dumps(content).encode())
    plain = tokenizer.encode("read from disk")
    assert plain == Tokenizer.from_sentencepiece(unigram_model(unigram["pieces"], unigram["scores"], unigram["types"])).encode(
        "read from disk"
    )
    assert tokenizer.decode(plain) == "read from disk"
    assert tokenizer.encode("<s>read from disk", special=True) == [1, *plain]
    assert 1 not in tokenizer.encode("<s>read from disk")


def test_unigram_from_gguf():
    unigram = metadata("unigram")
    keys = {"tokens": unigram["pieces"], "scores": unigram["scores"], "token_type": unigram["types"], "model": b"t5", "unknown_token_id": 0}
    files = tokenizer_files_from_gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    tokenizer = Tokenizer.from_sentencepiece(files["tokenizer.model"])
    assert tokenizer.decode(tokenizer.encode("read from disk")) == "read from disk"
