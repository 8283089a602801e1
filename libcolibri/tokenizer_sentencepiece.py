"""Encoding by the sentencepiece library: .model files, and Unigram vocabularies of a tokenizer.json.

In: the bytes of a model. Out: an encoder, and the vocabulary for decoding.
"""

import base64
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import sentencepiece

from .errors import TokenizerError
from .sentencepiece_model import unigram_model_from_json
from .tokenizer_pieces import PieceTable, steps


def unigram_encoder(tokenizer: Mapping[str, Any]) -> "SentencePieceEncoder":
    """The encoder of a tokenizer.json with a Unigram model."""
    maps = [step["precompiled_charsmap"] for step in steps(tokenizer.get("normalizer"), "normalizers") if step.get("type") == "Precompiled"]
    try:
        charsmap = base64.b64decode(maps[0], validate=True) if maps else b""
    except ValueError as error:
        raise TokenizerError(f"has a character map that is not base64 ({error})") from error
    control = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or () if token.get("special")}
    composed = any(step.get("type") == "NFC" for step in steps(tokenizer.get("normalizer"), "normalizers"))
    return SentencePieceEncoder(unigram_model_from_json(tokenizer, charsmap), control, composed)


def _character_map(data: bytes) -> sentencepiece.SentencePieceNormalizer:
    """The character map of a model alone: spaces are left to the encoding that follows."""
    return sentencepiece.SentencePieceNormalizer(
        model_proto=data, add_dummy_prefix=False, escape_whitespaces=False, remove_extra_whitespaces=False
    )


class SentencePieceEncoder:
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
