"""Text to token ids and back.

In: a tokenizer file of a model directory (tokenizer.json, or a SentencePiece .model). Out: ids, text, and text as it streams.
"""

import base64
import codecs
import json
import re
import sys
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
from kitoken import Kitoken

from .errors import TokenizerError
from .sentencepiece_model import unigram_model_from_json
from .tokenizer_pieces import PieceTable, byte_alphabet, is_byte_level, is_byte_token, steps

# Chat formats mark turns with such tokens. Some vocabularies list them as ordinary added tokens, which any text may
# produce; here they count as control tokens, so that a document cannot open a turn of its own.
_MARKER = re.compile(
    r"<[|｜].*|.*[|｜]>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]|<(?:start|end)_of_turn>|</?s>", re.DOTALL
)


# kitoken's pattern matcher needs stack in proportion to the text (it ends the process at a million spaces), its WordPiece
# time in proportion to the square. Longer texts are cut between two words, where every pattern of the table cuts as well.
_NO_CHARACTER = "\U0010fffe"
_CHUNK_CHARS = {"WordPiece": 2048, "BPE": 32768}
_WORD_BOUNDARY = re.compile(r"[^\W\d_](?=[ \n，。、；：！？][^\W\d_])")


class _Encoder(Protocol):
    control_ids: frozenset[int]

    def encode(self, text: str, special: bool) -> list[int]: ...


class Tokenizer:
    """The tokenizer of one model; immutable, may be shared between threads.

    Attributes
    ----------
    vocab_size : int, highest id + 1 (the embedding matrix may have more rows)
    bos_token_id : int | None
    eos_token_ids : frozenset[int], every id that ends an answer
    add_bos : bool, whether a prompt starts with the BOS token
    control_ids : frozenset[int], ids that plain text never yields
    """

    def __init__(
        self,
        encoder: _Encoder,
        pieces: PieceTable,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool = False,
    ):
        self._encoder, self._pieces = encoder, pieces
        self.vocab_size = pieces.size
        self.bos_token_id, self.eos_token_ids, self.add_bos = bos_token_id, frozenset(eos_token_ids), add_bos
        self.control_ids = encoder.control_ids

    @classmethod
    def load(cls, model_dir: str | Path, entry: Mapping[str, Any]) -> "Tokenizer":
        """Open the tokenizer of a model directory.

        entry: the manifest's "tokenizer": file, bos_token_id, eos_token_ids, add_bos. Raises TokenizerError.
        """
        name = entry.get("file")
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise TokenizerError(f"{model_dir}: tokenizer file is {name!r}, expected a file name without folders; convert the model again")
        path = Path(model_dir) / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TokenizerError(f"{path}: cannot be read ({error.strerror}); convert the model again") from error
        keys = {
            "bos_token_id": entry.get("bos_token_id"),
            "eos_token_ids": entry.get("eos_token_ids") or (),
            "add_bos": bool(entry.get("add_bos")),
        }
        try:
            return cls.from_sentencepiece(data, **keys) if path.suffix == ".model" else cls.from_json(data, **keys)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, data: bytes, **keys: Any) -> "Tokenizer":
        """From the bytes of a Hugging Face tokenizer.json (BPE, WordPiece or Unigram)."""
        tokenizer = parse_tokenizer_json(data)
        pieces = PieceTable.from_tokenizer_json(tokenizer)
        encoder = _unigram_encoder(tokenizer) if tokenizer["model"]["type"] == "Unigram" else _KitokenEncoder(tokenizer)
        return cls(encoder, pieces, **keys)

    @classmethod
    def from_sentencepiece(cls, data: bytes, **keys: Any) -> "Tokenizer":
        """From the bytes of a SentencePiece .model."""
        encoder = _SentencePieceEncoder(data)
        return cls(encoder, encoder.pieces(), **keys)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text, without BOS.

        special=False: control tokens spelled out in the text stay text. special=True: they become control ids; only for
        text a chat template made. Raises TokenizerError for text that is no Unicode (lone surrogates).
        """
        try:
            return self._encoder.encode(text, special)
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text has a lone surrogate at character {error.start}: it is not valid Unicode") from error

    def with_bos(self, ids: Sequence[int]) -> list[int]:
        """ids with BOS in front when the model wants it (add_bos) and a chat template has not already written it."""
        if not self.add_bos or self.bos_token_id is None or (ids and ids[0] == self.bos_token_id):
            return list(ids)
        return [self.bos_token_id, *ids]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of token ids; equals what a stream gives for them.

        Control tokens are left out unless special=True. Bytes that are no UTF-8 become U+FFFD, an unfinished last
        character is left out.
        """
        stream = self.stream(special=special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, special: bool = False) -> "TextStream":
        """A decoder that takes ids one by one."""
        return TextStream(self._pieces, special)

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8 of one token inside a text; may be part of a character, empty for an id without a token."""
        return self._pieces.bytes_of(token_id)

    def spelling(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it, None for an id without a token."""
        return self._pieces.spelling(token_id)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the vocabulary, None when there is no such token."""
        return self._pieces.id_of(token)


class TextStream:
    """Text of ids that arrive one by one; only whole characters come out."""

    def __init__(self, pieces: PieceTable, special: bool = False):
        self._pieces, self._special = pieces, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = pieces.strip

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; "" while a character is unfinished."""
        if token_id in self._pieces.hidden and not self._special:
            return ""
        data = self._pieces.bytes_of(token_id)
        if self._at_start and data:
            self._at_start, data = False, data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """End the text: what is left is an unfinished character, which is dropped, so always ""; the stream starts anew."""
        self._utf8.reset()
        self._at_start = self._pieces.strip
        return ""


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


