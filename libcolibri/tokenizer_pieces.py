"""What text each token id stands for, taken from a Hugging Face tokenizer.json.

In: the parsed tokenizer.json. Out: the bytes of one token, whatever its neighbours are.
Streaming needs this: a decoder that looks at whole sequences would have to be run again for every token.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from .errors import TokenizerError

METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_alphabet() -> Mapping[str, int]:
    """The 256 characters in which byte-level BPE writes bytes (as published with GPT-2): character -> byte.

    Printable Latin-1 bytes stand for themselves, the other 68 are shifted to U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(shifted)}


def is_byte_token(piece: str) -> bool:
    """Whether a token is spelled <0xAB>, which stands for one byte where bytes are a fallback."""
    return _BYTE_TOKEN.fullmatch(piece) is not None


def steps(node: Any, inner: str) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer, pre-tokenizer or decoder: those of a Sequence (listed under `inner`), or the node itself."""
    if not isinstance(node, dict):
        return
    if node.get("type") == "Sequence":
        for part in node.get(inner) or ():
            yield from steps(part, inner)
    else:
        yield node


def is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    """Whether the vocabulary is written in the byte alphabet."""
    found = [*steps(tokenizer.get("pre_tokenizer"), "pretokenizers"), *steps(tokenizer.get("decoder"), "decoders")]
    return any(step.get("type") == "ByteLevel" for step in found)


class PieceTable:
    """Bytes of every token.

    Parameters
    ----------
    pieces : id -> token as the vocabulary writes it
    kind : "byte_level", "metaspace" (SentencePiece spelling, U+2581 for a space) or "wordpiece" ("##" continues a word)
    literal : ids whose spelling is the text itself (added tokens of a byte-level vocabulary)
    hidden : ids that decoding leaves out (control tokens)
    strip : the first decoded character is left out when it is a space, because encoding put it there
    byte_tokens : "<0xAB>" stands for the byte AB
    """

    def __init__(
        self,
        pieces: Mapping[int, str],
        kind: str,
        *,
        literal: frozenset[int] = frozenset(),
        hidden: frozenset[int] = frozenset(),
        strip: bool = False,
        byte_tokens: bool = False,
    ):
        self._pieces, self._kind, self._literal, self._byte_tokens = pieces, kind, literal, byte_tokens
        self.hidden, self.strip = hidden, strip
        self._bytes: dict[int, bytes] = {}
        self.size = max(pieces, default=-1) + 1

    @classmethod
    def from_tokenizer_json(cls, tokenizer: Mapping[str, Any]) -> "PieceTable":
        """Read vocabulary, added tokens and decoder; TokenizerError for a decoder of an unknown kind."""
        model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
        vocab = model["vocab"]
        pieces = {i: piece for piece, i in vocab.items()} if isinstance(vocab, dict) else {i: piece for i, (piece, _) in enumerate(vocab)}
        pieces |= {token["id"]: token["content"] for token in added}
        kind, strip, byte_tokens = _decoder_of(tokenizer)
        return cls(
            pieces,
            kind,
            literal=frozenset(token["id"] for token in added) if kind != "metaspace" else frozenset(),
            hidden=frozenset(token["id"] for token in added if token.get("special")),
            strip=strip,
            byte_tokens=byte_tokens,
        )

    def spelling(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it, None for an id without a token."""
        return self._pieces.get(token_id)

    def id_of(self, piece: str) -> int | None:
        """The id of a token by its spelling, None if there is none. Searches the whole vocabulary."""
        return next((i for i, found in self._pieces.items() if found == piece), None)

    def bytes_of(self, token_id: int) -> bytes:
        """Text of one token in UTF-8, possibly part of a character; empty for an id that no token has (a reserved row)."""
        found = self._bytes.get(token_id)
        if found is None:
            if token_id < 0:
                raise TokenizerError(f"token id {token_id} is negative: ids count from 0")
            piece = self._pieces.get(token_id)
            found = self._bytes[token_id] = b"" if piece is None else self._spell(token_id, piece)
        return found

    def _spell(self, token_id: int, piece: str) -> bytes:
        if self._kind == "byte_level":
            alphabet = byte_alphabet()
            if token_id in self._literal or any(char not in alphabet for char in piece):
                return piece.encode("utf-8", "replace")
            return bytes(alphabet[char] for char in piece)
        if self._kind == "wordpiece":
            return piece[2:].encode("utf-8") if piece.startswith("##") and len(piece) > 2 else b" " + piece.encode("utf-8")
        if self._byte_tokens and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return piece.replace(METASPACE, " ").encode("utf-8", "replace")


def _decoder_of(tokenizer: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """(kind, strip, byte_tokens) of a tokenizer.json."""
    if is_byte_level(tokenizer):
        return "byte_level", False, False
    model = tokenizer["model"]
    if model.get("type") == "WordPiece":
        if (prefix := model.get("continuing_subword_prefix", "##")) != "##":
            raise TokenizerError(f"WordPiece with the prefix {prefix!r} is not supported, only '##'")
        return "wordpiece", True, False
    strip = byte_tokens = spaces = False
    for step in steps(tokenizer.get("decoder"), "decoders"):
        match step.get("type"):
            case "Metaspace":
                spaces = True
                strip |= step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
            case "Replace":
                spaces |= step.get("pattern") == {"String": METASPACE} and step.get("content") == " "
            case "Strip":
                strip |= bool(step.get("start"))
            case "ByteFallback":
                byte_tokens = True
            case "Fuse":
                pass
            case other:
                raise TokenizerError(
                    f"tokenizer.json has a decoder {other!r}, supported are ByteLevel, Metaspace, WordPiece and ByteFallback"
                )
    if not spaces:
        raise TokenizerError("tokenizer.json has no decoder that restores spaces, supported are ByteLevel, Metaspace and WordPiece")
    return "metaspace", strip, byte_tokens
