"""The parts of a tokenizer.json, each by itself."""

import base64
import json
import random

import pytest
from colibri_converter.unigram import compile_charsmap

from libcolibri.errors import TokenizerError
from libcolibri.tokenizer import Tokenizer
from libcolibri.tokenizer_bpe import BpeModel, Merges, word_starts
from libcolibri.tokenizer_normalizers import make_normalizer
from libcolibri.tokenizer_splits import Splitter
from libcolibri.tokenizer_unigram import UnigramModel


@pytest.mark.parametrize(
    ("node", "text", "expected"),
    [
        ({"type": "NFC"}, "e\u0301", "é"),
        ({"type": "NFC"}, "\u1dd8\u1df6\u0334", "\u1dd8\u1df6\u0334"),  # U+1DF6 came with Unicode 10: it is not moved
        ({"type": "NFKC"}, "ﬁ²", "fi2"),
        ({"type": "Lowercase"}, "ΣΑΣ", "σασ"),
        ({"type": "Strip", "strip_left": True, "strip_right": False}, " a ", "a "),
        ({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": r"\1"}, "a   b", r"a\1b"),
        ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Lowercase"}]}, "A", "▁a"),
        ({"type": "BertNormalizer"}, "Ünï\u200bx\t好", "unix  好 "),
        ({"type": "BertNormalizer", "lowercase": False}, "Ünï", "Ünï"),
    ],
)
def test_normalizers(node, text, expected):
    assert make_normalizer(node)(text) == expected


def test_a_normalizer_of_nothing_is_none():
    assert make_normalizer(None) is None
    assert make_normalizer({"type": "Sequence", "normalizers": []}) is None


def split(behavior: str, invert: bool = False) -> dict:
    return {"type": "Split", "pattern": {"Regex": "-"}, "behavior": behavior, "invert": invert}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (split("Isolated"), ["a", "-", "-", "b", "-", "c"]),
        (split("Removed"), ["a", "b", "c"]),
        (split("Removed", invert=True), ["-", "-", "-"]),
        (split("MergedWithPrevious"), ["a-", "-", "b-", "c"]),
        (split("MergedWithNext"), ["a", "-", "-b", "-c"]),
        (split("Contiguous"), ["a", "--", "b", "-", "c"]),
        ({"type": "Sequence", "pretokenizers": [split("Removed"), {"type": "Digits"}]}, ["a", "b", "c"]),
        (None, ["a--b-c"]),
    ],
)
def test_splits(node, expected):
    assert Splitter(node).split("a--b-c", True) == expected


@pytest.mark.parametrize(
    ("node", "text", "expected"),
    [
        ({"type": "Digits", "individual_digits": True}, "a12½", ["a", "1", "2", "½"]),
        ({"type": "Digits", "individual_digits": False}, "a12½", ["a", "12½"]),
        ({"type": "Whitespace"}, "a_b  c!", ["a_b", "c", "!"]),
        ({"type": "BertPreTokenizer"}, " a-b c", ["a", "-", "b", "c"]),
        ({"type": "Metaspace", "prepend_scheme": "always"}, "a b", ["▁a", "▁b"]),
        ({"type": "Metaspace", "prepend_scheme": "never", "split": False}, "a b", ["a▁b"]),
        ({"type": "Split", "pattern": {"String": "."}, "behavior": "Isolated"}, "a.b", ["a", ".", "b"]),
    ],
)
def test_words(node, text, expected):
    assert Splitter(node).split(text, True) == expected


