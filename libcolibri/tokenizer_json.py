"""Encoding as a Hugging Face tokenizer.json describes it: added tokens, normalizer, words, model.

In: the parsed file. Out: an encoder; TokenizerError names whatever is not supported.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import regex

from .errors import TokenizerError
from .tokenizer_bpe import BpeModel, Merges, WordModel, WordPieceModel, word_starts
from .tokenizer_normalizers import Normalizer, make_normalizer
from .tokenizer_pieces import is_byte_level
from .tokenizer_splits import Splitter, spell_bytes
from .tokenizer_unigram import UnigramModel

# Chat formats mark turns with such tokens. Some vocabularies list them as ordinary added tokens, which any text may
# produce; here they count as control tokens, so that a document cannot open a turn of its own.
_MARKER = regex.compile(
    r"<[|｜].*|.*[|｜]>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]|<(?:start|end)_of_turn>|</?s>", regex.DOTALL
)


def parse_tokenizer_json(data: bytes) -> dict[str, Any]:
    """Parse and check the parts of a tokenizer.json that are used here; TokenizerError says what is wrong."""
    try:
        tokenizer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"is not JSON ({error})") from error
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise TokenizerError("has no model with a vocab: this is not a Hugging Face tokenizer.json")
    kind = model.setdefault("type", "BPE" if "merges" in model else "WordPiece" if "max_input_chars_per_word" in model else "Unigram")
    if kind not in ("BPE", "WordPiece", "Unigram"):
        raise TokenizerError(f"has a model of type {kind!r}, supported are BPE, WordPiece and Unigram")
    if not _vocab_is_sound(kind, model["vocab"]):
        raise TokenizerError(f"has a malformed vocab: expected token -> id, or [token, score] pairs for Unigram, in a {kind} model")
    # Without merges every text would silently fall apart into bytes.
    if kind == "BPE" and not model.get("merges") and len(model["vocab"]) > 1000:
        raise TokenizerError(f"has {len(model['vocab'])} BPE tokens but no merges: the file is incomplete")
    for token in tokenizer.get("added_tokens") or ():
        if not isinstance(token, dict) or not isinstance(token.get("id"), int) or not isinstance(token.get("content"), str):
            raise TokenizerError(f"has a malformed added token {str(token)[:60]}")
    return tokenizer


def _vocab_is_sound(kind: str, vocab: Any) -> bool:
    if kind == "Unigram":
        return isinstance(vocab, list) and all(
            isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], int | float) for pair in vocab
        )
    return isinstance(vocab, dict) and all(isinstance(i, int) and i >= 0 for i in vocab.values())


class JsonEncoder:
    """Encoding of a tokenizer.json. The ids are those of Hugging Face's tokenizers without its post-processor."""

    def __init__(self, tokenizer: Mapping[str, Any]):
        added: Sequence[Mapping[str, Any]] = tokenizer.get("added_tokens") or []
        control = [token for token in added if token.get("special") or _MARKER.fullmatch(token["content"])]
        self.control_ids = frozenset(token["id"] for token in control)
        self._normalize = make_normalizer(tokenizer.get("normalizer"))
        self._splitter = Splitter(tokenizer.get("pre_tokenizer"))
        self._model, self._word_starts = _model_of(tokenizer, self.control_ids)
        self._added = _AddedTokens(added, self._normalize)
        self._ordinary = _AddedTokens([token for token in added if token["id"] not in self.control_ids], self._normalize)

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of a text; special: control tokens spelled in it count as such."""
        text.encode()  # lone surrogates are refused, whatever part of the text they are in
        ids: list[int] = []
        added = self._added if special else self._ordinary
        for piece, token_id, at_start in added.split(text):
            if token_id is None:
                self._encode_plain(piece, at_start, ids)
            else:
                ids.append(token_id)
        return ids

    def _encode_plain(self, text: str, at_start: bool, ids: list[int]) -> None:
        ids_of = self._model.ids_of
        for word in self._splitter.split(text, at_start):
            if self._splitter.spells_bytes:
                word = spell_bytes(word)
            if self._word_starts is None:
                ids += ids_of(word)
            else:
                for part in self._word_starts.split(word):
                    ids += ids_of(part)


def _model_of(tokenizer: Mapping[str, Any], control_ids: frozenset[int]) -> tuple[WordModel, "regex.Pattern[str] | None"]:
    """(the model, where its words may be cut further)."""
    model = tokenizer["model"]
    if model["type"] == "Unigram":
        return UnigramModel(model, control_ids), None
    vocab, unknown = model["vocab"], model.get("unk_token")
    if model["type"] == "WordPiece":
        return WordPieceModel(vocab, unknown, int(model.get("max_input_chars_per_word", 100)), control_ids), None
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise TokenizerError(f"has a BPE model with {key}={model[key]!r}, which is not supported")
    bpe = BpeModel(
        vocab,
        Merges(model.get("merges") or (), vocab),
        whole_words=bool(model.get("ignore_merges")),
        unknown=unknown,
        fuse_unknown=bool(model.get("fuse_unk")),
        byte_fallback=bool(model.get("byte_fallback")),
        hidden=control_ids,
    )
    spaces_are_marked = not is_byte_level(tokenizer) and not model.get("ignore_merges")
    return bpe, word_starts(vocab) if spaces_are_marked else None


class _AddedTokens:
    """Finds added tokens in text: the longest of those that begin first.

    Those that are not "normalized" are looked for in the text as it is, the others in what the normalizer makes of the rest.
    """

    def __init__(self, tokens: Sequence[Mapping[str, Any]], normalizer: Normalizer | None):
        self._normalize = normalizer
        self._raw = _Finder([token for token in tokens if not token.get("normalized")], None)
        self._normalized = _Finder([token for token in tokens if token.get("normalized")], normalizer)

    def split(self, text: str) -> Iterator[tuple[str, int | None, bool]]:
        """(text, None, whether it begins the whole) for plain text, which is normalized then, and (spelling, id, ...) for tokens."""
        for piece, token_id, begins in self._raw.split(text):
            if token_id is not None:
                yield piece, token_id, begins
                continue
            if self._normalize is not None:
                piece = self._normalize(piece)
            for inner, inner_id, inner_begins in self._normalized.split(piece):
                yield inner, inner_id, begins and inner_begins


class _Finder:
    """The longest token at the first place where there is one, by its first character and the lengths that occur with it."""

    def __init__(self, tokens: Sequence[Mapping[str, Any]], normalizer: Normalizer | None):
        self._tokens = {normalizer(token["content"]) if normalizer else token["content"]: token for token in tokens}
        self._tokens.pop("", None)
        lengths: dict[str, set[int]] = {}
        for content in self._tokens:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(map(regex.escape, self._lengths))
        self._first = regex.compile(f"[{firsts}]" if firsts else r"(?!)")

    def split(self, text: str) -> Iterator[tuple[str, int | None, bool]]:
        """(part, id or None, whether it begins the text), in order."""
        start = at = 0
        while (found := self._first.search(text, at)) is not None:
            at = found.start()
            end = self._end_of_token(text, at)
            if end is None:
                at += 1
                continue
            token = self._tokens[text[at:end]]
            begin, end = _widened(token, text, start, at, end)
            if begin > start:
                yield text[start:begin], None, start == 0
            yield token["content"], token["id"], start == 0
            start = at = end
        if start < len(text):
            yield text[start:], None, start == 0

    def _end_of_token(self, text: str, at: int) -> int | None:
        for end in [at + length for length in self._lengths[text[at]]]:
            token = self._tokens.get(text[at:end])
            if token is not None and not (token.get("single_word") and _inside_word(text, at, end)):
                return end
        return None


def _inside_word(text: str, begin: int, end: int) -> bool:
    return (begin > 0 and _is_word(text[begin - 1])) or (end < len(text) and _is_word(text[end]))


def _is_word(letter: str) -> bool:
    return letter == "_" or letter.isalnum()


def _widened(token: Mapping[str, Any], text: str, start: int, begin: int, end: int) -> tuple[int, int]:
    """(begin, end) of a token with the spaces that it takes along, none before `start`."""
    if token.get("lstrip"):
        begin = start + len(text[start:begin].rstrip())
    if token.get("rstrip"):
        end += len(text[end:]) - len(text[end:].lstrip())
    return begin, end