class _KitokenEncoder:
    """Encoding by kitoken. Decoding is not its business: it drops spaces of WordPiece and works on whole sequences."""

    def __init__(self, tokenizer: Mapping[str, Any]):
        kind, byte_level = tokenizer["model"]["type"], is_byte_level(tokenizer)
        if any(step.get("type") == "Precompiled" for step in steps(tokenizer.get("normalizer"), "normalizers")):
            raise TokenizerError(f"has a precompiled character map in a {kind} model, supported only for Unigram")
        added = tokenizer.get("added_tokens") or []
        control = [token for token in added if token.get("special") or _MARKER.fullmatch(token["content"])]
        self.control_ids = frozenset(token["id"] for token in control)
        self._chunk_chars = _CHUNK_CHARS[kind] if byte_level or kind == "WordPiece" else sys.maxsize
        # Padding and truncation belong to batches, the post-processor to with_bos and to the encoders.
        content = dict(tokenizer) | {"padding": None, "truncation": None, "post_processor": None}
        content["normalizer"] = _in_kitoken_names(tokenizer.get("normalizer"))
        content["model"] = _without_unreachable(tokenizer["model"], {token["content"] for token in added}, byte_level)
        self._source = _json_bytes(content)
        self._with_control = _kitoken(self._source)
        unknown = content["model"].get("unk_token")
        self._unknown, self._unknown_id = unknown, content["model"]["vocab"].get(unknown)
        self._without_control: Kitoken | None = None
        self._lock = threading.Lock()

    def encode(self, text: str, special: bool) -> list[int]:
        if len(text) > self._chunk_chars:
            return [i for chunk in _chunks(text, self._chunk_chars) for i in self.encode(chunk, special)]
        ids = _encode(self._with_control, text, True)
        return ids if special or self._is_plain(ids, text) else _encode(self._plain_kitoken(), text, ["priority"])

    def _is_plain(self, ids: list[int], text: str) -> bool:
        """Whether no control token was found; the unknown token may stand for text that has no other."""
        found = self.control_ids.intersection(ids)
        return not found or (found == {self._unknown_id} and self._unknown not in text)

    def _plain_kitoken(self) -> Kitoken:
        """A kitoken that knows no control tokens; made for the first text that spells one.

        Telling kitoken not to encode them is not enough: it still cuts the text where they stand.
        """
        with self._lock:
            if self._without_control is None:
                content = _without_control(json.loads(self._source), self.control_ids)
                self._without_control, self._source = _kitoken(_json_bytes(content)), b""
            return self._without_control


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def _kitoken(content: bytes) -> Kitoken:
    try:
        return Kitoken.from_tokenizers(content)
    except Exception as error:  # kitoken raises bare ValueErrors and others
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TokenizerError(f"is refused by the tokenizer library ({reason})") from error


def _encode(kitoken: Kitoken, text: str, specials: bool | list[str]) -> list[int]:
    try:
        return kitoken.encode(text, specials)
    except UnicodeEncodeError:
        raise
    except ValueError as error:
        raise TokenizerError(f"the text cannot be encoded: {error}") from error


def _without_control(content: dict[str, Any], control_ids: frozenset[int]) -> dict[str, Any]:
    """A tokenizer.json without the control tokens. The unknown token, which kitoken asks for, gets a spelling of its own."""
    model, unknown, added = content["model"], content["model"].get("unk_token"), content.get("added_tokens") or []
    kept = [token for token in added if token["id"] not in control_ids]
    vocab = {piece: i for piece, i in model["vocab"].items() if i not in control_ids}
    if unknown in model["vocab"]:
        token: dict[str, Any] = next((token for token in added if token["content"] == unknown), {})
        kept.append({**token, "id": model["vocab"][unknown], "content": _NO_CHARACTER, "special": True})
        vocab = {piece: i for piece, i in vocab.items() if piece != unknown} | {_NO_CHARACTER: model["vocab"][unknown]}
        model = model | {"unk_token": _NO_CHARACTER}
    return content | {"added_tokens": kept, "model": model | {"vocab": vocab}}


