"""Encoding, decoding, streaming, control tokens and malformed files."""

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libcolibri.errors import TokenizerError
from libcolibri.tokenizer import Tokenizer
from libcolibri.tokenizer_build import tokenizer_files_from_gguf

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizer"
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def metadata(name: str, **more: object) -> dict:
    return json.loads((FIXTURES / f"{name}.json").read_text()) | more


BYTE_LEVEL = metadata("byte_level", **{"tokenizer.ggml.pre": "llama-bpe"})
FILES = tokenizer_files_from_gguf(BYTE_LEVEL)
BYTES = Tokenizer.from_json(FILES["tokenizer.json"], bos_token_id=600, eos_token_ids=[602], add_bos=True)
SPM = Tokenizer.from_json(tokenizer_files_from_gguf(metadata("sentencepiece"))["tokenizer.json"])
SPM_FILE = Tokenizer.from_sentencepiece((FIXTURES / "sentencepiece.model").read_bytes())
WORDS = Tokenizer.from_json(tokenizer_files_from_gguf(metadata("wordpiece"))["tokenizer.json"])
ALL = pytest.mark.parametrize("tokenizer", [BYTES, SPM, SPM_FILE, WORDS], ids=["bytes", "spm", "spm_file", "wordpiece"])
LOSSLESS = pytest.mark.parametrize("tokenizer", [BYTES, SPM, SPM_FILE], ids=["bytes", "spm", "spm_file"])


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.flush()]


@LOSSLESS
@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@ALL
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_stream_equals_decode_for_any_ids(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@LOSSLESS
@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_stream_gives_whole_characters(tokenizer, text):
    shown = ""
    for part in streamed(tokenizer, tokenizer.encode(text)):
        shown += part
        assert text.startswith(shown)
    assert shown == text


@ALL
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "<|im_start|>",
                "<|im_end|>",
                "<|endoftext|>",
                "<|user|>",
                "<s>",
                "</s>",
                "<unk>",
                "[CLS]",
                "[SEP]",
                " ",
                "a",
                "<|im",
                "_end|>",
            ]
        )
    )
)
@settings(max_examples=100, deadline=None)
def test_plain_text_never_yields_control_tokens(tokenizer, pieces):
    assert tokenizer.control_ids
    unknown = {tokenizer.token_id("[UNK]")}
    assert not (set(tokenizer.encode("".join(pieces))) & tokenizer.control_ids) - unknown


def test_special_text_yields_control_tokens():
    assert BYTES.encode("<|im_start|>a<|im_end|>", special=True) == [601, *BYTES.encode("a"), 602]
    assert SPM_FILE.encode("<s>a</s>", special=True) == [1, *SPM_FILE.encode("a"), 2] == SPM.encode("<s>a</s>", special=True)


def test_user_defined_token_is_found_in_plain_text_but_a_turn_marker_is_not():
    assert BYTES.encode("<tool_call>") == [603]
    assert 604 not in BYTES.encode("<|user|>")
    assert BYTES.encode("<|user|>", special=True) == [604]


def test_control_tokens_are_hidden_unless_asked_for():
    ids = BYTES.encode("<|im_start|>a<|im_end|>", special=True)
    assert BYTES.decode(ids) == "a"
    assert BYTES.decode(ids, special=True) == "<|im_start|>a<|im_end|>"


def test_unfinished_character_is_held_back_and_dropped_at_the_end():
    ids = BYTES.encode("🙂")
    assert len(ids) > 1
    assert streamed(BYTES, ids) == [*[""] * (len(ids) - 1), "🙂", ""]
    assert BYTES.decode(ids[:-1]) == ""


def test_invalid_bytes_become_replacement_characters_once_they_are_certain():
    start, letter = BYTES.encode("🙂")[0], BYTES.encode("a")
    assert streamed(BYTES, [start, *letter]) == ["", "\ufffda", ""]


def test_byte_fallback_and_leading_space():
    assert SPM.decode(SPM.encode("a 🙂 b")) == "a 🙂 b"
    assert streamed(SPM, SPM.encode("hello"))[0][0] != " "


def test_bos_is_added_once():
    assert BYTES.with_bos([5]) == [600, 5] == BYTES.with_bos([600, 5])
    assert SPM.with_bos([5]) == [5]


def test_unused_and_unreachable_tokens_do_not_appear_in_text():
    assert 605 not in BYTES.encode("[PAD0]")
    assert 606 not in BYTES.encode("🎉")
    assert BYTES.decode([606]) == "🎉"


def test_long_texts_give_the_ids_of_their_words():
    sentence = BYTES.encode(" read from disk")
    assert BYTES.encode(" read from disk" * 10_000) == sentence * 10_000
    word = WORDS.encode(" disk")
    assert WORDS.encode(" disk" * 2_000) == word * 2_000


@ALL
def test_a_million_spaces(tokenizer):
    tokenizer.encode(" " * 1_000_000)


@ALL
def test_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(TokenizerError, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_threads_share_a_tokenizer():
    texts = [f"thread {i} reads from disk 你好 {i}" * 20 for i in range(8)]
    expected, found = [BYTES.encode(text) for text in texts], {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: BYTES.encode(texts[i])})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(8)] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["model"].update(merges=[]) or t["model"].update(vocab={f"t{i}": i for i in range(2000)}), "no merges"),
        (lambda t: t["model"].update(type="WordLevel"), "WordLevel"),
        (lambda t: t.pop("model"), "no model"),
        (lambda t: t["model"].update(vocab=[1, 2]), "malformed vocab"),
        (lambda t: t.update(added_tokens=[{"id": "x"}]), "malformed added token"),
        (lambda t: t.update(decoder={"type": "CTC"}, pre_tokenizer=None), "CTC"),
        (lambda t: t.update(decoder=None, pre_tokenizer=None), "restores spaces"),
        (lambda t: t.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "character map"),
        (
            lambda t: t.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
            "refused",
        ),
    ],
)
def test_malformed_tokenizer_json(change, message):
    content = json.loads(FILES["tokenizer.json"])
    change(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_json(json.dumps(content).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_not_a_tokenizer_json(data):
    with pytest.raises(TokenizerError):
        Tokenizer.from_json(data)


@pytest.mark.parametrize("data", [b"", b"\x00" * 50, b"no model"])
def test_not_a_sentencepiece_model(data):
    with pytest.raises(TokenizerError):
        Tokenizer.from_sentencepiece(data)


def test_load(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(FILES["tokenizer.json"])
    entry = {"file": "tokenizer.json", "bos_token_id": 600, "eos_token_ids": [602], "add_bos": True}
    tokenizer = Tokenizer.load(tmp_path, entry)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.add_bos) == (600, frozenset([602]), True)
    for name in ("../tokenizer.json", "a/b.json", None, "..", "a\\b"):
        with pytest.raises(TokenizerError):
            Tokenizer.load(tmp_path, entry | {"file": name})
    with pytest.raises(TokenizerError, match="missing"):
        Tokenizer.load(tmp_path, entry | {"file": "missing.json"})
