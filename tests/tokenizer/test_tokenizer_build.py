"""Tokenizer files from GGUF metadata, manifest entries from folders."""

import json
from pathlib import Path

import numpy as np
import pytest

from libcolibri.chat_template import ChatTemplate
from libcolibri.errors import TokenizerError
from libcolibri.tokenizer import Tokenizer
from libcolibri.tokenizer_build import chat_template_from_gguf, tokenizer_entry_from_folder, tokenizer_files_from_gguf

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizer"
BYTE_LEVEL = json.loads((FIXTURES / "byte_level.json").read_text()) | {"tokenizer.ggml.pre": "qwen2"}


def build(**changes: object) -> dict[str, bytes]:
    metadata = BYTE_LEVEL | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return tokenizer_files_from_gguf({key: value for key, value in metadata.items() if value is not None})


def folder_of(tmp_path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_bytes_arrays_and_pairs_are_the_same_as_strings():
    tokens = [token.encode() for token in BYTE_LEVEL["tokenizer.ggml.tokens"]]
    pairs = [merge.split(" ") for merge in BYTE_LEVEL["tokenizer.ggml.merges"]]
    types = np.array(BYTE_LEVEL["tokenizer.ggml.token_type"], dtype=np.int32)
    assert build(tokens=tokens, merges=pairs, token_type=types, model=b"gpt2", pre=b"qwen2") == build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "newest"}, "'newest' is not supported"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"model": "rwkv"}, "'rwkv'"),
        ({"model": None}, "holds no tokenizer"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "expected two tokens"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"token_type": [1, 1]}, "2 values for"),
        ({"eos_token_id": 10**6}, "token id 1000000"),
        ({"model": "llama"}, "no tokenizer.ggml.scores"),
    ],
)
def test_incomplete_metadata_is_refused_by_name(changes, message):
    with pytest.raises(TokenizerError, match=message):
        build(**changes)


def test_merge_of_a_token_that_begins_with_a_space():
    files = build(merges=[*BYTE_LEVEL["tokenizer.ggml.merges"], "  x"])
    assert json.loads(files["tokenizer.json"])["model"]["merges"][-1] == [" ", "x"]


def test_entry_of_rebuilt_files(tmp_path):
    entry = tokenizer_entry_from_folder(folder_of(tmp_path, build(eot_token_id=601, add_bos_token=False)))
    assert entry == {
        "file": "tokenizer.json",
        "bos_token_id": 600,
        "eos_token_ids": [602, 601, 600],
        "add_bos": False,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }
    assert Tokenizer.load(tmp_path, entry).eos_token_ids == {600, 601, 602}


def test_add_bos_follows_the_file_then_the_pattern_name(tmp_path):
    assert not tokenizer_entry_from_folder(folder_of(tmp_path, build()))["add_bos"]
    assert tokenizer_entry_from_folder(folder_of(tmp_path, build(pre="llama-bpe")))["add_bos"]
    assert not tokenizer_entry_from_folder(folder_of(tmp_path, build(pre="llama-bpe", add_bos_token=False)))["add_bos"]
    assert not tokenizer_entry_from_folder(folder_of(tmp_path, build(pre="llama-bpe", bos_token_id=None)))["add_bos"]


def test_add_bos_from_the_post_processor(tmp_path):
    files = build()
    content = json.loads(files["tokenizer.json"])
    content["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}]}
    config = json.dumps({"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"}).encode()
    changed = {
        "tokenizer.json": json.dumps(
            {**content, "post_processor": {"type": "Sequence", "processors": [content["post_processor"]]}}
        ).encode()
    }
    assert tokenizer_entry_from_folder(folder_of(tmp_path, files | changed | {"tokenizer_config.json": config}))["add_bos"]


def test_end_tokens_of_all_files_are_joined(tmp_path):
    config = {"text_config": {"eos_token_id": [3, 4]}, "bos_token_id": 7}
    files = build() | {
        "generation_config.json": b'{"eos_token_id": 5}',
        "config.json": json.dumps(config).encode(),
        "tokenizer_config.json": b"{}",
    }
    entry = tokenizer_entry_from_folder(folder_of(tmp_path, files))
    assert entry["eos_token_ids"] == [5, 3, 4, 602, 600]
    assert entry["bos_token_id"] == 7


def test_sentencepiece_folder(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((FIXTURES / "sentencepiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}')
    entry = tokenizer_entry_from_folder(tmp_path)
    assert (entry["file"], entry["bos_token_id"], entry["eos_token_ids"], entry["add_bos"]) == ("tokenizer.model", 1, [2], True)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_added_to_a_sentencepiece_model(tmp_path, name):
    (tmp_path / "tokenizer.model").write_bytes((FIXTURES / "sentencepiece.model").read_bytes())
    added = ((1, "<s>", True), (700, "<|end|>", True), (701, "<x>", False))
    decoder = {str(i): {"content": content, "special": special} for i, content, special in added}
    config = {"added_tokens_decoder": decoder} if name == "tokenizer_config.json" else {"<|end|>": 700}
    (tmp_path / name).write_text(json.dumps(config))
    entry = tokenizer_entry_from_folder(tmp_path)
    assert 700 in entry["eos_token_ids"]
    tokenizer = Tokenizer.load(tmp_path, entry)
    plain = tokenizer.encode("a")
    assert tokenizer.encode("a<|end|>", special=True) == [*plain, 700]
    assert 700 not in tokenizer.encode("a<|end|>") and tokenizer.vocab_size > 700
    assert tokenizer.decode([*plain, 700]) == "a"
    if name == "tokenizer_config.json":
        assert tokenizer.encode("a<x>") == [*plain, 701] and tokenizer.decode([*plain, 701]) == "a<x>"


def test_folder_without_tokenizer_says_what_it_found(tmp_path):
    with pytest.raises(TokenizerError, match="found none"):
        tokenizer_entry_from_folder(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerError, match="only vocab"):
        tokenizer_entry_from_folder(tmp_path)


def test_chat_template():
    assert chat_template_from_gguf({"tokenizer.chat_template": "{{ 'ä' }}".encode()}) == "{{ 'ä' }}"
    assert chat_template_from_gguf({"tokenizer.chat_template": "x"}) == "x"
    assert chat_template_from_gguf({}) is None


def test_template_for_tools(tmp_path):
    files = tokenizer_files_from_gguf(
        BYTE_LEVEL | {"tokenizer.chat_template": "{{ 1 }}", "tokenizer.chat_template.tool_use": "{{ tools | length }}"}
    )
    template = ChatTemplate.load(folder_of(tmp_path, files))
    assert (template.render([]), template.render([], tools=[{}, {}])) == ("1", "2")