def _chunks(text: str, limit: int) -> Iterator[str]:
    """The text in pieces of at most `limit` characters, cut before a space or newline between words where there is one."""
    start = 0
    while len(text) - start > limit:
        window = range(start + limit // 2, start + limit - 1)
        found = list(_WORD_BOUNDARY.finditer(text, window.start, window.stop + 2))
        cut = found[-1].end() if found else start + limit
        yield text[start:cut]
        start = cut
    yield text[start:]


def _in_kitoken_names(normalizer: Any) -> Any:
    """The same normalizer with Strip under the name that kitoken 0.11 expects."""
    if not isinstance(normalizer, dict):
        return normalizer
    if normalizer.get("type") == "Strip":
        return normalizer | {"type": "StripNormalizer"}
    if isinstance(parts := normalizer.get("normalizers"), list):
        return normalizer | {"normalizers": [_in_kitoken_names(part) for part in parts]}
    return normalizer


def _without_unreachable(model: dict[str, Any], added: set[str], byte_level: bool) -> dict[str, Any]:
    """A BPE model without the tokens that no merge makes and no single character is.

    Text never reaches them; kitoken, which looks whole words up, would use them (254 emoji in Command-R's vocabulary).
    """
    if model["type"] != "BPE":
        return model
    reachable = added | {str(model.get("unk_token"))}
    alphabet = byte_alphabet().keys()
    if not model.get("ignore_merges"):
        merges = model.get("merges") or ()
        reachable |= {"".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1) for merge in merges}
        reachable |= {piece for piece in model["vocab"] if is_byte_token(piece) or (piece in alphabet if byte_level else len(piece) == 1)}
        vocab = {piece: i for piece, i in model["vocab"].items() if piece in reachable}
    elif byte_level:
        vocab = {piece: i for piece, i in model["vocab"].items() if piece in reachable or alphabet >= set(piece)}
    else:
        return model
    return model if len(vocab) == len(model["vocab"]) else model | {"vocab": vocab}


def _unigram_encoder(tokenizer: Mapping[str, Any]) -> "_SentencePieceEncoder":
    maps = [step["precompiled_charsmap"] for step in steps(tokenizer.get("normalizer"), "normalizers") if step.get("type") == "Precompiled"]
    try:
        charsmap = base64.b64decode(maps[0], validate=True) if maps else b""
    except ValueError as error:
        raise TokenizerError(f"has a character map that is not base64 ({error})") from error
    control = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or () if token.get("special")}
    composed = any(step.get("type") == "NFC" for step in steps(tokenizer.get("normalizer"), "normalizers"))
    return _SentencePieceEncoder(unigram_model_from_json(tokenizer, charsmap), control, composed)


def _character_map(data: bytes) -> sentencepiece.SentencePieceNormalizer:
    """The character map of a model alone: spaces are left to the encoding that follows."""
    return sentencepiece.SentencePieceNormalizer(
        model_proto=data, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )


class _SentencePieceEncoder:
    """Encoding by sentencepiece, with control tokens found by their spelling when the caller asks for them.

    composed   what the model's character map gives is composed (NFC): the map knows single characters only, and halfwidth kana
               with a sound mark become two of them
    """

    def __init__(self, data: bytes, control: Mapping[str, int] | None = None, composed: bool = False):
        self._normalizer = _character_map(data) if composed else None
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise TokenizerError(f"is not a SentencePiece model ({str(error).splitlines()[0]})") from error
        self._ids = range(self._processor.GetPieceSize())
        if control is None:
            control = {self._processor.IdToPiece(i): i for i in self._ids if self._processor.IsControl(i)}
        self._control, self.control_ids = control, frozenset(control.values())
        self._pattern = re.compile("|".join(re.escape(piece) for piece in sorted(control, key=len, reverse=True)) or r"(?!)")

    def encode(self, text: str, special: bool) -> list[int]:
        if not special:
            return self._plain(text)
        ids: list[int] = []
        start = 0
        for found in self._pattern.finditer(text):
            ids += [*self._plain(text[start : found.start()]), self._control[found[0]]]
            start = found.end()
        return ids + self._plain(text[start:])

    def _plain(self, text: str) -> list[int]:
        text.encode()  # sentencepiece would read lone surrogates as garbage; this raises instead
        if self._normalizer is not None:
            text = unicodedata.normalize("NFC", self._normalizer.normalize(text))
        return self._processor.EncodeAsIds(text) if text else []

    def pieces(self) -> PieceTable:
        """The vocabulary for decoding."""
        processor = self._processor
        hidden = frozenset(i for i in self._ids if processor.IsControl(i) or processor.IsUnknown(i))
        # The model says nothing about its dummy prefix but in its normaliser; encoding one letter shows it.
        strip = processor.EncodeAsPieces("a")[0].startswith("\u2581")
        byte_tokens = any(processor.IsByte(i) for i in self._ids)
        return PieceTable({i: processor.IdToPiece(i) for i in self._ids}, "metaspace", hidden=hidden, strip=strip, byte_tokens=byte_tokens)
