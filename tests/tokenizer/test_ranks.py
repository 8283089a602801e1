"""Rank files and tekken.json become tokenizer.json files with the same ids."""

import base64
import json
from pathlib import Path

import pytest
from colibri_converter.tokenizers import files_from_folder

from libcolibri import tokenizer_ranks
from libcolibri.errors import SourceError, TokenizerError
from libcolibri.tokenizer import Tokenizer
from libcolibri.tokenizer_build import tokenizer_entry_from_folder
from libcolibri.tokenizer_ranks import files_from_ranks, files_from_tekken, is_rank_file

PATTERN = r" ?\p{L}+|\s+|[^\s\p{L}]"
# Every byte, then what merging makes of them; "aaa" can be made in two ways.
TOKENS = [bytes([byte]) for byte in range(256)] + [b"ab", b" a", b"aa", b"aaa", b" ab", "é".encode(), "你".encode()[:2], "你".encode()]
RANKS = b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(TOKENS))


def by_ranks(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The definition: merge the leftmost pair whose result has the lowest rank, until there is none."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], 1 << 30))
        if parts[best] + parts[best + 1] not in ranks:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return [ranks[part] for part in parts]


@pytest.fixture
def known(monkeypatch):
    entry = tokenizer_ranks._Known("llama3", ("<|begin|>", "<|end|>"), bos="<|begin|>", eos="<|end|>")
    monkeypatch.setitem(tokenizer_ranks._KNOWN, len(TOKENS), entry)


@pytest.mark.parametrize("word", ["aaaa", "abab", "aab", "你好", "aaaaaab", "é", "a你"])
def test_ids_are_those_of_the_ranks(known, word):
    tokenizer = Tokenizer.from_json(files_from_ranks(RANKS)["tokenizer.json"])
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    assert tokenizer.encode(word) == by_ranks(word.encode(), ranks)
    assert tokenizer.decode(tokenizer.encode(word)) == word


def test_control_tokens_follow_the_ranks(known):
    tokenizer = Tokenizer.from_json(files_from_ranks(RANKS)["tokenizer.json"])
    assert tokenizer.encode("<|begin|>ab", special=True) == [len(TOKENS), 256]
    assert len(TOKENS) not in tokenizer.encode("<|begin|>ab")


def test_tekken():
    tekken = {
        "config": {"pattern": PATTERN, "default_vocab_size": len(TOKENS) + 20, "default_num_special_tokens": 30},
        "vocab": [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(TOKENS)],
    }
    files = files_from_tekken(json.dumps(tekken).encode())
    tokenizer = Tokenizer.from_json(files["tokenizer.json"])
    ranks = {token: 30 + rank for rank, token in enumerate(TOKENS[:-10])}
    assert tokenizer.encode("[INST] zz", special=True) == [3, *by_ranks(b" zz", ranks)]
    assert tokenizer.encode("abab") == by_ranks(b"abab", ranks)
    assert tokenizer.spelling(29) == "<SPECIAL_29>"
    with pytest.raises(TokenizerError, match=r"no tekken\.json"):
        files_from_tekken(b"{}")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (RANKS, "264 tokens, whose split pattern is unknown"),
        (RANKS + b"!!!! 7\n", "line 265"),
        (RANKS + b"YWJjZGVm 900\n", "not 0 to 264"),
    ],
)
def test_unknown_and_damaged_rank_files_are_refused(data, message):
    with pytest.raises(TokenizerError, match=message):
        files_from_ranks(data)


def test_sentencepiece_models_are_no_rank_files():
    model = (Path(__file__).parents[1] / "fixtures" / "tokenizer" / "sentencepiece.model").read_bytes()
    assert is_rank_file(RANKS)
    assert not is_rank_file(model)


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "tiktoken.model"])
def test_folder_with_a_rank_file(known, tmp_path, name):
    (tmp_path / name).write_bytes(RANKS)
    files = files_from_folder(tmp_path)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    target = tmp_path / "model"
    target.mkdir()
    for file, data in files.items():
        (target / file).write_bytes(data)
    entry = tokenizer_entry_from_folder(target)
    assert (entry["bos_token_id"], entry["eos_token_ids"], entry["add_bos"]) == (len(TOKENS), [len(TOKENS) + 1], True)


def test_control_tokens_listed_beside_a_rank_file_count(known, tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(RANKS)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"400": {"content": "[EOS]"}}}))
    tokenizer = Tokenizer.from_json(files_from_folder(tmp_path)["tokenizer.json"])
    assert tokenizer.encode("[EOS]", special=True) == [400]


def test_an_unknown_rank_file_names_the_file(tmp_path):
    (tmp_path / "x.tiktoken").write_bytes(RANKS)
    with pytest.raises(SourceError, match=r"x\.tiktoken: is a rank file of 264 tokens"):
        files_from_folder(tmp_path)