def test_bytes_are_spelled_before_later_steps():
    steps = [{"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}, {"type": "Digits", "individual_digits": False}]
    assert Splitter({"type": "Sequence", "pretokenizers": steps}).split("a ²", True) == ["Ġa", "ĠÂ", "²"]


@pytest.mark.parametrize("node", [{"type": "UnicodeScripts"}, split("Torn"), {"type": "Split", "pattern": 7, "behavior": "Isolated"}])
def test_unknown_parts_are_refused(node):
    with pytest.raises(TokenizerError):
        Splitter(node)
    with pytest.raises(TokenizerError, match="Nmt"):
        make_normalizer({"type": "Nmt"})


def test_the_heap_merges_as_the_definition_does():
    rng = random.Random(7)
    letters = list("abc")
    vocab, merges = dict.fromkeys(letters), []
    while len(merges) < 60:
        left, right = rng.choice(list(vocab)), rng.choice(list(vocab))
        if len(left + right) < 9 and [left, right] not in merges:
            merges.append([left, right])
            vocab[left + right] = None
    model = Merges(merges, vocab)
    for _ in range(50):
        word = [rng.choice(letters) for _ in range(rng.randint(1, 300))]
        assert model._apply_to_long(list(word)) == model._apply_to_short(list(word))


def test_cutting_before_spaces_changes_no_ids():
    rng = random.Random(8)
    merges = ["▁ a", "a b", "▁a b", "c ▁", "▁ ▁", "c▁ a"]
    vocab = {token: i for i, token in enumerate(["▁", "a", "b", "c", *(merge.replace(" ", "") for merge in merges)])}
    model, starts = BpeModel(vocab, Merges(merges, vocab)), word_starts(vocab)
    assert starts.split("ab▁ab▁▁c▁a") == ["ab", "▁ab", "▁▁c▁a"]  # "c▁" is a token
    for _ in range(200):
        text = "".join(rng.choice("▁abc") for _ in range(rng.randint(1, 40)))
        assert [i for part in starts.split(text) for i in model.ids_of(part)] == list(model.ids_of(text))


def test_unknown_characters():
    vocab = {token: i for i, token in enumerate(["a", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = Merges([], vocab)
    assert BpeModel(vocab, merges, unknown="<unk>", byte_fallback=True).ids_of("aé") == [0, 2 + 0xC3, 2 + 0xA9]
    assert BpeModel(vocab, merges, unknown="<unk>", fuse_unknown=True).ids_of("éüa") == [1, 0]
    assert BpeModel(vocab, merges, unknown="<unk>").ids_of("éü") == [1, 1]
    assert BpeModel(vocab, merges).ids_of("éa") == [0]


@pytest.mark.parametrize("merges", [["ab"], [["a"]], [["a", "x"]], [7], ["a x"]])
def test_malformed_merges_are_refused(merges):
    with pytest.raises(TokenizerError, match="merge"):
        Merges(merges, {"a": 0, "b": 1})


def added(*tokens: dict) -> Tokenizer:
    content = {
        "added_tokens": [{"id": 10 + i, "special": False, **token} for i, token in enumerate(tokens)],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {letter: i for i, letter in enumerate("abcĠx")}, "merges": []},
    }
    return Tokenizer.from_json(json.dumps(content).encode())


@pytest.mark.parametrize(
    ("token", "text", "expected"),
    [
        ({"content": "[X]"}, "a [X] b", [0, 3, 10, 3, 1]),
        ({"content": "[X]"}, "a[x]b", [0, 4, 1]),  # "[" has no token here
        ({"content": "[X]", "normalized": True}, "a[x]b", [0, 10, 1]),
        ({"content": "[X]", "lstrip": True}, "a  [X] b", [0, 10, 3, 1]),
        ({"content": "[X]", "rstrip": True}, "a [X]  b", [0, 3, 10, 1]),
        ({"content": "ab", "single_word": True}, "abc ab", [0, 1, 2, 3, 10]),
    ],
)
def test_added_tokens(token, text, expected):
    assert added(token).encode(text) == expected


def test_the_longest_added_token_wins():
    assert added({"content": "<a"}, {"content": "<ab>"}).encode("<ab><ac") == [11, 10, 2]


def charsmap(table: dict[str, str]) -> dict:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(compile_charsmap(table)).decode()}


def test_character_map():
    step = charsmap({"\ufb01": "fi", "\u2126": "\u03a9", "\u200b": ""})
    assert make_normalizer(step)("a\ufb01 \u2126\u200bx") == "afi \u03a9x"
    cluster = "\u2126\u0301"  # a short cluster is replaced as a whole, by what its beginning stands for
    assert make_normalizer(step)(cluster) == "\u03a9"
    assert make_normalizer(step | {"per_character": True})(cluster) == "\u03a9\u0301"


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff\xff1234", b"\x03\0\0\0abcd"])
def test_a_damaged_character_map_is_refused(data):
    with pytest.raises(TokenizerError, match="character map"):
        make_normalizer({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()})


def unigram(**options) -> UnigramModel:
    vocab = [["<unk>", 0.0], ["a", -1.0], ["b", -1.0], ["ab", -2.0], ["abc", -1.0], ["</s>", 0.0]]
    vocab += [[f"<0x{byte:02X}>", -9.0] for byte in range(256)]
    return UnigramModel({"vocab": vocab, "unk_id": 0, **options}, frozenset([5]))


@pytest.mark.parametrize(
    ("word", "expected"),
    [("abc", [4]), ("aab", [1, 3]), ("b", [2]), ("axyb", [1, 0, 2]), ("x", [0]), ("", []), ("</s>", [0])],
)
def test_unigram_takes_the_most_probable_pieces(word, expected):
    assert list(unigram().ids_of(word)) == expected  # "ab" is found before "a" and "b", which are as probable


def test_unigram_with_bytes_for_unknown_characters():
    assert list(unigram(byte_fallback=True).ids_of("aé")) == [1, 6 + 0xC3, 6 + 0xA9]
    with pytest.raises(TokenizerError, match="unk_id"):
        unigram(unk_id=None)
