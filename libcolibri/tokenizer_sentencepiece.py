"""Encoding of .model files by the sentencepiece library.

In: the bytes of a model. Out: an encoder, and the vocabulary for decoding.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece

from .errors import TokenizerError
from .tokenizer_pieces import PieceTable


class AddedToken(NamedTuple):
    """A token beside the model's own; special: plain text never yields it."""

    id: int
    content: str
    special: bool


class SentencePieceEncoder:
    """Encoding by sentencepiece, with control tokens found by their spelling when the caller asks for them, `added` ones too."""

    def __init__(self, data: bytes, added: Sequence[AddedToken] = ()):
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise TokenizerError(f"is not a SentencePiece model ({str(error).splitlines()[0]})") from error
        self._ids = range(self._processor.GetPieceSize())
        control = {self._processor.IdToPiece(i): i for i in self._ids if self._processor.IsControl(i)}
        self._added = {token.content: token for token in added if token.id >= len(self._ids)}
        ordinary = {token.content: token.id for token in self._added.values() if not token.special}
        self._found = {False: ordinary, True: {**control, **{token.content: token.id for token in self._added.values()}}}
        self.control_ids = frozenset(self._found[True].values()).difference(ordinary.values())
        self._patterns = {special: _any_of(tokens) for special, tokens in self._found.items()}

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of a text; special: control tokens spelled in it count as such."""
        ids: list[int] = []
        start = 0
        for found in self._patterns[special].finditer(text):
            ids += [*self._plain(text[start : found.start()]), self._found[special][found[0]]]
            start = found.end()
        return ids + self._plain(text[start:])

    def _plain(self, text: str) -> list[int]:
        text.encode()  # sentencepiece would read lone surrogates as garbage; this raises instead
        return self._processor.EncodeAsIds(text) if text else []

    def pieces(self) -> PieceTable:
        """The vocabulary for decoding."""
        processor = self._processor
        hidden = frozenset(i for i in self._ids if processor.IsControl(i) or processor.IsUnknown(i))
        # The model says nothing about its dummy prefix but in its normaliser; encoding one letter shows it.
        strip = processor.EncodeAsPieces("a")[0].startswith("\u2581")
        byte_tokens = any(processor.IsByte(i) for i in self._ids)
        pieces = {i: processor.IdToPiece(i) for i in self._ids} | {token.id: token.content for token in self._added.values()}
        hidden |= {token.id for token in self._added.values() if token.special}
        return PieceTable(pieces, "metaspace", hidden=hidden, strip=strip, byte_tokens=byte_tokens)


def _any_of(tokens: Mapping[str, int]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")


def added_tokens_beside(folder: Path) -> list[AddedToken]:
    """The tokens that tokenizer_config.json or added_tokens.json of a folder add to its .model; TokenizerError if malformed."""
    for name, read in (("tokenizer_config.json", _from_config), ("added_tokens.json", _from_list)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            if found := read(json.loads(path.read_bytes())):
                return found
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise TokenizerError(f"{path}: its added tokens cannot be read ({type(error).__name__}: {error})") from error
    return []


def _from_config(config: Any) -> list[AddedToken]:
    listed = config.get("added_tokens_decoder") or {}
    return [AddedToken(int(i), str(token["content"]), bool(token.get("special", True))) for i, token in listed.items()]


def _from_list(tokens: Any) -> list[AddedToken]:
    return [AddedToken(int(i), str(content), True) for content, i in tokens.items()]
